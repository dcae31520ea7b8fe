"""Elementary functions of object arrays by way of others, and their limits at the infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from assay.golden.arithmetic.object_arrays import ObjectArray, each

Scalar = Any  # one number


def _softplus(xp: Any, x: ObjectArray) -> ObjectArray:
    """log(1 + exp x), as max(x, 0) + log(1 + exp(-|x|))."""
    above = xp.maximum(x, xp.exact(np.zeros(())))
    below = -xp.maximum(x, -x)
    return above + xp.apply("log1p", xp.exp(below))


def _exp2(xp: Any, x: ObjectArray) -> ObjectArray:
    """2^x; of a whole number exact, so that its ties can be told."""

    def exact(value: Scalar, power: Scalar) -> Scalar:
        near = float(value)
        is_whole = abs(near) <= 2**20 and near.is_integer() and bool(value == xp.number(near))
        return xp.number(2.0) ** int(near) if is_whole else power

    power = xp.exp(x * _log_two(xp))
    return each(exact, x, power)


def _log2(xp: Any, x: ObjectArray) -> ObjectArray:
    """log x / log 2; of a power of two exact."""

    def exact(value: Scalar, quotient: Scalar) -> Scalar:
        fraction, exponent = math.frexp(float(value))
        is_power = fraction == 0.5 and bool(value == xp.number(float(value)))
        return xp.number(float(exponent - 1)) if is_power else quotient

    quotient = xp.apply("log", x) / _log_two(xp)
    return each(exact, x, quotient)


def _log_two(xp: Any) -> ObjectArray:
    return xp.apply("log", xp.exact(np.full(1, 2.0)))[0]


BY_OTHERS: dict[str, Callable[[Any, ObjectArray], ObjectArray]] = {
    "exp2": _exp2,
    "log2": _log2,
    "sigmoid": lambda xp, x: xp.sigmoid(x),
    "softplus": _softplus,
    "log10": lambda xp, x: xp.apply("log", x) / xp.apply("log", xp.exact(np.full(1, 10.0)))[0],
    "rsqrt": lambda xp, x: xp.apply("reciprocal", xp.apply("sqrt", x)),
}
_INF, _NAN = math.inf, math.nan
LIMITS: dict[str, tuple[float, float]] = {
    "exp": (0, _INF), "exp2": (0, _INF), "expm1": (-1, _INF), "log": (_NAN, _INF), "log2": (_NAN, _INF),
    "log1p": (_NAN, _INF), "tanh": (-1, 1), "erf": (-1, 1), "sigmoid": (0, 1), "softplus": (0, _INF),
    "sqrt": (_NAN, _INF), "rsqrt": (_NAN, 0), "reciprocal": (0, 0), "sin": (_NAN, _NAN), "cos": (_NAN, _NAN),
    "log10": (_NAN, _INF), "tan": (_NAN, _NAN), "atan": (-math.pi / 2, math.pi / 2), "asinh": (-_INF, _INF),
    "sinh": (-_INF, _INF), "cosh": (_INF, _INF), "asin": (_NAN, _NAN), "acos": (_NAN, _NAN), "acosh": (_NAN, _INF),
    "atanh": (_NAN, _NAN), "erfc": (2, 0), "erfinv": (_NAN, _NAN), "lgamma": (_INF, _INF), "digamma": (_NAN, _INF),
}  # fmt: skip
"""At -inf and at inf."""
