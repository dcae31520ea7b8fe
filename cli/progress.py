"""Output of commands: progress as a bar or occasional plain lines, notes and errors in one line, and tables."""

from __future__ import annotations

import shlex
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from assay.runtime.errors import one_line
from assay.runtime.output import beneath, visible
from assay.runtime.pool import Unforeseen
from assay.runtime.results import installed_version

if TYPE_CHECKING:
    from assay.verify.campaign.survey import Job, Row

_QUIET = 2.0  # seconds before progress is shown
_BETWEEN = 10.0  # seconds between two plain lines


def note(message: object) -> None:
    """Print ``assay: message`` on standard error; standard output is for results."""
    print(f"assay: {message}", file=sys.stderr)


def report_error(message: str, status: int = 2) -> int:
    """Print one line on standard error; return ``status``, the exit status."""
    note(" ".join(message.split()))
    return status


def report_unforeseen(error: Exception) -> int:
    """Print an error that nobody foresaw in one line, which names a file with its traceback; return 2."""
    trace = error.trace if isinstance(error, Unforeseen) else "".join(traceback.format_exception(error))
    words = one_line(error if isinstance(error, Unforeseen) else f"{type(error).__name__}: {error}")
    try:
        descriptor, path = tempfile.mkstemp(prefix="assay-error-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(
                f"assay {installed_version('kernel-assay')}, Python {sys.version}\n{shlex.join(sys.argv)}\n\n{trace}"
            )
        where = f"{path} has the traceback"
    except OSError:
        where = "no temporary file can be written for its traceback"
    return report_error(f"unforeseen error ({words}); {where}, please report it")


class _VisibleConsole(Console):
    """A console that makes texts `visible`, which a terminal would obey, and adds its own colours."""

    def render(self, *arguments: Any, **named: Any) -> Iterator[Segment]:
        for text, style, control in super().render(*arguments, **named):
            yield Segment(text if control else visible(text), style, control)


def console(piped_width: int | None = None) -> Console:
    """Return standard output as a console, ``piped_width`` columns wide if it is no terminal."""
    return _VisibleConsole(file=beneath(sys.stdout), width=None if sys.stdout.isatty() else piped_width)


def console_table(head: Iterable[str | tuple[str, Mapping[str, Any]]], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Return a table without lines. Columns fold, except those with options of `Table.add_column`."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in head:
        name, options = (column, {"overflow": "fold"}) if isinstance(column, str) else column
        table.add_column(name, **options)
    for row in rows:
        table.add_row(*map(Text, map(visible, row)))
    return table


def in_rows(rows: Iterable[tuple[str | Text, ...]], first: int | None = None) -> Table:
    """Return a table without a head: subjects in bold, ``first`` characters wide, and their texts."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True, width=first)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(part)) if isinstance(part, str) else part for part in row))
    return table


def examined(jobs: Sequence[Job], rows: Iterable[tuple[int, Row]], show: Callable[[int, Row], None]) -> bool:
    """Pass every row to ``show(index, row)`` under a bar; return whether Ctrl-C stopped it before all jobs ended."""
    done = 0
    with ProgressBar("examined", len(jobs), sum(job.cost for job in jobs)) as bar, suppress(KeyboardInterrupt):
        for index, row in rows:
            show(index, row)
            done += 1
            bar.advance(jobs[index].cost)
    return done < len(jobs)


class ProgressBar:
    """A progress bar over ``effort`` (any unit, by default steps) in ``count`` steps; a context manager.

    ``rate`` also shows the steps per second, counted from the first one.
    """

    def __init__(self, label: str, count: int, effort: float | None = None, *, rate: bool = False) -> None:
        self.label, self._count, self._rate = label, count, rate
        self._effort = float(count) if effort is None else effort
        self._done, self._skipped, self._spent, self._started = 0, 0, 0.0, time.monotonic()
        self._begun = not rate  # with a rate, the first step only starts the clock
        self._next_line = self._started + _BETWEEN
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("left")
        console = Console(file=beneath(sys.stderr))
        self._bar = Progress(
            *columns, console=console, transient=True, speed_estimate_period=3600, disable=not sys.stderr.isatty()
        )
        self._task = self._bar.add_task(f"{label} 0 of {count}", total=self._effort)
        self._timer = threading.Timer(_QUIET, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> ProgressBar:
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()

    def advance(self, effort: float = 1.0) -> None:
        """Count one step of ``effort`` as done."""
        now = time.monotonic()
        if not self._begun:  # this step also waited for workers to start
            self._begun, self._started = True, now
            return self.skip(effort)
        self._done, self._spent = self._done + 1, self._spent + effort
        steps = f"{self._done} of {self._count}"
        if self._rate:
            steps += f", {(self._done - self._skipped) / max(now - self._started, 1e-3):.3g}/s"
        self._bar.update(self._task, completed=self._spent, total=self._effort, description=f"{self.label} {steps}")
        if self._bar.disable and now >= self._next_line and 0 < self._spent < self._effort:
            note(f"{self.label} {steps}, about {(now - self._started) * (self._effort / self._spent - 1):.0f} s left")
            self._next_line = now + _BETWEEN

    def skip(self, effort: float) -> None:
        """Count one step of ``effort`` as unnecessary."""
        self._done, self._skipped, self._effort = self._done + 1, self._skipped + 1, self._effort - effort
