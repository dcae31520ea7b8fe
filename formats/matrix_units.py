"""Matrix units, bit for bit: how tensor cores sum products.

One instruction takes ``block`` products and the running sum. The products are exact and not normalised: the product of
operands of exponents ea and eb has exponent ea + eb. All terms are aligned to the largest exponent, truncated to
``fraction`` bits and added exactly; the sum is truncated to ``output`` bits (a float16 accumulator is rounded to
nearest even). Source: MMA-Sim, as in ``configs/accumulators.toml``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from assay.formats.accumulator import Accumulator
from assay.formats.format import format_named

Array = npt.NDArray[Any]
_NO_EXPONENT = -(2**14)  # of zeros, infinities and NaN, which take no part in the alignment


def truncate_to_tf32(x: Array) -> Array:
    """Clear the low 13 bits of float32, which mma.sync ignores in a register that it reads as tf32."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@dataclass(frozen=True)
class Operand:
    """A matrix, the exponent of each element (1 <= |x| 2^-e < 2, less for subnormal numbers), and that of its scale."""

    numbers: Array
    exponents: Array
    scale_exponents: Array


def operand(numbers: Array, format: str, scales: Array | None = None, scale_format: str = "float8_e8m0fnu") -> Operand:
    """Return ``numbers`` of a format, times ``scales`` of the same shape."""
    exponents = _exponents(numbers, _least_exponent(format))
    if scales is None:
        return Operand(numbers, exponents, np.zeros_like(exponents))
    smallest = _least_exponent(scale_format)
    scale_exponents = np.where(np.isfinite(scales), np.maximum(np.frexp(scales)[1] - 1, smallest), 0)
    return Operand(numbers.astype(np.float64) * scales, exponents + scale_exponents, scale_exponents)


def matmul(a: Operand, b: Operand, c: Array, unit: Accumulator, *, promotion: int = 0) -> Array:
    """Return ``a @ b + c`` for a [..., M, K], b [..., K, N] and c [..., M, N] in float32 or float16, in the dtype of c.

    With ``promotion`` a separate running sum is added to c, rounded to nearest, after every ``promotion`` terms.
    """
    narrow = unit.fraction + 2 + unit.block.bit_length() <= 24  # bits of a block's sum: float32 holds it exactly
    compute = np.float32 if narrow else np.float64
    a_numbers: Array = a.numbers.astype(compute)
    b_numbers: Array = b.numbers.astype(compute)
    partial = np.zeros_like(c) if promotion else c
    num_terms = a_numbers.shape[-1]
    pending = 0
    for start in range(0, num_terms, unit.block):
        k = slice(start, start + unit.block)
        left, right = a_numbers[..., k], b_numbers[..., k, :]
        if unit.group:
            ea, eb = a.scale_exponents[..., k], b.scale_exponents[..., k, :]
            partial = _add_aligned(*_grouped(left, ea, right, eb, unit.group), partial, unit, compute)
        else:
            ea, eb = a.exponents[..., k], b.exponents[..., k, :]
            exponents = (ea[..., i, None] + eb[..., i, None, :] for i in range(left.shape[-1]))
            products = (left[..., i, None] * right[..., i, None, :] for i in range(left.shape[-1]))
            partial = _add_aligned(exponents, products, partial, unit, compute)
        pending += unit.block
        if promotion and (pending >= promotion or start + unit.block >= num_terms):
            c, partial, pending = c + partial, np.zeros_like(c), 0
    return c if promotion else partial


def _grouped(a: Array, ea: Array, b: Array, eb: Array, group: int) -> tuple[list[Array], list[Array]]:
    """Return the scales' exponents and the exact sums of each ``group`` products of a [..., M, L] and b [..., L, N]."""
    exponents, sums = [], []
    for i in range(0, a.shape[-1], group):
        left, right = a[..., i : i + group], b[..., i : i + group, :]
        nonzero = np.matmul(np.abs(left), np.abs(right)) != 0
        exponents.append(np.where(nonzero, ea[..., i, None] + eb[..., i, None, :], _NO_EXPONENT))
        sums.append(np.matmul(left, right))
    return exponents, sums


def _add_aligned(
    exponents: Iterable[Array], terms: Iterable[Array], c: Array, unit: Accumulator, compute: Any
) -> Array:
    """Evaluate one instruction: add ``terms`` of these exponents (overwritten) and the running sum c [..., M, N]."""
    half = c.dtype == np.float16
    largest = np.maximum(_exponents(c, -14 if half else -126), unit.zero + 112 if half else unit.zero)
    for each in exponents:
        np.maximum(largest, each, out=largest)
    shift = unit.fraction - largest
    total = np.trunc(np.ldexp(c.astype(np.float64), shift)).astype(compute)
    # A shift beyond the largest exponent occurs only if all terms are zero.
    scale = np.ldexp(compute(1), np.minimum(shift, np.finfo(compute).maxexp - 1))
    for term in terms:
        term *= scale
        total += np.trunc(term, out=term)
    result: Array = _round_output(np.ldexp(total.astype(np.float64), -shift), unit.output, c.dtype)
    result += c.dtype.type(0)  # a zero result is positive
    return result


@cache
def _least_exponent(format: str) -> int:
    """Return the exponent of the format's least normal number."""
    return math.frexp(format_named(format).smallest_normal)[1] - 1


def _exponents(numbers: Array, smallest: int) -> Array:
    exponents = np.maximum(np.frexp(numbers)[1] - 1, smallest)
    return np.where((numbers == 0) | ~np.isfinite(numbers), _NO_EXPONENT, exponents)


def _round_output(total: Array, bits: int, dtype: np.dtype[np.floating]) -> Array:
    """Round float64 to nearest even in float16, or truncate to ``bits`` fraction bits of float32."""
    rounded = total.astype(dtype)
    if dtype == np.float16:
        return rounded
    pattern = rounded.view(np.uint32)
    away = (np.abs(rounded.astype(np.float64)) > np.abs(total)) & (np.abs(total) < 2.0**128)
    truncated = (pattern - away) & np.uint32(2**32 - 2 ** (23 - bits))
    return np.where(np.isfinite(total), truncated, pattern).astype(np.uint32).view(np.float32)
