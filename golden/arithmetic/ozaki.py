"""Sums and products of matrices without loss: numbers are cut into slices whose sums of products float64 holds exactly.

K. Ozaki, T. Ogita, S. Oishi, S. M. Rump, *Error-free transformations of matrix multiplication by using fast routines of
matrix multiplication and its applications*, Numer. Algorithms 59 (2012); the cut is that of S. M. Rump, T. Ogita,
S. Oishi, *Accurate floating-point summation I*, SISC 31 (2008).

With 2^e at or above all of a row, slice s = 1, 2, ... holds multiples of g_s = 2^(e - b s), the first of at most 2^b of
them, the others of at most 2^(b-1); after it at most g_s / 2 is left of each number. Sums of n slices are whole
multiples of g_s, and exact in any order and with any fused operation as long as they stay below 2^53 of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from assay.golden.arithmetic.double_double import (
    TINY,
    DoubleDouble,
    add_radii,
    fast_two_sum,
    normalised,
    power_of_two,
    two_sum,
)

Tensor = torch.Tensor

_BITS = 106  # of a result, relative to its largest possible term
_HIGHEST, _LOWEST = 900, -800  # exponents within which neither cutting nor multiplying leaves float64


def exact_matmul(a: DoubleDouble, b: DoubleDouble, plus: DoubleDouble | None = None) -> DoubleDouble:
    """a @ b + plus for finite operands [..., M, K] and [..., K, N]; every float64 product below is exact.

    Pairs of slices below 2^-(106 + log2 K) of the largest conceivable sum are left out, and counted in the radius.
    """
    terms = a.shape[-1]
    bits, depth = _product_slices(terms)
    e, f = _exponent(a.high, -1), _exponent(b.high, -2)
    left, left_over = _slices(a, e, bits, depth)
    right, right_over = _slices(b, f, bits, depth)
    groups = [
        [(s, place - s) for s in range(place + 1) if s < len(left) and place - s < len(right)]
        for place in range(len(left) + len(right) - 1)
    ]
    parts = []
    for group in groups[:depth]:
        part = left[group[0][0]] @ right[group[0][1]]
        for s, t in group[1:]:
            part = part.add_(left[s] @ right[t])
        parts.append(part)
    lost = math.fsum(2.0 ** (-bits * place) * len(group) for place, group in enumerate(groups) if place >= depth)
    lost += (2.0 ** (-bits * len(left)) if left_over else 0.0) + (2.0 ** (-bits * len(right)) if right_over else 0.0)
    rad = terms * lost * _largest(a.high, e, -1) * _largest(b.high, f, -2) if lost else None
    if a.rad is not None or b.rad is not None:
        size_a, size_b = (x.high.abs().mul_(1 + 2.0**-50) for x in (a, b))
        if a.rad is not None:
            rad = add_radii(rad, a.radius @ (size_b if b.rad is None else size_b + b.radius))
        if b.rad is not None:
            rad = add_radii(rad, size_a @ b.radius)
        rad = add_radii(rad, _underflow(a, -1) * _underflow(b, -2) * TINY)
    if plus is not None:
        parts += [plus.high] if plus.low is None else [plus.high, plus.rest]
        rad = add_radii(rad, plus.rad)
    return total(parts, _unknown_outside(rad, e, f, e + f))


def exact_sum(x: DoubleDouble, axis: int) -> DoubleDouble:
    """The sum of finite numbers along ``axis``, which is kept.

    Highs and lows are cut alike, n of them at a time, and what is left of both, at most g each, is added up plainly, at
    a loss of at most (n + 1) u n g. Slices are as many as make that 2^-112 of the largest term.
    """
    terms = max(x.shape[axis], 1)
    carry_bits = math.ceil(math.log2(terms))
    bits = 51 - carry_bits
    e = _exponent(x.high, axis)
    high, low = x.high, x.low
    sums: list[Tensor] = []
    for place in range(1, math.ceil((59 + 2 * carry_bits) / bits) + 1):
        rounder = _rounder(e, bits * place)
        part = (high + rounder).sub_(rounder)
        high = high - part
        if low is not None and bits * place >= 52:  # before, lows are less than half a unit
            fine = (low + rounder).sub_(rounder)
            low = low - fine
            part = part.add_(fine)
        sums.append(part.sum(axis, keepdim=True))
    rad = None if x.rad is None else x.radius.sum(axis, keepdim=True)
    rest = high if low is None else high.add_(low)
    if bool(rest.any()):
        sums.append(rest.sum(axis, keepdim=True))
        lost = (terms + 1) * terms * 2.0 ** (-bits * (len(sums) - 1) - 53)
        rad = add_radii(rad, lost * _largest(x.high, e, axis))
    return total(sums, _unknown_outside(rad, e))


def total(parts: Sequence[Tensor], rad: Tensor | None) -> DoubleDouble:
    """The sum of a few tensors in two words; what a third word and its own rounding hold goes into the radius.

    First sums and their errors are added up by error-free transforms; the errors of the errors are added plainly,
    each addition losing at most u of what has come together.
    """
    first, second = parts[0], torch.zeros(())
    third: Tensor | None = None
    size: Tensor | None = None
    for place, part in enumerate(parts[1:]):
        first, error = two_sum(first, part)
        if place == 0:
            second = error
            continue
        second, error = two_sum(second, error)
        third = error if third is None else third + error
        size = error.abs() if size is None else size + error.abs()
    if len(parts) == 1:
        return DoubleDouble(first, None, rad)
    first, second = two_sum(first, second)
    if third is not None and size is not None:
        second, left = two_sum(second, third)
        first, second = fast_two_sum(first, second)
        own = left.abs() + size * (len(parts) * 2.0**-53)
        rad = add_radii(rad, own) if rad is not None or bool(own.any()) else None
    return normalised(first, second, rad) if bool(second.any()) else DoubleDouble(first, None, rad)


def _product_slices(terms: int) -> tuple[int, int]:
    """Bits of a slice, and how many there are to be, so that the sums of a group of products are exact.

    Slices s + t = d + 1 make d pairs of at most K 2^2b units (2^-1 of it where a slice is not the first, 2^-2 where
    neither is), so together at most K 2^2b max(1, (d + 2) / 4).
    """
    carry_bits = math.ceil(math.log2(max(terms, 1)))
    for bits in range(26, 0, -1):
        depth = math.ceil((_BITS + carry_bits) / bits)
        if terms * 4**bits * max(1.0, (depth + 2) / 4) <= 2**53:
            return bits, depth
    raise ValueError(f"a product of {terms} terms is too long")


def _exponent(high: Tensor, axis: int) -> Tensor:
    """The least e with |x| <= 2^e along the axis (0 where all are zero)."""
    if high.shape[axis] == 0:
        return high.sum(axis, keepdim=True).to(torch.int32)
    largest = high.abs().amax(axis, keepdim=True)
    return torch.frexp(largest)[1]


def _largest(high: Tensor, e: Tensor, axis: int) -> Tensor:
    """2^e, at or above all numbers along the axis, and zero where all of them are."""
    return power_of_two(e).masked_fill_(~high.any(axis, keepdim=True), 0.0)


def _rounder(e: Tensor, bits: int) -> Tensor:
    """What is added and subtracted to round numbers below 2^e to multiples of 2^(e - bits)."""
    return power_of_two(e.clamp(_LOWEST, _HIGHEST) - bits + 52) * 1.5


def _underflow(x: DoubleDouble, axis: int) -> Tensor:
    """One where there are other numbers than zero along the axis, whose radii's products may underflow."""
    if x.shape[axis] == 0:
        return x.high.sum(axis, keepdim=True)
    return ((x.high != 0) | (x.radius > 0)).any(axis, keepdim=True).to(torch.float64)


def _unknown_outside(rad: Tensor | None, *exponents: Tensor) -> Tensor | None:
    """``rad``, infinite where one of the exponents, which are broadcast to it, lies outside of the bounds."""
    for e in exponents:
        if e.numel() and not (int(e.min()) >= _LOWEST and int(e.max()) <= _HIGHEST):
            outside = (e < _LOWEST) | (e > _HIGHEST)
            rad = torch.where(outside, math.inf, torch.zeros(()).double() if rad is None else rad)
    return rad


def _slices(x: DoubleDouble, e: Tensor, bits: int, most: int) -> tuple[list[Tensor], bool]:
    """At most ``most`` slices of x, and whether anything is left beyond them."""
    high, low = x.high, x.low
    found: list[Tensor] = []
    while len(found) < most:
        rounder = _rounder(e, bits * (len(found) + 1))
        part = (high + rounder).sub_(rounder)
        high = high - part
        found.append(part)
        if low is not None:
            high, low = two_sum(high, low)
        if not bool(high.any()):
            return found, False
    return found, True
