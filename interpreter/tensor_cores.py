"""Matrix products as a device's tensor cores form them, bit for bit as its accumulator model says.

One instruction takes ``block`` products and the running sum. The products are exact and not normalised: with operands
of exponents ea and eb a product stands at ea + eb. All are aligned to the largest exponent, cut toward zero to
``fraction`` bits, added exactly, and the sum is cut toward zero to ``output`` bits (a float16 accumulator is rounded to
nearest even). Source: MMA-Sim, as in ``configs/accumulators.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assay.formats.accumulator import Accumulator
from assay.interpreter.small_floats import Array

_NO_EXPONENT = -(2**14)  # of zeros, which take no part in the alignment, and of infinities and NaN
_SMALLEST = {"fp16": -14, "bf16": -126, "fp32": -126, "fp8e4nv": -6, "fp8e5": -14, "fp4": 0}


@dataclass(frozen=True)
class Operand:
    """Numbers of a matrix, and the exponents at which they stand: 1 <= |x| 2^-e < 2, less for subnormal numbers."""

    numbers: Array
    exponents: Array


def operand(numbers: Array, format: str, scales: Array | None = None) -> Operand:
    """``numbers`` of a format by Triton's name ("fp4" for e2m1), times powers of two ``scales`` of the same shape."""
    exponents = _exponents(numbers, _SMALLEST[format])
    if scales is not None:
        numbers = numbers.astype(np.float64) * scales
        exponents = exponents + np.where(np.isfinite(scales), np.frexp(scales)[1] - 1, 0)
    return Operand(numbers, exponents)


def matmul(a: Operand, b: Operand, c: Array, unit: Accumulator, *, promotion: int = 0) -> Array:
    """``a @ b + c`` for a [..., M, K], b [..., K, N] and c [..., M, N] in float32 or float16, in the dtype of c.

    With ``promotion`` a running sum of its own is added to c, rounded to nearest, whenever it holds that many terms.
    """
    narrow = unit.fraction + 2 + unit.block.bit_length() <= 24  # bits that a block's sum takes
    compute = np.float32 if narrow else np.float64
    left, right = a.numbers.astype(compute), b.numbers.astype(compute)
    partial = np.zeros_like(c) if promotion else c
    terms = left.shape[-1]
    held = 0
    for start in range(0, terms, unit.block):
        span = slice(start, start + unit.block)
        parts = left[..., span], a.exponents[..., span], right[..., span, :], b.exponents[..., span, :]
        partial = _step(*parts, partial, unit)
        held += unit.block
        if promotion and (held >= promotion or start + unit.block >= terms):
            c, partial, held = c + partial, np.zeros_like(c), 0
    return c if promotion else partial


def _step(a: Array, ea: Array, b: Array, eb: Array, c: Array, unit: Accumulator) -> Array:
    """One instruction: a [..., M, L] and b [..., L, N] of one block, c [..., M, N]; term by term, on whole tiles."""
    ec = _exponents(c, -14 if c.dtype == np.float16 else -126)
    largest = np.maximum(ec, -126)
    for k in range(a.shape[-1]):
        np.maximum(largest, ea[..., k, None] + eb[..., k, None, :], out=largest)
    up = unit.fraction - largest
    total = np.trunc(np.ldexp(c.astype(np.float64), up)).astype(a.dtype)
    scale = np.ldexp(a.dtype.type(1), np.minimum(up, np.finfo(a.dtype).maxexp - 1))  # beyond: all products are zero
    for k in range(a.shape[-1]):
        term = a[..., k, None] * b[..., k, None, :]
        term *= scale
        total += np.trunc(term, out=term)
    return _output(np.ldexp(total.astype(np.float64), -up), unit.output, c.dtype)


def _exponents(numbers: Array, smallest: int) -> Array:
    exponents = np.maximum(np.frexp(numbers)[1] - 1, smallest)
    return np.where((numbers == 0) | ~np.isfinite(numbers), _NO_EXPONENT, exponents)


def _output(total: Array, bits: int, dtype: np.dtype[np.floating]) -> Array:
    """float64 to float16, rounded to nearest even, or to float32, cut to ``bits`` fraction bits toward zero."""
    rounded = total.astype(dtype)
    if dtype == np.float16:
        return rounded
    pattern = rounded.view(np.uint32)
    away = (np.abs(rounded.astype(np.float64)) > np.abs(total)) & (np.abs(total) < 2.0**128)
    cut = (pattern - away) & np.uint32(2**32 - 2 ** (23 - bits))
    return np.where(np.isfinite(total), cut, pattern).astype(np.uint32).view(np.float32)
