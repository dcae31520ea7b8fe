"""The terminal's summary of a run's verdicts, and the files that are written of them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

ROWS = pytest.StashKey[list[dict[str, Any]]]()
"""A test's verdicts: the fields of `report.summary.Line`, and what the summary says besides."""

_NO_DRIVER = "0 active drivers"  # Triton's words
_FAITHFUL = (
    "Triton finds no GPU. pytest --assay-faithful runs its kernels on the CPU, with a GPU's numbers; --assay-pretend "
    'cuda also lets tensors be on "cuda".'
)
_COLOURS = {"PASS": "green", "WARN": "yellow", "KNOWN": "yellow", "NOT TRIED": "yellow"}


class Summary:
    """Collects the verdicts of all tests, also from xdist's workers, and lists them at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Let the verdicts travel with a test's report, from workers too; say how Triton's kernels run without a
        GPU."""
        report = yield
        if call.excinfo is not None and _NO_DRIVER in str(call.excinfo.value):
            report.sections.append(("assay", _FAITHFUL))
        if report.when == "call":
            report.assay = item.stash.get(ROWS, [])
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect a test's verdicts."""
        self.rows.extend(getattr(report, "assay", []))

    @pytest.hookimpl(wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None, None, None]:
        """List the verdicts, and write the summary and the index of reports."""
        if self.rows:
            config = terminalreporter.config
            if config.getoption("dist", "no") != "no":  # workers finish in any order
                self.rows.sort(key=lambda row: row["test"])
            terminalreporter.section("assay")
            self._list(terminalreporter)
            if self.path is not None:
                self._append(terminalreporter, self.path)
            if config.getoption("assay_report") is not None:
                self._write_index(terminalreporter, config.getoption("assay_report"))
        return (yield)

    def _list(self, terminal: Any) -> None:
        """Print a line of each verdict, and what one needs of those that are no clean pass."""
        width = max(len(row["kernel"]) for row in self.rows)
        for row in self.rows:
            terminal.line(
                f"{row['kernel']:{width}}  {row['spec']:14} {row['dtype']:20} {row['cases']:6} cases"
                f"  worst {row['worst']:>8}  {row['outcome']}{_notes(row)}",
                **{_COLOURS.get(row["outcome"], "red"): True},
            )
            for name, words in (("cut", row["cut"]), ("baseline", row["known"]), *_details(row)):
                if words:
                    terminal.line(f"  {name:9} {words}")

    def _append(self, terminal: Any, path: Path) -> None:
        from assay.verify.report.summary import Line, append

        try:
            append(path, [Line(**{part.name: row[part.name] for part in fields(Line)}) for row in self.rows])
        except OSError as error:
            terminal.line(f"the summary could not be written to {path}: {error.strerror}", red=True)

    def _write_index(self, terminal: Any, folder: Path) -> None:
        from assay.verify.report.index import write_index

        try:
            terminal.line(f"wrote {write_index(folder, [row for row in self.rows if row['page']])}")
        except OSError as error:
            terminal.line(f"the index of reports could not be written to {folder}: {error.strerror}", red=True)


def _details(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a warning found and how to repeat it; a failing test has its own report."""
    if row["outcome"] == "NOT TRIED":
        return [("why", row["words"])]
    return [("case", row["words"]), ("repeat", row["repro"])] if row["outcome"] in ("WARN", "KNOWN") else []


def _notes(row: dict[str, Any]) -> str:
    """Return the vacuous lengths, the broken aspects, the number of stored cases, and which known faults are caught and
    which are not."""
    vacuous = f", vacuous at {row['vacuous']}" if row["vacuous"] else ""
    stored = "" if row["stored"] is None else f"  ({row['stored']} of them stored)"
    missed = f"; not {', '.join(row['survivors'][:3])}" if row["survivors"] else ""
    more = ", ..." if len(row["survivors"]) > 3 else ""
    broken = f": {row['broken']}" if row["broken"] else ""
    kept = "  (kept verdict)" if row["kept"] else ""
    return (
        vacuous
        + broken
        + stored
        + kept
        + (f"  catches {row['power']} known faults{missed}{more}" if row["power"] else "")
    )
