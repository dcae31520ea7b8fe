"""Error-free sums and matrix products: numbers are cut into slices whose sums of products are exact in float64.

K. Ozaki, T. Ogita, S. Oishi, S. M. Rump, *Error-free transformations of matrix multiplication by using fast routines of
matrix multiplication and its applications*, Numer. Algorithms 59 (2012); the slices are cut as in S. M. Rump,
T. Ogita, S. Oishi, *Accurate floating-point summation I*, SISC 31 (2008).

With 2^e at or above all magnitudes of a row, slice s = 1, 2, ... consists of multiples of g_s = 2^(e - b s), at most
2^b of them in the first slice and 2^(b-1) in the others; at most g_s / 2 remains of each number after it. Sums of n
slices are multiples of g_s, and exact in any order, fused or not, as long as they stay below 2^53 g_s.
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
_HIGHEST, _LOWEST = 900, -800  # exponents for which neither cutting nor multiplying overflows or underflows


def exact_matmul(a: DoubleDouble, b: DoubleDouble, plus: DoubleDouble | None = None) -> DoubleDouble:
    """Return a @ b + plus for finite operands [..., M, K] and [..., K, N]; every float64 product below is exact.

    Pairs of slices below 2^-(106 + log2 K) of the largest possible sum are omitted, and added to the radius.
    """
    terms = a.shape[-1]
    bits, depth = _product_slices(terms)
    e, f = _exponent(a.high, -1), _exponent(b.high, -2)
    left, left_over = _slices(a, e, bits, depth)
    right, right_over = _slices(b, f, bits, depth)
    groups = [
        [(s, level - s) for s in range(level + 1) if s < len(left) and level - s < len(right)]
        for level in range(len(left) + len(right) - 1)
    ]
    parts = []
    for group in groups[:depth]:
        part = left[group[0][0]] @ right[group[0][1]]
        for s, t in group[1:]:
            part = part.add_(left[s] @ right[t])
        parts.append(part)
    lost = math.fsum(2.0 ** (-bits * level) * len(group) for level, group in enumerate(groups) if level >= depth)
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
    """Return the sum of finite numbers along ``axis``, which keeps size one.

    High and low words are cut into the same slices; the n remainders of both, at most g each, are added in float64,
    with an error of at most (n + 1) u n g. There are enough slices for this to be 2^-112 of the largest term.
    """
    terms = max(x.shape[axis], 1)
    carry_bits = math.ceil(math.log2(terms))
    bits = 51 - carry_bits
    e = _exponent(x.high, axis)
    high, low = x.high, x.low
    sums: list[Tensor] = []
    for level in range(1, math.ceil((59 + 2 * carry_bits) / bits) + 1):
        rounder = _rounder(e, bits * level)
        part = (high + rounder).sub_(rounder)
        high = high - part
        if low is not None and bits * level >= 52:  # low words are less than half a unit of earlier slices
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
    """Return the sum of a few tensors as a double-double number; its radius includes the omitted third word.

    The sums and their errors are added by error-free transforms; the errors of the errors are added in float64, each
    addition with a relative error of at most u.
    """
    first, second = parts[0], torch.zeros(())
    third: Tensor | None = None
    size: Tensor | None = None
    for number, part in enumerate(parts[1:]):
        first, error = two_sum(first, part)
        if number == 0:
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
    """Return the bits and the number of slices for which sums of a group of products are exact.

    Slices s + t = d + 1 make d pairs of at most K 2^2b units (half of that if one slice is not the first, a quarter if
    neither is), so at most K 2^2b max(1, (d + 2) / 4) together.
    """
    carry_bits = math.ceil(math.log2(max(terms, 1)))
    for bits in range(26, 0, -1):
        depth = math.ceil((_BITS + carry_bits) / bits)
        if terms * 4**bits * max(1.0, (depth + 2) / 4) <= 2**53:
            return bits, depth
    raise ValueError(f"a product of {terms} terms is too long")


def _exponent(high: Tensor, axis: int) -> Tensor:
    """Return the least e with |x| <= 2^e along the axis (0 if all are zero)."""
    if high.shape[axis] == 0:
        return high.sum(axis, keepdim=True).to(torch.int32)
    largest = high.abs().amax(axis, keepdim=True)
    return torch.frexp(largest)[1]


def _largest(high: Tensor, e: Tensor, axis: int) -> Tensor:
    """Return 2^e, which is at or above all magnitudes along the axis; zero if all are zero."""
    return power_of_two(e).masked_fill_(~high.any(axis, keepdim=True), 0.0)


def _rounder(e: Tensor, bits: int) -> Tensor:
    """Return the number to add and subtract to round numbers below 2^e to multiples of 2^(e - bits)."""
    return power_of_two(e.clamp(_LOWEST, _HIGHEST) - bits + 52) * 1.5


def _underflow(x: DoubleDouble, axis: int) -> Tensor:
    """Return one where some number along the axis is not zero, so that products of radii may underflow; else zero."""
    if x.shape[axis] == 0:
        return x.high.sum(axis, keepdim=True)
    return ((x.high != 0) | (x.radius > 0)).any(axis, keepdim=True).to(torch.float64)


def _unknown_outside(rad: Tensor | None, *exponents: Tensor) -> Tensor | None:
    """Return ``rad``, infinite where one of the exponents, broadcast to it, is out of bounds."""
    for e in exponents:
        if e.numel() and not (int(e.min()) >= _LOWEST and int(e.max()) <= _HIGHEST):
            outside = (e < _LOWEST) | (e > _HIGHEST)
            rad = torch.where(outside, math.inf, torch.zeros(()).double() if rad is None else rad)
    return rad


def _slices(x: DoubleDouble, e: Tensor, bits: int, most: int) -> tuple[list[Tensor], bool]:
    """Return at most ``most`` slices of x, and whether a remainder is left."""
    high, low = x.high, x.low
    slices: list[Tensor] = []
    while len(slices) < most:
        rounder = _rounder(e, bits * (len(slices) + 1))
        part = (high + rounder).sub_(rounder)
        high = high - part
        slices.append(part)
        if low is not None:
            high, low = two_sum(high, low)
        if not bool(high.any()):
            return slices, False
    return slices, True
