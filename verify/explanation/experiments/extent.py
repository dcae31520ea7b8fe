"""Where a change holds: the dimension along which the wrong elements are apart from those that it would make wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor
_PER_INDEX = 2  # elements for each index, or any two elements would differ in some index


class Extent:
    """The wrong elements of several calls, and the right ones that a change would make wrong, by dimension."""

    def __init__(self) -> None:
        self._indices: dict[str, list[tuple[set[int], set[int], bool]]] = {}
        self._calls = 0

    def add(self, wrong: Tensor, spared: Tensor, dims: Sequence[str]) -> None:
        """Add one result of a call; the masks are of its shape."""
        if not bool(spared.any()) or not bool(wrong.any()):
            return
        self._calls += 1
        for axis, name in enumerate(dims):
            of = [set(mask.nonzero()[:, axis].tolist()) for mask in (wrong, spared)]
            dense = all(
                int(mask.sum()) >= _PER_INDEX * len(each) for mask, each in zip((wrong, spared), of, strict=True)
            )
            if not of[0] & of[1]:
                self._indices.setdefault(name, []).append((of[0], of[1], dense))

    def in_words(self) -> str | None:
        """Return where the change holds; empty: everywhere; None: it can't be said along any one dimension."""
        if not self._calls:
            return ""
        some = None
        for name, calls in self._indices.items():
            if len(calls) < self._calls:
                continue
            wrong = set[int]().union(*(each for each, _, _ in calls))
            spared = set[int]().union(*(each for _, each, _ in calls))
            if max(spared) < min(wrong):
                return f"at {name} from {min(wrong)} on"
            if max(wrong) < min(spared):
                return f"at {name} up to {max(wrong)}"
            if all(call[2] for call in calls):
                some = some or f"at some {name}"
        return some
