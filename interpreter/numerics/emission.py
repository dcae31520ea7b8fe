"""A compiler's arithmetic choices: contraction, flushing of subnormals, approximate functions.

The choices of Triton's NVIDIA backend were read from the PTX of releases 3.6 to 3.9, compiled for capability 9.0.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from assay.runtime.errors import SettingError, unknown

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Emission:
    """A compiler's choices; by default none, so that every operation is rounded once, separately.

    ``contraction``: a product and its addition or subtraction become one fma, even if the product has other uses; of
    two products the left one. Triton's default up to 3.9 (``enable_fp_fusion``). ``flush``: subnormal operands and
    results of float32 exp2, sqrt, rsqrt, sin, cos, erf and libdevice functions become zero (``.ftz``); sums, products,
    quotients, exp and logarithms keep them. ``approximate``: float32 exp(x) is 2^(x log2 e) with a rounded product;
    functions and quotients have the largest error that NVIDIA documents (`DIGITS`).
    """

    contraction: bool = False
    flush: bool = False
    approximate: bool = False


NVIDIA = Emission(contraction=True, flush=True, approximate=True)
"""The defaults of Triton's NVIDIA backend."""
ROUNDED = Emission()


def emission_named(name: str) -> Emission:
    """Parse ``nvidia``, or a comma-separated list of choices such as ``contraction,flush``; "" means none.

    Raises `SettingError` for an unknown choice.
    """
    choices = [field.name for field in fields(Emission)]
    enabled = choices if name == "nvidia" else [part.strip() for part in name.split(",") if part.strip()]
    for part in enabled:
        if part not in choices:
            raise SettingError(f"emission={name!r}: {unknown('choice', part, ['nvidia', *choices])}")
    return Emission(**dict.fromkeys(enabled, True))


def name_of(emission: Emission) -> str:
    """Return the name that `emission_named` parses to ``emission``."""
    enabled = [field.name for field in fields(emission) if getattr(emission, field.name)]
    return "nvidia" if emission == NVIDIA else ",".join(enabled)


DIGITS = {
    "exp2": 22, "log": 23, "log2": 23, "sqrt": 23, "rsqrt": 23, "sin": 22, "cos": 22, "erf": 22, "div": 22,
    "exp": 22, "exp10": 22, "expm1": 23, "log10": 22, "log1p": 23, "tan": 21, "tanh": 22, "sinh": 22, "cosh": 22,
    "asin": 22, "acos": 22, "atan": 22, "asinh": 22, "acosh": 21, "atanh": 22, "pow": 21, "erfc": 21, "erfinv": 22,
    "cbrt": 23, "rcbrt": 23, "normcdf": 21, "fdivide": 22, "tgamma": 21, "hypot": 22,
}  # fmt: skip
"""Significant bits to which a float32 result is rounded, so that its error is at most the one that NVIDIA documents:
23 for one ulp, 22 for two or three, 21 for four or five. Sources: PTX ISA 8.8 (ex2.approx and div.full: 2 ulps;
sqrt.approx: 2^-23; rsqrt.approx: 2^-22.9); CUDA C++ Programming Guide, mathematical functions, single precision."""


def coarsened(values: Array, name: str) -> Array:
    """Round float64 results of the function ``name`` to its `DIGITS`."""
    fraction, exponent = np.frexp(values)
    significand = np.rint(np.ldexp(fraction, DIGITS[name]))
    return np.where(np.isfinite(values), np.ldexp(significand, exponent - DIGITS[name]), values)


def flushed(values: Array) -> Array:
    """Replace float32 subnormals by zeros of the same sign."""
    return np.where(np.abs(values) < 2.0**-126, np.copysign(0, values), values)


def factors_of(handle: Any) -> tuple[Any, Any] | None:
    """Return the two handles whose product ``handle`` holds, if the compiler may contract the product."""
    factors: tuple[Any, Any] | None = handle.attr.get("factors")
    return factors


def reshaped(result: Any, source: Any, reshape: Any) -> Any:
    """Return ``result`` = ``reshape(source)``; if the source is a product, mark the result as one too."""
    factors = factors_of(source)
    if factors is not None:
        result.attr["factors"] = tuple(map(reshape, factors))
    return result
