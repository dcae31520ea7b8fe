"""One trial: a case is built, the kernel called as the case's protocol says, and its results judged.

Protocols: "once"; "repeat", the same call twice must give the same bits; "after_other" and "after_refill", a call with
other data of the same shape comes first, in other memory or in the same; "alone", each row by itself must give the
bits that it gives among the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from assay.golden.arithmetic import Arb, BallArithmetic
from assay.golden.evaluation import Golden, golden_of_ball, golden_of_enclosure, run
from assay.golden.registry import Spec
from assay.precision.formats import format_named
from assay.verify.calls import Call, Finding
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case, Inputs, build, contents, work
from assay.verify.judge import Judgement, Tolerance, judge, tolerance

_ARB_WORK = 20_000
_ARB_DIGITS = 40


@dataclass(frozen=True)
class Failure:
    """A proved violation: what the kernel gave, what is right, and how far off it may be."""

    kind: str
    case: Case
    message: str
    output: str = ""
    index: tuple[int, ...] = ()
    got: float | None = None
    golden: float | None = None
    radius: float | None = None
    ratio: float | None = None
    violations: int = 0
    elements: int = 0


@dataclass(frozen=True)
class Result:
    """What one trial showed."""

    case: Case
    failure: Failure | None = None
    worst: float = 0.0
    judged: int = 0
    nonzero: int = 0
    unjudged: int = 0
    unresolved: int = 0
    outputs: tuple[torch.Tensor, ...] = ()
    tolerances: tuple[Tolerance, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Bench:
    """A kernel on the bench: how it is called, and the contract that it is judged by.

    ``before`` is told of each case before it is tried, for whoever must know what a process died of.
    """

    call: Call
    contract: Contract
    device: torch.device | str = "cpu"
    before: Callable[[Case], None] | None = None

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
            return Result(case, self._found(case, Finding("nondeterministic", "a later call changed an earlier call's result")))
        for finding in (self._repeated(case, inputs, outputs), self._alone(case, outputs)):
            if finding is not None:
                return Result(case, self._found(case, finding))
        return self.judge_outputs(case, values, outputs)

    def _other_data_first(self, case: Case, inputs: Inputs) -> tuple[tuple[torch.Tensor, ...], Inputs, Finding | None]:
        """A call with other data of the same shapes; then the case's own data, in the same memory if it says so."""
        if case.protocol == "after_other":
            others = build(replace(case, seed=case.seed + 7_777_777, edits=()), self.device)
            outputs = self.call(case, others)
            return ((), inputs, outputs) if isinstance(outputs, Finding) else (outputs, inputs, None)
        tensors = {tensor.name: tensor for tensor in case.signature.tensors}
        other = replace(case, seed=case.seed + 7_777_777, edits=())
        refilled = {name: g.refill(contents(other, tensors[name]).to(g.tensor.device)) for name, g in inputs.guarded.items()}
        outputs = self.call(case, Inputs(refilled, inputs.keywords))
        own = {name: g.refill(contents(case, tensors[name]).to(g.tensor.device)) for name, g in inputs.guarded.items()}
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
                return Finding("nondeterministic", "the same call gave other bits the second time", place, _differ(first, second))
        return None

    def _alone(self, case: Case, outputs: tuple[torch.Tensor, ...]) -> Finding | None:
        symbol = case.definition.rows
        if case.protocol != "alone" or symbol is None or case.sizes[symbol] < 2:
            return None
        signature, rows = case.signature, case.sizes[symbol]
        for row in sorted({0, rows // 2, rows - 1}):
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

    def judge_outputs(self, case: Case, values: Mapping[str, torch.Tensor], outputs: tuple[torch.Tensor, ...]) -> Result:
        """The outputs against the goldens, element by element."""
        definition, signature = case.definition, case.signature
        chosen = _chosen(definition, signature.returns, outputs)
        result = Result(case, outputs=outputs)
        if chosen is not None:
            failure = self._wrong_choice(case, values, chosen)
            if failure is not None:
                return replace(result, failure=failure)
        allowed = self.tolerances(case, values, chosen)
        open_ended = self.contract.nonfinite == "unspecified" and not all(bool(x.isfinite().all()) for x in values.values())
        for place, (tensor, got, limits) in enumerate(zip(signature.returns, outputs, allowed, strict=True)):
            if tensor.is_integer:
                continue
            if open_ended:  # a NaN or an infinity of the inputs may come out anywhere
                limits = replace(limits, judged=limits.judged & got.cpu().isfinite())
            judgement = judge(got, limits)
            if bool(judgement.unresolved.any()) and work(definition, case.sizes) <= _ARB_WORK:
                limits = self.tolerances(case, values, chosen, proven=True)[place]
                judgement = judge(got, limits)
            judged = int(limits.judged.sum())
            result = replace(
                result,
                worst=max(result.worst, judgement.worst),
                judged=result.judged + judged,
                nonzero=result.nonzero + int((limits.judged & (limits.golden != 0)).sum()),
                unjudged=result.unjudged + limits.judged.numel() - judged,
                unresolved=result.unresolved + int(judgement.unresolved.sum()),
                tolerances=(*result.tolerances, limits),
            )
            if bool(judgement.broken.any()):
                return replace(result, failure=failure_of(case, tensor.name, got, judgement))
        return result

    def tolerances(
        self, case: Case, values: Mapping[str, torch.Tensor], chosen: torch.Tensor | None = None, *, proven: bool = False
    ) -> list[Tolerance]:
        """What the contract allows of each output, for inputs of these ``values``; ``proven``: by Arb."""
        model = self.contract.model(case.definition, self.input_format(case))
        with one_thread():
            golden = self._evaluate(case, values, chosen, Arb(_ARB_DIGITS) if proven else BallArithmetic())
            allowed = self._evaluate(case, values, chosen, BallArithmetic(model))
        return [
            tolerance(exact, permitted, format_named(dtype if not tensor.is_integer else "float64"), self.contract)
            for tensor, dtype, exact, permitted in zip(
                case.signature.returns, self.call.out_dtypes, golden, allowed, strict=True
            )
        ]

    def input_format(self, case: Case) -> Any:
        """The format of the first tensor, which contracts call "input"."""
        return format_named(next(iter(case.dtypes.values())))

    def _evaluate(self, case: Case, values: Mapping[str, torch.Tensor], chosen: torch.Tensor | None, xp: Any) -> list[Golden]:
        result = _run(case, values, xp, chosen)
        convert: Callable[[Any], Golden] = golden_of_enclosure if isinstance(xp, Arb) else golden_of_ball
        goldens = [convert(part) for part in (result if isinstance(result, tuple) else (result,))]
        return [
            replace(golden, radius=golden.radius + golden.low.abs()) if golden.low is not None else golden
            for golden in goldens
        ]

    def _wrong_choice(self, case: Case, values: Mapping[str, torch.Tensor], chosen: torch.Tensor) -> Failure | None:
        """A choice that no kernel under the contract may make."""
        definition = case.definition
        assert definition.admissible is not None
        xp = BallArithmetic(self.contract.model(definition, self.input_format(case)))
        tensors = [xp.exact(value) for value in values.values()]
        right = definition.admissible(xp, *tensors, chosen.to(torch.int64), **case.options)
        if bool(right.all()):
            return None
        index = tuple(int(place) for place in (~right).nonzero()[0])
        best = next(golden for golden in self._evaluate(case, values, None, BallArithmetic()) if not golden.value.is_floating_point())
        return Failure(
            "contract",
            case,
            f"{int((~right).sum())} of {right.numel()} choices are none that the exact values allow",
            str(definition.chosen),
            index,
            float(chosen[index]),
            float(best.value[index]),
            0.0,
            float("inf"),
            int((~right).sum()),
            right.numel(),
        )

    def _found(self, case: Case, finding: Finding) -> Failure:
        name = case.signature.returns[finding.output].name
        return Failure(finding.kind, case, finding.message, name, finding.index)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors on one thread: a pool's barriers cost more than they save, and far more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_DAMAGE = {
    "input_mutated": "the kernel changed its input {0}",
    "out_of_bounds_write": "the kernel wrote beyond its input {0}",
}


def _run(case: Case, values: Mapping[str, torch.Tensor], xp: Any, chosen: torch.Tensor | None) -> Any:
    keywords = {tensor.name: values[tensor.name] for tensor in case.signature.tensors if tensor.keyword}
    tensors = [value for name, value in values.items() if name not in keywords]
    options = {name: value for name, value in case.options.items() if name not in keywords}
    if chosen is not None:
        chosen = chosen.to(torch.int64).clamp(0, max(values[next(iter(values))].shape[-1] - 1, 0))
    return run(case.definition, xp, tensors, options | dict.fromkeys(set(keywords) & set(case.options), True), keywords, chosen)


def _chosen(definition: Spec, returns: Any, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    named = {tensor.name: output for tensor, output in zip(returns, outputs, strict=True)}
    return named[definition.chosen].detach().cpu() if definition.chosen else None


def failure_of(case: Case, name: str, got: torch.Tensor, judgement: Judgement) -> Failure:
    """The failure that the worst element of a judgement shows."""
    index, limits = judgement.worst_index(), judgement.tolerance
    y, golden = float(got[index]), float(limits.golden[index])
    violations = int(judgement.broken.sum())
    regular = torch.isfinite(torch.tensor([y, golden])).all()
    kind = "nonfinite" if not regular else "exact" if bool(limits.exact[index]) else "contract"
    return Failure(
        kind,
        case,
        f"{violations} of {got.numel()} elements are outside of what the contract allows",
        name,
        index,
        y,
        golden,
        float(judgement.radius[index]) if regular else None,
        float(judgement.ratio[index]),
        violations,
        got.numel(),
    )


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
