"""Progress of a long command, on standard error: a bar with the time left, or now and then a plain line."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_QUIET = 2.0  # seconds before anything is shown
_BETWEEN = 10.0  # seconds between two plain lines


class Ticker:
    """Shows how much of ``effort``, in any unit, is done in ``count`` steps; a context manager."""

    def __init__(self, label: str, count: int, effort: float) -> None:
        self._label, self._count, self._effort = label, count, effort
        self._done, self._spent, self._started = 0, 0.0, time.monotonic()
        self._next_line = self._started + _BETWEEN
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description} {task.fields[done]} of {task.fields[count]}"),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=Console(stderr=True),
                transient=True,
                speed_estimate_period=3600,
            )
            self._task = self._bar.add_task(label, total=effort, done=0, count=count)
            self._timer = threading.Timer(_QUIET, self._bar.start)
            self._timer.daemon = True

    def __enter__(self) -> Ticker:
        if self._bar is not None:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._timer.cancel()
            self._timer.join()
            self._bar.stop()

    def advance(self, effort: float) -> None:
        """One step, of so much effort, is done."""
        self._done, self._spent = self._done + 1, self._spent + effort
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._spent, done=self._done)
        elif now >= self._next_line and 0 < self._spent < self._effort:
            left = (now - self._started) * (self._effort / self._spent - 1)
            print(f"assay: {self._label} {self._done} of {self._count}, about {left:.0f} s left", file=sys.stderr)
            self._next_line = now + _BETWEEN
