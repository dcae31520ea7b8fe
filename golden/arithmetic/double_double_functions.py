"""Elementary functions of double-double numbers, with certified radii.

exp has a table and a short polynomial of its own. erf, expm1, tanh, log1p, sin and cos are Taylor polynomials about the
nearest of equidistant nodes; Arb encloses the coefficients, and the remainder over each node's whole interval. The
first terms are added in double-double arithmetic, whose radii certify them; the others, below 2^-50 of the result, are
added in float64, and their rounding errors are bounded. The other functions follow from these without cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from assay.golden.arithmetic.arbitrary_precision import working_precision
from assay.golden.arithmetic.double_double import (
    TINY,
    U2,
    DoubleDouble,
    as_pair,
    fast_two_sum,
    full_where,
    normalised,
    power_of_two,
    product_and_excess,
    scattered,
    square_root,
    two_sum,
    where,
)

Tensor = torch.Tensor


_EXP_STEPS = 16  # log2 of the table's length
# Adding it rounds a number to an integer n, which is then in the low bits of the sum.
_ROUND_TO_INTEGER = torch.tensor(1.5 * 2.0**52, dtype=torch.float64, device="cpu")
_OFFSET = 0x4338000000000000 >> _EXP_STEPS  # the bits of the sum without those of n
_EXP_ERROR = torch.tensor(11.01 * U2, dtype=torch.float64, device="cpu")
_SIXTH = torch.tensor(1 / 6, dtype=torch.float64, device="cpu")
_SHORT = 1.5 * 2.0**12  # adding and subtracting it leaves 23 bits
_LEAST, _MOST = -746.0, 709.5  # exp is below 2^-1076, or overflows, outside of these


@cache
def _exp_table() -> tuple[float, float, float, float, Tensor, Tensor]:
    """Return 2^16 / ln 2, the three parts of ln 2 / 2^16, and 2^(i / 2^16) for i < 2^16 as high and low words."""
    from flint import arb  # loaded on first use

    with working_precision(256):
        step = arb(2).log() / 2**_EXP_STEPS
        first = math.ldexp(round(math.ldexp(float(step), 43)), -43)
        second = math.ldexp(round(math.ldexp(float(step - first), 70)), -70)
        third = float((step - first - second).mid())
        ratio = float((1 / step).mid())
    with working_precision(140):
        powers = [(step * i).exp() for i in range(2**_EXP_STEPS)]
        highs = [float(power.mid()) for power in powers]
        lows = [float((power - high).mid()) for power, high in zip(powers, highs, strict=True)]
    high, low = (torch.tensor(words, dtype=torch.float64) for words in (highs, lows))
    return ratio, first, second, third, high, low


def exp(x: DoubleDouble) -> DoubleDouble:
    """Return exp x; its relative error is (11 + |x|) u^2, (11 + 3.4 |x|) u^2 if x has a low word, plus that of x's
    radius.

    x = n L + t with L = ln 2 / 2^16 and |t| <= 2^-17.5; exp x = 2^(n >> 16) T (1 + p), T = 2^((n mod 2^16) / 2^16) from
    a table enclosed by Arb, p = t + t^2/2 + t^3/6 + t^4/24 + t^5/120. In units of u^2 = 2^-106, relative to the result:

    - argument: L = L1 + L2 + L3 with n L1 and n L2 exact; x.high - n L1 - n L2 is exact too, since all are multiples of
      2^-70 (if n is not zero, |x| > 2^-18) and the result is below 2^-17.5. n L3, at most 0.36 u |x|, is rounded, L3 is
      rounded, and the product is subtracted: 0.9 |x|. A low word, of at most u |x|, adds two additions of 1.36 u |x|:
      3.3 |x|.
    - p: t = U + v with U of 23 bits: U^2 / 2 is exact; U v + v^2/2 < 2^-58 has a relative error of 3u; the cubic and
      higher terms, 2^-55.2, of 8u (three of them for t.low); omitting t^6/720 < 2^-114; two sums of 2^-55: together
      2.5.
    - T (1 + p) = T.high + (T.high s) + (rest), the first two added exactly: rounding T.low 0.5, adding it 1, T.high e
      and sums of up to 2^-52.6 and 2^-51.6: 0.5 + 2.6 + 2.6, omitting T.low e 0.5, p's error 2.5: together 10.3.
    """
    argument = x.high
    outside = None
    if argument.numel():
        least, most = (bound.item() for bound in torch.aminmax(argument))
        if not (least > _LEAST and most < _MOST):
            outside = ~((argument > _LEAST) & (argument < _MOST))
            argument = torch.where(outside, 0.0, argument)
    else:
        least = 0.0
    low = x.low if outside is None or x.low is None else torch.where(outside, 0.0, x.low)
    high, rest, exponent = _scaled(argument, low)
    relative = torch.add(_EXP_ERROR, argument.abs(), alpha=U2 if low is None else 3.4 * U2)
    if x.rad is not None:
        spread = x.rad + x.rad * x.rad  # at or above e^r - 1, for r below one
        relative = relative + torch.where(x.rad < 1, spread, math.inf)
    if least < -600:
        exponent = exponent - _OFFSET
        half = exponent >> 1
        for part in (half, exponent - half):
            high, rest = high * power_of_two(part), rest * power_of_two(part)
        rad = (relative * high).add_(2.0**-1072)
    else:
        scale = exponent.add_(1023 - _OFFSET).bitwise_left_shift_(52).view(torch.float64)
        high, rest = high * scale, rest.mul_(scale)
        rad = relative.mul_(high)
    if outside is None:
        return normalised(high, rest, rad)
    zero = (x.high <= _LEAST) & (x.radius < 1 if x.rad is not None else True)
    high = torch.where(outside, torch.exp(x.high), high).masked_fill_(zero, 0.0)
    rest = torch.where(outside, 0.0, rest)
    rad = torch.where(outside, math.inf, rad).masked_fill_(zero, 2.0**-1074)
    rad = rad.masked_fill_(zero & (x.high == -math.inf), 0.0)
    return normalised(high, rest, rad)


def _scaled(argument: Tensor, low: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp of a finite number as (high + rest) 2^(exponent - `_OFFSET`) with high in [1, 2]."""
    ratio, first, second, third, highs, lows = _exp_table()
    shifted = torch.add(_ROUND_TO_INTEGER, argument, alpha=ratio)
    number = shifted.contiguous().view(torch.int64)  # its low bits are those of n
    n = shifted - _ROUND_TO_INTEGER
    t = torch.add(argument, n, alpha=-first).add_(n, alpha=-second)
    tail = n.mul_(-third) if low is None else torch.add(low, n, alpha=-third)
    t, tail = two_sum(t, tail)

    short = (t + _SHORT).sub_(_SHORT)
    rest = (t - short).add_(tail)
    square = t * t
    cubic = torch.add(_SIXTH, t, alpha=1 / 24).add_(square, alpha=1 / 120).mul_(t).mul_(square)
    cubic = cubic.addcmul_(torch.add(short, rest, alpha=0.5), rest)
    s, error = fast_two_sum(t, short.mul_(short).mul_(0.5))
    small = error.add_(tail).add_(cubic)

    index = number & (2**_EXP_STEPS - 1)
    power, power_low = highs.take(index), lows.take(index)
    product, excess = product_and_excess(power, s)
    high, carried = fast_two_sum(power, product)
    small = torch.addcmul(power_low, small, power).addcmul_(power_low, s).sub_(excess).add_(carried)
    high, small = fast_two_sum(high, small)
    return high, small, number >> _EXP_STEPS


_STEP = 2.0**-9  # between nodes
_PAIRS, _TERMS = 7, 12  # double-double coefficients, and all: the first omitted power is (2^-10)^12
_SHARP = 2.0**-62  # radii of arguments below this are covered by the bound on the float64 terms
_PRECISION = 320  # bits; more than enough for the cancellation in the coefficients


@dataclass(frozen=True)
class Table:
    """Taylor coefficients [terms, nodes] about the nodes ``first`` + i 2^-9; ``lost`` bounds the float64 terms'
    errors."""

    first: float
    high: Tensor
    low: Tensor
    lost: Tensor

    def __call__(self, x: DoubleDouble) -> DoubleDouble:
        """Return the function of ``x``, which must be within half a step of the nodes."""
        nearest = ((x.high - self.first) * (1 / _STEP)).round().clamp(0, self.high.shape[1] - 1)
        node = nearest * _STEP + self.first
        index = nearest.to(torch.int64)
        t = x - DoubleDouble(node)
        tail = self.high[-1].take(index)
        for term in range(_TERMS - 2, _PAIRS - 1, -1):
            tail = (tail * t.high).add_(self.high[term].take(index))
        y = DoubleDouble(tail, None, self.lost.take(index))
        for term in range(_PAIRS - 1, -1, -1):
            high = self.high[term].take(index)
            y = y * t + DoubleDouble(high, self.low[term].take(index), high.abs() * 2.0**-106)
        return y


def _tabulate(series: Callable[[Any], Any], least: float, most: float) -> Table:
    """Return the table of a function of a power series, for arguments between two multiples of the step.

    ``lost`` bounds, per node, the error of the float64 tail c_k + t (c_(k+1) + ...): the remainder R t^n by
    |R| (h/2)^(n - k); and by 2^-48 of the sum of magnitudes the 2 (n - k) roundings, those of the coefficients, and the
    effect of t's low word and radius. h / 2 is taken slightly larger, since rounding chooses the nearest node.
    """
    from flint import arb, arb_series  # loaded on first use

    with working_precision(_PRECISION, terms=_TERMS + 1):
        half = arb(_STEP / 2) * 1.001
        count = round((most - least) / _STEP) + 1
        highs, lows, losses = [], [], []
        for number in range(count):
            node = arb(least + number * _STEP)
            about_node = series(arb_series([node, 1], prec=_TERMS))
            ends = series(arb_series([arb(node.mid(), half), 1], prec=_TERMS + 1))
            coefficients = [about_node[term] for term in range(_TERMS)]
            words = [float(value.mid()) for value in coefficients]
            highs.append(words)
            lows.append([float((value - word).mid()) for value, word in zip(coefficients, words, strict=True)])
            size = sum(abs(words[term]) * (_STEP / 2) ** (term - _PAIRS) for term in range(_PAIRS, _TERMS))
            remainder = float(ends[_TERMS].abs_upper()) * (_STEP / 2 * 1.001) ** (_TERMS - _PAIRS)
            losses.append(size * 2.0**-48 + remainder * 1.001)
    high, low = (torch.tensor(words, dtype=torch.float64).T.contiguous() for words in (highs, lows))
    return Table(least, high, low, torch.tensor(losses, dtype=torch.float64))


def _tanh_series(x: Any) -> Any:
    exponential = (x + x).exp()
    return (exponential - 1) / (exponential + 1)


_SERIES: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "erf": (lambda x: x.erf(), 0.0, 8.75),
    "expm1": (lambda x: x.exp() - 1, -0.5, 0.5),
    "tanh": (_tanh_series, 0.0, 0.5),
    "log1p": (lambda x: (x + 1).log(), -0.375, 0.375),
    "sin": (lambda x: x.sin(), -0.8125, 0.8125),
    "cos": (lambda x: x.cos(), -0.8125, 0.8125),
}
"""Functions by their power series, and the ends of the tabulated range."""


@cache
def _table(name: str) -> Table:
    return _tabulate(*_SERIES[name])


@cache
def _constant(name: str) -> DoubleDouble:
    """Return ln 2, or the three words of pi / 2: the first two have 33 bits, the third is a double-double number."""
    from flint import arb

    with working_precision(_PRECISION):
        value = arb(2).log() if name == "ln 2" else arb.pi() / 2
        words = []
        for bits in (32, 65) if name == "pi / 2" else ():
            words.append(math.ldexp(round(math.ldexp(float(value), bits)), -bits))
            value = value - words[-1]
        words.append(float(value.mid()))
        rest = float((value - words[-1]).mid())
    high = torch.tensor(words, dtype=torch.float64)
    return DoubleDouble(high, full_where(torch.arange(len(words)) == len(words) - 1, rest), high.abs() * 2.0**-106)


def _piecewise(x: DoubleDouble, mask: Tensor, inside: Any, outside: Any) -> DoubleDouble:
    """Return ``inside`` of the masked arguments and ``outside`` of the others."""
    if bool(mask.all()):
        return inside(x)
    if not bool(mask.any()):
        return outside(x)
    return scattered(scattered(x, mask, inside(x[mask])), ~mask, outside(x[~mask]))


def _absolute(x: DoubleDouble) -> tuple[Tensor, DoubleDouble]:
    negative = x.high < 0
    return negative, where(negative, -x, x)


def erf(x: DoubleDouble) -> DoubleDouble:
    """Return erf x by its table; from 8.75 on 1 - erf x < 2^-113."""
    negative, size = _absolute(x)
    y = _piecewise(
        size,
        (size.high < 8.75) & (size.radius < _SHARP),
        _table("erf"),
        lambda z: DoubleDouble(torch.ones_like(z.high), None, full_where(~(z.high - z.radius > 8.7), 2.0) + 2.0**-112),
    )
    return where(negative, -y, y)


def tanh(x: DoubleDouble) -> DoubleDouble:
    """Return tanh x by its table below 1/2, else (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    negative, size = _absolute(x)

    def far(z: DoubleDouble) -> DoubleDouble:
        small = exp(z * -2.0)
        return (1.0 - small) / (small + 1.0)

    y = _piecewise(size, _within(size, 0.5), _table("tanh"), far)
    return where(negative, -y, y)


def _within(x: DoubleDouble, bound: float) -> Tensor:
    """Return a mask of numbers that a table covers and whose radii are small enough for its float64 terms."""
    return (x.high.abs() <= bound) & (x.radius < _SHARP)


def expm1(x: DoubleDouble) -> DoubleDouble:
    """Return exp x - 1, by its table up to 1/2."""
    return _piecewise(x, _within(x, 0.5), _table("expm1"), lambda z: exp(z) - 1.0)


def log1p(x: DoubleDouble) -> DoubleDouble:
    """Return log(1 + x), by its table up to 3/8."""
    return _piecewise(x, _within(x, 0.375), _table("log1p"), lambda z: _log_far(z + 1.0))


def log(x: DoubleDouble) -> DoubleDouble:
    """Return log x; within 3/8 of one log1p(x - 1), whose relative error stays small."""
    near = (x.high - 1.0).abs() < 0.375
    return _piecewise(x, near & (x.radius < _SHARP), lambda z: _table("log1p")(z - 1.0), _log_far)


def _log_far(x: DoubleDouble) -> DoubleDouble:
    """k ln 2 + y + z - z^2 / 2 + z^3 / 3 for x = m 2^k, y = log m to float64, z = m exp(-y) - 1, at most 2^-48."""
    mantissa, exponent = torch.frexp(x.high)
    normal = (exponent > -1000) & (x.high > 0)
    scale = power_of_two(-exponent)
    m = DoubleDouble(mantissa, None if x.low is None else x.low * scale, None if x.rad is None else x.rad * scale)
    y = torch.log(mantissa)
    z = m * exp(DoubleDouble(-y)) - 1.0
    rough = z.high.abs() + z.radius
    correction = z - z * z * 0.5
    cubic_error = rough * rough * (z.radius + rough * 2.0**-50) + rough**4
    correction = correction + DoubleDouble(z.high**3 / 3, None, cubic_error)
    total = DoubleDouble(exponent.to(torch.float64)) * _constant("ln 2")[0] + DoubleDouble(y) + correction
    return DoubleDouble(total.high, total.low, total.radius + full_where(~normal | ~(rough < 2.0**-8), math.inf))


def softplus(x: DoubleDouble) -> DoubleDouble:
    """Return max(x, 0) + log(1 + exp(-|x|))."""
    negative, size = _absolute(x)
    zero = DoubleDouble(torch.zeros_like(x.high), None, x.rad)
    return where(negative, zero, x) + log1p(exp(-size))


def _sin_reduced(x: DoubleDouble, quarter: int) -> DoubleDouble:
    """Return sin(x + quarter pi / 2), from t = x - n pi / 2, whose first two products are exact, and n mod 4."""
    words = _constant("pi / 2")
    n = (x.high * (2 / math.pi)).round()
    far = (n.abs() > 2.0**20) | ~(x.radius < _SHARP)
    n = torch.where(far, 0.0, n)
    t = DoubleDouble(torch.where(far, 0.0, x.high), torch.where(far, 0.0, x.rest), torch.where(far, 0.0, x.radius))
    for word in (DoubleDouble(words.high[0]), DoubleDouble(words.high[1]), words[2]):
        t = t - DoubleDouble(n) * word
    quadrant = (n.to(torch.int64) + quarter) & 3
    y = _piecewise(t, (quadrant & 1) == 0, _table("sin"), _table("cos"))
    y = where(quadrant >= 2, -y, y)
    return DoubleDouble(y.high, y.low, y.radius + full_where(far, math.inf))


def exp2(x: DoubleDouble) -> DoubleDouble:
    """Return 2^x = 2^n exp((x - n) ln 2)."""
    n = torch.where(x.high.isnan(), 0.0, x.high.round().clamp(-900, 900))
    y, scale = exp((x - DoubleDouble(n)) * _constant("ln 2")[0]), power_of_two(n)
    return normalised(y.high * scale, y.rest * scale, y.radius * scale + TINY)


def sigmoid(x: DoubleDouble) -> DoubleDouble:
    """Return 1 / (1 + exp(-x)) as 1 / (1 + e) or e / (1 + e) with e = exp(-|x|), without cancellation or overflow."""
    negative, size = _absolute(x)
    small = exp(-size)
    one = DoubleDouble(torch.ones_like(x.high))
    return where(negative, small, one) / (small + 1.0)


FUNCTIONS: dict[str, Callable[[DoubleDouble], DoubleDouble]] = {
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "log": log,
    "log2": lambda x: log(x) / _constant("ln 2")[0],
    "log1p": log1p,
    "tanh": tanh,
    "erf": erf,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "sqrt": square_root,
    "rsqrt": lambda x: 1.0 / square_root(x),
    "reciprocal": lambda x: as_pair(1.0) / x,
    "sin": lambda x: _sin_reduced(x, 0),
    "cos": lambda x: _sin_reduced(x, 1),
}
"""Functions by the names of `Arithmetic.function`."""
