"""Arithmetic on float64 arrays rounded once to a format, in any of PTX's rounding modes.

Operands are numbers of the format. An operation is evaluated in float64; where that loses anything which the last
rounding could feel, what was lost is known in sign by rational arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from assay.formats import rounding
from assay.interpreter import functions
from assay.interpreter.small_floats import Array

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
"""PTX's names of formats, and those of `assay.formats`."""
MODES: dict[str, rounding.Mode] = {
    "rn": "nearest",
    "rna": "nearest_away",
    "rz": "toward_zero",
    "rm": "down",
    "rp": "up",
}
"""PTX's rounding modes."""


def rounded(values: Array, format: str, mode: str = "rn", *, saturate: bool = False) -> Array:
    """float64 ``values``, exact or rounded to odd, as numbers of a format: in float64.

    ``saturate``: what lies beyond the largest number becomes it, infinities too.
    """
    if format == "f64":
        return values
    if mode == "rn" and not saturate:
        if format == "f32":
            return values.astype(np.float32).astype(np.float64)
        if format == "f16":
            return values.astype(np.float16).astype(np.float64)
    given = torch.from_numpy(np.array(values, dtype=np.float64))
    found = rounding.round_to(given, FORMATS[format], MODES[mode], "saturate" if saturate else "inf")
    result: Array = found.numpy()
    return result


def operation(name: str, operands: tuple[Array, ...], format: str, mode: str = "rn") -> Array:
    """add, sub, mul, div, fma or sqrt of float64 arrays that hold numbers of ``format``, rounded once to it."""
    if name == "sub":
        name, operands = "add", (operands[0], -operands[1])
    if name == "fma" or (name == "add" and format != "f64"):
        x, y, z = operands if name == "fma" else (operands[0], np.ones(1), operands[1])
        result = _fma(x, y, z, format, mode)
    else:
        nearest = _NEAREST[name](*operands)
        if format == "f64" or mode != "rn":
            side = _sides(name, nearest, *np.broadcast_arrays(*operands))
            result = _moved(nearest, side, mode) if format == "f64" else rounded(_odd(nearest, side), format, mode)
        else:  # of 2 p + 2 bits, a rounding before the last changes nothing (Figueroa 1995)
            result = rounded(nearest, format)
    return _zero_sum(name, operands, result) if mode == "rm" else result


def from_integer(numbers: Array, format: str, mode: str = "rn") -> Array:
    """Integers of up to 64 bits rounded once to a format: in float64."""
    if format != "f64":
        return rounded(_integer_to_odd(numbers), format, mode)
    nearest = numbers.astype(np.float64)
    return _moved(nearest, _integer_sides(numbers.astype(object), nearest), mode) if mode != "rn" else nearest


def _integer_to_odd(numbers: Array) -> Array:
    """int64 or uint64 as float64, rounded to odd: of more than 53 bits eleven are lost but for a sticky one."""
    negative = numbers < 0
    magnitude = np.where(negative, (~numbers.astype(np.uint64)) + np.uint64(1), numbers.astype(np.uint64))
    low = magnitude & np.uint64(0x7FF)
    cut = (magnitude - low) | np.where(low != 0, np.uint64(0x800), np.uint64(0))
    exact = np.where(magnitude < np.uint64(2**53), magnitude, cut).astype(np.float64)
    return np.where(negative, -exact, exact)


def _fma(x: Array, y: Array, z: Array, format: str, mode: str) -> Array:
    if format != "f64":
        narrow = [np.asarray(value).astype(np.float32) for value in (x, y, z)]
        return rounded(functions.fma(*narrow), format, mode)
    x, y, z = np.broadcast_arrays(x, y, z)
    nearest = np.asarray(functions.fma(x, y, z))
    return _moved(nearest, _sides("fma", nearest, x, y, z), mode) if mode != "rn" else nearest


def _moved(nearest: Array, side: Array, mode: str) -> Array:
    """float64 results rounded to nearest, as the mode has them; ``side`` is the sign of exact minus nearest."""
    if mode in ("rn", "rna"):
        return nearest
    down = {"rm": side < 0, "rp": np.zeros_like(side, bool), "rz": (side < 0) & (nearest > 0)}[mode]
    up = {"rp": side > 0, "rm": np.zeros_like(side, bool), "rz": (side > 0) & (nearest < 0)}[mode]
    below, above = np.nextafter(nearest, -np.inf), np.nextafter(nearest, np.inf)
    return np.where(down, below, np.where(up, np.where((nearest < 0) & (above == 0), -0.0, above), nearest))


def _odd(nearest: Array, side: Array) -> Array:
    """Rounded to odd (`small_floats.round_to_odd`): toward zero, the last bit set where anything was lost."""
    away = (side < 0) & (nearest > 0) | (side > 0) & (nearest < 0)
    bits = np.ascontiguousarray(np.where(away, np.nextafter(nearest, 0.0), nearest)).view(np.int64)
    return np.where((side != 0) & np.isfinite(nearest), bits | 1, bits).view(np.float64)


def _zero_sum(name: str, operands: tuple[Array, ...], result: Array) -> Array:
    """Downward an exact sum of zero is negative, unless both terms are +0 (IEEE 754-2019, 6.3)."""
    if name not in ("add", "fma"):
        return result
    first = operands[0] if name == "add" else operands[0] * operands[1]
    zeros = (first == 0) & (operands[-1] == 0) & ~np.signbit(first) & ~np.signbit(operands[-1])
    return np.where((result == 0) & ~zeros, -0.0, result)


def _side(name: str, nearest: float, *operands: float) -> int:
    """The sign of the exact result minus ``nearest``."""
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
