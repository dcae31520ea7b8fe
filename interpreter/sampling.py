"""Some programs of a launch instead of all: at sizes of production the others take time and show nothing new.

What the others would have stored is then poisoned, as fresh memory is in an examination: it holds NaN in one call and
large numbers in another, so that whatever comes out with the same bits in both depends on programs that ran. That holds
where programs don't depend on each other. `Samples` sees every access, and raises `DependentPrograms` for an atomic
operation, and for a load, by a later launch, of what an earlier one would have stored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from assay.interpreter.errors import DependentPrograms
from assay.interpreter.numerics.floats import Array

_SEED = 20  # of the programs that are drawn, equal in all calls


def sampled(grid: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return at most ``most`` programs of a grid, ascending: the first, the last, their neighbours and random ones."""
    count = math.prod(grid)
    chosen = {0, 1, count - 2, count - 1} | {random.Random(_SEED + each).randrange(count) for each in range(most)}
    inside = sorted(index for index in chosen if 0 <= index < count)
    inside = inside if len(inside) <= most else [*inside[: most - 2], *inside[-2:]]
    return [tuple(int(part) for part in np.unravel_index(index, tuple(grid))) for index in inside]


class Samples:
    """What the programs of incomplete launches stored: by the address at which memory begins, a flag for each byte."""

    def __init__(self) -> None:
        self._earlier: dict[int, Array] = {}
        self._now: dict[int, Array] = {}

    def store(self, low: int, high: int, addresses: Array, width: int) -> None:
        """Note a store of elements of ``width`` bytes to the memory from ``low`` to ``high``."""
        stored = self._now.get(low)
        if stored is None:
            stored = self._now[low] = np.zeros(high - low, bool)
        offsets = (addresses - np.uint64(low)).astype(np.int64)
        for byte in range(width):
            stored[offsets + byte] = True

    def check_load(self, low: int, addresses: Array, name: str) -> None:
        """Raise `DependentPrograms` for a load of what a program of an earlier launch that didn't run would have
        stored."""
        earlier = self._earlier.get(low)
        if earlier is None:
            return
        offsets = (addresses - np.uint64(low)).astype(np.int64)
        known = earlier[offsets] | self._now[low][offsets] if low in self._now else earlier[offsets]
        if not known.all():
            raise DependentPrograms(f"a launch loads from {name} what programs of an earlier one store")

    def end(self, *, is_complete: bool) -> None:
        """End a launch, of which all programs ran if it ``is_complete``."""
        for low, stored in self._now.items():
            if low in self._earlier and len(self._earlier[low]) == len(stored):
                self._earlier[low] |= stored
            elif not is_complete:
                self._earlier[low] = stored
        self._now.clear()

    def poison(self, low: int, memory: Array, dtype: torch.dtype, content: str) -> None:
        """Fill the bytes of ``memory`` that no program stored, where others did, with a number of ``dtype``."""
        stored = self._earlier.get(low)
        if stored is not None and len(stored) == len(memory) and not stored.all():
            pattern = _poison(dtype, content).reshape(1).view(torch.uint8).numpy()
            missing = np.flatnonzero(~stored)
            memory[missing] = pattern[missing % len(pattern)]


def _poison(dtype: torch.dtype, content: str) -> torch.Tensor:
    """Return NaN, or with "huge" 2^100 (at most the largest number); of integers 0 or 1, which are harmless indices."""
    if not dtype.is_floating_point:
        return torch.tensor(int(content == "huge")).to(dtype)
    return torch.tensor(min(2.0**100, torch.finfo(dtype).max) if content == "huge" else math.nan).to(dtype)
