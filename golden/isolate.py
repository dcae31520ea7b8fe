"""Worker processes: a task that takes its process down, or never comes back, becomes an answer like any other.

What is isolated so: a kernel under examination, and the making of one golden beside a million others.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from assay.precision.errors import AssayError

Remember = Callable[..., None]
Task = Callable[[Any, Remember], Any]

_MOST_WORKERS = 8
_NOTE_BYTES = 1 << 16
_TICK = 1.0  # seconds between two looks at workers that say nothing
_START = 300.0  # seconds that a worker may take to import what it needs
_spawn = get_context("spawn")  # a forked torch may hang in its thread pool


@dataclass(frozen=True)
class Lost:
    """A worker that did not come back: "crash" or "timeout", how it ended, and what it last asked to remember."""

    kind: str
    message: str
    note: str


@dataclass(frozen=True)
class Raised:
    """A task that raised; ``mendable`` if by an `AssayError`, whose message tells the user what to do."""

    message: str
    mendable: bool
    trace: str


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count() -> int:
    """A worker for each core, eight at most: each holds a torch of its own."""
    return min(core_count(), _MOST_WORKERS)


class Workers:
    """Processes that do tasks; a context manager, which ends them.

    They start at once, and import ``preload`` while the caller goes on. ``quiet`` keeps what kernels print from the
    terminal; else it goes to standard error. A worker that remembers nothing new for ``patience`` seconds is ended.
    """

    def __init__(self, count: int, *, preload: str, patience: float = 300.0, quiet: bool = True) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="assay-")
        self._settings = (preload, quiet, Path(self._folder.name))
        self._patience = patience
        self._workers: list[_Worker] = []
        self.grow(count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.end()
        self._folder.cleanup()

    def grow(self, count: int) -> None:
        """Start further processes until there are ``count``."""
        while len(self._workers) < count:
            self._workers.append(_Worker(*self._settings))

    def each(
        self, task: Task, items: Iterable[Any], *, until: float = float("inf")
    ) -> Iterator[tuple[int, Any | Lost | Raised]]:
        """``(place, task(item, remember))`` for each item, as they come; none is begun after the moment ``until``.

        ``task`` is a function of a module. What it hands to ``remember`` is known after its process is lost;
        ``remember(text, seconds)`` says also within how many seconds it comes back, where that isn't the patience.
        An item is taken from ``items`` only when a worker is there to do it.
        """
        waiting = enumerate(items)
        while True:
            for place, worker in enumerate(self._workers):
                if worker.idle and time.monotonic() < until:
                    following = next(waiting, None)
                    if following is None:
                        break
                    if worker.gone:
                        worker.end()
                        self._workers[place] = worker = _Worker(*self._settings)
                    worker.give(task, *following)
            busy = [worker for worker in self._workers if not worker.idle]
            if not busy:
                return
            connection.wait([handle for worker in busy for handle in worker.handles], timeout=_TICK)
            for worker in busy:
                if (answer := worker.answer(self._patience)) is not None:
                    yield answer


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, preload: str, quiet: bool, folder: Path) -> None:
        self._pipe, other = _spawn.Pipe()
        self._note = _spawn.RawArray("c", _NOTE_BYTES)
        self._beat = _spawn.RawArray("d", 2)  # how often something was remembered, and the seconds it said
        self._ready = _spawn.RawValue("b", 0)
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        self._log = Path(name)
        self._process = _spawn.Process(
            target=_serve,
            args=(other, self._note, self._beat, self._ready, preload, name if quiet else ""),
            daemon=True,
        )
        self._process.start()
        other.close()
        self._place: int | None = None
        self._seen: tuple[tuple[float, int], float] = ((0.0, 0), 0.0)

    @property
    def idle(self) -> bool:
        return self._place is None

    @property
    def gone(self) -> bool:
        return not self._process.is_alive()

    @property
    def handles(self) -> tuple[Any, Any]:
        return self._pipe, self._process.sentinel

    def give(self, task: Task, place: int, item: Any) -> None:
        self._place, self._seen = place, ((self._beat[0], self._ready.value), time.monotonic())
        self._note.value, self._beat[1] = b"", 0.0
        os.truncate(self._log, 0)
        with suppress(BrokenPipeError):  # `answer` will find it gone
            self._pipe.send((task, item))

    def answer(self, patience: float) -> tuple[int, Any] | None:
        """The item's place and what became of it, if that is known."""
        answer: Any = None
        try:
            if self._pipe.poll():
                answer = self._pipe.recv()
            elif self.gone:
                answer = self._lost("crash", "")
            elif self._silent() > (limit := self._limit(patience)):
                answer = self._lost("timeout", f"nothing came back for {limit:g} s, and it could not be interrupted")
        except (EOFError, ConnectionResetError):
            answer = self._lost("crash", "")
        if answer is None or self._place is None:
            return None
        place, self._place = self._place, None
        return place, answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _limit(self, patience: float) -> float:
        """Seconds that the worker may say nothing."""
        return self._beat[1] or (patience if self._ready.value else max(patience, _START))

    def _silent(self) -> float:
        """Seconds since something was last remembered, or the worker began."""
        state = (self._beat[0], self._ready.value)
        if state != self._seen[0]:
            self._seen = (state, time.monotonic())
        return time.monotonic() - self._seen[1]

    def _lost(self, kind: str, message: str) -> Lost:
        if kind == "timeout":
            self._process.kill()
        self._process.join()
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        message = message or ending(self._process.exitcode) + "".join(f" ({line.strip()[:200]})" for line in last)
        return Lost(kind, message, self._note.value.decode("utf-8", errors="replace"))


def ending(code: int | None) -> str:
    """How a process ended, by its exit code as `multiprocessing` gives it."""
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended itself with status {code}"


def _serve(pipe: Any, note: Any, beat: Any, ready: Any, preload: str, log: str) -> None:
    """A worker's life: tasks in, answers out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _divert(log)
    with suppress(OSError):  # when memory runs out on Linux, better a worker than the parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    importlib.import_module(preload)
    ready.value = 1

    def remember(text: str, seconds: float = 0.0) -> None:
        note.value = text.encode()[: _NOTE_BYTES - 1]
        beat[0], beat[1] = beat[0] + 1, seconds

    while True:
        try:
            task, item = pipe.recv()
        except EOFError:
            return
        try:
            answer = task(item, remember)
        except AssayError as error:
            answer = Raised(str(error), True, "")
        except Exception as error:
            answer = Raised(f"{type(error).__name__}: {error}", False, traceback.format_exc())
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return  # nobody waits for it any more


def _divert(log: str) -> None:
    """Standard output, which belongs to the report, goes to standard error; both go to ``log`` where it is given."""
    sys.stdout.flush()
    if log:
        target = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(target, 2)
        os.close(target)
    os.dup2(2, 1)
