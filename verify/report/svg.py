"""The geometry of a report's pictures: error maps as a few paths, histograms as heights of bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from assay.verify.findings import EDGES, STEPS, ErrorMap

LEVELS = (0.5, 1.0, 2.0, 10.0, 100.0, math.inf)
"""The largest ratio of each colour of a map; the last is for NaN and infinities too."""

LABELS = ("up to ½", "up to 1: allowed", "up to 2", "up to 10", "up to 100", "more, or no number", "not judged")

_NOT_JUDGED = len(LEVELS)
_WIDE, _TALL = 560, 320  # pixels that a map fills where it has many cells
_LARGEST, _SMALLEST = 30, 8  # pixels of a cell


@dataclass(frozen=True)
class Drawing:
    """A map of ``columns`` by ``rows`` cells: one path in units of cells per level, and the lines between cells.

    ``width`` and ``height`` are in pixels.
    """

    columns: int
    rows: int
    width: int
    height: int
    paths: tuple[tuple[int, str], ...]
    lines: str

    @property
    def legend(self) -> tuple[tuple[int, str], ...]:
        """The levels that occur, and what they mean."""
        return tuple((level, LABELS[level]) for level, _ in self.paths)


@dataclass(frozen=True)
class Bar:
    """One bin of a histogram: its ``kind`` ("exact", "kept", "broken"), ``height`` in percent, and in words."""

    kind: str
    height: float
    words: str


def drawn(errors: ErrorMap) -> Drawing:
    """A map's cells as paths: neighbours of one level in a row are one rectangle."""
    rows, columns = len(errors.cells), len(errors.cells[0])
    results: dict[int, list[str]] = {}
    for row, cells in enumerate(errors.cells):
        start = 0
        for level, run in groupby(map(_level, cells)):
            length = len(list(run))
            results.setdefault(level, []).append(f"M{start} {row}h{length}v1h-{length}z")
            start += length
    lines = [f"M{index} 0v{rows}" for index in range(1, columns)] + [
        f"M0 {index}h{columns}" for index in range(1, rows)
    ]
    width, height = (
        int(cells * min(_LARGEST, max(_SMALLEST, most / cells))) for cells, most in ((columns, _WIDE), (rows, _TALL))
    )
    paths = tuple((level, "".join(results[level])) for level in sorted(results))
    return Drawing(columns, rows, width, max(height, _LARGEST), paths, "".join(lines))


def bars(histogram: Sequence[int]) -> list[Bar]:
    """A histogram's bins, as bars on a logarithmic scale."""
    top = math.log1p(max(histogram, default=0)) or 1.0
    return [
        Bar(
            "exact" if index == 0 else "kept" if index <= STEPS else "broken",
            round(100 * math.log1p(count) / top, 1),
            f"{_bin(index)}: {count:,}",
        )
        for index, count in enumerate(histogram)
    ]


def told(histogram: Sequence[int]) -> str:
    """A histogram in one sentence."""
    total, exact, kept, broken = (
        sum(histogram),
        histogram[0],
        sum(histogram[1 : STEPS + 1]),
        sum(histogram[STEPS + 1 :]),
    )
    near = sum(histogram[STEPS // 2 + 1 : STEPS + 1])
    return (
        f"Of {total:,} judged elements {exact:,} are the golden itself, {kept:,} lie within what is allowed "
        f"({near:,} of them beyond half of it), {broken:,} outside."
    )


def _level(ratio: float | None) -> int:
    if ratio is None:
        return _NOT_JUDGED
    return next((level for level, most in enumerate(LEVELS) if ratio <= most), _NOT_JUDGED - 1)


def _bin(index: int) -> str:
    if index == 0:
        return "exactly 0"
    if index == len(EDGES):
        return f"more than {EDGES[-1]:g}"
    return f"{EDGES[index - 1]:g} to {EDGES[index]:g}"
