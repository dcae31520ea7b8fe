"""What a command says on standard error: its progress, as a bar or now and then a plain line, and what went wrong."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_QUIET = 2.0  # seconds before anything is shown
_BETWEEN = 10.0  # seconds between two plain lines


def complain(message: str, status: int = 2) -> int:
    """One line on standard error; the exit status that goes with it."""
    print(f"assay: {' '.join(message.split())}", file=sys.stderr)
    return status


class Ticker:
    """Shows how much of ``effort``, in any unit, is done in ``count`` steps; a context manager.

    ``rate`` shows also how many steps are done in a second, counted from the first one.
    """

    def __init__(self, label: str, count: int, effort: float, *, rate: bool = False) -> None:
        self._label, self._count, self._effort, self._rate = label, count, effort, rate
        self._done, self._skipped, self._spent, self._started = 0, 0, 0.0, time.monotonic()
        self._begun = False
        self._next_line = self._started + _BETWEEN
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description} {task.fields[done]} of {task.fields[count]}{task.fields[rate]}"),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=Console(stderr=True),
                transient=True,
                speed_estimate_period=3600,
            )
            self._task = self._bar.add_task(label, total=effort, done=0, count=count, rate="")
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
        now = time.monotonic()
        if self._rate and not self._begun:  # the first one waited for whatever had to be started
            self._begun, self._started = True, now
            self.skip(effort)
            return
        self._done, self._spent = self._done + 1, self._spent + effort
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self._spent, total=self._effort, done=self._done, rate=self._speed(now)
            )
        elif now >= self._next_line and 0 < self._spent < self._effort:
            left = (now - self._started) * (self._effort / self._spent - 1)
            steps = f"{self._done} of {self._count}{self._speed(now)}"
            print(f"assay: {self._label} {steps}, about {left:.0f} s left", file=sys.stderr)
            self._next_line = now + _BETWEEN

    def skip(self, effort: float) -> None:
        """One step, which would have taken so much effort, needn't be done."""
        self._done, self._skipped, self._effort = self._done + 1, self._skipped + 1, self._effort - effort

    def _speed(self, now: float) -> str:
        return f", {(self._done - self._skipped) / max(now - self._started, 1e-3):.3g}/s" if self._rate else ""
