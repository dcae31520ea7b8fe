"""Which accesses a cell of memory has seen: lists of segments that share their tails, each known by a number.

The cells of a block mostly have one history, so that adding an access to a block makes one new list: its newest segment
and the number of the rest.
"""

from __future__ import annotations

import numpy as np

from assay.interpreter.ordering import Ordering
from assay.interpreter.small_floats import Array

EMPTY = 0
"""The history of a cell that nobody has accessed: it holds what was there before the launch."""

_REPLACED = -1  # ends a history before which the cell held something else


class Histories:
    """The histories of one launch's cells of one tensor."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._newest = [0]
        self._rest = [EMPTY]
        self._original = [True]  # whether the cell holds what was there before the launch
        self._longer: dict[int, int] = {}  # by history, the one that has the segment ``_added`` too
        self._added = 0

    def add(self, histories: Array, segment: int) -> Array:
        """The histories with an access in ``segment`` added, int32 of the same shape."""
        if not histories.size:
            return histories
        if (histories == histories.flat[0]).all():
            return np.full(histories.shape, self._with(int(histories.flat[0]), segment), np.int32)
        distinct, which = np.unique(histories, return_inverse=True)
        longer = np.array([self._with(history, segment) for history in distinct.tolist()], np.int32)
        return longer[which].reshape(histories.shape)

    def begin(self, segment: int) -> int:
        """The history of a cell whose content was replaced in ``segment``."""
        return self._with(_REPLACED, segment)

    def unordered(self, history: int) -> int:
        """A segment of the history that nothing puts before the present moment, 0 for none."""
        while history > 0:
            if not self._ordering.is_before(self._newest[history]):
                return self._newest[history]
            history = self._rest[history]
        return 0

    def unseen(self, history: int) -> int:
        """0 if what all these stores have left is there at the present moment in every order; else one of them."""
        if self._original[history]:
            return 0
        newest = self._newest[history]
        while history != _REPLACED:
            if self._ordering.is_before(self._newest[history]):
                return 0
            history = self._rest[history]
        return newest

    def _with(self, history: int, segment: int) -> int:
        if history > 0 and self._newest[history] == segment:
            return history
        if segment != self._added:
            self._added = segment
            self._longer.clear()
        if history not in self._longer:
            self._longer[history] = len(self._newest)
            self._newest.append(segment)
            self._rest.append(history)
            self._original.append(history != _REPLACED and self._original[history])
        return self._longer[history]
