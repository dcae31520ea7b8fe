"""From double-double numbers to Arb's balls and back: what `Exact` has no fast way for is done there, one by one."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic.double_double import DoubleDouble
from assay.golden.arithmetic.objects import Arb

_DIGITS = 80  # a pair of float64 and what a function adds to its error; with wider gaps Arb's radius tells


def through_arb(method: str, *arguments: Any, **keywords: Any) -> Any:
    """The method of `Arb` on the same arguments, its results as double-double numbers with proven radii."""
    arithmetic = Arb(_DIGITS)
    with arithmetic.precision():
        result = getattr(arithmetic, method)(
            *(_to_arb(arithmetic, value) for value in arguments),
            **{name: _to_arb(arithmetic, value) for name, value in keywords.items()},
        )
        return _from_arb(result)


def enclosures(arithmetic: Arb, x: DoubleDouble) -> Any:
    """An object array of balls that hold the numbers."""
    ball = arithmetic.flint.arb
    found = np.empty(x.shape, dtype=object)
    parts = (part.contiguous().numpy().ravel() for part in (x.high, x.rest, x.radius))
    flat = found.reshape(-1)
    for place, (high, low, radius) in enumerate(zip(*(part.tolist() for part in parts), strict=True)):
        number = ball(high) + low if low else ball(high)
        if radius:
            number = number + ball(0, radius if radius == radius else math.inf)
        flat[place] = number
    return found


def parts_of(result: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """High and low words and radii of an object array of balls.

    What is known to be infinite, if only as a float64, has radius zero; what is no number, or may lie on either side of
    float64's end, an infinite one.
    """
    value, low, radius = (np.zeros(result.shape) for _ in range(3))
    for index in np.ndindex(result.shape):
        number = result[index]
        high = float(number.mid())
        value[index] = high
        if math.isfinite(high):
            rest = number - high
            low[index] = float(rest.mid())
            radius[index] = _most(rest - float(low[index]))
        elif number.is_finite():
            if not math.isinf(float(number.abs_lower())):
                value[index], radius[index] = math.copysign(sys.float_info.max, high), math.inf
        elif high != high or number.rad() != 0:
            radius[index] = math.inf
    return torch.from_numpy(value), torch.from_numpy(low), torch.from_numpy(radius)


def nearest_to(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 nearest to each ball of an object array, and a radius that holds the ball about it.

    The radius is infinite unless the whole ball rounds to that float64, and zero where that is an infinity.
    """
    value, radius = (np.zeros(result.shape) for _ in range(2))
    for index in np.ndindex(result.shape):
        number = result[index]
        value[index] = high = float(number.mid())
        if not (float(number.lower()) == high == float(number.upper())):
            value[index], radius[index] = np.clip(high, -sys.float_info.max, sys.float_info.max), math.inf
        elif math.isfinite(high):
            radius[index] = _most(number - high)
    return torch.from_numpy(value), torch.from_numpy(radius)


def _most(number: Any) -> float:
    """A float64 at or above all magnitudes in a ball, zero for zero alone."""
    most = number.abs_upper()
    return math.nextafter(float(most) * (1 + 2.0**-50), math.inf) if most > 0 else 0.0


def _to_arb(arithmetic: Arb, value: Any) -> Any:
    if isinstance(value, DoubleDouble):
        return enclosures(arithmetic, value)
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return [_to_arb(arithmetic, part) for part in value] if isinstance(value, (list, tuple)) else value


def _from_arb(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_from_arb, result))
    if not isinstance(result, np.ndarray) or result.dtype != object:
        return torch.as_tensor(result)
    return DoubleDouble(*parts_of(result))
