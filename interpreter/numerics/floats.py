"""Floating-point conversions and arithmetic on NumPy arrays with the results of NVIDIA's instructions.

NumPy has no bfloat16 and no 8-bit floats: the interpreter keeps them as bit patterns. A pattern is decoded by a table,
a number is encoded by binary search among the midpoints of neighbouring values, so both are exact by construction.
Overflow, infinity and NaN are treated as by the conversion instructions:

| target    | instruction (PTX ISA, `cvt`)      | beyond the largest | infinity | NaN      |
|-----------|-----------------------------------|--------------------|----------|----------|
| bfloat16  | cvt.rn.bf16.f32                   | infinity           | infinity | 0x7fff   |
| e4m3      | cvt.rn.satfinite.e4m3x2.f32       | 448                | 448      | 0x7f     |
| e5m2      | cvt.rn.satfinite.e5m2x2.f32       | 57344              | 57344    | 0x7f     |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from assay.formats import rounding
from assay.formats.codes import all_values
from assay.formats.format import format_named

Array = np.ndarray[Any, Any]

_FP8 = {
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
    "fp8e4b8": "float8_e4m3fnuz",
    "fp8e5b16": "float8_e5m2fnuz",
}
NARROW = ("bf16", *_FP8)
"""Triton's names of the formats that are kept as bit patterns."""

_BF16_NAN = 0x7FFF


@cache
def _table(name: str) -> tuple[Array, Array]:
    """Return the value of each pattern of an 8-bit float, and the least number that rounds to each magnitude."""
    target = format_named(_FP8[name])
    values = all_values(target).numpy()
    magnitudes = values[: target.largest_code + 1]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    ties_up = np.arange(len(middles)) % 2 == 1  # ties to even: the midpoint above an odd pattern rounds up
    return values.astype(np.float32), np.where(ties_up, middles, np.nextafter(middles, np.inf))


def decode(patterns: Array, name: str) -> Array:
    """Return the float32 values of bit ``patterns`` of the format ``name``, one of `NARROW`."""
    if name == "bf16":
        return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _table(name)[0][patterns]


def encode(numbers: Array, name: str, *, toward_zero: bool = False) -> Array:
    """Round float32 or float64 ``numbers`` once (to nearest even) to bit patterns of the format ``name``."""
    patterns = _encode_bf16(numbers) if name == "bf16" else _encode_fp8(numbers, name)
    if toward_zero:
        away = np.abs(decode(patterns, name)) > np.abs(numbers)
        patterns = patterns - away.astype(patterns.dtype)
    return patterns


def _encode_bf16(numbers: Array) -> Array:
    if numbers.dtype == np.float64:
        numbers = round_to_odd(numbers)  # through float32 without double rounding
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), _BF16_NAN, rounded).astype(np.uint16).reshape(numbers.shape)


def _encode_fp8(numbers: Array, name: str) -> Array:
    magnitude = np.searchsorted(_table(name)[1], np.abs(numbers).astype(np.float64), side="right").astype(np.uint8)
    sign, nan = np.signbit(numbers), 0x7F
    if not format_named(_FP8[name]).has_negative_zero:
        sign, nan = sign & (magnitude > 0), 0x80
    return np.where(np.isnan(numbers), nan, magnitude | (sign.astype(np.uint8) << 7)).astype(np.uint8)


def round_to_odd(numbers: Array) -> Array:
    """Round float64 to float32 such that a later rounding to at most 22 bits gives the result of a single rounding.

    Truncates, and sets the last bit where the truncation was inexact (Boldo & Melquiond, Emulation of FMA and correctly
    rounded sums, IEEE Transactions on Computers 57(4), 2008, theorem 3).
    """
    truncated = to_float(numbers, np.float32, toward_zero=True)
    inexact = (truncated != numbers) & ~np.isnan(numbers)
    bits = truncated.view(np.uint32)
    return np.where(inexact, bits | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def to_float(numbers: Array, target: Any, *, toward_zero: bool = False) -> Array:
    """Convert floats to float16, float32 or float64, rounded once; overflow gives infinity."""
    rounded = numbers.astype(target)
    if not toward_zero or np.dtype(target).itemsize >= numbers.dtype.itemsize:
        return rounded
    pattern = rounded.view(f"u{rounded.itemsize}")
    away = np.abs(rounded.astype(numbers.dtype)) > np.abs(numbers)
    return (pattern - away.astype(pattern.dtype)).view(target)


def to_integer(numbers: Array, target: Any) -> Array:
    """Convert floats to integers, toward zero and saturated (PTX ISA, `cvt.rzi`); for 8 bits: to 16, then the low byte.

    NaN becomes 0, or the pattern with only the top bit set if source or target has 64 bits.
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
    """Return x y + z rounded once if z is float64; else in float64, rounded to odd for one later rounding."""
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
    """Return the error function in float64."""
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64))).numpy().reshape(x.shape)


def rsqrt(x: Array) -> Array:
    """Return 1 / sqrt(x) in the dtype of x."""
    return 1 / np.sqrt(x)


def e8m0(patterns: Array) -> Array:
    """Return the float32 values of e8m0 patterns: 2^(pattern - 127); 255 is NaN."""
    exponents = patterns.view(np.uint8).astype(np.int32) - 127
    return np.where(exponents == 128, np.nan, np.ldexp(np.float32(1), exponents)).astype(np.float32)


FORMATS = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "tf32": "tf32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e2m1": "float4_e2m1fn",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "ue8m0": "float8_e8m0fnu",
}
"""Names of formats in `assay.formats` by their names in PTX."""
MODES: dict[str, rounding.Mode] = {
    "rn": "nearest",
    "rna": "nearest_away",
    "rz": "toward_zero",
    "rm": "down",
    "rp": "up",
}
"""PTX's rounding modes."""


def rounded(values: Array, format: str, mode: str = "rn", *, saturate: bool = False) -> Array:
    """Round float64 ``values``, exact or rounded to odd, to a format; the result is float64.

    With ``saturate`` overflow and infinities become the largest finite value.
    """
    if format == "f64":
        return values
    if mode == "rn" and not saturate:
        if format == "f32":
            return values.astype(np.float32).astype(np.float64)
        if format == "f16":
            return values.astype(np.float16).astype(np.float64)
    x = torch.from_numpy(np.array(values, dtype=np.float64))
    result: Array = rounding.round_to(x, FORMATS[format], MODES[mode], "saturate" if saturate else "inf").numpy()
    return result


def operation(name: str, operands: tuple[Array, ...], format: str, mode: str = "rn") -> Array:
    """Evaluate add, sub, mul, div, fma or sqrt of float64 arrays of numbers of ``format``, rounded once to ``format``.

    The operation is evaluated in float64. Where a second rounding could differ from a single one, rational arithmetic
    gives the sign of the first rounding error.
    """
    if name == "sub":
        name, operands = "add", (operands[0], -operands[1])
    if name == "fma" or (name == "add" and format != "f64"):
        x, y, z = operands if name == "fma" else (operands[0], np.ones(1), operands[1])
        result = _fma(x, y, z, format, mode)
    else:
        nearest = _NEAREST[name](*operands)
        if format == "f64" or mode != "rn":
            side = _sides(name, nearest, *np.broadcast_arrays(*operands))
            result = _directed(nearest, side, mode) if format == "f64" else rounded(_odd(nearest, side), format, mode)
        else:  # double rounding is innocuous from 2 p + 2 bits on (Figueroa 1995)
            result = rounded(nearest, format)
    return _zero_sum(name, operands, result) if mode == "rm" else result


def from_integer(numbers: Array, format: str, mode: str = "rn") -> Array:
    """Round integers of up to 64 bits once to a format; the result is float64."""
    if format != "f64":
        return rounded(_integer_to_odd(numbers), format, mode)
    nearest = numbers.astype(np.float64)
    return _directed(nearest, _integer_sides(numbers.astype(object), nearest), mode) if mode != "rn" else nearest


def _integer_to_odd(numbers: Array) -> Array:
    """Round int64 or uint64 to float64, to odd: beyond 53 bits the low eleven become one sticky bit."""
    negative = numbers < 0
    magnitude = np.where(negative, (~numbers.astype(np.uint64)) + np.uint64(1), numbers.astype(np.uint64))
    low = magnitude & np.uint64(0x7FF)
    cut = (magnitude - low) | np.where(low != 0, np.uint64(0x800), np.uint64(0))
    exact = np.where(magnitude < np.uint64(2**53), magnitude, cut).astype(np.float64)
    return np.where(negative, -exact, exact)


def _fma(x: Array, y: Array, z: Array, format: str, mode: str) -> Array:
    if format != "f64":
        narrow = [np.asarray(value).astype(np.float32) for value in (x, y, z)]
        return rounded(fma(*narrow), format, mode)
    x, y, z = np.broadcast_arrays(x, y, z)
    nearest = np.asarray(fma(x, y, z))
    return _directed(nearest, _sides("fma", nearest, x, y, z), mode) if mode != "rn" else nearest


def _directed(nearest: Array, side: Array, mode: str) -> Array:
    """Turn float64 results rounded to nearest into those of ``mode``; ``side`` is the sign of exact minus nearest."""
    if mode in ("rn", "rna"):
        return nearest
    down = {"rm": side < 0, "rp": np.zeros_like(side, bool), "rz": (side < 0) & (nearest > 0)}[mode]
    up = {"rp": side > 0, "rm": np.zeros_like(side, bool), "rz": (side > 0) & (nearest < 0)}[mode]
    below, above = np.nextafter(nearest, -np.inf), np.nextafter(nearest, np.inf)
    return np.where(down, below, np.where(up, np.where((nearest < 0) & (above == 0), -0.0, above), nearest))


def _odd(nearest: Array, side: Array) -> Array:
    """Round to odd, as `round_to_odd`: toward zero, with the last bit set where inexact."""
    away = (side < 0) & (nearest > 0) | (side > 0) & (nearest < 0)
    bits = np.ascontiguousarray(np.where(away, np.nextafter(nearest, 0.0), nearest)).view(np.int64)
    return np.where((side != 0) & np.isfinite(nearest), bits | 1, bits).view(np.float64)


def _zero_sum(name: str, operands: tuple[Array, ...], result: Array) -> Array:
    """Give an exact zero sum the sign of rounding down: negative, unless both terms are +0 (IEEE 754-2019, 6.3)."""
    if name not in ("add", "fma"):
        return result
    first = operands[0] if name == "add" else operands[0] * operands[1]
    zeros = (first == 0) & (operands[-1] == 0) & ~np.signbit(first) & ~np.signbit(operands[-1])
    return np.where((result == 0) & ~zeros, -0.0, result)


def _side(name: str, nearest: float, *operands: float) -> int:
    """Return the sign of the exact result minus ``nearest``."""
    if not all(map(math.isfinite, operands)) or math.isnan(nearest):
        return 0
    exact = [Fraction(value) for value in operands]
    if name == "sqrt":
        if operands[0] < 0:
            return 0
        difference = exact[0] - Fraction(nearest) ** 2
    else:
        if name == "div" and not exact[1]:
            return 0
        value = _EXACT[name](*exact)
        if math.isinf(nearest):
            return -1 if nearest > 0 else 1
        difference = value - Fraction(nearest)
    return (difference > 0) - (difference < 0)


_integer_sides = np.vectorize(lambda exact, near: (exact > int(near)) - (exact < int(near)), otypes=[np.int8])
_sides = np.vectorize(_side, otypes=[np.int8])
_NEAREST: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
}
_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "fma": lambda x, y, z: x * y + z,
}
