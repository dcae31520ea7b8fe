"""Shadow memory: for each element of a tensor's storage who has written and read it in this launch.

Cells are as wide as the narrowest element that has been accessed. Stores are entered at once. Loads and atomics are
noted, and entered when another program accesses the same storage otherwise: most tensors are accessed in one way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from assay.interpreter.histories import EMPTY, Histories
from assay.interpreter.ordering import Ordering
from assay.interpreter.small_floats import Array

_MOST_NOTED = 2**21  # addresses of a kind of access that are kept before they are entered


class Shadow:
    """The cells of the ``size`` bytes at address ``base``: for each kind of access its history.

    Of stores these are the last one that changed the cell and those of the same bits since.
    """

    def __init__(self, base: int, size: int, width: int, ordering: Ordering) -> None:
        self.base = base
        self.size = size
        self.width = width
        self._ordering = ordering
        self._histories = Histories(ordering)
        self._cells: dict[str, Array] = {}
        self._noted: dict[str, list[tuple[int, Array, int]]] = {"load": [], "atomic": []}
        self._counts = {"load": 0, "atomic": 0}

    def cells(self, addresses: Array, width: int) -> Array:
        """The cells of elements of ``width`` bytes, those of one element in a row: [elements, cells of each]."""
        if width < self.width:
            for name, histories in self._cells.items():
                self._cells[name] = np.repeat(histories, self.width // width)
            self.width = width
        first = (addresses - np.uint64(self.base)).astype(np.int64) // self.width
        return first[:, None] + np.arange(width // self.width) if width > self.width else first[:, None]

    def note(self, kind: str, addresses: Array, width: int) -> None:
        """A load or an atomic operation by the present program."""
        if self._counts[kind] > _MOST_NOTED:
            self._enter(kind)
        self._noted[kind].append((self._ordering.segment, addresses, width))
        self._counts[kind] += len(addresses)

    def enter_store(self, addresses: Array, width: int, changed: Array) -> None:
        """A store by the present program, ordered after all before it where it has ``changed`` elements. [elements]"""
        cells = self.cells(addresses, width)
        histories = self._of("store")
        segment = self._ordering.segment
        histories[cells[changed]] = self._histories.begin(segment)
        if not changed.all():
            cells_kept = cells[~changed]
            histories[cells_kept] = self._histories.add(histories[cells_kept], segment)
        if "load" in self._cells:  # what comes after this store comes after the loads before it
            self._cells["load"][cells[changed]] = EMPTY

    def conflicts(self, kind: str, addresses: Array, width: int) -> Array:
        """For each element the segment of an access by another program that nothing puts before the present moment.

        Kinds of access are "store", "load" and "atomic"; 0 stands for none. [elements]
        """
        noted = self._noted.get(kind)
        if noted and noted[0][0] < self._ordering.first:
            self._enter(kind)
        return self._look_up(kind, addresses, width, self._histories.unordered)

    def unseen(self, addresses: Array, width: int) -> Array:
        """For each element the segment of a store whose bits may not be there yet; 0 for none. [elements]"""
        return self._look_up("store", addresses, width, self._histories.unseen)

    def _look_up(self, kind: str, addresses: Array, width: int, find: Callable[[int], int]) -> Array:
        none = np.zeros(len(addresses), np.int32)
        if kind not in self._cells:
            return none
        cells = self.cells(addresses, width)  # first: it may make the cells narrower
        histories = self._cells[kind][cells]
        first = int(histories.flat[0])
        if (histories == first).all():
            return none + find(first)
        distinct, which = np.unique(histories, return_inverse=True)
        segments = np.array([find(history) for history in distinct.tolist()], np.int32)
        return segments[which].reshape(histories.shape).max(axis=1) if segments.any() else none

    def _of(self, kind: str) -> Array:
        if kind not in self._cells:
            self._cells[kind] = np.full(-(-self.size // self.width), EMPTY, np.int32)
        return self._cells[kind]

    def _enter(self, kind: str) -> None:
        for segment, addresses, width in self._noted[kind]:
            cells = self.cells(addresses, width)
            histories = self._of(kind)
            histories[cells] = self._histories.add(histories[cells], segment)
        self._noted[kind].clear()
        self._counts[kind] = 0
