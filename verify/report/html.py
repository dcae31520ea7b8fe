"""HTML reports: the self-contained page of a verdict, and what other pages share with it.

Error maps are drawn as a few SVG paths, histograms as bars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jinja2

from assay.charts import SCRIPT, STYLE
from assay.verify.cases.case import Case, configs_in_words
from assay.verify.cases.sequences import sequence_in_words
from assay.verify.findings import EDGES, STEPS, ErrorMap, Findings
from assay.verify.report.pictures import pictured
from assay.verify.report.rendering import environment as plain_environment
from assay.verify.report.text import failure_in_words, greatest

if TYPE_CHECKING:
    from assay.verify.power_report import PowerReport

LEVELS = (0.5, 1.0, 2.0, 10.0, 100.0, math.inf)
"""The largest ratio of each colour of a map; the last is for NaN and infinities too."""

LABELS = ("up to ½", "up to 1: allowed", "up to 2", "up to 10", "up to 100", "more, or no number", "not judged")

_NOT_JUDGED = len(LEVELS)
_WIDE, _TALL = 560, 320  # largest pixel size of a map with many cells
_LARGEST, _SMALLEST = 30, 8  # pixels of a cell


@dataclass(frozen=True)
class Drawing:
    """A map of ``columns`` by ``rows`` cells: one path for each level, in units of cells, and the grid lines.

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
        """Return the levels that occur, and their meaning."""
        return tuple((level, LABELS[level]) for level, _ in self.paths)


@dataclass(frozen=True)
class Bar:
    """One bin of a histogram: its ``kind`` ("exact", "kept", "broken"), ``height`` in percent, and description."""

    kind: str
    height: float
    words: str


def drawn(errors: ErrorMap) -> Drawing:
    """Return a map's cells as paths: neighbours in a row with the same level form one rectangle."""
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
    """Return a histogram's bins as bars on a logarithmic scale."""
    top = math.log1p(max(histogram, default=0)) or 1.0
    return [
        Bar(
            "exact" if index == 0 else "kept" if index <= STEPS else "broken",
            round(100 * math.log1p(count) / top, 1),
            f"{_bin(index)}: {count:,}",
        )
        for index, count in enumerate(histogram)
    ]


def histogram_words(histogram: Sequence[int]) -> str:
    """Return a histogram in one sentence."""
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


def verdict_page(verdict: Findings, power: PowerReport | None = None) -> str:
    """Return a verdict as an HTML page, with the ``power`` of the examination if it was measured."""
    has_pictures = any(fact.picture is not None for fact in verdict.facts)
    settings = (
        {"chart_style": STYLE, "chart_script": SCRIPT} if has_pictures else {"chart_style": "", "chart_script": ""}
    )
    return environment().get_template("verdict.html.j2").render(verdict=verdict, power=power, **settings)


@cache
def environment() -> jinja2.Environment:
    """Return the template environment for pages of verdicts."""
    environment = plain_environment()
    environment.filters |= {"number": number, "ratio": ratio, "tone": _tone, "total": math.prod}
    environment.filters |= {
        "drawn": drawn,
        "bars": bars,
        "histogram_words": histogram_words,
        "sentence": _sentence,
        "places": _positions,
        "greatest": greatest,
        "shown_case": shown_case,
        "in_words": failure_in_words,
        "pictured": pictured,
    }
    return environment


def number(value: float | None) -> str:
    """Return a number in full, as readers need it for comparison."""
    return "" if value is None else f"{value:.9g}"


def ratio(value: float) -> str:
    """Return a ratio in three digits; ∞ for NaN, infinities and failures without a ratio."""
    return "∞" if math.isinf(value) else f"{value:#.3g}".rstrip(".")


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _positions(size: int) -> str:
    return "0" if size == 1 else f"0 to {size - 1}"


_TONES = {
    **dict.fromkeys(("PASS", "kept"), "good"),
    **dict.fromkeys(("FAIL", "broken"), "bad"),
    **dict.fromkeys(("NOT HERE", "NOT RUN", "not tried"), "quiet"),
}


def _tone(outcome: str) -> str:
    """Return the colour of an outcome; the page always shows the outcome's word too."""
    return _TONES.get(outcome, "doubt")


def shown_case(case: Case) -> Mapping[str, Any]:
    """Return the template's data for a failing case."""
    return {
        "sizes": case.sizes,
        "options": _options(case),
        "tensors": [
            (
                tensor.name,
                " × ".join(map(str, case.shape(tensor))) or "scalar",
                case.dtypes[tensor.name],
                case.values.get(tensor.name, ""),
                case.layouts.get(tensor.name, "contiguous"),
            )
            for tensor in case.signature.tensors
        ],
        "zeros": sum(value == 0 for _, _, value in case.edits),
        "edits": [(f"{name}{list(index)}", f"{value:g}") for name, index, value in case.edits if value != 0],
        "memory": _MEMORY[case.memory],
        "protocol": f"calls: {sequence_in_words(case.before)}"
        if case.before
        else _PROTOCOLS.get(case.protocol, case.protocol),
        "configs": configs_in_words(case.configs),
    }


_MEMORY = {"plain": "", "nan": "fresh memory is filled with NaN", "huge": "fresh memory is filled with 2¹⁰⁰"}
_PROTOCOLS = {
    "once": "",
    "repeat": "the same call is made twice",
    "after_other": "a call with other data of the same shapes comes first",
    "after_refill": "a call with other data in the same memory comes first",
    "after_many": "many equal calls with other data in the same memory come first",
    "alone": "each row is also given alone",
    "bias": "a series of calls with fresh data",
    "emitted": "a * b + c is rounded once, subnormals are flushed, functions are approximate: as NVIDIA has it",
    "outside": "the call is made in a process of its own, where nothing tells of an examination",
}


def _options(case: Case) -> dict[str, Any]:
    defaults = case.definition.complete({})
    return {name: value for name, value in case.options.items() if value != defaults[name]}
