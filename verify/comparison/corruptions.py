"""Correct outputs corrupted on purpose, as a faulty kernel might corrupt them; NumPy only.

The gate of an examination shows them to its own check, `assay.mutation` to the comparisons of a test suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64] | NDArray[np.complex128]
TILE = 16
"""Rows and columns of a tile."""


def of_structure(right: Numbers) -> Iterator[tuple[str, Numbers]]:
    """Yield (name, corrupted numbers) of a nonempty array: changes of all numbers, then of rows along the last axis.

    The row of largest magnitudes becomes zero, then a tile at the end of the last rows, then the first and last rows
    are swapped.
    """
    yield "all zeros", np.zeros_like(right)
    negative: Any = np.asarray(-right)  # of a scalar too
    yield "sign changed", negative
    rows = right.reshape(-1, right.shape[-1] if right.ndim else 1)
    row, tile, swapped = rows.copy(), rows.copy(), rows.copy()
    row[int(sizes(rows).sum(-1).argmax())] = 0
    yield "one row zero", row.reshape(right.shape)
    tile[-TILE:, -TILE:] = 0
    yield "one tile zero", tile.reshape(right.shape)
    swapped[[0, -1]] = swapped[[-1, 0]]
    yield "two rows swapped", swapped.reshape(right.shape)


def sizes(numbers: Numbers) -> NDArray[np.float64]:
    """Return magnitudes, zero for numbers that aren't finite."""
    return np.abs(np.where(np.isfinite(numbers), numbers, 0))


def of_the_largest(numbers: Numbers) -> tuple[np.intp, ...]:
    """Return the index of the largest finite magnitude, the first of equals."""
    return np.unravel_index(int(sizes(numbers).argmax()), numbers.shape) if numbers.ndim else ()


def with_element(right: Numbers, index: tuple[np.intp, ...], value: float | complex) -> Numbers:
    """Return the same numbers with one replaced."""
    wrong = right.copy()
    wrong[index] = value
    return wrong
