"""Ziv's strategy, element for element: float64 balls, then double-double numbers, then Arb at growing precision.

What one tier does not resolve goes to the next, and only the rows (and, where they are independent, the columns) that
hold such elements are evaluated again. A. Ziv, *Fast evaluation of elementary mathematical functions with correctly
rounded last bit*, ACM TOMS 17 (1991).

Precision is capped at `_MOST_DIGITS`, which holds every sum of products of float64 numbers exactly (their bits span
2^-2148 to 2^2048): sums, products, and what quotients and roots of them are dyadic, have radius zero there, so that
their ties are decided. exp, log, sin, cos, tanh and sigmoid of a number other than the one where they are rational, and
quotients of sums of exponentials that do not all coincide, are no dyadic numbers (Lindemann & Weierstrass), so they
cannot tie; of erf and of compositions that is not known. How near to a tie such a number may come nobody has bounded
either: what the cap leaves open keeps the certified radius that was reached, and is not passed off as resolved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from assay.golden.arithmetic import Arb, Arithmetic, BallArithmetic, Exact
from assay.golden.evaluation.call import Call, grid
from assay.golden.evaluation.golden import Golden
from assay.golden.signature import TensorSpec

Tensor = torch.Tensor

Tier = Callable[[], Arithmetic]  # makes the arithmetic of it

FLOAT64_DIGITS = 15
_MOST_DIGITS = 1340
_PAIR = 2.0**-106 * (1 + 2.0**-30)  # what a pair of float64 leaves at most, relative to its number
_LEAST = 2.0**-1068  # and absolutely


def to_digits(call: Call, digits: int) -> tuple[Golden, ...]:
    """Goldens of ``digits`` decimal digits, as far as a pair of float64 has them."""
    share = max(10.0**-digits, _PAIR)

    def is_resolved(golden: Golden) -> Tensor:
        return golden.radius <= golden.value.abs().mul_(share).clamp_(min=_LEAST)

    tiers = tiers_from(digits)
    if digits > FLOAT64_DIGITS:
        tiers = tiers[1:]
    return refined(call, is_resolved, tiers)


def refined(call: Call, is_resolved: Callable[[Golden], Tensor], tiers: list[Tier]) -> tuple[Golden, ...]:
    """The results in the first tier, and of what is not resolved in the next ones."""
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
    """The goldens, with what is not resolved from one tier after another.

    A result that is infinite or NaN is resolved where an arithmetic says so with radius zero, or where the tensors hold
    such numbers themselves.
    """
    for tier in tiers:
        wanted = [_open(golden, is_resolved, call) for golden in goldens]
        if not any(bool(mask.any()) for mask in wanted):
            break
        goldens = tuple(map(_owned, goldens))
        arithmetic = tier()
        for index in call.places(wanted):
            with arithmetic.precision():
                found = under(call.part(index), arithmetic)
            for golden, new, tensor in zip(goldens, found, call.signature.returns, strict=True):
                _update(golden, new, tensor, index)
    return goldens


def tiers_from(digits: int) -> list[Tier]:
    """Float64, double-double, and Arb with 15 digits to spare, with thrice as many, and at the cap."""
    arbs = (digits + 15, 3 * digits + 60, max(_MOST_DIGITS, 2 * digits))
    return [BallArithmetic, Exact, *(partial(Arb, most) for most in arbs)]


def _owned(golden: Golden) -> Golden:
    """A golden whose words are its own, to be written to."""
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
    """Take over, in place, what ``new`` knows better of the places in ``index``."""
    if not golden.value.is_floating_point():
        return
    places = grid(tensor, golden.value, index)
    old = Golden(golden.value[places], golden.radius[places])
    open_infinity = (old.radius != 0) | torch.isfinite(new.radius)
    better = torch.isfinite(new.value)
    better &= torch.where(torch.isinf(old.value), open_infinity, new.radius < old.radius)
    better |= old.value.isnan() & ~new.value.isnan()
    better |= torch.isinf(new.value) & (new.radius == 0) & (old.radius != 0)
    assert golden.low is not None
    for target, source in ((golden.value, new.value), (golden.radius, new.radius), (golden.low, new.rest)):
        target[places] = torch.where(better, source, target[places])
