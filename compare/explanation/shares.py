"""Each region's share of the difference between two runs' log-probabilities.

To first order the difference is the sum over regions of what the region's own error does to the output:

    log p_b(t) - log p_a(t)  =  sum_r < J_r(t), e_b,r - e_a,r >  +  second order

where e is what a run gave less what the definition gives for the inputs that this run had, with the weights of run a,
and J_r(t) the gradient of token t's log-probability by the region's output, at run a's values. (Both runs obey x' =
f(x) + e; subtract, and linearise f at run a.) The share of a region is its sum over tokens, each weighted by its
measured difference:

    share_r = sum_t d_t < J_r(t), e_b,r - e_a,r > / sum_t d_t^2

so that shares add up to 1 where the form holds, and one backward pass, with d as the cotangent, gives all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from assay.compare.judging import Missing, in_float64, inputs_of, outputs_of
from assay.compare.runs.run import Run, Slot
from assay.compare.structure import Plan, Structure


def log_probabilities(run: Run, logits: Slot) -> Tensor | None:
    """Return the log-probability of each token but the first, [tokens] in float64; None without logits of all tokens.

    They are those that the run computed itself, where it did, else those of its logits.
    """
    results = []
    own = Slot("log_softmax", "outputs", "0")
    for index, ids in enumerate(run.ids):
        values = run.sequence(own, index) if run.has(own) else None
        if values is None:
            values = run.sequence(logits, index)
            values = None if values is None else values.double().log_softmax(-1)
        if values is None or len(values) < len(ids) - 1:
            return None
        results.append(values[: len(ids) - 1].double().gather(1, ids[1:, None].long())[:, 0])
    return torch.cat(results) if results else None


class Shares:
    """The shares of all regions, from one pass backward over the regions."""

    def __init__(self, structure: Structure, a: Run, b: Run, difference: Tensor) -> None:
        self._structure, self._a, self._b = structure, a, b
        self._weights = difference / difference.pow(2).sum()
        self._cotangents: dict[Slot, Tensor] = {}
        self._shares: dict[str, float] = defaultdict(float)
        self._known: set[str] = set()
        self._seed()
        for plan in reversed(structure.plans):
            self._pass_back(plan)
        self._add_flips()

    @property
    def total(self) -> float:
        """The sum of all shares."""
        return sum(self._shares.values())

    def of(self, plan: Plan) -> float | None:
        """Return a region's share, with that of the links behind it; None where the difference doesn't depend on it."""
        return self._shares[plan.name] if plan.name in self._known else None

    def _seed(self) -> None:
        """Set the cotangent of what gives the log-probabilities: the recorded ones, or the logits."""
        own = Slot("log_softmax", "outputs", "0")
        recorded = self._a.has(own) and self._b.has(own) and any(own in plan.outputs for plan in self._structure.plans)
        slot = own if recorded else self._structure.sources[self._structure.logits]
        values = self._a.whole(slot)
        if values is None:
            return
        cotangent, row, start = torch.zeros_like(values, dtype=torch.float64), 0, 0
        for index, ids in enumerate(self._a.ids):
            some = self._a.sequence(slot, index)
            assert some is not None
            weights = self._weights[start : start + len(ids) - 1]
            block = torch.zeros_like(some, dtype=torch.float64)
            block[torch.arange(len(ids) - 1), ids[1:].long()] = weights
            if not recorded:
                block[: len(ids) - 1] -= weights[:, None] * some[: len(ids) - 1].double().softmax(-1)
            cotangent[row : row + len(some)] = block
            row, start = row + len(some), start + len(ids) - 1
        self._cotangents[slot] = cotangent

    def _pass_back(self, plan: Plan) -> None:
        cotangents = [self._cotangents.get(slot) for slot in plan.outputs]
        if all(each is None for each in cotangents):
            return
        try:
            calls_a, calls_b = inputs_of(plan, self._a), inputs_of(plan, self._b, self._a)
            given_a, given_b = outputs_of(plan, self._a), outputs_of(plan, self._b)
            golden_a, golden_b = _joined(plan, calls_a), _joined(plan, calls_b)
        except (Missing, RuntimeError, ValueError, IndexError, TypeError):  # or shapes that the definition hasn't
            return
        self._known.add(plan.name)
        for cotangent, one, two, right_a, right_b in zip(cotangents, given_a, given_b, golden_a, golden_b, strict=True):
            if cotangent is not None:
                error = (two.double() - right_b) - (one.double() - right_a)
                self._shares[plan.name] += float((cotangent * error).sum())
        self._to_inputs(plan, calls_a, cotangents)

    def _add_flips(self) -> None:
        """Add what other choices of experts do: run a's regions evaluated again with run b's choices, layer by layer.

        A choice has no gradient, and what it does is large: this part of the difference isn't linearised.
        """
        taken: dict[Slot, Tensor] = {}
        before: Tensor | None = None
        for plan in self._structure.plans:
            if plan.definition != "experts" or plan.name not in self._known:
                continue
            slot = plan.inputs[1]
            assert isinstance(slot, Slot)
            ids, others = self._a.whole(slot), self._b.whole(slot)
            if ids is None or others is None:
                continue
            flipped = (ids.sort(-1).values != others.sort(-1).values).any(-1, keepdim=True)
            if not bool(flipped.any()):
                continue
            before = self._replayed(taken) if before is None else before
            weights = self._structure.sources.get(plan.inputs[2])  # type: ignore[arg-type]
            router = next((each for each in self._structure.plans if weights in each.outputs), None)
            for chosen in (slot, *(router.inputs[1:2] if router is not None else ())):
                assert isinstance(chosen, Slot)
                taken[chosen] = torch.where(flipped, others, ids)
            after = self._replayed(taken)
            self._shares[plan.name] += float(((after - before) * self._weights).sum())
            before = after

    @torch.no_grad()
    def _replayed(self, choices: Mapping[Slot, Tensor]) -> Tensor:
        """Return the log-probabilities of run a's definitions in float64, with these ids of experts by slot."""
        values: dict[Slot, Tensor] = {}
        starts = [0]
        for ids in self._a.ids:
            starts.append(starts[-1] + len(ids))
        for plan in self._structure.plans:
            try:
                calls = inputs_of(plan, self._a)
            except Missing:
                continue
            for index, slot in enumerate(plan.inputs):
                if not isinstance(slot, Slot):
                    continue
                source = self._structure.sources.get(slot, slot)
                known = values.get(replace(source, part=None))
                if slot in choices:
                    known = choices[slot]
                elif known is None:
                    continue
                elif source.part is not None:
                    known = known[:, slice(*source.part)]
                for order, call in enumerate(calls):
                    call[index] = known if plan.whole else known[starts[order] : starts[order + 1]]
            values |= zip(plan.outputs, _joined(plan, calls), strict=True)
        logits, results = values[self._structure.sources[self._structure.logits]], []
        for index, ids in enumerate(self._a.ids):
            some = logits[starts[index] : starts[index + 1] - 1].log_softmax(-1)
            results.append(some.gather(1, ids[1:, None].long())[:, 0])
        return torch.cat(results)

    def _to_inputs(self, plan: Plan, calls: list[list[Tensor]], cotangents: list[Tensor | None]) -> None:
        """Carry cotangents from a region's outputs to its inputs, and on to what gave these."""
        slots = [(index, each) for index, each in enumerate(plan.inputs) if isinstance(each, Slot)]
        gathered: dict[int, list[Tensor]] = defaultdict(list)
        start = 0
        for tensors in calls:
            length = len(tensors[slots[0][0]])
            wide = [each.double() if each.is_floating_point() else each for each in tensors]
            chosen = [index for index, _ in slots if wide[index].is_floating_point()]
            for index in chosen:
                wide[index] = wide[index].detach().requires_grad_()
            outputs = in_float64(plan, wide)
            pairs = [
                (output, cotangent[start : start + len(output)])
                for output, cotangent in zip(outputs, cotangents, strict=True)
                if cotangent is not None and output.requires_grad
            ]
            start += length
            if not pairs or not chosen:
                continue
            gradients = torch.autograd.grad(
                [output for output, _ in pairs],
                [wide[index] for index in chosen],
                [c for _, c in pairs],
                allow_unused=True,
            )
            for index, gradient in zip(chosen, gradients, strict=True):
                gathered[index].append(torch.zeros_like(wide[index]) if gradient is None else gradient)
        for index, slot in slots:
            if gathered[index]:
                self._arrive(plan, slot, torch.cat(gathered[index]))

    def _of_tokens(self, source: Slot, slot: Slot, run: Run) -> Tensor | None:
        """Return a source's values of the tokens that a slot has: a log-softmax may leave out each sequence's last."""
        parts = []
        for index in range(len(run.sequences)):
            given, taken = run.sequence(source, index), run.sequence(slot, index)
            if given is None or taken is None or len(taken) > len(given):
                return None
            parts.append(given[: len(taken)])
        return torch.cat(parts)

    def _for_all_tokens(self, gradient: Tensor, slot: Slot) -> Tensor:
        """Return a cotangent with zeros for the tokens that the slot leaves out."""
        parts, start = [], 0
        for index, ids in enumerate(self._a.ids):
            taken = self._a.sequence(slot, index)
            assert taken is not None
            some = gradient[start : start + len(taken)]
            parts.append(torch.cat([some, some.new_zeros(len(ids) - len(taken), some.shape[1])]))
            start += len(taken)
        return torch.cat(parts)

    def _arrive(self, plan: Plan, slot: Slot, gradient: Tensor) -> None:
        """Add a cotangent to the output that an input comes from, and the share of a run that took another value."""
        source = self._structure.sources.get(slot, slot)
        if source != slot:
            for run, sign in ((self._a, -1.0), (self._b, 1.0)):
                taken, given = run.whole(slot), self._of_tokens(source, slot, run)
                if taken is not None and given is not None and len(taken) == len(given) == len(gradient):
                    self._shares[plan.name] += sign * float((gradient * (taken.double() - given.double())).sum())
            gradient = self._for_all_tokens(gradient, slot)
        if source.part is not None:
            whole = self._a.whole(replace(source, part=None))
            assert whole is not None
            padded = torch.zeros(whole.shape, dtype=torch.float64)
            padded[:, source.part[0] : source.part[1]] = gradient
            source, gradient = replace(source, part=None), padded
        known = self._cotangents.get(source)
        self._cotangents[source] = gradient if known is None else known + gradient


def _joined(plan: Plan, calls: list[list[Tensor]]) -> list[Tensor]:
    with torch.no_grad():
        parts = [in_float64(plan, tensors) for tensors in calls]
    return [torch.cat(each) for each in zip(*parts, strict=True)]
