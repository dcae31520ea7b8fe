"""Shadow memory: for each element of a tensor's storage who has written and read it in this launch.

Cells are as wide as the narrowest element that has been accessed. Stores are entered at once. Loads are only noted, and
entered when another program stores to the same storage: most tensors are either read or written.
"""

from __future__ import annotations

import numpy as np

from assay.verify.interpreter.narrow import Array
from assay.verify.interpreter.ordering import Ordering

_MOST_NOTED = 2**21  # addresses of loads that are kept before they are entered


class Shadow:
    """The cells of the ``size`` bytes at address ``base``: the segment of the first or last access, 0 for none."""

    def __init__(self, base: int, size: int, width: int, ordering: Ordering) -> None:
        self.base = base
        self.size = size
        self.width = width
        self._ordering = ordering
        self._cells: dict[str, Array] = {}
        self._programs: dict[str, dict[tuple[int, ...], int]] = {"load": {}, "atomic": {}}
        self._noted: list[tuple[int, Array, int]] = []
        self._count = 0

    def cells(self, addresses: Array, width: int) -> Array:
        """The cells of elements of ``width`` bytes, those of one element in a row: [elements, cells of each]."""
        if width < self.width:
            for name, segments in self._cells.items():
                self._cells[name] = np.repeat(segments, self.width // width)
            self.width = width
        first = (addresses - np.uint64(self.base)).astype(np.int64) // self.width
        return first[:, None] + np.arange(width // self.width) if width > self.width else first[:, None]

    def note_load(self, addresses: Array, width: int) -> None:
        """A load by the present program."""
        if self._count > _MOST_NOTED:
            self._enter_loads()
        self._noted.append((self._ordering.segment, addresses, width))
        self._count += len(addresses)
        self._programs["load"][self._present] = self._ordering.segment

    def enter_store(self, addresses: Array, width: int) -> None:
        """A store by the present program."""
        cells = self.cells(addresses, width)
        self._segments("store")[cells] = self._ordering.segment

    def enter_atomic(self, addresses: Array, width: int) -> None:
        """An atomic operation by the present program."""
        cells = self.cells(addresses, width)
        self._enter_first("atomic", cells, self._ordering.segment)
        self._programs["atomic"][self._present] = self._ordering.segment

    def conflicts(self, kind: str, addresses: Array, width: int) -> Array:
        """For each element the segment of an access by another program that nothing puts before the present moment.

        Kinds of access are "store", "load" and "atomic"; 0 stands for none. [elements]
        """
        if kind == "load" and self._noted and self._noted[0][0] < self._ordering.first:
            self._enter_loads()
        if kind not in self._cells:
            return np.zeros(len(addresses), np.int32)
        cells = self.cells(addresses, width)
        segments = self._cells[kind][cells]
        foreign = (segments > 0) & (segments < self._ordering.first)
        if not foreign.any():
            return np.zeros(len(addresses), np.int32)
        unordered = [segment for segment in np.unique(segments[foreign]) if not self._is_before(kind, int(segment))]
        return np.where(np.isin(segments, unordered), segments, 0).max(axis=1)

    def _is_before(self, kind: str, segment: int) -> bool:
        """Whether an access is ordered; of loads and atomics only the first is in the cell, so that all must be."""
        if kind == "store":
            return self._ordering.is_before(segment)
        return all(self._ordering.is_before(last) for last in self._programs[kind].values())

    @property
    def _present(self) -> tuple[int, ...]:
        return self._ordering.program(self._ordering.segment)

    def _segments(self, kind: str) -> Array:
        if kind not in self._cells:
            self._cells[kind] = np.zeros(-(-self.size // self.width), np.int32)
        return self._cells[kind]

    def _enter_loads(self) -> None:
        for segment, addresses, width in self._noted:
            self._enter_first("load", self.cells(addresses, width), segment)
        self._noted.clear()
        self._count = 0

    def _enter_first(self, kind: str, cells: Array, segment: int) -> None:
        segments = self._segments(kind)
        before = segments[cells]
        segments[cells] = np.where(before == 0, segment, before)
