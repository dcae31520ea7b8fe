"""Elementary functions of double-double numbers.

Where a function has no algorithm of its own it is a Taylor polynomial about the nearest of equidistant nodes, whose
coefficients and whose remainder, over the whole of a node's interval, Arb encloses. The first terms are added in
double-double arithmetic, whose radii certify them; of the others, below 2^-50 of the whole, float64's own error is
counted. Elsewhere functions come from `exp` by formulas in which nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from assay.golden.arithmetic.double_double import (
    TINY,
    DoubleDouble,
    as_pair,
    full_where,
    normalised,
    power_of_two,
    scattered,
    square_root,
    where,
)
from assay.golden.arithmetic.exact_exponential import exp
from assay.golden.arithmetic.working_precision import working_precision

Tensor = torch.Tensor

_STEP = 2.0**-9
_PAIRS, _TERMS = 7, 12  # coefficients as pairs, and all of them: 2^-10 to the twelfth is left out
_SHARP = 2.0**-62  # radius of an argument up to which the float64 terms don't feel it
_PRECISION = 320  # bits, of which cancellation leaves more than enough


@dataclass(frozen=True)
class Table:
    """Taylor coefficients [terms, nodes] about the nodes ``first`` + i 2^-9, and bounds on what float64 terms lose."""

    first: float
    high: Tensor
    low: Tensor
    lost: Tensor

    def __call__(self, x: DoubleDouble) -> DoubleDouble:
        """The function's value; ``x`` must lie within half a step of the nodes."""
        place = ((x.high - self.first) * (1 / _STEP)).round().clamp(0, self.high.shape[1] - 1)
        node = place * _STEP + self.first
        index = place.to(torch.int64)
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
    """The table of a function of a power series, for arguments between two multiples of the step.

    ``lost`` bounds, per node, what the float64 tail c_k + t (c_(k+1) + ...) lacks: the remainder R t^n as
    |R| (h/2)^(n - k), and as 2^-48 of the sum of magnitudes at most 2 (n - k) roundings, those of the coefficients, and
    what t's low word and radius would change. h / 2 is taken a little larger, as the nearest node is found by rounding.
    """
    from flint import arb, arb_series  # loaded on first use

    with working_precision(_PRECISION, terms=_TERMS + 1):
        half = arb(_STEP / 2) * 1.001
        count = round((most - least) / _STEP) + 1
        highs, lows, losses = [], [], []
        for place in range(count):
            node = arb(least + place * _STEP)
            found = series(arb_series([node, 1], prec=_TERMS))
            ends = series(arb_series([arb(node.mid(), half), 1], prec=_TERMS + 1))
            coefficients = [found[term] for term in range(_TERMS)]
            words = [float(value.mid()) for value in coefficients]
            highs.append(words)
            lows.append([float((value - word).mid()) for value, word in zip(coefficients, words, strict=True)])
            size = sum(abs(words[term]) * (_STEP / 2) ** (term - _PAIRS) for term in range(_PAIRS, _TERMS))
            remainder = float(ends[_TERMS].abs_upper()) * (_STEP / 2 * 1.001) ** (_TERMS - _PAIRS)
            losses.append(size * 2.0**-48 + remainder * 1.001)
    high, low = (torch.tensor(words, dtype=torch.float64).T.contiguous() for words in (highs, lows))
    return Table(least, high, low, torch.tensor(losses, dtype=torch.float64))


def _tanh_series(x: Any) -> Any:
    grown = (x + x).exp()
    return (grown - 1) / (grown + 1)


_SERIES: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "erf": (lambda x: x.erf(), 0.0, 8.75),
    "expm1": (lambda x: x.exp() - 1, -0.5, 0.5),
    "tanh": (_tanh_series, 0.0, 0.5),
    "log1p": (lambda x: (x + 1).log(), -0.375, 0.375),
    "sin": (lambda x: x.sin(), -0.8125, 0.8125),
    "cos": (lambda x: x.cos(), -0.8125, 0.8125),
}
"""Functions by their power series, and between which arguments they are tabulated."""


@cache
def _table(name: str) -> Table:
    return _tabulate(*_SERIES[name])


@cache
def _constant(name: str) -> DoubleDouble:
    """ln 2, or pi / 2 in three words of which the first two have 33 bits, as [4]: the last is what the third lacks."""
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
    """``inside`` where the mask holds, ``outside`` elsewhere; each is given those arguments only."""
    if bool(mask.all()):
        return inside(x)
    if not bool(mask.any()):
        return outside(x)
    return scattered(scattered(x, mask, inside(x[mask])), ~mask, outside(x[~mask]))


def _absolute(x: DoubleDouble) -> tuple[Tensor, DoubleDouble]:
    negative = x.high < 0
    return negative, where(negative, -x, x)


def erf(x: DoubleDouble) -> DoubleDouble:
    """erf x by its table; from 8.75 on 1 - erf x < 2^-113."""
    negative, size = _absolute(x)
    y = _piecewise(
        size,
        (size.high < 8.75) & (size.radius < _SHARP),
        _table("erf"),
        lambda z: DoubleDouble(torch.ones_like(z.high), None, full_where(~(z.high - z.radius > 8.7), 2.0) + 2.0**-112),
    )
    return where(negative, -y, y)


def tanh(x: DoubleDouble) -> DoubleDouble:
    """tanh x by its table below 1/2, then (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    negative, size = _absolute(x)

    def far(z: DoubleDouble) -> DoubleDouble:
        small = exp(z * -2.0)
        return (1.0 - small) / (small + 1.0)

    y = _piecewise(size, _within(size, 0.5), _table("tanh"), far)
    return where(negative, -y, y)


def _within(x: DoubleDouble, bound: float) -> Tensor:
    """Where x, whole as it is, lies within what a table holds sharply enough for its float64 terms."""
    return (x.high.abs() <= bound) & (x.radius < _SHARP)


def expm1(x: DoubleDouble) -> DoubleDouble:
    """exp x - 1 by its table up to 1/2."""
    return _piecewise(x, _within(x, 0.5), _table("expm1"), lambda z: exp(z) - 1.0)


def log1p(x: DoubleDouble) -> DoubleDouble:
    """log(1 + x) by its table up to 3/8."""
    return _piecewise(x, _within(x, 0.375), _table("log1p"), lambda z: _log_far(z + 1.0))


def log(x: DoubleDouble) -> DoubleDouble:
    """log x, of x - 1 where x is within 3/8 of one, so that the result's own digits are right."""
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
    found = DoubleDouble(exponent.to(torch.float64)) * _constant("ln 2")[0] + DoubleDouble(y) + correction
    return DoubleDouble(found.high, found.low, found.radius + full_where(~normal | ~(rough < 2.0**-8), math.inf))


def softplus(x: DoubleDouble) -> DoubleDouble:
    """max(x, 0) + log(1 + exp(-|x|))."""
    negative, size = _absolute(x)
    zero = DoubleDouble(torch.zeros_like(x.high), None, x.rad)
    return where(negative, zero, x) + log1p(exp(-size))


def _sin_reduced(x: DoubleDouble, quarter: int) -> DoubleDouble:
    """sin(x + quarter pi / 2): t = x - n pi / 2, in which the first two products are exact, and the n-th quarter."""
    words = _constant("pi / 2")
    n = (x.high * (2 / math.pi)).round()
    far = (n.abs() > 2.0**20) | ~(x.radius < _SHARP)
    n = torch.where(far, 0.0, n)
    t = DoubleDouble(torch.where(far, 0.0, x.high), torch.where(far, 0.0, x.rest), torch.where(far, 0.0, x.radius))
    for place in range(3):
        word = words[place] if place == 2 else DoubleDouble(words.high[place])
        t = t - DoubleDouble(n) * word
    turn = (n.to(torch.int64) + quarter) & 3
    y = _piecewise(t, (turn & 1) == 0, _table("sin"), _table("cos"))
    y = where(turn >= 2, -y, y)
    return DoubleDouble(y.high, y.low, y.radius + full_where(far, math.inf))


def exp2(x: DoubleDouble) -> DoubleDouble:
    """2^x = 2^n exp((x - n) ln 2)."""
    n = torch.where(x.high.isnan(), 0.0, x.high.round().clamp(-900, 900))
    y, scale = exp((x - DoubleDouble(n)) * _constant("ln 2")[0]), power_of_two(n)
    return normalised(y.high * scale, y.rest * scale, y.radius * scale + TINY)


def sigmoid(x: DoubleDouble) -> DoubleDouble:
    """1 / (1 + exp(-x)), as 1 / (1 + e) or e / (1 + e) with e = exp(-|x|): nothing cancels, nothing overflows."""
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
"""By the names of `Arithmetic.function`."""
