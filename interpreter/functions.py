"""Elementary functions and conversions on NumPy arrays, as a GPU computes them.

A function is evaluated in float64 and rounded once: nearer to the truth than any instruction, so that what a kernel
loses is its own doing.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch

from assay.interpreter.small_floats import Array


def to_float(numbers: Array, target: Any, *, toward_zero: bool = False) -> Array:
    """Float to float16, float32 or float64, rounded once (beyond the largest: infinity)."""
    rounded = numbers.astype(target)
    if not toward_zero or np.dtype(target).itemsize >= numbers.dtype.itemsize:
        return rounded
    pattern = rounded.view(f"u{rounded.itemsize}")
    away = np.abs(rounded.astype(numbers.dtype)) > np.abs(numbers)
    return (pattern - away.astype(pattern.dtype)).view(target)


def to_integer(numbers: Array, target: Any) -> Array:
    """Toward zero and saturated; to 8 bits by way of 16, of which the low ones are kept (PTX ISA, `cvt.rzi`).

    NaN becomes 0, or the top bit alone where source or target has 64 bits.
    """
    target = np.dtype(target)
    wide = np.dtype(f"{target.kind}{max(target.itemsize, 2)}")
    limits = np.iinfo(wide)
    whole = np.trunc(numbers.astype(np.float64))
    low, high = float(limits.min), float(limits.max)  # the latter is rounded up for 64 bits
    inside = np.where((whole > low) & (whole < high), whole, 0.0).astype(wide)
    result = np.where(whole >= high, limits.max, np.where(whole <= low, limits.min, inside)).astype(wide)
    if 8 in (numbers.dtype.itemsize, target.itemsize):
        top = limits.min if target.kind == "i" else limits.max // 2 + 1
        result = np.where(np.isnan(numbers), wide.type(top), result)
    return result.astype(target)


def fma(x: Array, y: Array, z: Array) -> Array:
    """x y + z, rounded once: in float64 for float64, else to float64 such that rounding it further is the only one."""
    if z.dtype == np.float64:
        return _fma64(x, y, z)
    product, z64 = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)  # exact: 24 + 24 bits
    total = product + z64
    back = total - product
    lost = (product - (total - back)) + (z64 - back)  # Knuth's two-sum
    bits = total.view(np.int64)
    toward_zero = (lost != 0) & (np.signbit(lost) != np.signbit(total))
    odd = np.where((lost != 0) & np.isfinite(total), (bits - toward_zero) | 1, bits)
    return odd.view(np.float64)


@partial(np.vectorize, otypes=[np.float64])
def _fma64(x: float, y: float, z: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        return x * y + z
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        return float(exact) if exact else x * y + z
    except OverflowError:
        return x * y + z


def erf(x: Array) -> Array:
    """The error function, in float64."""
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64))).numpy().reshape(x.shape)


def rsqrt(x: Array) -> Array:
    """1 / sqrt(x), in the dtype of x."""
    return 1 / np.sqrt(x)


def e8m0(patterns: Array) -> Array:
    """Powers of two from 2^-127 up by their biased exponents; 255 is NaN."""
    exponents = patterns.view(np.uint8).astype(np.int32) - 127
    return np.where(exponents == 128, np.nan, np.ldexp(np.float32(1), exponents)).astype(np.float32)
