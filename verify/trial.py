"""One trial: a case is built, the kernel called as the case's protocol says, and its results judged.

Protocols: "once"; "repeat", the same call twice must give the same bits; "after_other" and "after_refill", a call with
other data of the same shape comes first, in other memory or in the same; "alone", each row by itself must give the
bits that it gives among the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from assay.golden.run import Golden
from assay.verify.appraisal import Appraiser
from assay.verify.calls import Call, Finding
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case, Inputs, all_contents, build
from assay.verify.result import Failure, Result


@dataclass(frozen=True)
class Bench:
    """A kernel on the bench: how it is called, and the contract that it is judged by.

    ``before`` is told of each case before it is tried, for whoever must know what a process died of. ``goldens`` are
    those of the case at hand, where they are known already.
    """

    call: Call
    contract: Contract
    device: torch.device | str = "cpu"
    before: Callable[[Case], None] | None = None
    goldens: tuple[Golden, ...] | None = None

    def try_case(self, case: Case) -> Result:
        """Build, call, judge."""
        if self.before is not None:
            self.before(case)
        inputs = build(case, self.device)
        before: tuple[torch.Tensor, ...] = ()
        held: tuple[torch.Tensor, ...] = ()
        if case.protocol in ("after_other", "after_refill"):
            before, inputs, finding = self._other_data_first(case, inputs)
            if finding is not None:
                return Result(case, self._found(case, finding))
            held = tuple(output.clone() for output in before)
        values = {name: guarded.tensor.detach().cpu().clone() for name, guarded in inputs.guarded.items()}
        outputs = self.call(case, inputs)
        if isinstance(outputs, Finding):
            return Result(case, self._found(case, outputs))
        damage = inputs.damage()
        if damage is not None:
            name, kind = damage
            return Result(case, self._found(case, Finding(kind, _DAMAGE[kind].format(name))))
        if any(not same_bits(now, then) for now, then in zip(before, held, strict=True)):
            return Result(
                case, self._found(case, Finding("nondeterministic", "a later call changed an earlier call's result"))
            )
        for finding in (self._repeated(case, inputs, outputs), self._alone(case, outputs)):
            if finding is not None:
                return Result(case, self._found(case, finding))
        return self.appraiser.appraise(case, values, outputs)

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
        own = {name: g.refill(own_data[name].to(g.tensor.device)) for name, g in inputs.guarded.items()}
        return ((), inputs, outputs) if isinstance(outputs, Finding) else (outputs, Inputs(own, inputs.keywords), None)

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
