"""Patience: a limit on time that a busy machine doesn't shorten, and what is started meanwhile ended with it.

A hang either computes for ever, or waits for ever. So what is limited is the processor time of the thread that
computes; where it waits, the time that passes while nothing of its process runs; and, as a last resort, many times as
much time. Who only waits for its turn on a busy machine has some processor time now and then, and uses up neither.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

BUSY = 30.0
"""How many times its limit something may take by the clock."""

_ASLEEP = 0.003  # of the time that passes, the share of processor time below which nothing runs
_STRETCH = 0.25  # of the limit, how long nothing must have run
_LEAST_STRETCH = 1.0  # seconds; a process of low priority has its turn meanwhile
_LOOK = 0.25  # seconds between two looks beyond the limit
_OTHERS = b"torch._inductor"  # worker processes that are shared, and wait for more work
Clock = Callable[[], tuple[float, float]]
"""Seconds of processor time: of the thread that computes, and of its whole process."""


class Patience:
    """Whether something that begins now, and whose processor time ``clock`` tells, has had its ``seconds``.

    ``aside`` are seconds that it may take for what isn't counted.
    """

    def __init__(self, seconds: float, clock: Clock, aside: float = 0.0) -> None:
        self.seconds, self.aside = seconds, aside
        self._clock = clock
        self._began = self._looked = self._ran = time.monotonic()
        self._first = self._last = clock()
        self._wall = self._own = self._asleep = 0.0
        self.set_aside = 0.0

    def is_over(self, *, counted: bool = True) -> bool:
        """Whether its time is over; what has passed since it was asked last counts, or is set aside."""
        now, last = time.monotonic(), self._clock()
        passed, (before, whole) = now - self._looked, self._last
        self._looked, self._last = now, last
        if not counted:
            self.set_aside += passed
            self._ran = now
            return self.set_aside > self.aside
        self._wall += passed
        self._own += last[0] - before
        if last[1] - whole > _ASLEEP * passed:
            self._ran = now
        asleep = now - self._ran >= max(_LEAST_STRETCH, _STRETCH * self.seconds)
        return self._wall >= self.seconds and (self._own >= self.seconds or asleep or self._wall >= BUSY * self.seconds)

    @property
    def used(self) -> float:
        """Seconds of processor time so far, less what was set aside."""
        return self._own + self._clock()[0] - self._last[0]

    @property
    def soon(self) -> float:
        """Seconds after which it is to be asked again."""
        return max(_LOOK, self._began + self.seconds - time.monotonic())


def own_time() -> tuple[float, float]:
    """The `Clock` of this thread."""
    return time.thread_time(), time.process_time()


def time_of(pid: int) -> Clock:
    """The `Clock` of another process, by its main thread; where the system doesn't tell, the time of day."""
    files = Path(f"/proc/{pid}/task/{pid}/stat"), Path(f"/proc/{pid}/stat")
    last = (0.0, 0.0)

    def clock() -> tuple[float, float]:
        nonlocal last
        with suppress(OSError, ValueError, IndexError):  # it has ended
            own, whole = (sum(map(int, _fields(file)[11:13])) / os.sysconf("SC_CLK_TCK") for file in files)
            last = own, whole
        return last

    clock()
    return clock if files[1].exists() else lambda: (time.monotonic(), time.monotonic())


def end_children_since(moment: float) -> None:
    """End the processes that this one, or a child of it, has started since ``moment`` by the monotonic clock.

    Compilers, for example. Without effect where Linux's /proc isn't there.
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
                if _OTHERS not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def _descends(pid: int, parent: dict[int, int]) -> bool:
    """Whether a process is a child of this one, or of a child."""
    above = parent.get(pid, 0)
    return above == os.getpid() or (above > 1 and _descends(above, parent))


def _fields(file: Path) -> list[str]:
    """What a stat file of /proc says after the name: state, parent, ..."""
    return file.read_text().rpartition(")")[2].split()
