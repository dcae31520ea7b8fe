"""The oracle: evaluates goldens and tolerances of a case, and judges each output by them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from assay.formats.rounding import ulp_towards
from assay.golden.arithmetic import Arb, BallArithmetic, RoundingModel
from assay.golden.arithmetic.model import EVALUATION, Chance
from assay.golden.errors import StoreError
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.lowering.choices import Answered, Choices, Followed, Loosened
from assay.golden.registry import Spec
from assay.golden.signature import INTEGERS, symbols_in
from assay.runtime.environment import standard_environment
from assay.verify.cases.case import Case, all_contents
from assay.verify.comparison.error_map import histogram
from assay.verify.comparison.judge import Judgement, Tolerance, judge, tolerance
from assay.verify.comparison.resolution import Resolved, Resolver
from assay.verify.comparison.result import UNDECIDED, Counts, Result
from assay.verify.contract import Contract
from assay.verify.findings import Difference, Failure, coordinates

RATE = 1e-4
"""The stated rate of false suspicions of an examination."""
SUMS = 2**6
"""Long sums that an examination judges by the statistical bound, at most: 12 cases (6 lengths,
2 distributions), five in each, rounded up to a power of two."""
SPECIAL = "of NaN or infinities, which the contract leaves alone (nonfinite=)"
BEYOND = "beyond what float64 holds"
OPEN = "where any number is within the contract (errors without a bound, or the op leaves it open)"
"""Reasons why an element isn't judged."""

_ARB_WORK = 20_000  # operations: Arb works number by number, and slowly
_FEW = 8  # choices of a row that are named
_ARB_DIGITS = 40  # more than twice those of float64, so that what balls leave unresolved is decided

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Oracle:
    """Judges outputs by ``contract``, against ``precomputed`` goldens if there are some.

    ``statistical``: judge by the statistical bound (`assay.verify.comparison.statistics`), not by the contract's worst
    case.
    """

    contract: Contract
    precomputed: tuple[Golden, ...] | None = None
    statistical: bool = False

    @standard_environment()
    def judge(
        self,
        case: Case,
        values: Values,
        outputs: tuple[torch.Tensor, ...],
        except_outputs: Container[str] = (),
        only: Mapping[str, torch.Tensor] | None = None,
    ) -> Result:
        """Judge the outputs against the goldens, element by element, except those named in ``except_outputs``.

        ``only`` are masks, by output, of the elements to judge; the others count as none.
        """
        definition, signature = case.definition, case.signature
        named = {tensor.name: output for tensor, output in zip(signature.returns, outputs, strict=True)}
        chosen = {name: named[name].detach().cpu() for name in definition.outputs.chosen}
        result = Result(case, outputs=outputs)
        wrong = self._wrong_choice(case, values, chosen)
        if wrong is not None:
            return replace(result, failure=wrong[0], ratio=wrong[1])
        resolved = self._resolved(case, values, outputs, chosen, except_outputs, only or {})
        finite = _is_finite(case.definition, values)
        for index, (tensor, got, limits) in enumerate(zip(signature.returns, outputs, resolved.limits, strict=True)):
            if tensor.is_integer or tensor.name in except_outputs:
                continue
            limits = self._restricted(case, limits, got, finite=finite)
            counted = torch.ones_like(limits.judged) if only is None else only[tensor.name]
            limits = replace(limits, judged=limits.judged & counted)
            judgement = judge(got, limits)
            if bool(judgement.unresolved.any()) and definition.cost(case.sizes) <= _ARB_WORK:
                answers = Followed(resolved.sites)
                proven = self.tolerances(case, values, chosen, choices=answers, proven=True)[index]
                limits = replace(proven, judged=limits.judged)
                judgement = judge(got, limits)
            judged = int(limits.judged.count_nonzero())
            undecided = resolved.undecided[index] & counted if resolved.undecided else torch.zeros_like(limits.judged)
            others = replace(limits, judged=limits.judged | ~counted)
            counts = Counts(
                worst=judgement.worst,
                judged=judged,
                nonzero=int((limits.judged & (limits.golden != 0)).count_nonzero()),
                judged_of=Counter({tensor.name: judged}),
                left_out=self._left_out(case, tensor.name, others, undecided, resolved.line, finite=finite),
                unresolved=int(judgement.unresolved.count_nonzero()),
                histogram=histogram(judgement.ratio, int(counted.count_nonzero()) - judged),
            )
            result = replace(result.counting(counts), tolerances=(*result.tolerances, limits))
            if bool(judgement.broken.any()):
                ratio = torch.where(limits.judged, judgement.ratio, torch.nan)
                failure = failure_of(case, tensor.name, got, judgement)
                return replace(result, failure=failure, ratio=ratio, worst=max(result.worst, failure.ratio or 0.0))
        wrong = self._wrong_count(case, values, outputs[0], except_outputs, only)
        if wrong is not None:
            return replace(result, failure=wrong[0], ratio=wrong[1], worst=math.inf)
        return replace(result, own_choices=resolved.own)

    def _resolved(
        self,
        case: Case,
        values: Values,
        outputs: tuple[torch.Tensor, ...],
        chosen: Values,
        except_outputs: Container[str],
        only: Mapping[str, torch.Tensor],
    ) -> Resolved:
        """Return what the contract allows, given the answers that explain the outputs where a reference leaves some
        open."""
        finite = _is_finite(case.definition, values)

        def broken_in(limits: list[Tolerance]) -> list[torch.Tensor]:
            masks = []
            for tensor, got, part in zip(case.signature.returns, outputs, limits, strict=True):
                skipped = tensor.is_integer or tensor.name in except_outputs
                part = self._restricted(case, part, got, finite=finite)
                broken = torch.zeros_like(part.judged) if skipped else judge(got, part).broken
                masks.append(broken & only.get(tensor.name, broken))
            return masks

        def limits_of(choices: Choices) -> list[Tolerance]:
            return self.tolerances(case, values, chosen, choices=choices)

        return Resolver(limits_of, broken_in, outputs).resolve()

    def _restricted(self, case: Case, limits: Tolerance, got: torch.Tensor, *, finite: bool) -> Tolerance:
        """Return the limits without the elements that this output may leave unjudged."""
        if not finite and self.contract.nonfinite == "unspecified":  # then they may come out anywhere
            numbers = got.cpu().double().isfinite() & limits.golden.isfinite()
            limits = replace(limits, judged=limits.judged & numbers)
        if finite and "float64" in case.dtypes.values():  # the evaluation itself may have overflowed
            limits = replace(limits, judged=limits.judged & limits.golden.isfinite())
        return limits

    def _left_out(
        self, case: Case, output: str, limits: Tolerance, undecided: torch.Tensor, line: str, *, finite: bool
    ) -> Counter[tuple[str, str]]:
        """Return the number of unjudged elements, by output and reason."""
        left = int(undecided.count_nonzero())
        if left:
            reason = f"{UNDECIDED} ({line})"
            others = replace(limits, judged=limits.judged | undecided)
            nothing = torch.zeros_like(undecided)
            return Counter({(output, reason): left}) + self._left_out(
                case, output, others, nothing, line, finite=finite
            )
        without = ~limits.judged
        total = int(without.count_nonzero())
        if not total:
            return Counter()
        special = total if not finite and self.contract.nonfinite == "unspecified" else 0
        infinite = ~limits.golden.isfinite() & (limits.golden != case.definition.outputs.fills)
        beyond = 0 if special else int((without & infinite).count_nonzero())
        return Counter({(output, SPECIAL): special, (output, BEYOND): beyond, (output, OPEN): total - special - beyond})

    @standard_environment()
    def tolerances(
        self,
        case: Case,
        values: Values,
        chosen: Values | None = None,
        *,
        choices: Choices | None = None,
        proven: bool = False,
    ) -> list[Tolerance]:
        """Return what the contract allows of each output, for inputs of these ``values``.

        ``choices``: the answers to what a reference leaves open, by default the likeliest. ``proven``: evaluated by
        Arb.
        """
        model, choices = self.model(case), choices or Answered()
        with one_thread():
            allowed = self._evaluate(case, values, chosen, BallArithmetic(model), choices)
            sites = choices.followed if isinstance(choices, Followed) else choices.sites

            def evaluated(xp: Any) -> list[Golden]:
                return self._evaluate(case, values, chosen, xp, Followed(sites))

            if proven or self.precomputed is None or sites:
                own = BallArithmetic(replace(EVALUATION, rounding=self.contract.code_rounding))
                golden = evaluated(Arb(_ARB_DIGITS) if proven else own)
            else:
                golden = [_without_low_word(stored) for stored in self.precomputed]
            overflow_evaluations, nan_propagated = [], []
            if self.contract.nonfinite == "masked":
                nan_propagated = evaluated(BallArithmetic(replace(model, spills=True)))
            may_overflow = any(bool((part.radius.isinf() & part.value.isfinite()).any()) for part in allowed)
            # which elements overflow depends on the order of factors in products and gradients: those aren't judged
            has_one_order = not case.definition.sizes.work and case.definition.outputs.gradient_of is None
            if may_overflow and has_one_order and not isinstance(choices, Loosened):
                overflow_models = [BallArithmetic(replace(model, beyond=beyond)) for beyond in ("nothing", "infinity")]
                overflow_evaluations = list(zip(*(evaluated(xp) for xp in overflow_models), strict=True))
        # a stored golden and its allowed ball that are disjoint have no exact result in both
        pairs = zip(golden, allowed, strict=True) if self.precomputed is not None and not sites else ()
        if any(bool(((g.value - a.value).abs() > g.radius + a.radius).any()) for g, a in pairs):
            mend = "run assay golden check STORE --sample 1000000, which names it, then assay golden discard"
            raise StoreError(f"a stored golden is not what the definition gives; {mend} ({case})")
        return tolerances_of(case, self.contract, golden, allowed, overflow_evaluations, nan_propagated)

    @standard_environment()
    def evaluate_in(self, case: Case, arithmetic: BallArithmetic) -> list[Golden]:
        """Return the results of a case on its own data in another ball arithmetic; choices are those of the
        definition."""
        with one_thread():
            return self._evaluate(case, all_contents(case), None, arithmetic, Answered())

    def model(self, case: Case) -> RoundingModel:
        """Return the contract's rounding model for a case, statistical if ``statistical``."""
        format = case.input_format
        model = self.contract.model(case.definition, format)
        if not self.statistical:
            return model
        reduction = case.definition.reduction
        long = symbols_in(reduction.over) if reduction is not None else ()
        others = [size for symbol, size in case.sizes.items() if symbol not in long]
        return replace(model, chance=Chance.of(SUMS * prod(others), RATE, format.precision))

    def _evaluate(self, case: Case, values: Values, chosen: Values | None, xp: Any, choices: Choices) -> list[Golden]:
        keywords = {tensor.name: values[tensor.name] for tensor in case.signature.tensors if tensor.keyword}
        tensors = [value for name, value in values.items() if name not in keywords]
        results = run(case.definition, xp, tensors, {**case.options, **keywords}, chosen, choices)
        return [_without_low_word(golden_of(part)) for part in results]

    def admitted(self, case: Case, values: Values, chosen: Values) -> torch.Tensor | None:
        """Return which of the kernel's own choices the contract admits, element by element; None if intervals judge
        them all."""
        definition = case.definition
        if definition.outputs.accepts is None:
            return None
        xp = BallArithmetic(self.contract.model(definition, case.input_format))
        tensors = [xp.exact(value) for value in values.values()]
        ids = chosen[definition.outputs.chosen[0]].to(torch.int64)
        right: torch.Tensor = definition.outputs.accepts(xp, *tensors, ids, **case.options)
        return right

    def _wrong_choice(self, case: Case, values: Values, chosen: Values) -> tuple[Failure, torch.Tensor] | None:
        """Return the failure of a choice that no kernel under the contract may make, and the ratio of each: 0 or
        infinite."""
        right = self.admitted(case, values, chosen)
        if right is None or bool(right.all()):
            return None
        name = case.definition.outputs.chosen[0]
        index = tuple(int(position) for position in (~right).nonzero()[0])
        position = [tensor.name for tensor in case.signature.returns].index(name)
        best = self._evaluate(case, values, None, BallArithmetic(), Answered())[position]
        row, wanted = ([int(id) for id in ids[index[:-1]][:_FEW].tolist()] for ids in (chosen[name], best.value))
        words = f"{name}{list(index[:-1])} came {row}, right is e.g. {wanted}"
        failure = Failure(
            "contract",
            case,
            f"{int((~right).sum())} of {right.numel()} choices are none that the exact values allow: {words}",
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

    def _wrong_count(
        self,
        case: Case,
        values: Values,
        output: torch.Tensor,
        except_outputs: Container[str],
        only: Mapping[str, torch.Tensor] | None,
    ) -> tuple[Failure, torch.Tensor] | None:
        """Return the failure of a row that keeps more or fewer numbers than the op, and the ratio of each element."""
        rules, name = case.definition.outputs, case.signature.returns[0].name
        if rules.keeps is None or name in except_outputs:
            return None
        xp, got = BallArithmetic(self.model(case)), output.detach().cpu().double()
        least, most = rules.keeps(xp, *(xp.exact(value) for value in values.values()), **case.options)
        kept = torch.as_tensor(got != rules.fills)
        numbers = kept.sum(-1)
        wrong = (numbers < least) | (numbers > most)
        if only is not None:
            wrong &= only[name].all(-1)
        if not bool(wrong.any()):
            return None
        row = int(wrong.nonzero()[0])
        index = (row, int((kept[row] if bool(kept[row].any()) else ~kept[row]).nonzero()[-1]))
        right = f"{int(least[row])}" + (f" to {int(most[row])}" if least[row] < most[row] else "")
        failure = Failure(
            "contract",
            case,
            f"{int(wrong.sum())} of {wrong.numel()} rows keep another number of elements than the op: {name}[{row}] "
            f"keeps {int(numbers[row])}, right is {right}",
            name,
            index,
            float(got[index]),
            rules.fills if bool(kept[index]) else float(values[next(iter(values))][index]),
            None,
            math.inf,
            int(wrong.sum()),
            wrong.numel(),
        )
        return failure, torch.where(wrong[:, None] & kept, torch.inf, 0.0).double()


def tolerances_of(
    case: Case,
    contract: Contract,
    golden: list[Golden],
    allowed: list[Golden],
    overflow_evaluations: Sequence[tuple[Golden, Golden]] = (),
    nan_propagated: Sequence[Golden] = (),
) -> list[Tolerance]:
    """Return a contract's limits of each result, from its exact value ``golden`` and its evaluation under the model.

    ``overflow_evaluations``: the evaluation without overflow on the way, and the one with infinity from an overflow on.
    ``nan_propagated``: the evaluation in which NaN and infinities of masked or unread elements spread. Integers are
    judged as numbers; any integer between the ends is right, such as the indices of equal numbers.
    """
    integral = [dtype in INTEGERS for dtype in case.result_dtypes]
    golden = [
        replace(part, radius=torch.where(part.radius.isfinite(), 0.0, part.radius)) if is_integral else part
        for part, is_integral in zip(golden, integral, strict=True)
    ]
    overflows: Sequence[tuple[Golden, Golden] | None] = overflow_evaluations or [None] * len(allowed)
    spreads: Sequence[Golden | None] = nan_propagated or [None] * len(allowed)
    floats = [format.kind == "float" for format in case.result_formats]
    # a whole number has no infinity for what overflowed on the way
    overflows = [overflow if is_float else None for overflow, is_float in zip(overflows, floats, strict=True)]
    results = zip(case.signature.returns, case.result_formats, golden, allowed, overflows, spreads, strict=True)
    return [
        tolerance(
            exact,
            permitted,
            format,
            contract,
            rounded=tensor.role == "rounded",
            overflow_evaluations=overflow,
            nan_propagated=spread,
            fills=case.definition.outputs.fills,
        )
        for tensor, format, exact, permitted, overflow, spread in results
    ]


def _without_low_word(golden: Golden) -> Golden:
    """Return the golden without its low part, which the radius absorbs."""
    if golden.low is None:
        return golden
    return Golden(golden.value, golden.radius + golden.low.abs())


def _is_finite(definition: Spec, values: Values) -> bool:
    """Whether all numbers on which a result depends are finite."""
    unused = definition.inputs.unused(*values.values()) if definition.inputs.unused else {}
    return all(
        bool((value.double().isfinite() | unused.get(name, torch.tensor(False))).all())
        for name, value in values.items()
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for small tensors a pool's barriers cost more than they save, most on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def failure_of(case: Case, name: str, got: torch.Tensor, judgement: Judgement) -> Failure:
    """Build a Failure from the worst element of a judgement.

    The store's share of the radius is taken from the format's spacing at the golden value; at a value far off the
    spacing is larger, and no measure of the error.
    """
    index, limits = judgement.worst_index(), judgement.tolerance
    y, golden = float(got[index]), float(limits.golden[index])
    violations = int(judgement.broken.sum())
    regular = math.isfinite(y) and math.isfinite(golden)
    radius, ratio = float(judgement.radius[index]), float(judgement.ratio[index])
    if regular:
        gap = float(ulp_towards(limits.golden[index], torch.tensor(y), limits.out))
        radius = min(radius, float(limits.pre_store_radius[index]) + limits.share * gap)
        ratio = max(ratio, abs(y - golden) / radius) if radius else ratio
    kind = "nonfinite" if not regular else "exact" if bool(limits.exact[index]) else "contract"
    return Failure(
        kind,
        case,
        f"{violations} of {got.numel()} elements are outside of what the contract allows",
        name,
        index,
        y,
        golden,
        radius if regular else None,
        ratio,
        violations,
        got.numel(),
        *_greatest(got, judgement),
    )


def _greatest(got: torch.Tensor, judgement: Judgement) -> tuple[Difference | None, Difference | None]:
    """Return the greatest absolute and relative differences among the elements that break the contract."""
    golden = judgement.tolerance.golden
    absolute = torch.where(judgement.broken, (got.detach().cpu().double() - golden).abs(), torch.nan)
    results = []
    for differences in (absolute, absolute / golden.abs()):
        known = torch.where(differences.isfinite(), differences, -1.0)
        index = int(known.reshape(-1).argmax())
        value = float(known.reshape(-1)[index])
        results.append(Difference(value, coordinates(index, known.shape)) if value >= 0 else None)
    return results[0], results[1]
