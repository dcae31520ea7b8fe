"""Reports a bench record: table rows, a Markdown page, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from assay.bench.timing.contest import Line, Record
from assay.bench.timing.gate import Change
from assay.runtime.output import visible

HEAD = (
    "kernel",
    "time",
    "+-",
    "x best",
    "roofline",
    "GB/s",
    "TFLOP/s",
    "bits",
    "error/allowed",
    "calls judged, timed",
    "",
)
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def duration(seconds: float | None) -> str:
    """Return seconds as text in a readable unit."""
    if seconds is None:
        return ""
    scale, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{seconds / scale:.4g} {unit}"


def by_case(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    """Yield each case with its kernels, the fastest first, kernels without a time last."""
    for case, same in groupby(lines, key=lambda line: line.case):
        yield case, sorted(same, key=lambda line: (line.seconds is None, line.seconds or 0.0))


def row(line: Line, best: float | None) -> tuple[str, ...]:
    """Return a kernel's row under `HEAD`."""
    if line.seconds is None:
        return (line.kernel, line.outcome, *[""] * 7, _judged(line), line.why)
    return (
        line.kernel,
        duration(line.seconds),
        f"{50 * (line.spread or 0.0) / line.seconds:.2g} %",
        f"{line.seconds / best:.3g}" if best else "",
        f"{100 * line.share:.3g} %" if line.share else "",
        f"{line.bytes / line.seconds / 1e9:.4g}" if line.bytes else "",
        f"{line.products / line.seconds / 1e12:.4g}" if line.products else "",
        f"{line.bits:.1f}" if line.bits is not None else "exact" if line.judged else "",
        f"{line.worst:.2g}" if line.worst is not None else "",
        _judged(line),
        line.gap,
    )


def _judged(line: Line) -> str:
    return f"{line.judged}, {line.calls}"


def change_words(change: Change) -> str:
    """Return one comparison as a line."""
    text = f"{change.answer.upper()}  {change.kernel}; {change.case}"
    if change.change is None:
        return f"{text}: {change.why}"
    low, high = (f"{100 * (value or 0.0):+.2g} %" for value in (change.low, change.high))
    return f"{text}: {100 * change.change:+.2g} % ({low} to {high}){f'; {change.why}' if change.why else ''}"


def markdown(record: Record, changes: Sequence[Change] = ()) -> str:
    """Return a page of one record in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    lines = [
        f"# Speed and accuracy on {record.machine}",
        "",
        f"What `{record.command}` measured, {record.made}; {versions}. Timed by {record.clock}.",
        "",
        f"Roofline: {record.peak}." if record.peak else "No peak of this device is known.",
        "`+-`: half the distance of the rounds' quartiles. `calls judged`: some of the timed calls and some others; a",
        "kernel that was wrong in one has no time. `bits`: log2 of the root mean square of results over that of their",
        "errors.",
        "",
    ]
    for case, same in by_case(record.lines):
        best = same[0].seconds
        lines += [f"## {case}", "", f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row(line, best))} |" for line in same]
        lines.append("")
    if changes:
        lines += ["## Changes", "", *(f"- {change_words(change)}" for change in changes), ""]
    return visible("\n".join(lines).rstrip() + "\n")


def as_json(record: Record, changes: Sequence[Change]) -> str:
    """Return the record and its comparisons as JSON."""
    return json.dumps({**record.as_dict(), "changes": [vars_of(change) for change in changes]}, indent=1)


def vars_of(change: Change) -> dict[str, Any]:
    """Return plain data."""
    return {name: getattr(change, name) for name in change.__dataclass_fields__}
