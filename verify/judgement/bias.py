"""A test of bias: errors that lie within the radius, and all on one side.

A contract that rounds to nearest allows each rounding half an ulp, of the sign that chance gives it. A kernel that
truncates an intermediate spends the same radius on one side; no single element proves it, many do.

The error of a stored result y is taken against the exact result stored in the contract's way, d = y - store(exact):
stores err themselves, and where results crowd about a power of two their own errors have a mean (null: not zero).
With exact results spread evenly over a gap, E d is the mean error before the store. A statistic is T = sum of
d / radius over a whole output, once as it is (a bias downward or upward) and once with the signs of the exact results
(a bias toward or away from zero). What a contract lets err on one side (elementary functions, folded constants, what
sums of few values drift by: all but stages that round to nearest) may add up to at most F = sum of free / radius.

The unit of independence is a call with fresh data: elements of one call share operands and so their roundings. An
honest kernel exceeds `MARGIN` F on a given side with a probability of at most 1/2; `UNITS` calls that all exceed it
on one side prove the bias. The first call that doesn't ends the test, so honest kernels cost two or three calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden.arithmetic import RoundingModel
from assay.golden.arithmetic.chance import Chance
from assay.golden.evaluation.golden import Golden
from assay.verify.cases.case import Case
from assay.verify.contract import Contract
from assay.verify.findings import Failure, Side
from assay.verify.judgement.judge import Tolerance
from assay.verify.judgement.result import Result

RATE = 1e-6
"""The stated rate of false alarms of an examination."""

UNITS = 32
"""Calls that must agree: 48 questions (4 series, 3 results, 2 statistics, 2 sides) at 0.55^32 each stay below RATE."""

MARGIN = 1.5
"""Beyond F by this factor: then even a mean of F, seen as rare steps of one ulp, exceeds in half the calls at most."""

_STRIDE = 104_729  # between the seeds of two units

STATISTICS: Mapping[str, tuple[Side, Side]] = {
    "mean": ("downward", "upward"),
    "magnitude": ("toward zero", "away from zero"),
}

Name = tuple[str, str]  # of a result, and of a statistic
Free = Callable[[Case, RoundingModel], list[Golden]]


@dataclass(frozen=True)
class Score:
    """One statistic of one result in one call: T, and F that one-sided freedoms explain at most."""

    result: str
    statistic: str
    total: float
    free: float
    elements: int

    @property
    def side(self) -> int:
        """-1 or 1 where T lies beyond what the contract's freedoms explain, else 0."""
        if not abs(self.total) > MARGIN * self.free:
            return 0
        return 1 if self.total > 0 else -1


def one_sided(model: RoundingModel, bits: int) -> RoundingModel:
    """The part of a contract's model that an honest kernel may spend on one side, of inputs of so many ``bits``.

    Roundings to nearest of stages are left out, and of sums in a format at least as fine as the arithmetic around them
    all but the drift of terms that have few values (`assay.golden.arithmetic.chance`). A matrix unit truncates, and
    coarse accumulators stagnate: their errors have a sign, and stay in; so do all rescalings.
    """
    return replace(model, stages={}, chance=Chance(0.0, bits))


def unit_cases(case: Case) -> Iterator[Case]:
    """The calls of a series: the case with fresh data each time."""
    for unit in range(UNITS):
        yield replace(case, protocol="once", seed=case.seed + unit * _STRIDE)


def try_series(case: Case, attempt: Callable[[Case], Result], contract: Contract, free: Free) -> Result:
    """Calls with fresh data until no side is left on which all of them erred, or all are done: then it is a failure.

    ``attempt`` tries one case and judges it element by element; a violation there ends the series. ``free`` evaluates
    the op of a case under a rounding model.
    """
    format = format_named(next(iter(case.dtypes.values())))
    model = one_sided(contract.model(case.definition, format), format.precision)
    leaning: dict[Name, int] | None = None
    seen: list[dict[Name, Score]] = []
    first: Result | None = None
    for single in unit_cases(case):
        result = attempt(single)
        first = first or result
        if result.failure is not None or case.definition.chosen:
            return result
        found = {(score.result, score.statistic): score for score in scores(single, result, model, contract, free)}
        sides = {name: score.side for name, score in found.items() if score.side}
        leaning = sides if leaning is None else {n: side for n, side in leaning.items() if sides.get(n) == side}
        if not leaning:
            return first
        seen.append(found)
    assert first is not None
    assert leaning is not None
    return replace(first, failure=_failure(case, seen, leaning))


def scores(case: Case, result: Result, model: RoundingModel, contract: Contract, free: Free) -> list[Score]:
    """The statistics of a judged call; none where nothing was left to err, or every result is the nearest number."""
    places = [place for place, tensor in enumerate(case.signature.returns) if not tensor.is_integer]
    found: list[Score] = []
    freedoms: list[Golden] | None = None
    for place, limits in zip(places, result.tolerances, strict=True):
        tensor, y = case.signature.returns[place], result.outputs[place].detach().cpu().double()
        errors = y - _stored(limits, contract)
        if tensor.role == "rounded" or bool((errors == 0).all()):
            continue
        freedoms = freedoms or free(case, model)
        allowed, radius = freedoms[place].radius, limits.inner + 0.5 * _gap(limits)
        kept = _ordinary(limits) & y.isfinite() & allowed.isfinite() & limits.inner.isfinite()
        shares = torch.where(kept, errors / radius, 0.0)
        explained, count = float(torch.where(kept, allowed / radius, 0.0).sum()), int(kept.sum())
        found.append(Score(tensor.name, "mean", float(shares.sum()), explained, count))
        found.append(Score(tensor.name, "magnitude", float((shares * limits.golden.sign()).sum()), explained, count))
    return found


def _stored(limits: Tolerance, contract: Contract) -> torch.Tensor:
    """What an exact computation would have stored."""
    if contract.rounding == "stochastic":
        return limits.golden  # its mean is the exact result
    finite = torch.where(limits.golden.isfinite(), limits.golden, 0.0)
    return round_to(finite, limits.out, "nearest" if contract.rounding == "nearest" else "toward_zero")


def _gap(limits: Tolerance) -> torch.Tensor:
    size = limits.golden.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=limits.out.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(size))) * 2.0 ** (1 - limits.out.precision)


def _ordinary(limits: Tolerance) -> torch.Tensor:
    """Judged numbers well inside the range: subnormals may be flushed, and overflow has a side."""
    size = limits.golden.abs()
    return limits.judged & (size >= 4 * limits.out.smallest_normal) & (size <= limits.out.largest / 4)


def _failure(case: Case, seen: list[dict[Name, Score]], sides: Mapping[Name, int]) -> Failure:
    """The failure that the strongest of the statistics shows."""
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
