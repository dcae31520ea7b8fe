"""Ziv's strategy for each element: float64 balls, then double-double numbers, then Arb at growing precision.

Elements that one tier does not resolve go to the next, and only the rows (and, if they are independent, the columns)
with such elements are evaluated again. A. Ziv, *Fast evaluation of elementary mathematical functions with correctly
rounded last bit*, ACM TOMS 17 (1991).

Precision is capped at `_MOST_DIGITS`, with which every sum of products of float64 numbers is exact (their bits span
2^-2148 to 2^2048): sums, products, and dyadic quotients and roots of them have radius zero there, so that their ties
are decided. exp, log, sin, cos, tanh and sigmoid, except at the number where they are rational, and quotients of sums
of exponentials that do not all coincide, are not dyadic (Lindemann & Weierstrass), so they cannot tie; for erf and for
compositions this is not known, nor is a bound on how near to a tie such a number may come. Elements that the cap leaves
open keep the certified radius that was reached, and do not count as resolved.

Correct rounding, to nearest with ties to even, is proven by Ziv's test: rounding is monotone, so if both ends of an
enclosure round to the same number, the exact result does. An end is the sum of three float64; it is rounded to odd
before it is rounded to the format, which equals rounding once (S. Boldo, G. Melquiond, *Emulation of a FMA and
correctly rounded sums*, IEEE TC 57 (2008): two more digits are enough). For float64 itself two words of float64 do not
decide ties; where double-double numbers leave the rounding open, the ends of Arb's balls are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from assay.formats.format import Format
from assay.formats.rounding import round_to
from assay.golden.arithmetic import Arb, Arithmetic, BallArithmetic, Exact
from assay.golden.arithmetic.double_double import two_sum
from assay.golden.arithmetic.exact import nearest_to
from assay.golden.evaluation.call import Call, grid
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.signature import TensorSpec

Tensor = torch.Tensor

Tier = Callable[[], Arithmetic]  # makes its arithmetic
FLOAT64_DIGITS = 15
_MOST_DIGITS = 1340
_PAIR = 2.0**-106 * (1 + 2.0**-30)  # largest relative error of a pair of float64
_LEAST = 2.0**-1068  # and largest absolute error


def to_digits(call: Call, digits: int) -> tuple[Golden, ...]:
    """Return goldens of ``digits`` decimal digits, limited to those of a pair of float64."""
    share = max(10.0**-digits, _PAIR)

    def is_resolved(golden: Golden) -> Tensor:
        return golden.radius <= golden.value.abs().mul_(share).clamp_(min=_LEAST)

    tiers = tiers_from(digits)
    if digits > FLOAT64_DIGITS:
        tiers = tiers[1:]
    return refined(call, is_resolved, tiers)


def settled(call: Call, goldens: tuple[Golden, ...]) -> tuple[Golden, ...]:
    """Return the goldens of a float64 evaluation, with more digits where it met infinities of its own.

    Of finite tensors a NaN without a radius may come from two numbers that float64 doesn't have.
    """
    floating = (golden for golden in goldens if golden.value.is_floating_point())
    if not any(bool((golden.value.isnan() & golden.radius.isinf()).any()) for golden in floating) or not call.is_finite:
        return goldens
    return improved(call, goldens, lambda golden: torch.ones_like(golden.value, dtype=torch.bool), tiers_from(30)[2:])


def refined(call: Call, is_resolved: Callable[[Golden], Tensor], tiers: list[Tier]) -> tuple[Golden, ...]:
    """Return the results of the first tier, with unresolved elements from the next ones."""
    goldens = first = call.in_blocks(tiers[0]())
    goldens = improved(call, goldens, is_resolved, tiers[1:])
    if any(bool(golden.value.isnan().any()) for golden in goldens if golden.value.is_floating_point()):
        goldens = tuple(map(_owned, goldens))
        # Float64 has limits and signs of infinities that Arb lacks.
        certified = first if tiers[0] is BallArithmetic else call.in_blocks(BallArithmetic())
        for golden, new, tensor in zip(goldens, certified, call.signature.returns, strict=True):
            _update(golden, new, tensor, {})
    return goldens


def improved(
    call: Call,
    goldens: tuple[Golden, ...],
    is_resolved: Callable[[Golden], Tensor],
    tiers: list[Tier],
    under: Callable[[Call, Arithmetic], tuple[Golden, ...]] = lambda call, arithmetic: call.under(arithmetic),
) -> tuple[Golden, ...]:
    """Return the goldens, with unresolved elements evaluated in one tier after another.

    A result that is infinite or NaN is resolved if an arithmetic gives it with radius zero, or if the tensors contain
    infinities or NaN.
    """
    for tier in tiers:
        wanted = [_open(golden, is_resolved, call) for golden in goldens]
        if not any(bool(mask.any()) for mask in wanted):
            break
        goldens = tuple(map(_owned, goldens))
        arithmetic = tier()
        for index in call.indices_of(wanted):
            with arithmetic.precision():
                refined_goldens = under(call.part(index), arithmetic)
            for golden, new, tensor in zip(goldens, refined_goldens, call.signature.returns, strict=True):
                _update(golden, new, tensor, index)
    return goldens


def tiers_from(digits: int) -> list[Tier]:
    """Return float64, double-double, and Arb with 15 extra digits, with three times as many, and at the cap."""
    arbs = (digits + 15, 3 * digits + 60, max(_MOST_DIGITS, 2 * digits))
    return [BallArithmetic, Exact, *(partial(Arb, most) for most in arbs)]


def _owned(golden: Golden) -> Golden:
    """Return a copy of a golden that can be written to."""
    if not golden.value.is_floating_point():
        return golden
    return Golden(golden.value.clone(), golden.radius.clone(), golden.rest.clone())


def _open(golden: Golden, is_resolved: Callable[[Golden], Tensor], call: Call) -> Tensor:
    if not golden.value.is_floating_point():
        return torch.zeros(golden.value.shape, dtype=torch.bool)
    unresolved = ~is_resolved(golden)
    if math.isfinite(golden.value.sum().item()):
        return unresolved
    return torch.where(torch.isfinite(golden.value), unresolved, (golden.radius != 0) & call.is_finite)


def _update(golden: Golden, new: Golden, tensor: TensorSpec, index: Mapping[str, Tensor]) -> None:
    """Copy in place the elements at ``index`` for which ``new`` is better."""
    if not golden.value.is_floating_point():
        return
    elements = grid(tensor, golden.value, index)
    old = Golden(golden.value[elements], golden.radius[elements])
    open_infinity = (old.radius != 0) | torch.isfinite(new.radius)
    better = torch.isfinite(new.value)
    better &= torch.where(torch.isinf(old.value), open_infinity, new.radius < old.radius)
    better |= old.value.isnan() & ~new.value.isnan()
    better |= torch.isinf(new.value) & (new.radius == 0) & (old.radius != 0)
    assert golden.low is not None
    for target, source in ((golden.value, new.value), (golden.radius, new.radius), (golden.low, new.rest)):
        target[elements] = torch.where(better, source, target[elements])


def correctly_rounded(call: Call, format: Format) -> tuple[Golden, ...]:
    """Return goldens whose values are numbers of ``format``, each with a radius that encloses the exact result.

    If not even the last tier proves the rounding, the radius is infinite. Beyond the largest number the value is
    `round_to`'s result for overflow, with radius zero if the overflow is proven.
    """
    tiers = tiers_from(FLOAT64_DIGITS)
    first = 2 if format.precision == 53 else len(tiers)
    goldens = refined(call, lambda golden: _is_proven(golden, format), tiers[:first])
    goldens = tuple(_rounded(golden, format) for golden in goldens)
    goldens = improved(call, goldens, lambda golden: torch.isfinite(golden.radius), tiers[first:], _nearest)
    return tuple(Golden(golden.value, golden.radius) for golden in goldens)


def _nearest(call: Call, arithmetic: Arithmetic) -> tuple[Golden, ...]:
    """Return the results in Arb, rounded to float64."""
    results = map(np.asarray, call.results(arithmetic))
    return tuple(Golden(*nearest_to(result)) if result.dtype == object else golden_of(result) for result in results)


def _is_proven(golden: Golden, format: Format) -> Tensor:
    ends = [_end(golden, sign, format) for sign in (-1, 1)]
    least, most = (_to_format(end, format) for end in ends)
    overflow = least.isnan() & most.isnan() & (ends[0].sign() == ends[1].sign())  # where there are no infinities
    return ((least == most) | overflow) & torch.isfinite(golden.radius)


def _end(golden: Golden, sign: int, format: Format) -> Tensor:
    """Return an end of the enclosure, rounded outward by less than its distance, then to odd."""
    part = golden.rest + sign * golden.radius
    outward = torch.nextafter(part, torch.full_like(part, sign * math.inf))
    total, error = two_sum(golden.value, torch.where(golden.radius > 0, outward, part))
    if format.precision == 53:
        return total  # rounded once, to nearest even
    is_even = (total.view(torch.int64) & 1) == 0
    neighbour = torch.nextafter(total, error.sign() * math.inf)
    return torch.where(is_even & (error != 0) & torch.isfinite(total), neighbour, total)


def _to_format(values: Tensor, format: Format) -> Tensor:
    """Round values; NaN stays NaN even in a format without NaN."""
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
