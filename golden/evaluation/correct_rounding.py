"""Goldens that are proven to be the correct rounding of the exact result, to nearest with ties to even.

Ziv's test: rounding is monotone, so where both ends of an enclosure round to the same number, the exact result does.
An end is the sum of three float64; it is rounded to odd before it is rounded to the format, which gives what rounding
it once would (S. Boldo, G. Melquiond, *Emulation of a FMA and correctly rounded sums*, IEEE TC 57 (2008): two digits
more are enough).

Float64 itself, of whose ties two words of float64 tell too little, is rounded to by Arb where double-double numbers
leave it open: the ends of its balls are.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from assay.formats.format import Format
from assay.formats.rounding import round_to
from assay.golden.arithmetic import Arithmetic
from assay.golden.arithmetic.double_double import two_sum
from assay.golden.arithmetic.exact import nearest_to
from assay.golden.evaluation.call import Call
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.evaluation.tiers import FLOAT64_DIGITS, improved, refined, tiers_from

Tensor = torch.Tensor


def correctly_rounded(call: Call, format: Format) -> tuple[Golden, ...]:
    """Goldens whose values are numbers of ``format``, each with the radius that holds the exact result about it.

    Where not even the last tier proves the rounding, the radius is infinite. Beyond the largest number the value is
    what `round_to` makes of overflow, and the radius zero where that is proven.
    """
    tiers = tiers_from(FLOAT64_DIGITS)
    first = 2 if format.precision == 53 else len(tiers)
    goldens = refined(call, lambda golden: _is_proven(golden, format), tiers[:first])
    goldens = tuple(_rounded(golden, format) for golden in goldens)
    goldens = improved(call, goldens, lambda golden: torch.isfinite(golden.radius), tiers[first:], _nearest)
    return tuple(Golden(golden.value, golden.radius) for golden in goldens)


def _nearest(call: Call, arithmetic: Arithmetic) -> tuple[Golden, ...]:
    """The results in Arb, rounded to float64."""
    results = map(np.asarray, call.results(arithmetic))
    return tuple(Golden(*nearest_to(result)) if result.dtype == object else golden_of(result) for result in results)


def _is_proven(golden: Golden, format: Format) -> Tensor:
    ends = [_end(golden, sign, format) for sign in (-1, 1)]
    least, most = (_to_format(end, format) for end in ends)
    overflow = least.isnan() & most.isnan() & (ends[0].sign() == ends[1].sign())  # where there are no infinities
    return ((least == most) | overflow) & torch.isfinite(golden.radius)


def _end(golden: Golden, sign: int, format: Format) -> Tensor:
    """An end of the enclosure, rounded outward by less than its distance, and then to odd."""
    part = golden.rest + sign * golden.radius
    outward = torch.nextafter(part, torch.full_like(part, sign * math.inf))
    total, error = two_sum(golden.value, torch.where(golden.radius > 0, outward, part))
    if format.precision == 53:
        return total  # rounded once, to nearest even
    is_even = (total.view(torch.int64) & 1) == 0
    neighbour = torch.nextafter(total, error.sign() * math.inf)
    return torch.where(is_even & (error != 0) & torch.isfinite(total), neighbour, total)


def _to_format(values: Tensor, format: Format) -> Tensor:
    """Values rounded; NaN stays NaN even in a format that has none."""
    undefined = values.isnan()
    return round_to(values.masked_fill(undefined, 0.0), format).masked_fill_(undefined, math.nan)


def _rounded(golden: Golden, format: Format) -> Golden:
    """|rounded - exact| <= |(rounded - value) - low| + radius; the first difference is exact or rounded by 2^-53."""
    if not golden.value.is_floating_point():
        return golden
    low = golden.rest
    value = _to_format(_end(Golden(golden.value, torch.zeros_like(golden.radius), low), 1, format), format)
    difference, error = two_sum(value, -golden.value)
    difference, rest = two_sum(difference, -low)
    radius = (difference.abs() + (rest.abs() + error.abs()) + golden.radius) * (1 + 2.0**-50)
    radius = torch.where(radius > 0, torch.nextafter(radius, torch.full_like(radius, math.inf)), radius)
    radius = torch.where(torch.isfinite(value), radius.nan_to_num(nan=math.inf, posinf=math.inf), 0.0)
    is_known = torch.where(torch.isfinite(golden.value), _is_proven(golden, format), golden.radius == 0)
    return Golden(value, torch.where(is_known, radius, math.inf))
