"""The exponential function of double-double numbers, by a table and a short polynomial.

x = n L + t with L = ln 2 / 2^16 and |t| <= 2^-17.5; exp x = 2^(n >> 16) T (1 + p), T = 2^((n mod 2^16) / 2^16) from a
table enclosed by Arb, p = t + t^2/2 + t^3/6 + t^4/24 + t^5/120. In units of u^2 = 2^-106, relative to the result:

- argument: L = L1 + L2 + L3 with n L1 and n L2 exact; x.high - n L1 - n L2 too, for all are multiples of 2^-70 (where
  n is not zero, |x| > 2^-18), and what comes out is below 2^-17.5. n L3, at most 0.36 u |x|, is rounded, has L3
  rounded, and is subtracted: 0.9 |x|. With a low word, of at most u |x|, two additions of 1.36 u |x|: 3.3 |x|.
- p: t = U + v with U of 23 bits: U^2 / 2 is exact; U v + v^2/2 < 2^-58 is off by 3u of itself; the cubic and higher
  terms, 2^-55.2, by 8u (three of them for t.low), leaving out t^6/720 < 2^-114; two sums of 2^-55: together 2.5.
- T (1 + p) = T.high + (T.high s) + (rest), the first two added exactly: T.low rounded 0.5, its sum 1, T.high e and sums
  of up to 2^-52.6 and 2^-51.6: 0.5 + 2.6 + 2.6, T.low e left out 0.5, p's error 2.5: together 10.3.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from assay.golden.arithmetic.double_double import (
    U2,
    DoubleDouble,
    fast_two_sum,
    normalised,
    power_of_two,
    product_and_excess,
    two_sum,
)
from assay.golden.arithmetic.working_precision import working_precision

Tensor = torch.Tensor

_STEPS = 16
# Added to a number it leaves that rounded to a whole one, in the low bits.
_ROUND_TO_WHOLE = torch.tensor(1.5 * 2.0**52, dtype=torch.float64)
_OFFSET = 0x4338000000000000 >> _STEPS  # its bits without those of n
_OWN = torch.tensor(11.01 * U2, dtype=torch.float64)
_SIXTH = torch.tensor(1 / 6, dtype=torch.float64)
_SHORT = 1.5 * 2.0**12  # added and subtracted: what is left has 23 bits
_LEAST, _MOST = -746.0, 709.5  # beyond, exp is less than 2^-1076, or no float64


@cache
def _table() -> tuple[float, float, float, float, Tensor, Tensor]:
    """2^16 / ln 2, the three parts of ln 2 / 2^16, and 2^(i / 2^16) for i < 2^16 as high and low words."""
    from flint import arb  # loaded on first use

    with working_precision(256):
        step = arb(2).log() / 2**_STEPS
        first = math.ldexp(round(math.ldexp(float(step), 43)), -43)
        second = math.ldexp(round(math.ldexp(float(step - first), 70)), -70)
        third = float((step - first - second).mid())
        ratio = float((1 / step).mid())
    with working_precision(140):
        powers = [(step * place).exp() for place in range(2**_STEPS)]
        highs = [float(power.mid()) for power in powers]
        lows = [float((power - high).mid()) for power, high in zip(powers, highs, strict=True)]
    high, low = (torch.tensor(words, dtype=torch.float64) for words in (highs, lows))
    return ratio, first, second, third, high, low


def exp(x: DoubleDouble) -> DoubleDouble:
    """exp x; relative error (11 + |x|) u^2, or (11 + 3.4 |x|) u^2 where x has a low word, beside what x inherits."""
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
    relative = torch.add(_OWN, argument.abs(), alpha=U2 if low is None else 3.4 * U2)
    if x.rad is not None:
        grown = x.rad + x.rad * x.rad  # e^r - 1, for r below one
        relative = relative + torch.where(x.rad < 1, grown, math.inf)
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
    """exp of a finite number as (high + rest) 2^(exponent - `_OFFSET`) with high in [1, 2]."""
    ratio, first, second, third, highs, lows = _table()
    shifted = torch.add(_ROUND_TO_WHOLE, argument, alpha=ratio)
    number = shifted.contiguous().view(torch.int64)  # its low bits are those of n
    n = shifted - _ROUND_TO_WHOLE
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

    index = number & (2**_STEPS - 1)
    power, power_low = highs.take(index), lows.take(index)
    product, excess = product_and_excess(power, s)
    high, carried = fast_two_sum(power, product)
    small = torch.addcmul(power_low, small, power).addcmul_(power_low, s).sub_(excess).add_(carried)
    high, small = fast_two_sum(high, small)
    return high, small, number >> _STEPS
