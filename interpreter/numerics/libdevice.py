"""NVIDIA's libdevice on NumPy arrays, by the symbols that Triton calls: CUDA's mathematical functions and intrinsics.

Real functions are evaluated in float64 and rounded once, more accurately than by the library. Arithmetic with a
rounding mode, conversions and bit operations follow CUDA's documentation of libdevice to the last bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import mpmath
import numpy as np
import torch

from assay.interpreter.numerics.floats import Array, erf, from_integer, operation, rounded, rsqrt, to_integer
from assay.interpreter.numerics.ptx import permuted_bytes, reverse_bits

_MODES = {"rn": "rn", "rz": "rz", "rd": "rm", "ru": "rp"}
_TO_INTEGRAL: dict[str, Any] = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
_INTEGERS = {"int": np.int32, "uint": np.uint32, "ll": np.int64, "ull": np.uint64}
_FLOATS = {"float": "f32", "double": "f64"}


def libdevice(symbol: str) -> Callable[..., Array]:
    """Return the function of a libdevice symbol such as ``__nv_tanhf``, on arrays of its arguments' dtypes.

    The function returns float64, to be rounded to the result's format, or an integer dtype with the result's bits.
    Raises NotImplementedError for an unknown symbol.
    """
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    if name in _BITS:
        return _BITS[name]
    if match := re.fullmatch(r"([fd])(add|sub|mul|div|rcp|sqrt)_(r[nzdu])", name):
        kind, op, mode = match.groups()
        return partial(_in_mode, op, "f32" if kind == "f" else "f64", _MODES[mode])
    if match := re.fullmatch(r"fma(f?)(?:_(r[nzdu]))?", name):
        return partial(_in_mode, "fma", "f32" if match[1] else "f64", _MODES[match[2] or "rn"])
    if match := re.fullmatch(r"(float|double)2(int|uint|ll|ull)_(r[nzdu])", name):
        return partial(_to_integer, match[2], match[3])
    if match := re.fullmatch(r"(int|uint|ll|ull)2(float|double)_(r[nzdu])", name):
        kind, op, mode = match.groups()
        return lambda x: from_integer(x.astype(_INTEGERS[kind]), _FLOATS[op], _MODES[mode])
    if match := re.fullmatch(r"double2float_(r[nzdu])", name):
        mode = match[1]
        return lambda x: rounded(x, "f32", _MODES[mode])
    function = _REAL.get(name) or _REAL.get(name.removesuffix("f"))  # float32 variants end with "f"
    if function is None:
        raise NotImplementedError(f"libdevice's {symbol} is not interpreted")
    return lambda *operands: function(*(_widened(operand) for operand in operands))


def _widened(operand: Array) -> Array:
    return operand.astype(np.float64) if operand.dtype.kind == "f" else operand


def _in_mode(op: str, format: str, mode: str, *operands: Array) -> Array:
    wide = tuple(operand.astype(np.float64) for operand in operands)
    if op == "rcp":
        op, wide = "div", (np.ones_like(wide[0]), *wide)
    return operation(op, wide, format, mode)


def _to_integer(kind: str, mode: str, x: Array) -> Array:
    return to_integer(_TO_INTEGRAL[mode](x), _INTEGERS[kind])


def _torch(name: str) -> Callable[..., Array]:
    function = getattr(torch.special, name)
    return lambda x: function(torch.from_numpy(np.ascontiguousarray(x))).numpy().reshape(x.shape)


def _each(function: Callable[..., float]) -> Callable[..., Array]:
    """Apply a function of Python numbers to arrays; undefined results become NaN, overflow infinity."""

    def valued(*numbers: Any) -> float:
        try:
            return float(function(*numbers))
        except (ValueError, ZeroDivisionError):
            return math.nan
        except OverflowError:
            return math.inf

    return np.vectorize(valued, otypes=[np.float64])


def _bessel(name: str) -> Callable[..., Array]:
    def value(order: int, x: float) -> float:
        if math.isnan(x) or order < 0 or (name == "bessely" and x < 0):
            return math.nan
        if x == 0 and name == "bessely":
            return -math.inf
        return 0.0 if math.isinf(x) else float(getattr(mpmath, name)(int(order), x))

    return _each(value)


def _tgamma(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    if x == -math.inf or (x < 0 and x == math.floor(x)):
        return math.nan
    return math.gamma(x)


def _sinpi(x: Array) -> Array:
    """sin(pi x), with x modulo 2 reduced exactly to [-1/2, 1/2]."""
    r = np.fmod(x, 2.0)
    folded = np.where(np.abs(r) > 1.5, r - np.copysign(2, r), np.copysign(1, r) - r)
    return np.sin(math.pi * np.where(np.abs(r) > 0.5, folded, r))


def _cospi(x: Array) -> Array:
    r = np.abs(np.fmod(x, 2.0))
    r = np.where(r > 1, 2 - r, r)
    return np.where(r < 0.25, np.cos(math.pi * r), np.sin(math.pi * (0.5 - r)))


def _erfcinv(x: Array) -> Array:
    """From 1/2 on erfinv(1 - x), where 1 - x is exact; below by the normal distribution's quantile."""
    upper = _torch("erfinv")(1 - np.where(x >= 0.5, x, 1.0))
    lower = -_torch("ndtri")(np.where(x < 0.5, x, 0.5) / 2) / math.sqrt(2)
    return np.where(np.isnan(x), x, np.where(x >= 0.5, upper, lower))


def _norm(*parts: Array) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = np.hypot(total, part)
    return np.abs(total)


def _round(x: Array) -> Array:
    """To the nearest integer, ties away from zero."""
    whole = np.trunc(x)
    return np.copysign(np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole), x)


def _exponent(x: Array) -> Array:
    return np.asarray(np.frexp(x)[1] - 1.0)


def _ilogb(x: Array) -> Array:
    """For zero and NaN the least int32, for infinities the largest."""
    limits = np.iinfo(np.int32)
    special = np.where(np.isinf(x), limits.max, limits.min)
    return np.where(np.isfinite(x) & (x != 0), _exponent(np.where(np.isfinite(x), x, 1.0)), special).astype(np.int32)


def _ldexp(x: Array, power: Array) -> Array:
    return np.ldexp(x, np.clip(power.astype(np.int64), -5000, 5000))  # ldexp takes C ints; beyond 5000 all is 0 or inf


def _high_half(x: Array, y: Array, width: int) -> Array:
    product = x.astype(object) * y.astype(object) >> width
    kind = np.dtype(f"{x.dtype.kind}{width // 8}")
    result: Array = np.asarray([int(part) for part in product.reshape(-1)], kind).reshape(product.shape)
    return result


def _mul24(kind: str, x: Array, y: Array) -> Array:
    """The low 32 bits of the product of the operands' low 24 bits."""
    wide = (part.astype(np.int64) & 0xFFFFFF for part in (x, y))
    first, second = (np.where(kind == "i", (part ^ 0x800000) - 0x800000, part) for part in wide)
    return np.asarray(first * second).astype(np.uint32).view(f"{kind}4")


def _average(kind: str, carry: int, x: Array, y: Array) -> Array:
    return (x.astype(np.int64) + y.astype(np.int64) + carry >> 1).astype(f"{kind}4")


def _sum_of_absolute_difference(kind: str, x: Array, y: Array, z: Array) -> Array:
    return (np.abs(x.astype(np.int64) - y.astype(np.int64)) + z.astype(np.int64)).astype(np.uint32).view(f"{kind}4")


def _per_pattern(function: Callable[[int, int], int], kind: Any = np.int32) -> Callable[[Array], Array]:
    """``function(bits, width)`` of each pattern, in dtype ``kind``, or that of the argument if None."""

    def apply(x: Array) -> Array:
        width = 8 * x.dtype.itemsize
        results = [function(int(each) % 2**width, width) for each in x.reshape(-1)]
        dtype = x.dtype if kind is None else np.dtype(kind)
        return np.array(results, f"u{dtype.itemsize}").view(dtype).reshape(x.shape)

    return apply


def _byte_perm(x: Array, y: Array, selector: Array) -> Array:
    """Four of the eight bytes of {y, x}, selected by the low three bits of each nibble."""
    pair = y.view(np.uint32).astype(np.uint64) << np.uint64(32) | x.view(np.uint32)
    nibbles = selector.view(np.uint32).astype(np.uint64) & np.uint64(0x7777)
    return permuted_bytes(pair, nibbles).astype(np.uint32).view(np.int32)


def _bitcast(kind: str) -> Callable[[Array], Array]:
    return lambda x: np.ascontiguousarray(x).view(kind).reshape(x.shape)


def _join_double(high: Array, low: Array) -> Array:
    bits = high.astype(np.uint32).astype(np.uint64) << np.uint64(32) | low.astype(np.uint32)
    return bits.view(np.float64)


def _word_of_double(x: Array, shift: int) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint64).reshape(x.shape)
    return (bits >> np.uint64(shift)).astype(np.uint32).view(np.int32)


def _rcp64h(x: Array) -> Array:
    """The reciprocal of a double's high word, to a high word; the low words are zero."""
    high_word = np.uint64(0xFFFFFFFF00000000)
    high = (np.ascontiguousarray(x).view(np.uint64) & high_word).view(np.float64)
    result: Array = (np.reciprocal(high).view(np.uint64) & high_word).view(np.float64).reshape(x.shape)
    return result


_IN_NUMPY = """
abs cbrt ceil copysign cos cosh exp exp2 expm1 floor fmod hypot isinf isnan log log10 log1p log2 fmax fmin
rint signbit sin sinh sqrt tan tanh trunc
"""
_REAL: dict[str, Callable[..., Any]] = {name: getattr(np, name) for name in _IN_NUMPY.split()} | {
    "fabs": np.abs,
    "llabs": np.abs,
    **{f"a{name}": getattr(np, f"arc{name}") for name in ["cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh"]},
    "fdivide": np.divide,
    "erf": erf,
    **{name: _torch(name) for name in ("erfc", "erfcx", "erfinv")},
    "erfcinv": _erfcinv,
    "normcdf": lambda x: _torch("erfc")(-x / math.sqrt(2)) / 2,  # torch.special.ndtr loses the left tail (torch 2.13)
    "normcdfinv": _torch("ndtri"),
    "exp10": lambda x: np.power(10.0, x),
    "finite": np.isfinite,
    "isfinited": np.isfinite,
    "isinfd": np.isinf,
    "isnand": np.isnan,
    "j0": partial(_bessel("besselj"), 0),
    "j1": partial(_bessel("besselj"), 1),
    "y0": partial(_bessel("bessely"), 0),
    "y1": partial(_bessel("bessely"), 1),
    "jn": _bessel("besselj"),
    "yn": _bessel("bessely"),
    "cyl_bessel_i0": _torch("i0"),
    "cyl_bessel_i1": _torch("i1"),
    "lgamma": _torch("gammaln"),
    "tgamma": _each(_tgamma),
    "max": np.maximum,
    "min": np.minimum,
    "nearbyint": np.rint,
    "norm3d": _norm,
    "norm4d": _norm,
    "rnorm3d": lambda *parts: 1 / _norm(*parts),
    "rnorm4d": lambda *parts: 1 / _norm(*parts),
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "sinpi": _sinpi,
    "cospi": _cospi,
    "saturate": lambda x: np.where(np.isnan(x), 0.0, np.clip(x, 0.0, 1.0)),
    "fdim": lambda x, y: np.where(x <= y, 0.0, x - y),
    "ldexp": _ldexp,
    "scalbn": _ldexp,
    "logb": lambda x: np.where(np.isfinite(x), np.where(x == 0, -np.inf, _exponent(x)), np.abs(x)),
    "ilogb": _ilogb,
    "remainder": _each(math.remainder),
    "pow": np.power,
    "powi": np.power,
    "round": _round,
    "rsqrt": rsqrt,
    "frsqrt_rn": rsqrt,
    "signbitd": np.signbit,
    "rcp64h": _rcp64h,
}
_PER_PATTERN = {
    "brev": _per_pattern(reverse_bits, None),
    "clz": _per_pattern(lambda bits, width: width - bits.bit_length()),
    "popc": _per_pattern(lambda bits, width: bits.bit_count()),
    "ffs": _per_pattern(lambda bits, width: (bits & -bits).bit_length()),
}
_BITS: dict[str, Callable[..., Array]] = {
    **_PER_PATTERN,
    **{f"{name}ll": function for name, function in _PER_PATTERN.items()},
    "llrint": partial(_to_integer, "ll", "rn"),
    "llrintf": partial(_to_integer, "ll", "rn"),
    "llround": lambda x: to_integer(_round(x), np.int64),
    "llroundf": lambda x: to_integer(_round(x), np.int64),
    "nextafter": np.nextafter,
    "nextafterf": np.nextafter,
    "byte_perm": _byte_perm,
    "mulhi": partial(_high_half, width=32),
    "umulhi": partial(_high_half, width=32),
    "mul64hi": partial(_high_half, width=64),
    "umul64hi": partial(_high_half, width=64),
    "mul24": partial(_mul24, "i"),
    "umul24": partial(_mul24, "u"),
    "hadd": partial(_average, "i", 0),
    "uhadd": partial(_average, "u", 0),
    "rhadd": partial(_average, "i", 1),
    "urhadd": partial(_average, "u", 1),
    "sad": partial(_sum_of_absolute_difference, "i"),
    "usad": partial(_sum_of_absolute_difference, "u"),
    "float_as_int": _bitcast("i4"),
    "float_as_uint": _bitcast("i4"),
    "int_as_float": _bitcast("f4"),
    "uint_as_float": _bitcast("f4"),
    "double_as_longlong": _bitcast("i8"),
    "longlong_as_double": _bitcast("f8"),
    "hiloint2double": _join_double,
    "double2hiint": partial(_word_of_double, shift=32),
    "double2loint": partial(_word_of_double, shift=0),
}
