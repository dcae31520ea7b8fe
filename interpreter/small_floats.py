"""bfloat16 and the 8-bit floats in NumPy, which lacks them: bit patterns to numbers and back.

A pattern is decoded by table and a number encoded by binary search among the midpoints of neighbouring values, so that
each is exact by construction. Overflow, infinity and NaN are treated as NVIDIA's conversion instructions do:

| target    | instruction (PTX ISA, `cvt`)      | beyond the largest | infinity | NaN      |
|-----------|-----------------------------------|--------------------|----------|----------|
| bfloat16  | cvt.rn.bf16.f32                   | infinity           | infinity | 0x7fff   |
| e4m3      | cvt.rn.satfinite.e4m3x2.f32       | 448                | 448      | 0x7f     |
| e5m2      | cvt.rn.satfinite.e5m2x2.f32       | 57344              | 57344    | 0x7f     |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

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


@dataclass(frozen=True)
class _Table:
    """An 8-bit float as tables: the value of each pattern, and for encoding where each next magnitude begins."""

    values: Array
    begins32: Array
    begins64: Array
    nan: int
    signed_zero: bool


@cache
def _table(name: str) -> _Table:
    target = format_named(_FP8[name])
    values = all_values(target).numpy()
    magnitudes = values[: target.largest_code + 1]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    ties_up = np.arange(len(middles)) % 2 == 1  # a tie goes to the even pattern
    return _Table(
        values=values.astype(np.float32),
        begins32=np.where(ties_up, middles, np.nextafter(middles.astype(np.float32), np.float32(np.inf))).astype(
            np.float32
        ),
        begins64=np.where(ties_up, middles, np.nextafter(middles, np.inf)),
        nan=0x7F if target.has_negative_zero else 0x80,
        signed_zero=target.has_negative_zero,
    )


def decode(patterns: Array, name: str) -> Array:
    """The numbers, in float32, that ``patterns`` of the format ``name`` (of `NARROW`) stand for."""
    if name == "bf16":
        return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _table(name).values[patterns]


def encode(numbers: Array, name: str, *, toward_zero: bool = False) -> Array:
    """The patterns of float32 or float64 ``numbers`` in the format ``name``, rounded once (to nearest even)."""
    patterns = _encode_bf16(numbers) if name == "bf16" else _encode_fp8(numbers, _table(name))
    if toward_zero:
        away = np.abs(decode(patterns, name)) > np.abs(numbers)
        patterns = patterns - away.astype(patterns.dtype)
    return patterns


def _encode_bf16(numbers: Array) -> Array:
    if numbers.dtype == np.float64:
        numbers = round_to_odd(numbers)
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), _BF16_NAN, rounded).astype(np.uint16).reshape(numbers.shape)


def _encode_fp8(numbers: Array, table: _Table) -> Array:
    begins = table.begins64 if numbers.dtype == np.float64 else table.begins32
    magnitude = np.searchsorted(begins, np.abs(numbers), side="right").astype(np.uint8)
    sign = np.signbit(numbers) if table.signed_zero else np.signbit(numbers) & (magnitude > 0)
    return np.where(np.isnan(numbers), table.nan, magnitude | (sign.astype(np.uint8) << 7)).astype(np.uint8)


def round_to_odd(numbers: Array) -> Array:
    """float64 to float32 such that a later rounding to at most 22 bits rounds as if from float64.

    Truncated, with the last bit set where that lost anything (Boldo & Melquiond, Emulation of FMA and correctly
    rounded sums, IEEE Transactions on Computers 57(4), 2008, theorem 3).
    """
    nearest = numbers.astype(np.float32)
    widened = nearest.astype(np.float64)
    bits = nearest.view(np.uint32)
    truncated = bits - (np.abs(widened) > np.abs(numbers))
    inexact = (widened != numbers) & ~np.isnan(numbers)
    return np.where(inexact, truncated | np.uint32(1), bits).astype(np.uint32).view(np.float32)
