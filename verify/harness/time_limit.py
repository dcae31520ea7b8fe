"""How long a call of a kernel may take: by its own processor time, its earlier calls, and not while it compiles."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from types import FrameType
from typing import Any

from assay.runtime.deadline import CpuLimit, kill_children_since, thread_clock
from assay.verify.cases.case import Case

COMPILATION = 600.0
"""Seconds by the clock that a call may spend compiling."""

_TICK = 1.0  # seconds between two looks at a call, less where it may take little
_SLACK = 8.0  # how many times what earlier calls tell a call may take
MOST = 10.0  # times its limit, whatever they tell
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile", "torch.utils.cpp_extension",
              "triton.compiler.", "jax._src.compiler", "numba.core.compiler", "subprocess")  # fmt: skip
"""Modules one of whose functions is under way while a kernel is compiled, which other processes may do."""


class KernelTimeout(BaseException):
    """Raised inside a kernel that has run out of time; a BaseException, so that kernels don't swallow it."""


def can_be_limited() -> bool:
    """Whether a call from here can be interrupted: in the main thread of a POSIX process."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")


@contextlib.contextmanager
def time_limit(seconds: float, compiling: Callable[[], object] = lambda: None) -> Iterator[CpuLimit]:
    """Interrupt the body by `KernelTimeout` once it has had its ``seconds``, where it can be; what it started ends.

    ``compiling`` is called now and then while it compiles, which isn't counted.
    """
    limit, started = CpuLimit(seconds, thread_clock, COMPILATION), time.monotonic()
    if not can_be_limited():
        yield limit
        return

    def look(signum: int, frame: FrameType | None) -> None:
        busy = _compiles(frame)
        if limit.is_over(counted=not busy):
            raise KernelTimeout  # and again at the next look, from a kernel that has caught it
        if busy:
            compiling()

    tick = min(_TICK, seconds / 4)
    handler = signal.signal(signal.SIGALRM, look)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, tick, tick)
    try:
        yield limit
    except KernelTimeout:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        kill_children_since(started)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:  # somebody else's deadline goes on
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, remaining - (time.monotonic() - started)), interval)


def _compiles(frame: FrameType | None) -> bool:
    """Whether what is interrupted compiles, or waits for a process that does."""
    while frame is not None:
        name: Any = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.startswith(_COMPILERS):
            return True
        frame = frame.f_back
    return False


@dataclass
class Pace:
    """How fast a kernel is, as its longest call so far tells."""

    longest: float = 0.0
    work: tuple[float, float] = (1.0, 1.0)

    def limit(self, case: Case, timeout: float) -> float:
        """Seconds that a call may take: ``timeout``, or more where the longest so far tells that it takes longer.

        In proportion to the work of the case, or to how many programs it has where these grow faster.
        """
        growth = max(now / then for now, then in zip(_work(case), self.work, strict=True))
        return min(max(timeout, _SLACK * self.longest * max(1.0, growth)), MOST * timeout)

    def add(self, case: Case, seconds: float) -> None:
        """A call took this many seconds."""
        if seconds > self.longest:
            self.longest, self.work = seconds, _work(case)


def _work(case: Case) -> tuple[float, float]:
    """About how many operations a case takes, and how many programs of a kernel."""
    definition = case.definition
    programs = prod(max(case.sizes.get(symbol, 1), 1) for symbol in definition.axes.grid)
    return max(definition.cost(case.sizes), 1), programs
