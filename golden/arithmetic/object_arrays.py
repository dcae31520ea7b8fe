"""NumPy arrays of numbers that are objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

ObjectArray = np.ndarray[Any, np.dtype[Any]]  # of numbers
IntegerArray = ObjectArray  # of whole numbers, or a mask


def float_below(value: Fraction) -> float:
    """The largest float at or below a fraction."""
    near = float(value)
    return near if Fraction(near) <= value else math.nextafter(near, -math.inf)


class Numbers(np.ndarray[Any, np.dtype[Any]]):
    """An object array that stays one where it has no axes: of a plain one NumPy makes its element."""


def each(function: Callable[..., Any], *arrays: ObjectArray) -> ObjectArray:
    """The function of the arrays' elements, one by one."""
    given = [np.asarray(array, dtype=object) for array in arrays]
    found = np.empty(np.broadcast_shapes(*(array.shape for array in given)), dtype=object).view(Numbers)
    with np.errstate(all="ignore"):  # NaN is a number here
        return np.frompyfunc(function, len(given), 1)(*given, out=found)
