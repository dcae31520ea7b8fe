"""Races between the programs of one launch: which accesses are ordered, and who accessed each element.

Programs run at the same time, in any order; only atomics order them. An atomic that releases publishes what its program
has done, and what that program knew of others; one that acquires at the same address learns it (happens-before as in
Flanagan and Freund, FastTrack, PLDI 2009). Programs are interpreted one after another, so time is one number: a new
*segment* begins with each program and after each release.

At sizes of production some programs of a launch may run instead of all (`sampled`). What the others would have stored
is then poisoned, as fresh memory is in an examination: it holds NaN in one call and large numbers in another, so that
whatever comes out with the same bits in both comes from programs that ran. That holds where programs don't depend on
each other: `Samples` raises `DependentPrograms` for a later launch that loads what an earlier one would have stored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from assay.interpreter.errors import DependentPrograms
from assay.interpreter.numerics.floats import Array

_EMPTY = 0  # the history of a cell without accesses: it holds its value from before the launch
_REPLACED = -1  # ends a history: before it the cell held another value
_SEED = 20  # of the programs that are drawn, equal in all calls
_MAX_PENDING = 2**21  # addresses of one kind of access that are queued before they are entered into the cells


def arranged(grid: Sequence[int], order: int) -> list[tuple[int, ...]]:
    """Return the programs of a grid, ascending (0), descending (1), or shuffled by the seed ``order``."""
    programs = list(np.ndindex(*grid))
    if order == 1:
        programs.reverse()
    elif order:
        random.Random(order).shuffle(programs)
    return programs


def sampled(grid: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return at most ``most`` programs of a grid, ascending: the first, the last, their neighbours and random ones."""
    count = math.prod(grid)
    chosen = {0, 1, count - 2, count - 1} | {random.Random(_SEED + each).randrange(count) for each in range(most)}
    inside = sorted(index for index in chosen if 0 <= index < count)
    inside = inside if len(inside) <= most else [*inside[: most - 2], *inside[-2:]]
    return [tuple(int(part) for part in np.unravel_index(index, tuple(grid))) for index in inside]


class Ordering:
    """The segments of a launch, and which of them precede the present one."""

    def __init__(self) -> None:
        self.segment = 0
        self.first = 1
        self._programs: list[tuple[int, ...]] = [()]
        self._known: dict[tuple[int, ...], int] = {}
        self._published: dict[int, dict[tuple[int, ...], int]] = {}

    def begin(self, program: tuple[int, ...]) -> None:
        """Begin ``program``, which knows of no other."""
        self.first = self.segment + 1
        self._known = {}
        self._next_segment(program)

    def _next_segment(self, program: tuple[int, ...]) -> None:
        self.segment += 1
        self._programs.append(program)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let other programs begin and end inside; the present one then continues, with what it knew before."""
        program, known = self._programs[self.segment], self._known
        known[program] = self.segment
        yield
        self._known = known
        self.first = self.segment + 1
        self._next_segment(program)

    def program(self, segment: int) -> tuple[int, ...]:
        """Return the program of a segment."""
        return self._programs[segment]

    def acquire(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            for program, segment in self._published.get(address, {}).items():
                self._known[program] = max(segment, self._known.get(program, 0))

    def release(self, addresses: Iterable[int]) -> None:
        present = self._programs[self.segment]
        for address in addresses:
            published = self._published.setdefault(address, {})
            for program, segment in self._known.items():
                published[program] = max(segment, published.get(program, 0))
            published[present] = self.segment
        self._next_segment(present)

    def is_before(self, segment: int) -> bool:
        """Whether a segment precedes the present moment in every order of execution."""
        return segment >= self.first or segment <= self._known.get(self._programs[segment], 0)


class _Histories:
    """Histories of accesses by number: linked lists of segments that share their tails.

    The cells of a block mostly share one history, so an access to a block adds one list node.
    """

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._newest = [0]
        self._rest = [_EMPTY]
        self._original = [True]  # whether the cell holds its value from before the launch
        self._extended: dict[int, int] = {}  # history -> the same with the segment ``_last_added``
        self._last_added = 0

    def add(self, histories: Array, segment: int) -> Array:
        """Return the histories with an access in ``segment`` added, int32 of the same shape."""
        if not histories.size:
            return histories
        if (histories == histories.flat[0]).all():
            return np.full(histories.shape, self._extend(int(histories.flat[0]), segment), np.int32)
        distinct, inverse = np.unique(histories, return_inverse=True)
        extended = np.array([self._extend(history, segment) for history in distinct.tolist()], np.int32)
        return extended[inverse].reshape(histories.shape)

    def begin(self, segment: int) -> int:
        """Return the history of a cell whose value was replaced in ``segment``."""
        return self._extend(_REPLACED, segment)

    def unordered(self, history: int) -> int:
        """Return a segment of the history that is not ordered before the present moment, or 0."""
        while history > 0:
            if not self._ordering.is_before(self._newest[history]):
                return self._newest[history]
            history = self._rest[history]
        return 0

    def unseen(self, history: int) -> int:
        """Return 0 if the cell's value is present in every order of execution, else the segment of a store."""
        if self._original[history]:
            return 0
        newest = self._newest[history]
        while history != _REPLACED:
            if self._ordering.is_before(self._newest[history]):
                return 0
            history = self._rest[history]
        return newest

    def _extend(self, history: int, segment: int) -> int:
        if history > 0 and self._newest[history] == segment:
            return history
        if segment != self._last_added:
            self._last_added = segment
            self._extended.clear()
        if history not in self._extended:
            self._extended[history] = len(self._newest)
            self._newest.append(segment)
            self._rest.append(history)
            self._original.append(history != _REPLACED and self._original[history])
        return self._extended[history]


class Shadow:
    """Shadow memory of the ``size`` bytes at ``base``: a history of each kind of access ("store", "load", "atomic").

    A cell is as wide as the narrowest element accessed so far. A store history has the last store that changed the cell
    and later ones of the same bits. Stores are entered at once; loads and atomics are queued until another program
    accesses the storage in another way, since most tensors are accessed in one way only.
    """

    def __init__(self, base: int, size: int, width: int, ordering: Ordering) -> None:
        self.base = base
        self.size = size
        self.width = width
        self._ordering = ordering
        self._histories = _Histories(ordering)
        self._cells: dict[str, Array] = {}
        self._pending: dict[str, list[tuple[int, Array, int]]] = {"load": [], "atomic": []}
        self._counts = {"load": 0, "atomic": 0}

    def note(self, kind: str, addresses: Array, width: int) -> None:
        """Queue a load or an atomic operation of the present program."""
        if self._counts[kind] > _MAX_PENDING:
            self._enter_pending(kind)
        self._pending[kind].append((self._ordering.segment, addresses, width))
        self._counts[kind] += len(addresses)

    def enter_store(self, addresses: Array, width: int, changed: Array) -> None:
        """Enter a store of the present program; ``changed`` elements are ordered after all before them. [elements]"""
        indices = self._indices(addresses, width)
        cells = self._cells_of("store")
        segment = self._ordering.segment
        cells[indices[changed]] = self._histories.begin(segment)
        if not changed.all():
            unchanged = indices[~changed]
            cells[unchanged] = self._histories.add(cells[unchanged], segment)
        if "load" in self._cells:  # accesses after this store also come after the loads before it
            self._cells["load"][indices[changed]] = _EMPTY

    def conflicts(self, kind: str, addresses: Array, width: int) -> Array:
        """Return for each element the segment of an unordered access by another program, or 0. [elements]"""
        pending = self._pending.get(kind)
        if pending and pending[0][0] < self._ordering.first:
            self._enter_pending(kind)
        return self._look_up(kind, addresses, width, self._histories.unordered)

    def unseen(self, addresses: Array, width: int) -> Array:
        """Return for each element the segment of a store whose bits may not be present yet, or 0. [elements]"""
        return self._look_up("store", addresses, width, self._histories.unseen)

    def _indices(self, addresses: Array, width: int) -> Array:
        """Return the cells of elements of ``width`` bytes: [elements, cells of each]. May split cells."""
        if width < self.width:
            for kind, cells in self._cells.items():
                self._cells[kind] = np.repeat(cells, self.width // width)
            self.width = width
        first = (addresses - np.uint64(self.base)).astype(np.int64) // self.width
        return first[:, None] + np.arange(width // self.width) if width > self.width else first[:, None]

    def _look_up(self, kind: str, addresses: Array, width: int, find: Callable[[int], int]) -> Array:
        none = np.zeros(len(addresses), np.int32)
        if kind not in self._cells:
            return none
        indices = self._indices(addresses, width)  # before reading the cells, which it may split
        histories = self._cells[kind][indices]
        first = int(histories.flat[0])
        if (histories == first).all():
            return none + find(first)
        distinct, inverse = np.unique(histories, return_inverse=True)
        segments = np.array([find(history) for history in distinct.tolist()], np.int32)
        return segments[inverse].reshape(histories.shape).max(axis=1) if segments.any() else none

    def _cells_of(self, kind: str) -> Array:
        if kind not in self._cells:
            self._cells[kind] = np.full(-(-self.size // self.width), _EMPTY, np.int32)
        return self._cells[kind]

    def _enter_pending(self, kind: str) -> None:
        for segment, addresses, width in self._pending[kind]:
            indices = self._indices(addresses, width)
            cells = self._cells_of(kind)
            cells[indices] = self._histories.add(cells[indices], segment)
        self._pending[kind].clear()
        self._counts[kind] = 0


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
