"""The accuracy of a measured error: its standard error over sequences, its interval, and paired comparisons.

A measured error is a ratio of sums over sequences, of distances d_i to weights w_i (positions, or squares of the
reference), or a root of that. Its standard error is that of the linearised ratio: Cochran, Sampling Techniques, 1977,
section 6.3, with Student's t for the interval. Sequences count as independent draws of the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95
"""Confidence level of the intervals over sequences."""
_DRAWS = 2000  # Bootstrap draws: 50 of them lie beyond either end of an interval


class MeasuredError(float):
    """An error in the metric's unit with what each sequence adds to it: a float with an interval."""

    distances: np.ndarray
    """[N]: the distance of each sequence, summed over its positions."""
    weights: np.ndarray
    """[N]: the divisor of each sequence; the error is (sum of distances / sum of weights)^(1 / power)."""
    power: float

    @classmethod
    def of(cls, distances: np.ndarray, weights: np.ndarray, power: float) -> MeasuredError:
        """Return the error from what each of N sequences adds, both [N], the weights of positive sum."""
        with np.errstate(invalid="ignore", over="ignore"):
            error = cls(float(distances.sum() / weights.sum()) ** (1 / power))
        error.distances, error.weights, error.power = distances, weights, power
        return error

    @property
    def standard_error(self) -> float:
        """The standard error over sequences; infinite for one sequence, NaN where the error is not finite."""
        return _standard_error(_influence(self)) if math.isfinite(self) else math.nan

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval of the error over other sequences like these."""
        return self._end(-1)

    @property
    def high(self) -> float:
        """The upper end."""
        return self._end(1)

    def _end(self, sign: int) -> float:
        if not math.isfinite(self) or not self > 0:
            return float(self)
        off = _quantile(self) * self.standard_error / self
        return float(self) * math.exp(sign * off) if off < 700 else (0.0, math.inf)[sign > 0]


@dataclass(frozen=True, slots=True)
class Difference:
    """One measured error minus another over the same sequences, with its 95 % interval."""

    error: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """-1 where the first error is smaller, 1 where it is larger, 0 where the interval holds both."""
        return (self.low > 0) - (self.high < 0)


def difference(first: MeasuredError, second: MeasuredError) -> Difference:
    """Return the first error minus the second, paired by sequence, so that a sequence's contribution to both cancels.

    An error that isn't finite is larger than one that is. Raises ValueError for errors over different sequences.
    """
    if not np.array_equal(first.weights, second.weights):
        raise ValueError("expected errors over the same sequences, got other ones: measure both on the same data")
    if not (math.isfinite(first) and math.isfinite(second)):
        gap = math.nan if math.isfinite(first) == math.isfinite(second) else math.inf
        gap = -gap if math.isfinite(first) else gap
        return Difference(gap, gap, gap)
    gap = float(first) - float(second)
    spread = _standard_error(_influence(first) - _influence(second))
    half = _quantile(first, second) * spread if spread else 0.0
    return Difference(gap, gap - half, gap + half)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One measured error divided by another over the same sequences, with its 95 % interval."""

    ratio: float
    low: float
    high: float


def ratio(first: MeasuredError, second: MeasuredError) -> Ratio:
    """Return the first error over the second, paired by sequence, with the interval of the difference of their
    logarithms.

    From a single sequence the interval is 0 to infinity; NaN where an error is zero or not finite.
    """
    if not (0 < first < math.inf and 0 < second < math.inf):
        return Ratio(math.nan, math.nan, math.nan)
    value = float(first) / float(second)
    off = _standard_error(_influence(first) / float(first) - _influence(second) / float(second))
    half = _quantile(first, second) * off if off else 0.0
    return Ratio(value, value * math.exp(-half), value * math.exp(half) if half < 700 else math.inf)


def relative_spread(errors: list[MeasuredError]) -> float:
    """The standard deviation of a single sequence's part in an error, relative to it: the median over several errors.

    An error over N sequences has about 1 / sqrt(N) of it as its relative standard error.
    """
    known = [error for error in errors if math.isfinite(error) and error > 0 and len(error.weights) > 1]
    spreads = [error.standard_error / error * math.sqrt(len(error.weights)) for error in known]
    return float(np.median(spreads)) if spreads else 0.0


class OtherSequences:
    """The range of the error over M other sequences around the error over the N sequences at hand.

    If sequence n adds p_n to a sum that is divided by w_n, both errors are means of draws from one distribution, of
    which the N are a sample. So the logarithm of a resampled mean of M over a resampled one of N (Efron and Tibshirani,
    An Introduction to the Bootstrap, 1993, chapters 8 and 13) spreads as that of the held-out error over the one at
    hand. Its quantiles 2.5 % and 97.5 % are the ends: an error that few sequences dominate has a longer interval,
    longer to the side where these are many or none. The ends of a bootstrap are short by Student's t over the normal
    quantile; its degrees of freedom are taken as the effective number of sequences, (sum p)^2 / sum p^2, less one.
    Static scales are of the sequences at hand too: where other sequences exceed them, their error is larger.
    """

    def __init__(self, weights: np.ndarray, count: int, known: int | None = None) -> None:
        """weights: [N], of the sequences at hand; count: M. known: the number of sequences like them over which the
        error is known, where not N."""
        generator, number = np.random.default_rng(0), len(weights)
        even, sizes = np.full(number, 1 / number), (count, known or number)
        self._weights = weights
        self.saturation_cache: dict[object, np.ndarray | float] = {}
        """The clipped energies that a caller has computed from `excess_squares`, by site and scheme."""
        self._count = count
        self._drawn = [generator.multinomial(size, even, size=_DRAWS) / size for size in sizes]
        self._least = 1 / sum(sizes)

    def excess_squares(self, tops: np.ndarray) -> np.ndarray:
        """Return by how much the largest magnitudes of other sequences exceed the largest at hand: the mean square over
        the M sequences in each of D draws, [D]. tops: [N], the largest magnitude of each sequence at hand, positive.

        Beyond the k = sqrt(N) largest at hand, magnitudes are taken to have a Pareto tail, whose exponent is estimated
        from these k: Weissman, Estimation of parameters and large quantiles based on the k largest observations, JASA
        1978.
        """
        generator, number = np.random.default_rng(1), len(tops)
        if number < 3:
            return np.zeros(_DRAWS)
        most, logs = round(math.sqrt(number)), np.sort(np.log(tops))[::-1]
        slopes = float((logs[:most] - logs[most]).sum()) / generator.gamma(most, size=(_DRAWS, 1))
        counts = generator.poisson(self._count * most / number, (_DRAWS, 1))
        beyond = np.minimum(logs[most] - logs[0] + slopes * generator.exponential(size=(_DRAWS, counts.max())), 300.0)
        exceeding = np.where(np.arange(counts.max()) < counts, np.expm1(np.maximum(beyond, 0.0)), 0.0)
        squares: np.ndarray = np.square(exceeding * tops.max()).sum(1) / self._count
        return squares

    def ends(self, parts: np.ndarray, power: float, saturation: np.ndarray | float = 0.0) -> tuple[float, float]:
        """Return how far the interval reaches below and above the error, in logarithms. parts: [N], the terms of the
        error's sum; saturation: the clipped energy in each draw, [D], over that sum."""
        if len(parts) < 2 or not parts.sum() > 0:
            return math.inf, math.inf
        ratio = parts.sum() / self._weights.sum()
        logs = []
        for drawn in self._drawn:  # of no sequence that counts there is less than so many can tell
            divided = np.maximum(drawn @ self._weights, 1e-300)
            logs.append(np.log(np.maximum(drawn @ parts / divided / ratio, self._least)))
        log_ratios = logs[0] - logs[1]
        low, high = (
            np.quantile(log_ratios, (1 - LEVEL) / 2),
            np.quantile(log_ratios + np.log1p(saturation), (1 + LEVEL) / 2),
        )
        wider = stdtrit(max(_counting(parts) - 1, 1.0), (1 + LEVEL) / 2) / stdtrit(math.inf, (1 + LEVEL) / 2)
        return max(-float(low), 0.0) * wider / power, max(float(high), 0.0) * wider / power


def _influence(error: MeasuredError) -> np.ndarray:
    """Return the derivative of the error by each sequence, [N], of sum zero."""
    if not error > 0:
        return np.zeros_like(error.distances)
    ratio = float(error) ** error.power
    moved: np.ndarray = (error.distances - ratio * error.weights) / error.weights.sum()
    return moved * float(error) / (error.power * ratio)


def _standard_error(influence: np.ndarray) -> float:
    count = len(influence)
    return math.sqrt(count / (count - 1) * float(np.square(influence).sum())) if count > 1 else math.inf


def _counting(parts: np.ndarray) -> float:
    """Return the effective number of sequences in a sum of ``parts`` [N], zero or more: (sum p)^2 / sum p^2."""
    squares = float(np.square(parts).sum())
    return float(parts.sum()) ** 2 / squares if squares else float(len(parts))


def _quantile(*errors: MeasuredError) -> float:
    """Return Student's t, with the fewest effective sequences of the errors: where a few make most of an error, its
    standard error depends on these."""
    if len(errors[0].weights) == 1:
        return math.inf
    freedom = max(min(_counting(error.distances) for error in errors) - 1, 1.0)
    return float(stdtrit(freedom, (1 + LEVEL) / 2))
