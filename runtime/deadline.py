"""Limits on time: by the clock, by processor time, and by either, so that a busy machine doesn't shorten them.

Code that hangs either computes for ever, or waits for ever. So `CpuLimit` limits the processor time of the thread that
computes; where the thread waits, the time in which nothing of its process runs; and, as a last resort, many times as
much time by the clock. Code that waits only for its turn on a busy machine has some processor time now and then, and
exceeds neither.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WALL_FACTOR = 30.0
"""How many times a `CpuLimit` something may take by the clock."""
STRETCH = 4.0
"""How many times a `CpuBudget` something may take by the clock."""

_IDLE_SHARE = 0.003  # of the time by the clock: with less processor time than this, nothing runs
_IDLE_PART = 0.25  # of the limit, for which nothing must have run
_LEAST_IDLE = 1.0  # seconds; a process of low priority has its turn meanwhile
_CHECK = 0.25  # seconds between two checks beyond the limit
_SHARED_WORKERS = b"torch._inductor"  # compile workers of torch serve all callers and wait for more work
Clock = Callable[[], tuple[float, float]]
"""Seconds of processor time: of the thread that computes, and of its whole process."""


class Deadline:
    """``seconds`` by the clock, from now on."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        """The moment of its end by the monotonic clock."""

    @property
    def left(self) -> float:
        """Seconds that are left, 0 when it is over."""
        return max(self.end - time.monotonic(), 0.0)


class CpuBudget:
    """``seconds`` of processor time of all threads, or `STRETCH` times as much by the clock on a busy machine."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._processor, self._clock = time.process_time(), time.monotonic()

    def is_over(self) -> bool:
        """Return whether the budget is spent."""
        spent = max(time.process_time() - self._processor, (time.monotonic() - self._clock) / STRETCH)
        return spent > self._seconds


class CpuLimit:
    """A limit of ``seconds`` on what begins now, whose processor time ``clock`` tells.

    ``most_uncounted``: seconds that it may take beside for what isn't counted, such as compilation.
    """

    def __init__(self, seconds: float, clock: Clock, most_uncounted: float = 0.0) -> None:
        self.seconds, self.most_uncounted = seconds, most_uncounted
        self._clock = clock
        self._began = self._checked = self._ran = time.monotonic()
        self._last = clock()
        self._wall = self._own = 0.0
        self.uncounted = 0.0

    def is_over(self, *, counted: bool = True) -> bool:
        """Return whether the time is up; ``counted``: whether the time since the last call counts."""
        now, last = time.monotonic(), self._clock()
        passed, (before, whole) = now - self._checked, self._last
        self._checked, self._last = now, last
        if not counted:
            self.uncounted += passed
            self._ran = now
            return self.uncounted > self.most_uncounted
        self._wall += passed
        self._own += last[0] - before
        if last[1] - whole > _IDLE_SHARE * passed:
            self._ran = now
        idle = now - self._ran >= max(_LEAST_IDLE, _IDLE_PART * self.seconds)
        late = self._wall >= WALL_FACTOR * self.seconds
        return self._wall >= self.seconds and (self._own >= self.seconds or idle or late)

    @property
    def used(self) -> float:
        """Seconds of processor time so far, without the uncounted."""
        return self._own + self._clock()[0] - self._last[0]

    @property
    def next_check(self) -> float:
        """Seconds after which `is_over` is to be called again."""
        return max(_CHECK, self._began + self.seconds - time.monotonic())


def thread_clock() -> tuple[float, float]:
    """The `Clock` of this thread."""
    return time.thread_time(), time.process_time()


def process_clock(pid: int) -> Clock:
    """Return the `Clock` of another process, by its main thread; the time of day where the system doesn't tell."""
    files = Path(f"/proc/{pid}/task/{pid}/stat"), Path(f"/proc/{pid}/stat")
    last = (0.0, 0.0)

    def clock() -> tuple[float, float]:
        nonlocal last
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            own, whole = (sum(map(int, _fields(file)[11:13])) / os.sysconf("SC_CLK_TCK") for file in files)
            last = own, whole
        return last

    clock()
    return clock if files[1].exists() else lambda: (time.monotonic(), time.monotonic())


def kill_children_since(moment: float) -> None:
    """Kill the processes, such as compilers, that this one or a child of it has started since ``moment``.

    ``moment`` is by the monotonic clock. Without effect where Linux's /proc isn't there.
    """
    begun, parent = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            pid, fields = int(file.parent.name), _fields(file)
            parent[pid], begun[pid] = int(fields[1]), int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if not begun:
        return
    since = moment - time.monotonic() + time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid in sorted(begun, key=begun.__getitem__):
        if begun[pid] >= since - 0.02 and _descends(pid, parent):
            with suppress(OSError):
                if _SHARED_WORKERS not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def _descends(pid: int, parent: dict[int, int]) -> bool:
    above = parent.get(pid, 0)
    return above == os.getpid() or (above > 1 and _descends(above, parent))


def _fields(file: Path) -> list[str]:
    """The fields of a stat file of /proc after the name: state, parent, ..."""
    return file.read_text().rpartition(")")[2].split()
