"""Draws bench records as a page of charts: roofline, speed against accuracy, history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from assay.bench.timing.contest import Line, Record
from assay.bench.timing.page import HEAD, by_case, duration, row
from assay.charts import SCRIPT, STYLE, Axis, Chart, Mark, Series, drawn
from assay.verify.report.rendering import environment

_MARKS: tuple[Mark, ...] = ("dot", "diamond", "square", "triangle", "cross")
_TONES = 8  # colours of the charts' style
_DATES = 5  # labelled ticks under a history


def plots(records: Sequence[Record]) -> str:
    """Return an HTML page of the newest record, as charts and a table, and of each case's history.

    The page loads nothing from a network. Raises ValueError if there are no records.
    """
    if not records:
        raise ValueError("records: expected one at least, got none")
    newest = records[-1]
    timed = [line for line in newest.lines if line.seconds]
    styles = _styles(line.kernel for record in records for line in record.lines if line.seconds)
    histories = [drawn(chart, f"history{index}") for index, chart in enumerate(_histories(records, styles))]
    tables = [(case, [row(line, same[0].seconds) for line in same]) for case, same in by_case(newest.lines)]
    return (
        environment()
        .get_template("bench.html.j2")
        .render(
            record=newest,
            count=len(records),
            roofline=drawn(_roofline(timed, styles), "roofline") if any(line.bytes for line in timed) else "",
            accuracy=drawn(_accuracy(timed, styles), "accuracy")
            if any(line.bits is not None for line in timed)
            else "",
            histories=histories,
            head=HEAD,
            tables=tables,
            chart_style=STYLE,
            chart_script=SCRIPT,
        )
    )


def _styles(kernels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a mark for each kernel, the same in all charts."""
    names = dict.fromkeys(kernels)
    return {
        name: {"tone": f"c{index % _TONES}", "mark": _MARKS[(index + index // _TONES) % len(_MARKS)]}
        for index, name in enumerate(names)
    }


def _roofline(lines: Sequence[Line], styles: dict[str, dict[str, Any]]) -> Chart:
    """Draw each kernel's rate over the op's intensity, and the roofline; the rate is in bytes if these are more."""
    known = [line for line in lines if line.bytes]
    series = [
        Series(
            kernel,
            [_intensity(line) for line in same],
            [_rate(line, line.seconds) for line in same],
            _tooltips(same),
            **styles[kernel],
        )
        for kernel, same in _by_kernel(known).items()
    ]
    bounds = sorted({(_intensity(line), _rate(line, line.least)) for line in known if line.least})
    if bounds:
        words = [f"roofline\n{x:.3g} operations per byte\n{y:.3g} GFLOP/s or GB/s" for x, y in bounds]
        xs, ys = zip(*bounds, strict=True)
        series.insert(
            0, Series("roofline, the least time", xs, ys, words, "triangle", "solid" if len(set(xs)) > 1 else "", "ink")
        )
    return Chart(
        f"Operations per byte against the rate of {len(known)} timings; the numbers are in the table.",
        Axis("operations per byte moved, logarithmic; 1 for what has fewer, or none", log=True),
        Axis("GFLOP/s, or GB/s where bytes are more, logarithmic", log=True),
        series,
        height=420,
    )


def _intensity(line: Line) -> float:
    return max((line.products or 0.0) / (line.bytes or 1.0), 1.0)


def _rate(line: Line, seconds: float | None) -> float:
    return max(line.products or 0.0, line.bytes or 0.0) / (seconds or 1.0) / 1e9


def _accuracy(lines: Sequence[Line], styles: dict[str, dict[str, Any]]) -> Chart:
    known = [line for line in lines if line.bits is not None]
    return Chart(
        f"Time of a call against accuracy in bits of {len(known)} timings; the numbers are in the table.",
        Axis("time of a call, µs, logarithmic", log=True),
        Axis("accuracy, bits"),
        [
            Series(
                kernel,
                [1e6 * (line.seconds or 0.0) for line in same],
                [line.bits or 0.0 for line in same],
                _tooltips(same),
                **styles[kernel],
            )
            for kernel, same in _by_kernel(known).items()
        ],
    )


def _histories(records: Sequence[Record], styles: dict[str, dict[str, Any]]) -> list[Chart]:
    """Return a chart for each timed case: every kernel's time over the records."""
    cases: dict[str, dict[str, list[tuple[Record, Line]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for line in record.lines:
            if line.seconds:
                cases[line.case][line.kernel].append((record, line))
    return [
        Chart(
            f"Times of {len(kernels)} kernels over records: {case}",
            Axis(
                "when the record was made, UTC",
                ticks=_dates([record for same in kernels.values() for record, _ in same]),
            ),
            Axis(f"{case}: time of a call, µs", zero=True),
            [
                Series(
                    kernel,
                    [_when(record) for record, _ in same],
                    [1e6 * (line.seconds or 0.0) for _, line in same],
                    [
                        f"{words}\n{record.made}{f', {record.commit}' if record.commit else ''}"
                        for (record, _), words in zip(same, _tooltips([line for _, line in same]), strict=True)
                    ],
                    line="solid",
                    **styles[kernel],
                )
                for kernel, same in kernels.items()
            ],
            height=240,
        )
        for case, kernels in cases.items()
    ]


def _when(record: Record) -> float:
    return datetime.fromisoformat(record.made).timestamp()


def _dates(records: Sequence[Record]) -> list[tuple[float, str]]:
    """Return evenly spread times of records with labels: days, minutes or seconds."""
    times = sorted({_when(record): datetime.fromisoformat(record.made) for record in records}.items())
    first, last = times[0][0], times[-1][0]
    form = "%Y-%m-%d" if last - first > 3 * 86400 else "%m-%d %H:%M" if last - first > 3600 else "%H:%M:%S"
    step = (last - first) / (_DATES - 1)
    results: list[tuple[float, str]] = []
    for at, time in times:
        if not results or at - results[-1][0] >= step:
            results.append((at, time.strftime(form)))
    return results


def _tooltips(lines: Sequence[Line]) -> list[str]:
    """Return a tooltip for each timing."""
    results = []
    for line in lines:
        share = f", {100 * line.share:.3g} % of the roofline" if line.share else ""
        bits = f"{line.bits:.1f} bits" if line.bits is not None else ""
        results.append("\n".join(filter(None, [line.kernel, line.case, f"{duration(line.seconds)}{share}", bits])))
    return results


def _by_kernel(lines: Iterable[Line]) -> dict[str, list[Line]]:
    results: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        results[line.kernel].append(line)
    return results
