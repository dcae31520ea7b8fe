"""Worker processes: a task that crashes its process, or never returns, yields an answer like any other.

Pebble's pool also ends a task that takes too long, but its limit is fixed in advance, and a running task can neither
change it nor leave a note for the case that its process dies. This pool can do both.
"""

from __future__ import annotations

import importlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from assay.runtime.errors import AssayError
from assay.runtime.process import Lost, Parent, Process, wait_for

_MOST_WORKERS = 8  # each has a torch in memory


class Heartbeat(Protocol):
    """Called by a running task: ``note`` survives the loss of its process.

    ``seconds``: the time until its next call or its end, if it differs from the engine's timeout.
    """

    def __call__(self, note: str = "", seconds: float = 0.0) -> None: ...


Task = Callable[[Any, Heartbeat], Any]


class Unforeseen(Exception):
    """An exception of a task that is none of ours; ``trace`` is its traceback."""

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace


@dataclass(frozen=True)
class Raised:
    """A task that raised; ``user_error`` if an `AssayError`, whose message tells the user what to do."""

    message: str
    user_error: bool
    trace: str

    @staticmethod
    def of(error: Exception) -> Raised:
        if isinstance(error, AssayError):
            return Raised(str(error), True, "")
        return Raised(f"{type(error).__name__}: {error}", False, "".join(traceback.format_exception(error)))

    def again(self, kind: Callable[[str], AssayError], before: str = "") -> Exception:
        """Return it as an exception here: of ``kind``, with words before its message, or `Unforeseen`."""
        words = f"{before}{self.message}"
        return kind(words) if self.user_error else Unforeseen(words, self.trace)


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count() -> int:
    """Return one worker per core, at most eight: each has a torch in memory."""
    return min(core_count(), _MOST_WORKERS)


class Pool:
    """Processes that run tasks, an `engines.Engine`; a context manager, which ends them.

    They start at once, and import ``preload`` while the caller goes on. ``quiet`` drops output of kernels; else it goes
    to standard error. A worker that sends no heartbeat for ``timeout`` seconds is ended.
    """

    def __init__(self, count: int, *, preload: str, timeout: float = 300.0, quiet: bool = True) -> None:
        self._preload, self._timeout, self._quiet = preload, timeout, quiet
        self._workers: list[Process] = []
        self.resize(count)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()

    def resize(self, count: int) -> None:
        """Start further processes until there are ``count``."""
        while len(self._workers) < count:
            self._workers.append(self._started())

    def run(
        self, task: Task, items: Iterable[Any], *, until: float = float("inf")
    ) -> Iterator[tuple[int, Any | Lost | Raised]]:
        waiting = enumerate(items)
        busy: dict[Process, int] = {}
        try:
            while True:
                for number, worker in enumerate(self._workers):
                    if worker not in busy and time.monotonic() < until:
                        following = next(waiting, None)
                        if following is None:
                            break
                        if not worker.alive:
                            worker.kill()
                            self._workers[number] = worker = self._started()
                        busy[worker], item = following
                        worker.submit(pickle.dumps((task, item)), self._timeout)
                if not busy:
                    return
                wait_for(busy)
                for worker in list(busy):
                    if (answer := worker.poll()) is not None:
                        yield busy.pop(worker), answer if isinstance(answer, Lost) else pickle.loads(answer)
        finally:
            for worker in busy:  # nobody reads their answers any more
                worker.kill()

    def _started(self) -> Process:
        return Process.start(_work, self._preload, quiet=self._quiet)


def run_alone(
    task: Task, item: Any, *, preload: str, timeout: float = 300.0, quiet: bool = True
) -> Any | Lost | Raised:
    """Run ``task(item, heartbeat)`` in a separate process; return its result, its exception, or how it was lost."""
    with Pool(1, preload=preload, timeout=timeout, quiet=quiet) as pool:
        ((_, answer),) = pool.run(task, [item])
    return answer


def _work(parent: Parent, preload: str) -> None:
    importlib.import_module(preload)
    parent.heartbeat()

    def answer(message: bytes) -> bytes:
        try:
            task, item = pickle.loads(message)
            return pickle.dumps(task(item, parent.heartbeat))
        except Exception as error:
            return pickle.dumps(Raised.of(error))

    parent.serve(answer)
