"""One trial: a case is built, the kernel called as the case's protocol says, and its results judged.

Protocols: "once"; "repeat", the same call twice must give the same bits; "after_other" and "after_refill", a call with
other data of the same shape comes first, in other memory or in the same; "after_many", many such calls, as when it is
timed; "outside", the call is made where nothing tells of an examination; "alone", each row by itself must give the
bits that it gives among the others; "bias", calls with fresh data, whose errors may not all lean to one side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from assay.golden.run import Golden
from assay.verify.appraisal import Appraiser
from assay.verify.calls import GRACE, Call, Finding, options_for, target_of
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case, Inputs, all_contents, build
from assay.verify.isolation import Isolation
from assay.verify.outside import START, call_outside
from assay.verify.result import Failure, Result
from assay.verify.statistics.bias import try_series
from assay.verify.tampering import Namespaces

_MANY = 40  # equal calls of the protocol "after_many"
_NO_GPU = "0 active drivers"  # what Triton says without a GPU, where nobody interprets its kernels


@dataclass(frozen=True)
class Bench:
    """A kernel on the bench: how it is called, and the contract that it is judged by.

    ``goldens`` are those of the case at hand, where they are known already. ``isolation`` makes the calls in another
    process.
    """

    call: Call
    contract: Contract
    device: torch.device | str = "cpu"
    goldens: tuple[Golden, ...] | None = None
    isolation: Isolation | None = None

    def try_case(self, case: Case) -> Result:
        """Build, call, judge."""
        if case.protocol == "bias":
            return try_series(case, self.try_case, self.contract, self.appraiser.under)
        self.call.tell(case)
        if self.isolation is not None:
            values, seen = all_contents(case), self.isolation.observe(case)
        else:
            inputs = build(case, self.device)
            values = {name: guarded.tensor.detach().cpu().clone() for name, guarded in inputs.guarded.items()}
            seen = self.observe(case, inputs)
        if isinstance(seen, Failure):
            return Result(case, seen)
        return self.appraiser.appraise(case, values, seen)

    def outputs(self, case: Case) -> tuple[torch.Tensor, ...] | None:
        """What one call gives, whatever it is worth; None where it gives nothing."""
        case = replace(case, protocol="once")
        seen = self.isolation.observe(case) if self.isolation else self.observe(case, build(case, self.device))
        return None if isinstance(seen, Failure) else seen

    def observe(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Failure:
        """The outputs of the calls that the case's protocol makes, or what was wrong with them besides numbers."""
        namespaces = Namespaces()
        seen = self._outside(case, inputs) if case.protocol == "outside" else self._inside(case, inputs)
        replaced = namespaces.restore()
        if replaced:
            return self._found(case, Finding("input_mutated", f"the kernel replaced {', '.join(replaced)}"))
        return seen

    def _inside(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Failure:
        before: tuple[torch.Tensor, ...] = ()
        held: tuple[torch.Tensor, ...] = ()
        if case.protocol.startswith("after_"):
            before, inputs, finding = self._other_data_first(case, inputs)
            if finding is not None:
                return self._found(case, finding)
            held = tuple(output.clone() for output in before)
        outputs = self.call(case, inputs)
        if isinstance(outputs, Finding):
            return self._found(case, outputs)
        damage = inputs.damage()
        if damage is not None:
            name, kind = damage
            return self._found(case, Finding(kind, _DAMAGE[kind].format(name)))
        if any(not same_bits(now, then) for now, then in zip(before, held, strict=True)):
            return self._found(case, Finding("nondeterministic", "a later call changed an earlier call's result"))
        for finding in (self._repeated(case, inputs, outputs), self._alone(case, outputs)):
            if finding is not None:
                return self._found(case, finding)
        return outputs

    @property
    def appraiser(self) -> Appraiser:
        """Who judges the outputs."""
        return Appraiser(self.contract, self.goldens)

    def _other_data_first(self, case: Case, inputs: Inputs) -> tuple[tuple[torch.Tensor, ...], Inputs, Finding | None]:
        """A call with other data of the same shapes; then the case's own data, in the same memory if it says so."""
        if case.protocol == "after_other":
            others = build(replace(case, seed=case.seed + 7_777_777, edits=()), self.device)
            outputs = self.call(case, others)
            return ((), inputs, outputs) if isinstance(outputs, Finding) else (outputs, inputs, None)
        others_data = all_contents(replace(case, seed=case.seed + 7_777_777, edits=()))
        own_data = all_contents(case)
        refilled = {name: g.refill(others_data[name].to(g.tensor.device)) for name, g in inputs.guarded.items()}
        outputs = self.call(case, Inputs(refilled, inputs.keywords))
        if case.protocol == "after_many":
            outputs = self._often(case, Inputs(refilled, inputs.keywords), outputs)
        own = {name: g.refill(own_data[name].to(g.tensor.device)) for name, g in inputs.guarded.items()}
        return ((), inputs, outputs) if isinstance(outputs, Finding) else (outputs, Inputs(own, inputs.keywords), None)

    def _often(
        self, case: Case, inputs: Inputs, first: tuple[torch.Tensor, ...] | Finding
    ) -> tuple[torch.Tensor, ...] | Finding:
        """The last of many equal calls, which must give what the first did."""
        if isinstance(first, Finding):
            return first
        held, last = tuple(output.clone() for output in first), first
        for _ in range(_MANY - 1):
            answer = self.call(case, inputs)
            if isinstance(answer, Finding):
                return answer
            last = answer
        if not self.contract.deterministic or all(map(same_bits, last, held)):
            return last
        return Finding("nondeterministic", f"the last of {_MANY} equal calls gave other bits than the first")

    def _outside(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Failure:
        """What the kernel gives where nothing tells of an examination."""
        keywords = options_for(case, inputs, self.call.listed)
        self.call.tell(case, self.call.timeout + START + GRACE)
        found = call_outside(target_of(self.call.kernel), inputs.positional, keywords, self.call.timeout)
        self.call.tell(case)
        if isinstance(found, str) and _NO_GPU not in found:
            return self._found(case, Finding("crash", f"in a process of its own: {found}"))
        outputs = self.call(case, inputs) if isinstance(found, str) else self.call.form(case, inputs, found)
        return self._found(case, outputs) if isinstance(outputs, Finding) else outputs

    def _repeated(self, case: Case, inputs: Inputs, outputs: tuple[torch.Tensor, ...]) -> Finding | None:
        if case.protocol != "repeat" or not self.contract.deterministic:
            return None
        held = tuple(output.clone() for output in outputs)
        again = self.call(case, inputs)
        if isinstance(again, Finding):
            return replace(again, message=f"in the second of two equal calls: {again.message}")
        for place, (first, second) in enumerate(zip(held, again, strict=True)):
            if not same_bits(first, second):
                return Finding(
                    "nondeterministic", "the same call gave other bits the second time", place, _differ(first, second)
                )
        return None

    def _alone(self, case: Case, outputs: tuple[torch.Tensor, ...]) -> Finding | None:
        symbol = case.definition.independent(case.options)
        if case.protocol != "alone" or symbol is None or case.sizes[symbol] < 2:
            return None
        signature, rows = case.signature, case.sizes[symbol]
        for row in sorted({0, min(1, rows - 1), min(2, rows - 1), rows // 2, rows - 1}):
            single = replace(case, sizes={**case.sizes, symbol: 1})
            whole = build(case, self.device)
            sliced = {
                tensor.name: replace(guarded, tensor=_row(guarded.tensor, tensor.dims, symbol, row))
                for tensor, guarded in zip(signature.tensors, whole.guarded.values(), strict=True)
            }
            alone = self.call(single, Inputs(sliced, whole.keywords))
            if isinstance(alone, Finding):
                return replace(alone, message=f"row {row} alone: {alone.message}")
            for place, (tensor, part, full) in enumerate(zip(signature.returns, alone, outputs, strict=True)):
                if symbol in tensor.dims and not same_bits(part, _row(full, tensor.dims, symbol, row)):
                    return Finding("batch_variant", f"row {row} alone gives other bits than among {rows}", place)
        return None

    def _found(self, case: Case, finding: Finding) -> Failure:
        name = case.signature.returns[finding.output].name
        return Failure(finding.kind, case, finding.message, name, finding.index)


_DAMAGE = {
    "input_mutated": "the kernel changed its input {0}",
    "out_of_bounds_write": "the kernel wrote beyond its input {0}",
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits (any NaN equals any NaN)."""
    if a.dtype.is_floating_point:
        a, b = a.double(), b.double()
        return bool((((a == b) & (torch.signbit(a) == torch.signbit(b))) | (a.isnan() & b.isnan())).all())
    return bool((a == b).all())


def _differ(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    different = (a.double() != b.double()) & ~(a.double().isnan() & b.double().isnan())
    places = different.nonzero()
    return tuple(int(place) for place in places[0]) if len(places) else ()


def _row(tensor: torch.Tensor, dims: tuple[str, ...], symbol: str, row: int) -> torch.Tensor:
    """One row along ``symbol``, kept as a dimension of size one."""
    return tensor.narrow(dims.index(symbol), row, 1) if symbol in dims else tensor
