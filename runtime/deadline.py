"""Time limits: in wall-clock time, in processor time, and in both, so that a busy machine doesn't shorten them.

Code that hangs either computes forever or waits forever. So `CpuLimit` limits the processor time of the thread that
computes; if the thread waits, the time in which no thread of its process runs; and, as a last resort, wall-clock time,
by a large factor: a smaller one for time in which no thread waits for a core, where Linux reports that. Code that only
waits for a core of a busy machine gets some processor time now and then, and exceeds neither of the first two limits.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WALL_FACTOR = 30.0
"""Wall-clock limit of a `CpuLimit`, as a multiple of its seconds."""
ASLEEP_FACTOR = 4.0
"""The same of the time in which no thread of the process waits for a core."""
BUDGET_WALL_FACTOR = 4.0
"""Wall-clock limit of a `CpuBudget`, as a multiple of its seconds."""

_IDLE_SHARE = 0.003  # of wall-clock time: with less processor time than this, a process counts as idle
_IDLE_PART = 0.25  # of the limit: idle time after which a process counts as hung
_LEAST_IDLE = 1.0  # seconds, at least: a low-priority process may wait this long for a core
_CHECK = 0.25  # seconds between two checks beyond the limit
SHARED_WORKERS = b"torch._inductor"  # torch's compile workers serve all callers and wait for more work
Clock = Callable[[], tuple[float, float]]
"""Returns seconds of processor time: of the thread that computes, and of its whole process."""


class Deadline:
    """A limit of ``seconds`` of wall-clock time, from now on."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        """The end, by the monotonic clock."""

    @property
    def left(self) -> float:
        """Return the seconds left, 0 when it is over."""
        return max(self.end - time.monotonic(), 0.0)


class CpuBudget:
    """A limit of ``seconds`` of processor time of all threads, or of `BUDGET_WALL_FACTOR` times as much wall time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._processor, self._clock = time.process_time(), time.monotonic()

    def is_over(self) -> bool:
        """Return whether the budget is spent."""
        spent = max(time.process_time() - self._processor, (time.monotonic() - self._clock) / BUDGET_WALL_FACTOR)
        return spent > self._seconds


class CpuLimit:
    """A limit of ``seconds``, from now on; ``clock`` returns the processor time.

    ``most_uncounted``: further seconds for work that isn't counted, such as compilation. ``queued`` returns the seconds
    for which threads have waited for a core; where that isn't known, the clock: they may always have. ``others``
    returns the processor time of processes that it may wait for, such as compilers: called where nothing else runs.
    """

    def __init__(
        self,
        seconds: float,
        clock: Clock,
        most_uncounted: float = 0.0,
        *,
        queued: Callable[[], float] | None = None,
        others: Callable[[], float] | None = None,
    ) -> None:
        self.seconds, self.most_uncounted = seconds, most_uncounted
        self._clock, self._queued, self._others = clock, queued or time.monotonic, others
        self._spent = 0.0
        self._began = self._checked = self._ran = self._asked = time.monotonic()
        self._last, self._waited = clock(), self._queued()
        self._wall = self._own = self._unhindered = 0.0
        self.uncounted = 0.0

    def is_over(self, *, counted: bool = True) -> bool:
        """Return whether the time is up; ``counted``: whether the time since the last call counts."""
        now, last, waited = time.monotonic(), self._clock(), self._queued()
        passed, (before, whole), hindered = now - self._checked, self._last, waited - self._waited
        self._checked, self._last, self._waited = now, last, waited
        if not counted:
            self.uncounted += passed
            self._ran = now
            return self.uncounted > self.most_uncounted
        self._wall += passed
        self._unhindered += min(max(passed - hindered, 0.0), passed)
        self._own += last[0] - before
        if last[1] - whole > _IDLE_SHARE * passed:
            self._ran = now
        idle = now - self._ran >= max(_LEAST_IDLE, _IDLE_PART * self.seconds)
        if idle and self._wall >= self.seconds and self._others is not None:
            spent, since = self._others() - self._spent, now - self._asked
            self._spent, self._asked = self._spent + spent, now
            if spent > _IDLE_SHARE * since:
                self._ran, idle = now, False
        late = self._wall >= WALL_FACTOR * self.seconds or self._unhindered >= ASLEEP_FACTOR * self.seconds
        return self._wall >= self.seconds and (self._own >= self.seconds or idle or late)

    @property
    def used(self) -> float:
        """Return the seconds of processor time so far, without the uncounted ones."""
        return self._own + self._clock()[0] - self._last[0]

    @property
    def next_check(self) -> float:
        """Return the seconds after which to call `is_over` again."""
        return max(_CHECK, self._began + self.seconds - time.monotonic())


def thread_clock() -> tuple[float, float]:
    """Return the `Clock` readings of this thread."""
    return time.thread_time(), time.process_time()


def process_clock(pid: int) -> Clock:
    """Return the `Clock` of another process, by its main thread; wall-clock time if the system has no such data."""
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


def queue_clock(pid: int) -> Callable[[], float]:
    """Return a function that returns the seconds for which the threads of a process have waited for a core, together.

    Where Linux doesn't report it, the function returns the time.
    """
    last = 0.0

    def clock() -> float:
        nonlocal last
        with suppress(OSError, ValueError, IndexError):  # a thread has ended
            last = (
                sum(int(file.read_text().split()[1]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9
            )
        return last

    return clock if Path(f"/proc/{pid}/schedstat").exists() else time.monotonic


def kill_children_since(moment: float) -> None:
    """Kill processes, such as compilers, that this process or a child of it has started since ``moment``.

    ``moment`` is by the monotonic clock. No effect without Linux's /proc.
    """
    below = {pid: _begun(pid) for pid in descendants(os.getpid())[1:]}
    if not below:
        return
    since = moment - time.monotonic() + time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid in sorted(below, key=below.__getitem__):
        if below[pid] >= since - 0.02:
            with suppress(OSError):
                if SHARED_WORKERS not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def _begun(pid: int) -> float:
    """Return when a process began, in seconds since the machine's start; 0 if it has ended."""
    with suppress(OSError, IndexError, ValueError):
        return int(_fields(Path(f"/proc/{pid}/stat"))[19]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def descendants(pid: int) -> list[int]:
    """Return the processes below a process that haven't ended, and itself, by Linux's /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):  # it has ended
                fields = _fields(Path(entry.path, "stat"))
                if fields[0] != "Z" or int(fields[17]) > 1:  # its first thread may end before the others
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    results = [pid]
    for each in results:
        results += children.get(each, [])
    return results


def spent_below(pid: int) -> float:
    """Return the seconds of processor time of the processes below a process."""
    spent = 0.0
    for each in descendants(pid)[1:]:
        with suppress(OSError, IndexError):  # it has ended
            spent += process_clock(each)()[1]
    return spent


def _fields(file: Path) -> list[str]:
    """Return the fields of a stat file of /proc after the name: state, parent, ..."""
    return file.read_text(errors="replace").rpartition(")")[2].split()
