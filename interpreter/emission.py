"""What a compiler makes of a kernel's arithmetic where it has a choice: contraction, flushing, approximate functions.

What Triton's NVIDIA backend emits was read from the PTX of releases 3.6 to 3.9, compiled offline for capability 9.0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from assay.runtime.errors import SettingError, unknown

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Emission:
    """A compiler's choices; by default none is taken, and every operation is rounded once, by itself.

    ``contraction``: a product that is added or subtracted is rounded with the sum, in one fma, also where the product
    is used elsewhere; of two products the left one. Triton's default up to 3.9 (``enable_fp_fusion``).
    ``flush``: subnormal operands and results of exp2, sqrt, rsqrt, sin, cos, erf and libdevice's functions of float32
    are zeros (``.ftz``); those of sums, products, quotients, exp and logarithms are kept.
    ``approximate``: of float32, exp(x) is 2^(x log2 e), the product rounded, and functions and quotients are as wrong
    as NVIDIA documents at most (`DIGITS`).
    """

    contraction: bool = False
    flush: bool = False
    approximate: bool = False


NVIDIA = Emission(contraction=True, flush=True, approximate=True)
"""What Triton's NVIDIA backend emits by default."""
ROUNDED = Emission()


def emission_named(name: str) -> Emission:
    """``nvidia``, or the choices that are taken, with commas between: ``contraction,flush``; none of an empty name.

    Raises `SettingError`.
    """
    choices = [field.name for field in fields(Emission)]
    taken = choices if name == "nvidia" else [part.strip() for part in name.split(",") if part.strip()]
    for part in taken:
        if part not in choices:
            raise SettingError(f"emission={name!r}: {unknown('choice', part, ['nvidia', *choices])}")
    return Emission(**dict.fromkeys(taken, True))


def name_of(emission: Emission) -> str:
    """The name by which `emission_named` gives it."""
    taken = [field.name for field in fields(emission) if getattr(emission, field.name)]
    return "nvidia" if emission == NVIDIA else ",".join(taken)


DIGITS = {
    "exp2": 22, "log": 23, "log2": 23, "sqrt": 23, "rsqrt": 23, "sin": 22, "cos": 22, "erf": 22, "div": 22,
    "exp": 22, "exp10": 22, "expm1": 23, "log10": 22, "log1p": 23, "tan": 21, "tanh": 22, "sinh": 22, "cosh": 22,
    "asin": 22, "acos": 22, "atan": 22, "asinh": 22, "acosh": 21, "atanh": 22, "pow": 21, "erfc": 21, "erfinv": 22,
    "cbrt": 23, "rcbrt": 23, "normcdf": 21, "fdivide": 22, "tgamma": 21, "hypot": 22,
}  # fmt: skip
"""The digits to which a result is rounded, so that half a unit is at most the error that NVIDIA documents for float32:
23 for one ulp, 22 for two or three, 21 for four or five. Sources: PTX ISA 8.8 (ex2.approx and div.full: 2 ulps;
sqrt.approx: 2^-23; rsqrt.approx: 2^-22.9); CUDA C++ Programming Guide, mathematical functions, single precision."""


def coarsened(values: Array, name: str) -> Array:
    """float64 results of a function, with as many digits as `DIGITS` says."""
    fraction, exponent = np.frexp(values)
    whole = np.rint(np.ldexp(fraction, DIGITS[name]))
    return np.where(np.isfinite(values), np.ldexp(whole, exponent - DIGITS[name]), values)


def flushed(values: Array) -> Array:
    """Numbers of float32 with zeros in place of subnormals, which keep their sign."""
    return np.where(np.abs(values) < 2.0**-126, np.copysign(0, values), values)


def factors_of(handle: Any) -> tuple[Any, Any] | None:
    """The handles whose product a handle is, where a compiler may contract it."""
    found: tuple[Any, Any] | None = handle.attr.get("factors")
    return found


def moved(result: Any, source: Any, move: Any) -> Any:
    """``result``, which is ``move(source)``: a product of factors moved likewise, if the source is a product."""
    factors = factors_of(source)
    if factors is not None:
        result.attr["factors"] = tuple(map(move, factors))
    return result
