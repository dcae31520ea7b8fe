"""Rounding models: bounds on the error of each operation of an evaluation.

With float64's constants a model bounds the float64 evaluation that produces a golden, so that the golden's radius is
certified; with the constants of a kernel's contract it bounds every kernel that keeps the contract, so that the radius
is the tolerance.

Sources: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., ch. 3 (gamma_n); P. Blanchard,
N. J. Higham, F. Lopez, T. Mary, S. Pranesh, *Mixed precision block fused multiply-add*, SISC 42 (2020) C124.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from assay.formats.accumulator import Accumulator
from assay.formats.format import Format, format_named
from assay.formats.rounding import Mode, round_to

_DEVIATIONS = 4.0  # of a drift, which depends on the distribution and the length, not on the draw


@dataclass(frozen=True)
class Chance:
    """A probabilistic bound on successive roundings: it grows as the square root of their number, plus a drift.

    Bounds such as gamma_n = n u / (1 - n u) are reached only if all n roundings err by a whole u to the same side. With
    errors of mean zero, n factors 1 + e_i stay within exp(lambda sqrt(n) u + n u^2) of one with a probability of at
    least 1 - 2 exp(-lambda^2 / 2) (N. J. Higham & T. Mary, *A new approach to probabilistic rounding error analysis*,
    SISC 41 (2019) A2815; under mean independence M. P. Connolly, N. J. Higham & T. Mary, *Stochastic rounding and its
    probabilistic backward error analysis*, SISC 43 (2021) A566). This class changes that bound in three ways.

    **The constant.** Rounding to nearest gives errors that are uniform within half a gap: e is uniform within +-u / m,
    with m >= 1 the significand. A uniform X within +-a has E exp(tX) = sinh(ta) / (ta) <= exp(t^2 a^2 / 6), because
    (2k + 1)! >= 6^k k!; for an arbitrary X within +-a only exp(t^2 a^2 / 2) is known (Hoeffding). So e_1 + ... + e_n
    exceeds lambda sqrt(n / 3) u with a probability of at most 2 exp(-lambda^2 / 2), and |log(1 + e) - e| <= u^2 extends
    that to the product. A sum in any order has the same bound: its error is sum s_k e_k over its n - 1 partial sums,
    |s_k| <= sum |x_i|, so that sum s_k^2 <= n (sum |x_i|)^2.

    **The rate.** lambda = sqrt(2 log(2 N / rate)) for N sums, by the union bound.

    **A drift.** Mean zero fails if terms have few values. A partial sum is a multiple of its gap, so that a term of one
    value always errs by the same amount while the sum stays in a binade. The mean of v such errors, each uniform within
    +-u, is off by about u / sqrt(3 v): n terms drift by up to k n u / sqrt(3 v) for k standard deviations. A format of
    p bits has v = 2^p values in two octaves, which contain most terms. Measured: sequential sums of 65,536 squares of
    bfloat16 numbers drift by 0.02 n u, five times what sqrt(n) u predicts.

    deviations: lambda; zero leaves only the drift, which has a sign. bits: the precision p of the terms.
    """

    deviations: float
    bits: int

    @staticmethod
    def of(sums: int, rate: float, bits: int) -> Chance:
        """Return the bound that at least one of ``sums`` sums exceeds with a probability of at most ``rate``."""
        return Chance(math.sqrt(2 * math.log(2 * max(sums, 1) / rate)), bits)

    def sum_of(self, count: int, error: float) -> float:
        """Return a bound on the logarithm of a product of ``count`` factors 1 + e, |e| <= ``error``."""
        drift = _DEVIATIONS / math.sqrt(3 * 2.0**self.bits)
        return (self.deviations * math.sqrt(count / 3) + drift * count) * error + count * error * error


RADIUS_ROUNDING = 1 + 2.0**-30
"""Radii are computed in float64, rounded to nearest: within 2^23 u of their formula.

Where one is subtracted (|b| - r) the difference may have a larger relative error: the radius is widened first
(`outward`). Sums of more than 2^20 terms have a factor of their own (`RoundingModel.sum_rounding`).
"""
_LARGEST_EXPONENT = 700.0  # below the overflow of exp
UNLISTED_ULPS = 4.0  # for functions that a model does not list
ENDS_OF_ROUNDING: Mapping[str, tuple[Mode, Mode]] = {
    "nearest": ("nearest", "nearest"),
    "nearest_away": ("nearest_away", "nearest_away"),
    "toward_zero": ("toward_zero", "toward_zero"),
    "stochastic": ("down", "up"),
}
"""By the names of `RoundingModel.rounding`: how the least and the largest number of an interval are rounded."""


@dataclass(frozen=True)
class RoundingModel:
    """Bounds on the error of each operation.

    ``ulps`` are the errors of elementary functions in ulps of ``compute`` (`UNLISTED_ULPS` where left out); ``stages``
    the formats to which marked intermediates may be rounded; ``flush`` allows zero for a subnormal; ``empty_row`` is
    the value of an attention row without visible keys (None: any); ``rounding`` how codes are rounded ("nearest",
    "nearest_away", "toward_zero", "stochastic": to either neighbour); ``rescale_every`` how many terms of a running sum
    of exponentials come before it is rescaled to a new maximum. With ``chance`` successive roundings have its
    probabilistic bound, not the worst case. ``beyond``: the result if an intermediate may overflow: "anything";
    "nothing", as if there were no overflow; or "infinity" if every kernel's overflows, and else the number that it is
    without overflow, or none. ``spills``: results are unspecified where a masked or unread NaN or infinity enters a sum
    with a weight of zero. ``regroup``: products and sums may be distributed and regrouped. ``chunk``: how many
    positions of a recurrence a kernel goes through at once, at most; ``prefix_sums``: exponentials may be of
    differences of prefix sums of so many exponents (`prefix_error`). ``certifies`` marks the model of the float64
    evaluation itself, whose algorithms are known, so that orders and formulas of kernels are not covered.
    """

    compute: Format
    accumulate: Accumulator
    ulps: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, Format] = field(default_factory=dict)
    flush: bool = False
    empty_row: float | None = 0.0
    rounding: str = "nearest"
    rescale_every: int = 1
    chance: Chance | None = None
    beyond: str = "anything"
    spills: bool = False
    regroup: bool = False
    chunk: int = 64
    prefix_sums: bool = False
    certifies: bool = False

    @property
    def unit_roundoff(self) -> float:
        """Return the largest relative error of one rounding of an elementwise intermediate."""
        return self.compute.unit_roundoff

    @property
    def largest(self) -> float:
        """Return the magnitude beyond which an intermediate may overflow."""
        return math.inf if self.beyond == "nothing" else self.range

    @property
    def surely_beyond(self) -> float:
        """Return the magnitude beyond which every kernel's intermediate is infinite, if that is followed."""
        return self.range * (1 + 2 * self.unit_roundoff) if self.beyond == "infinity" else math.inf

    @property
    def is_unlimited(self) -> bool:
        """Return whether overflow needs no check: float64 has no larger format."""
        return math.isinf(self.largest * 2)

    @property
    def range(self) -> float:
        """Return the magnitude beyond which an intermediate overflows."""
        return min(self.compute.largest, self.accumulate.format.largest)

    def gamma(self, terms: int) -> float:
        """Return a bound on the error of a sum of ``terms`` products, in any order, relative to the sum of magnitudes.

        ``chance`` applies only to rounding to nearest in 24 bits or more: matrix units truncate, and narrow
        accumulators stagnate.
        """
        worst = self.accumulate.gamma(terms)
        if self.chance is None or self.accumulate.block or self.accumulate.format.precision < 24:
            return worst
        likely = self.chance.sum_of(terms, self.accumulate.format.unit_roundoff)
        return min(worst, math.expm1(min(_LARGEST_EXPONENT, likely)))

    def running_sum(self, terms: int) -> float:
        """Return the same for a running sum of ``terms`` and its rescalings, and one more rounding of each."""
        factors = self.rescalings(terms) + 1
        separate = self.gamma(terms + 1) + self.compounded(factors, self.unit_roundoff)
        if self.chance is None or self.accumulate.block:
            return separate
        return min(separate, self.gamma(terms + 1 + factors))  # all factors together

    def compounded(self, factors: int, error: float) -> float:
        """Return a bound on the product of ``factors`` factors 1 + e, |e| <= ``error``, less one; e may be biased."""
        total = factors * error
        if self.chance is not None and self.chance.deviations:
            total = min(total, self.chance.sum_of(factors, error))
        return math.expm1(min(_LARGEST_EXPONENT, total))

    def sum_rounding(self, terms: int) -> float:
        """Return the factor for rounding a sum of ``terms`` radii, u per partial sum; one if `RADIUS_ROUNDING`
        covers it."""
        return 1.0 if terms <= 2**20 else 1 + terms * 2.0**-52

    def rescalings(self, terms: int) -> int:
        """Return how often a running sum of n ``terms`` is rescaled: once per block of b but the first, ceil((n - 1)
        / b)."""
        return math.ceil(max(terms - 1, 0) / self.rescale_every)

    def prefix_error(self, largest: float) -> float:
        """Return the error of an exponent that is a difference of prefix sums in a chunk, with ``largest`` terms.

        A product of exp(g_r), s < r <= t, is exp(G_t - G_s) too, G_t the sum of g up to t from the first position of a
        chunk of n. In any order a prefix sum has an error of gamma_n P, P = sum |g| <= n max |g| over the chunk up to
        t. Each of the two is stored, and their difference rounded, by u P. What g_r itself was rounded by is the same
        number in both sums up to s, and cancels. Every factor of the product is given this error, though the product
        has it once: so each product of any number of them has it. If P may overflow, a difference may be of infinities.
        """
        if not self.prefix_sums:
            return 0.0
        if self.chunk * largest > self.range:
            return math.inf
        return (2 * self.gamma(self.chunk) + 3 * self.unit_roundoff) * self.chunk * largest

    def underflow(self, format: Format) -> float:
        """Return the absolute error of one operation whose result is subnormal in ``format``.

        Processors add a subnormal number ten times slower than others, so the evaluation itself claims no more than
        2^-1000.
        """
        if self.certifies:
            return 2.0**-1000
        if self.flush:
            return format.smallest_normal
        return format.smallest_subnormal / 2 or format.smallest_subnormal

    @property
    def tiny(self) -> float:
        """Return the absolute error of one elementwise operation whose result is subnormal."""
        return self.underflow(self.compute)

    def function_error(self, function: str) -> float:
        """Return the relative error allowed to an elementary function: its ulps, each of at most 2 u."""
        return 2 * self.unit_roundoff * self.ulps.get(function, UNLISTED_ULPS)

    def function_underflow(self, function: str) -> float:
        """Return the absolute error allowed to an elementary function with a subnormal result: its ulps there."""
        return 2 * self.tiny * max(1.0, self.ulps.get(function, UNLISTED_ULPS))

    def represents(self, values: torch.Tensor) -> torch.Tensor:
        """Return where float64 ``values`` are numbers of the compute format."""
        if self.compute.name == "float64":
            return torch.ones_like(values, dtype=torch.bool)
        if self.compute.name == "float32":
            return values == values.to(torch.float32).to(torch.float64)
        return values == round_to(values, self.compute)


def all_finite(x: torch.Tensor) -> bool:
    """Return whether all elements are finite; a finite sum shows it without a mask."""
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())


def is_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return where |x| is a power of two."""
    return torch.frexp(x.abs())[0] == 0.5


def lowest_bit(x: torch.Tensor) -> torch.Tensor:
    """Return the value of the lowest set bit of each float64 (infinite for zero)."""
    bits = x.contiguous().view(torch.int64)
    mantissa = (bits & ((1 << 52) - 1)) != 0
    cleared = torch.where(mantissa, bits & (bits - 1), 0).view(torch.float64)
    return torch.where(x == 0, math.inf, (x - cleared).abs())


def outward(radius: torch.Tensor) -> torch.Tensor:
    """Return the radius rounded up, to be subtracted."""
    return radius * RADIUS_ROUNDING


_FLOAT64 = format_named("float64")
# Elementary functions of torch in float64: SLEEF's vector versions state 1.0 ulp, libm's are below 1 ulp and CUDA's
# (configs/cuda_functions.toml) are at most 3.5, erfc and erfinv aside; `tests/golden` checks them against Arb.
EVALUATION = RoundingModel(_FLOAT64, Accumulator(_FLOAT64), certifies=True)


def expm1_upper(error: torch.Tensor) -> torch.Tensor:
    """Return an upper bound on exp(error) - 1; cheap for small errors: e^t - 1 <= t + t^2 for t <= 1.79."""
    small = error + error * error
    return small if bool((error < 1).all()) else torch.where(error < 1, small, torch.expm1(error))


def spread_of_log(x: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Return log x - log(x - radius), infinite where x - radius <= 0."""
    return -torch.log1p(-(outward(radius) / x).clamp(max=1.0))


def spread_of_erf(x: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Return a bound by erf' = 2/sqrt(pi) exp(-z^2), at the ball's least magnitude."""
    least = (x.abs() - outward(radius)).clamp(min=0)
    return _at_most_two(radius * (2 / math.sqrt(math.pi)) * torch.exp(-least * least), radius)


def spread_of_tanh(x: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Return a bound by tanh' = 1 - tanh^2 <= 4 exp(-2 |z|), at the ball's least magnitude."""
    slope = 4 * torch.exp(-2 * (x.abs() - outward(radius)).clamp(min=0))
    return _at_most_two(radius * slope.clamp(max=1.0), radius)


def _at_most_two(spread: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Limit the spread of a function between -1 and 1; infinite where the argument may have overflowed (to NaN)."""
    return torch.where(torch.isinf(radius), math.inf, spread.clamp(max=2.0))
