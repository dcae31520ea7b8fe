"""Appraising the outputs of a case: goldens and tolerances for its inputs, and each output against them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from assay.golden.arithmetic import Arb, BallArithmetic, RoundingModel
from assay.golden.errors import StoreError
from assay.golden.registry import Spec
from assay.golden.run import Golden, golden_of_ball, golden_of_enclosure, run
from assay.precision.formats import Format, format_named
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case, all_contents, work
from assay.verify.judge import Judgement, Tolerance, judge, tolerance
from assay.verify.picture import histogram, summed
from assay.verify.result import Failure, Result

_ARB_WORK = 20_000
_ARB_DIGITS = 40

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Appraiser:
    """Judges outputs by ``contract``, against ``known`` goldens where they needn't be evaluated."""

    contract: Contract
    known: tuple[Golden, ...] | None = None

    def appraise(self, case: Case, values: Values, outputs: tuple[torch.Tensor, ...]) -> Result:
        """The outputs against the goldens, element by element."""
        definition, signature = case.definition, case.signature
        named = {tensor.name: output for tensor, output in zip(signature.returns, outputs, strict=True)}
        chosen = {name: named[name].detach().cpu() for name in definition.chosen}
        result = Result(case, outputs=outputs)
        wrong = self._wrong_choice(case, values, chosen)
        if wrong is not None:
            return replace(result, failure=wrong[0], ratio=wrong[1])
        allowed = self.tolerances(case, values, chosen)
        finite = _is_finite(definition, values)
        for place, (tensor, got, limits) in enumerate(zip(signature.returns, outputs, allowed, strict=True)):
            if tensor.is_integer:
                continue
            if not finite and self.contract.nonfinite == "unspecified":  # then they may come out anywhere
                limits = replace(limits, judged=limits.judged & got.cpu().double().isfinite())
            if finite and "float64" in case.dtypes.values():  # the evaluation itself may have overflowed
                limits = replace(limits, judged=limits.judged & limits.golden.isfinite())
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
                histogram=summed(result.histogram, histogram(judgement.ratio, limits.judged.numel() - judged)),
                tolerances=(*result.tolerances, limits),
            )
            if bool(judgement.broken.any()):
                ratio = torch.where(limits.judged, judgement.ratio, torch.nan)
                return replace(result, failure=failure_of(case, tensor.name, got, judgement), ratio=ratio)
        return result

    def tolerances(
        self,
        case: Case,
        values: Values,
        chosen: Values | None = None,
        *,
        proven: bool = False,
    ) -> list[Tolerance]:
        """What the contract allows of each output, for inputs of these ``values``; ``proven``: by Arb."""
        model = self.contract.model(case.definition, self.input_format(case))
        with one_thread():
            if proven or self.known is None:
                golden = self._evaluate(case, values, chosen, Arb(_ARB_DIGITS) if proven else BallArithmetic())
            else:
                golden = [_one_number(known) for known in self.known]
            allowed = self._evaluate(case, values, chosen, BallArithmetic(model))
        if self.known is not None and any(map(_lie_apart, golden, allowed)):
            mend = "run assay golden check STORE --sample 1000000, which names it, then assay golden discard"
            raise StoreError(f"a stored golden is not what the definition gives; {mend} ({case})")
        return [
            tolerance(
                exact,
                permitted,
                format_named(dtype if not tensor.is_integer else "float64"),
                self.contract,
                rounded=tensor.role == "rounded",
            )
            for tensor, dtype, exact, permitted in zip(
                case.signature.returns, case.result_dtypes, golden, allowed, strict=True
            )
        ]

    def under(self, case: Case, model: RoundingModel) -> list[Golden]:
        """The results of a case, with its own data, under another model; choices are those of the definition."""
        with one_thread():
            return self._evaluate(case, all_contents(case), None, BallArithmetic(model))

    def input_format(self, case: Case) -> Format:
        """The format of the first tensor, which contracts call "input"."""
        return format_named(next(iter(case.dtypes.values())))

    def _evaluate(self, case: Case, values: Values, chosen: Values | None, xp: Any) -> list[Golden]:
        result = _run(case, values, xp, chosen)
        convert: Callable[[Any], Golden] = golden_of_enclosure if isinstance(xp, Arb) else golden_of_ball
        return [_one_number(convert(part)) for part in (result if isinstance(result, tuple) else (result,))]

    def admitted(self, case: Case, values: Values, chosen: Values) -> torch.Tensor | None:
        """Which of a kernel's own choices the contract admits, element by element; None: intervals judge them all."""
        definition = case.definition
        if definition.admissible is None:
            return None
        xp = BallArithmetic(self.contract.model(definition, self.input_format(case)))
        tensors = [xp.exact(value) for value in values.values()]
        ids = chosen[definition.chosen[0]].to(torch.int64)
        right: torch.Tensor = definition.admissible(xp, *tensors, ids, **case.options)
        return right

    def _wrong_choice(self, case: Case, values: Values, chosen: Values) -> tuple[Failure, torch.Tensor] | None:
        """A choice that no kernel under the contract may make, and the ratio of each: 0 or infinite."""
        right = self.admitted(case, values, chosen)
        if right is None or bool(right.all()):
            return None
        name = case.definition.chosen[0]
        index = tuple(int(place) for place in (~right).nonzero()[0])
        place = [tensor.name for tensor in case.signature.returns].index(name)
        best = self._evaluate(case, values, None, BallArithmetic())[place]
        failure = Failure(
            "contract",
            case,
            f"{int((~right).sum())} of {right.numel()} choices are none that the exact values allow",
            name,
            index,
            float(chosen[name][index]),
            float(best.value[index]),
            0.0,
            float("inf"),
            int((~right).sum()),
            right.numel(),
        )
        return failure, torch.where(right, 0.0, torch.inf).double()


def _lie_apart(golden: Golden, allowed: Golden) -> bool:
    """Whether no exact result can lie both within a golden and within what a contract allows."""
    return bool(((golden.value - allowed.value).abs() > golden.radius + allowed.radius).any())


def _one_number(golden: Golden) -> Golden:
    """The golden without its low part, which the radius takes in."""
    if golden.low is None:
        return golden
    return Golden(golden.value, golden.radius + golden.low.abs())


def _is_finite(definition: Spec, values: Values) -> bool:
    """Whether all numbers are that a result depends on."""
    unused = definition.unused(*values.values()) if definition.unused else {}
    return all(
        bool((value.double().isfinite() | unused.get(name, torch.tensor(False))).all())
        for name, value in values.items()
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors on one thread: a pool's barriers cost more than they save, and far more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run(case: Case, values: Values, xp: Any, chosen: Values | None) -> Any:
    keywords = {tensor.name: values[tensor.name] for tensor in case.signature.tensors if tensor.keyword}
    tensors = [value for name, value in values.items() if name not in keywords]
    options = {name: value for name, value in case.options.items() if name not in keywords}
    return run(
        case.definition, xp, tensors, options | dict.fromkeys(set(keywords) & set(case.options), True), keywords, chosen
    )


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
