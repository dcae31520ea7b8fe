"""A test of bias: errors that are within the radius, but all on one side.

A contract that rounds to nearest allows each rounding half an ulp, of random sign. A kernel that truncates an
intermediate spends the same radius on one side; no single element proves it, many do.

The error of a stored result y is taken against the exact result, stored as the contract says: d = y - store(exact).
Stores err themselves, and where results crowd about a power of two their errors have a nonzero mean. With exact results
spread evenly over a gap, E d is the mean error before the store. The statistic T is the sum of d / radius over a whole
output, once as it is (a bias downward or upward) and once with the signs of the exact results (a bias toward or away
from zero). Errors that the contract lets have one sign (of elementary functions, folded constants, the drift of sums of
few values: all but stages that round to nearest) add up to at most F = sum of free / radius.

Stages round to nearest, but the value decides in which direction: for few distinct values, or for values just next to a
number of the format, all errors may have one sign. So if a call leans, the results of a correct kernel are computed for
each combination of rounded stages (`stage_roundings`), and the call counts as leaning only if it leans to the same side
of each. A kernel that rounds a part theta of a stage's values is theta of the way from one to another, so beyond
neither end.

Results aren't always spread evenly either: those of few distinct values may all be just next to a midpoint, so that an
error of any size changes the stored number. The sum of the steps that the contract's radius w can cause, store(x + w) -
store(x), has the mean of w if results are spread. If it exceeds that by three standard deviations over all calls,
results are crowded, and the excess counts as free too. This is computed only for kernels that would otherwise be
reported.

The unit of independence is a call with fresh data: elements of one call share operands and so their roundings. A
correct kernel exceeds `MARGIN` F on a given side with a probability of at most 1/2; `UNITS` calls that all exceed it on
one side prove the bias. The first call that doesn't ends the test, so correct kernels cost two or three calls.

How a correct kernel may round the stages of a contract: each is rounded to nearest or not at all. The rounding error of
a stage value z is a function of z, not random. Over values spread evenly within the gaps of the format its mean is
zero; over few values (silu of integers), or over values just next to a number of the format (silu(x) just below x), it
isn't, and it is the same in each call with fresh data. So it is computed: the definition is evaluated again with z
rounded to nearest (`NearestBalls`).

A kernel has z' = z + e with |e| <= w, where w is the radius of z under the whole contract (`ends`; for sums the worst
case, since even its random errors take z across a nearby midpoint in one direction only). It rounds z' to a number
between round(z - w) and round(z + w). If these are equal, as for nearly all z, no freedom is left; otherwise the
interval between them is free, and goes through the rest of the definition as a radius.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from assay.formats.format import Format
from assay.formats.rounding import round_to
from assay.golden.arithmetic import BallArithmetic, Real, RoundingModel
from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.model import Chance
from assay.golden.evaluation.golden import Golden
from assay.verify.cases.case import Case
from assay.verify.comparison.judge import Tolerance
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.findings import Failure, Side

Tensor = torch.Tensor
Ends = tuple[Tensor, Tensor]

WEIGHTS = ("rounded", "rounded and added up", "normalised")
"""How the stage "probabilities" of attention may be rounded: before the division, and the sum of the weights taken of
what was rounded or of what was not; or after it."""
_MOST_STAGES = 3  # the most stages of which every combination is tried: each is an evaluation of the definition
_WEIGHTS_STAGE = "probabilities"


@dataclass(frozen=True)
class StageRounding:
    """The stages that a kernel rounds, each to its format; ``weights`` says how it rounds attention's."""

    stages: Mapping[str, Format]
    weights: str = WEIGHTS[0]


def stage_roundings(model: RoundingModel) -> Iterator[StageRounding]:
    """Yield the combinations of stages that a kernel under this model may round, except none at all.

    Stages at least as fine as the arithmetic round nothing more. Of many stages: all of them, and each alone.
    """
    coarse = {name: format for name, format in model.stages.items() if format.precision < model.compute.precision}
    sizes = range(1, len(coarse) + 1) if len(coarse) <= _MOST_STAGES else (1, len(coarse))
    for size in sizes:
        for names in itertools.combinations(coarse, size):
            for weights in WEIGHTS if _WEIGHTS_STAGE in names else WEIGHTS[:1]:
                yield StageRounding({name: coarse[name] for name in names}, weights)


class NearestBalls(BallArithmetic):
    """Balls under a ``model`` without stages, whose stages are rounded to nearest by ``stage_rounding``.

    ``ends`` are those of each stage value in turn, from an earlier evaluation; if left out, they are those of the balls
    themselves, and are kept in ``stage_ends``. ``rounds`` says afterwards whether anything was rounded.
    """

    def __init__(self, model: RoundingModel, stage_rounding: StageRounding, ends: Sequence[Ends] | None = None) -> None:
        super().__init__(model)
        self.stage_rounding, self.stage_ends, self.rounds = stage_rounding, list[Ends](), False
        self._ends = None if ends is None else iter(ends)

    def stores(self, stage: str) -> bool:
        return stage in self.stage_rounding.stages

    def round(self, x: Ball, stage: str) -> Ball:
        format = self.stage_rounding.stages.get(stage)
        return x if format is None else self._nearest(x, format)

    def _nearest(self, x: Ball, format: Format) -> Ball:
        if self._ends is None:
            self.stage_ends.append((round_to(x.mid - x.radius, format), round_to(x.mid + x.radius, format)))
            low, high = self.stage_ends[-1]
        else:
            low, high = next(self._ends)
        self.rounds = True
        mid = round_to(x.mid, format)
        rad = torch.maximum(high - mid, mid - low)
        if self.model.flush:
            rad = rad + torch.where(mid.abs() < format.smallest_normal, mid.abs(), 0.0)
        open_ = ~(mid.isfinite() & rad.isfinite())
        return Ball(torch.where(open_, x.mid, mid), torch.where(open_, math.inf, rad), self.model)

    def attend(self, scores: Ball, visible: Tensor, values: Ball, sinks: Ball | None) -> tuple[Ball, Ball]:
        """Evaluate the definition, moved by the effect on the output of rounding its weights in this way.

        Weights are rounded as their exact values are: the side of a midpoint on which a kernel's values fall is left to
        chance.
        """
        out, lse = super().attend(scores, visible, values, sinks)
        format = self.stage_rounding.stages.get(_WEIGHTS_STAGE)
        if format is None or not values.is_finite:
            return out, lse
        self.rounds = True
        weights, total = Real().attention_weights(scores.mid, visible, None if sinks is None else sinks.mid)
        hidden = torch.where(visible, scores.mid, -math.inf).amax(-1, keepdim=True) if scores.shape[-1] else total
        scale = torch.exp(total - hidden)  # what the division is by
        known = scale.isfinite() & (scale > 0)
        scale = torch.where(known, scale, 1.0)
        if self.stage_rounding.weights == "normalised":
            moved = round_to(weights, format)
        else:
            moved = round_to(weights * scale, format) / scale
            if self.stage_rounding.weights == "rounded and added up":
                other = 1 - weights.sum(-1, keepdim=True)  # a sink's share
                moved = moved / (moved.sum(-1, keepdim=True) + other).clamp(min=1e-30)
        shift = torch.where(known, (moved - weights) @ values.mid, 0.0)
        return Ball(out.mid + shift, out.rad, self.model), lse


RATE = 1e-6
"""The stated rate of false alarms of an examination."""

UNITS = 32
"""Calls that must agree: 48 tests (4 series, 3 results, 2 statistics, 2 sides) at 0.55^32 each stay below RATE."""

MARGIN = 1.5
"""Beyond F by this factor: then even a mean of F, seen as rare steps of one ulp, exceeds in half the calls at most."""

_CROWDED = 3.0  # standard deviations above the mean of evenly spread results
_STRIDE = 104_729  # between the seeds of two calls: a prime, so that series from near seeds share none

STATISTICS: Mapping[str, tuple[Side, Side]] = {
    "mean": ("downward", "upward"),
    "magnitude": ("toward zero", "away from zero"),
}

Name = tuple[str, str]  # of a result, and of a statistic
Evaluate = Callable[[Case, BallArithmetic], list[Golden]]


@dataclass(frozen=True)
class Score:
    """One statistic of one result in one call: T, and F, the most that one-sided freedoms explain.

    ``steps`` are the sums of the possible changes by the store, downward and upward, within the contract's radius,
    ``spread`` their mean for evenly spread results, ``variance`` their variance then; all zero if not requested.
    """

    result: str
    statistic: str
    total: float
    free: float
    elements: int
    steps: tuple[float, float] = (0.0, 0.0)
    spread: float = 0.0
    variance: float = 0.0

    @property
    def side(self) -> int:
        """-1 or 1 if T is beyond what the contract's freedoms explain, else 0."""
        if not self.beyond > 0:
            return 0
        return 1 if self.total > 0 else -1

    @property
    def beyond(self) -> float:
        """The amount by which T is beyond that."""
        return abs(self.total) - MARGIN * self.free


def one_sided(model: RoundingModel, bits: int) -> RoundingModel:
    """Return the part of a contract's model that a correct kernel may spend on one side, for inputs of ``bits``.

    It leaves out roundings of stages to nearest. Of sums in a format at least as fine as the arithmetic around them it
    keeps only the drift of terms with few values (`assay.golden.arithmetic.model`). A matrix unit truncates, and coarse
    accumulators stagnate: their errors have a sign and are kept, as are all rescalings.
    """
    return replace(model, stages={}, chance=Chance(0.0, bits))


def unit_cases(case: Case) -> Iterator[Case]:
    """Yield the calls of a series: the case with fresh data each time."""
    for unit in range(UNITS):
        yield replace(case, protocol="once", seed=case.seed + unit * _STRIDE)


def try_series(case: Case, attempt: Callable[[Case], Result], contract: Contract, evaluate: Evaluate) -> Result:
    """Call with fresh data until no side is left on which all calls erred, or until all calls are done, which is a
    failure.

    ``attempt`` tries one case and judges it element by element; a violation there ends the series. ``evaluate`` returns
    the results of a case in an arithmetic.
    """
    leaning: dict[Name, int] | None = None
    seen: list[dict[Name, Score]] = []
    calls: list[Result] = []
    every = tuple(stage_roundings(contract.model(case.definition, case.input_format)))
    for single in unit_cases(case):
        result = attempt(single)
        calls.append(result)
        if result.failure is not None or case.definition.outputs.chosen or not result.tolerances:
            return result
        if result.own_choices:  # an evaluation of the definition alone makes others
            return result
        nearest: dict[Name, Score] = {}
        for stage_rounding in (None, *every):
            beside = scores(result, contract, evaluate, stage_rounding)
            if beside is None:
                continue
            results = {(score.result, score.statistic): score for score in beside}
            sides = {name: score.side for name, score in results.items() if score.side}
            leaning = sides if leaning is None else {n: side for n, side in leaning.items() if sides.get(n) == side}
            if not leaning:
                return calls[0]
            known = {name: results[name] for name in leaning}
            nearest |= {n: s for n, s in known.items() if n not in nearest or s.beyond < nearest[n].beyond}
        seen.append(nearest)
    assert leaning is not None
    for stage_rounding in (None, *every):
        beside_all = [scores(result, contract, evaluate, stage_rounding, steps=True) for result in calls]
        leaning = _not_crowded(leaning, [beside for beside in beside_all if beside is not None])
    if not leaning:
        return calls[0]
    return replace(calls[0], failure=_failure(case, seen, leaning))


def _not_crowded(leaning: Mapping[Name, int], calls: list[list[Score]]) -> dict[Name, int]:
    """Return the statistics that lean further than crowded midpoints explain."""
    left = {}
    for name, side in leaning.items():
        units = [score for result in calls for score in result if (score.result, score.statistic) == name]
        steps = [score.steps[side > 0] for score in units]
        spread = sum(score.spread for score in units)
        is_crowded = sum(steps) > spread + _CROWDED * sum(score.variance for score in units) ** 0.5
        more = [max(0.0, step - score.spread) * is_crowded for step, score in zip(steps, units, strict=True)]
        if all(score.beyond > extra for score, extra in zip(units, more, strict=True)):
            left[name] = side
    return left


def scores(
    result: Result,
    contract: Contract,
    evaluate: Evaluate,
    stage_rounding: StageRounding | None = None,
    *,
    steps: bool = False,
) -> list[Score] | None:
    """Return the statistics of a judged call against a kernel that rounds stages by ``stage_rounding``, or rounds none.

    Empty if nothing could err, or if every result is the nearest number; None if the definition rounds nothing in
    this way. ``steps``: also compute the possible changes by the store.
    """
    case = result.case
    indices = [index for index, tensor in enumerate(case.signature.returns) if not tensor.is_integer]
    if all(
        bool((_given(result, index) == _stored(limits.golden, limits, contract)).all())
        for index, limits in zip(indices, result.tolerances, strict=True)
    ):
        return []
    full = contract.model(case.definition, case.input_format)
    likely, worst = one_sided(full, case.input_format.precision), replace(full, stages={})
    if stage_rounding is None:
        free = evaluate(case, BallArithmetic(likely))
        wide = evaluate(case, BallArithmetic(worst)) if steps else free
    else:
        around = NearestBalls(worst, stage_rounding)
        wide = evaluate(case, around)
        if not around.rounds:
            return None
        free = evaluate(case, NearestBalls(likely, stage_rounding, around.stage_ends))
    results: list[Score] = []
    for index, limits in zip(indices, result.tolerances, strict=True):
        tensor, y = case.signature.returns[index], _given(result, index)
        exact = limits.golden if stage_rounding is None else free[index].value
        right = _stored(exact, limits, contract)
        if tensor.role == "rounded" or bool((y == right).all()):
            continue
        allowed, gap = free[index].radius, _gap(limits)
        radius = limits.pre_store_radius + 0.5 * gap
        kept = (
            _ordinary(limits)
            & y.isfinite()
            & exact.isfinite()
            & allowed.isfinite()
            & limits.pre_store_radius.isfinite()
        )
        reach = torch.where(kept, wide[index].radius.nan_to_num(0.0, 0.0, 0.0), 0.0) * steps

        def total(x: torch.Tensor, kept: torch.Tensor = kept, radius: torch.Tensor = radius) -> float:
            return float(torch.where(kept, x / radius, 0.0).sum())

        down = right - _stored(exact - reach, limits, contract)
        up = _stored(exact + reach, limits, contract) - right
        variance = total(torch.minimum(reach, gap / 4) * gap / radius)
        for statistic, sign in (("mean", torch.ones_like(exact)), ("magnitude", exact.sign())):
            ends = [total(torch.where(sign > 0, one, torch.where(sign < 0, other, 0.0)))
                    for one, other in ((down, up), (up, down))]  # fmt: skip
            share = total((y - right) * sign)
            count = int(kept.sum())
            more = ((ends[0], ends[1]), total(reach), variance) if steps else ()
            results.append(Score(tensor.name, statistic, share, total(allowed), count, *more))
    return results


def _given(result: Result, index: int) -> torch.Tensor:
    return result.outputs[index].detach().cpu().double()


def _stored(exact: torch.Tensor, limits: Tolerance, contract: Contract) -> torch.Tensor:
    """Return the results that an exact computation would store."""
    if contract.rounding == "stochastic":
        return exact  # its mean is the exact result
    finite = torch.where(exact.isfinite(), exact, 0.0)
    return round_to(finite, limits.out, contract.code_rounding)


def _gap(limits: Tolerance) -> torch.Tensor:
    size = limits.golden.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=limits.out.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(size))) * 2.0 ** (1 - limits.out.precision)


def _ordinary(limits: Tolerance) -> torch.Tensor:
    """Return the judged numbers well inside the range: subnormals may be flushed, and overflow has a side."""
    size = limits.golden.abs()
    return limits.judged & (size >= 4 * limits.out.smallest_normal) & (size <= limits.out.largest / 4)


def _failure(case: Case, seen: list[dict[Name, Score]], sides: Mapping[Name, int]) -> Failure:
    """Return the failure of the strongest statistic."""
    name = max(sides, key=lambda name: min(abs(unit[name].total) / unit[name].elements for unit in seen))
    result, statistic = name
    mean = sum(unit[name].total / unit[name].elements for unit in seen) / len(seen)
    free = sum(unit[name].free / unit[name].elements for unit in seen) / len(seen)
    direction = STATISTICS[statistic][sides[name] > 0]
    message = (
        f"errors lean {direction} in {len(seen)} of {len(seen)} calls with fresh data, by {abs(mean):.3g} of the "
        f"radius in the mean; the contract's one-sided freedoms explain {free:.3g} (false alarms: at most {RATE:g} "
        "an examination)"
    )
    ratio = abs(mean) / free if free else None
    elements = sum(unit[name].elements for unit in seen)
    return Failure("bias", case, message, result, ratio=ratio, elements=elements, side=direction)
