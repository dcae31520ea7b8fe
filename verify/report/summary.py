"""The verdicts of a run as Markdown, for GitHub's job summaries."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.runtime.output import visible
from assay.verify.findings import Findings
from assay.verify.report.text import failure_in_words, where

_MOST = 100  # most details: GitHub limits a summary to 1 MiB
_MARKS = {"PASS": "✅", "FAIL": "❌", "WARN": "⚠️"}


@dataclass(frozen=True)
class Line:
    """One verdict's line; every field but ``cases`` is text.

    ``words`` describes the first violation, or why there is no verdict; ``where`` is the position of the first wrong
    output, and ``broken`` the broken aspects.
    """

    kernel: str
    spec: str
    dtype: str
    outcome: str
    cases: int = 0
    worst: str = ""
    words: str = ""
    where: str = ""
    repro: str = ""
    broken: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def line_of(verdict: Findings) -> Line:
    """Return a verdict's line."""
    words, index = verdict.note, ""
    if verdict.failure is not None:
        words, index = failure_in_words(verdict.failure), where(verdict.map) if verdict.map else ""
    return Line(
        verdict.kernel,
        verdict.spec,
        verdict.dtype,
        verdict.outcome,
        verdict.cases,
        f"{verdict.worst:.3g}",
        words,
        index,
        verdict.repro,
        ", ".join(verdict.broken),
    )


def markdown(lines: Sequence[Line]) -> str:
    """Return the table of all verdicts, those that passed last, and folded details of the others."""
    ordered = sorted(lines, key=lambda line: line.outcome == "PASS")
    count = Counter(line.outcome for line in lines)
    warned = f", {count['WARN']} more with warnings" if count["WARN"] else ""
    parts = [f"### assay: {count['PASS']} of {len(lines)} kernels keep their contract{warned}", ""]
    parts += [
        "| | kernel | spec | dtype | cases | worst ratio | broken | gravest violation |",
        "|---|---|---|---|--:|--:|---|---|",
    ]
    parts += [_row(line) for line in ordered]
    broken = [line for line in ordered if line.repro]
    for line in broken[:_MOST]:
        parts += ["", *_details(line)]
    if len(broken) > _MOST:
        parts += ["", f"And {len(broken) - _MOST} more."]
    return visible("\n".join(parts) + "\n")


def append(path: str | Path, lines: Iterable[Line]) -> None:
    """Append the summary of ``lines`` to a file; raise OSError if it can't be written."""
    with Path(path).open("ab", buffering=0) as file:
        file.write(f"\n{markdown(list(lines))}".encode())  # by one call: other runs append to it too


def _row(line: Line) -> str:
    outcome = f"{_MARKS.get(line.outcome, '⚠️')} {line.outcome}"
    cells = (outcome, line.kernel, line.spec, line.dtype, str(line.cases), line.worst, line.broken, line.words)
    return f"| {' | '.join(map(_escaped, cells))} |"


def _details(line: Line) -> list[str]:
    title = html.escape(" ".join(f"{line.kernel} as {line.spec} in {line.dtype}: {line.words}".split()))
    longest = max(map(len, re.findall(r"`+", line.repro)), default=0)
    fence = "`" * max(3, longest + 1)
    where = [_escaped(line.where), ""] if line.where else []
    return [f"<details><summary>{title}</summary>", "", *where, f"{fence}sh", line.repro, fence, "", "</details>"]


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_|\[\]~#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
