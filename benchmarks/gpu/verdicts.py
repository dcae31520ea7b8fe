"""Verdicts of a run as a table of docs/: a row for the dtypes of a kernel that came out alike."""

from collections.abc import Iterable
from dataclasses import dataclass

_WORDS = 150  # characters of a violation in a table


@dataclass(frozen=True)
class Line:
    """A kernel's verdict in one dtype: ``words`` is the first violation, or why there is no verdict."""

    kernel: str
    dtype: str
    outcome: str
    cases: int
    words: str = ""

    def __str__(self) -> str:
        result = f"{self.outcome:8} {self.kernel} {self.dtype}: {self.cases} cases"
        return f"{result}: {self.words}" if self.words else result


def table(lines: Iterable[Line]) -> str:
    """Return a Markdown table, kernels in the order of their first line."""
    kernels: dict[str, list[Line]] = {}
    for line in lines:
        kernels.setdefault(line.kernel, []).append(line)
    rows = ["| kernel | dtypes | verdict | cases | first violation |", "|---|---|---|---|---|"]
    for kernel, own in kernels.items():
        alike: dict[str, list[Line]] = {}
        for line in own:
            alike.setdefault(line.outcome, []).append(line)
        for outcome, some in alike.items():
            dtypes, counts = ", ".join(line.dtype for line in some), sorted({line.cases for line in some})
            cases = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            words = next((line.words for line in some if line.words), "").replace("|", "\\|")
            words = words if len(words) <= _WORDS else words[: _WORDS - 1].rstrip() + "…"
            rows.append(f"| {kernel} | {dtypes} | {outcome} | {cases} | {f'`{words}`' if words else ''} |")
    return "\n".join(rows)
