"""Engines that run many tasks which may crash: worker processes of this machine, or a Ray cluster."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any, Protocol

from assay.runtime.errors import EngineError, first_line
from assay.runtime.modules import optional
from assay.runtime.pool import Pool, Raised, Task, core_count
from assay.runtime.process import Lost

_AHEAD = 2  # tasks in flight for each core of a cluster: one running and one waiting
_OBJECT_STORE = 80 * 2**20  # only answers pass through it


class Engine(Protocol):
    """Runs tasks, each in a process that may die; a context manager that ends the processes it has started."""

    def run(
        self, task: Task, items: Iterable[Any], *, until: float = float("inf")
    ) -> Iterator[tuple[int, Any | Lost | Raised]]:
        """Yield ``(index, task(item, heartbeat))`` as tasks finish; start none after the moment ``until``.

        ``task`` is a function of a module. A task that raises, takes its process down, or sends no heartbeat for longer
        than allowed affects no other task, and its answer says so. An item is taken from ``items`` only when a process
        is free.
        """

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exception: object) -> None: ...


def engine_named(name: str, workers: int | None, *, preload: str, timeout: float) -> Engine:
    """Return the engine "local" or "ray", started with ``workers`` (None: one for each core). Raises `EngineError`."""
    if name == "local":
        return Pool(workers or core_count(), preload=preload, timeout=timeout)
    if name == "ray":
        return RayEngine(workers, timeout=timeout)
    raise EngineError(f"--engine {name!r}; expected local or ray")


def run_retried(
    engine: Engine,
    task: Task,
    items: Sequence[Any],
    *,
    until: float = float("inf"),
    again: Callable[[Lost], bool] = lambda lost: True,
) -> Iterator[tuple[int, Any | Lost | Raised]]:
    """Run as `Engine.run` does; repeat an item whose process was lost once, after the others.

    ``again`` returns whether to repeat it, for losses that may be the item's own fault.
    """
    indices = list(range(len(items)))
    for last in (False, True):
        lost = []
        for position, answer in engine.run(task, [items[index] for index in indices], until=until):
            if isinstance(answer, Lost) and not last and again(answer):
                lost.append(indices[position])
            else:
                yield indices[position], answer
        indices = lost


def part_of(text: str, most: int) -> tuple[int, int]:
    """Parse ``"3/10"`` as (3, 10), at most ``most`` parts; ``""`` is everything, (1, 1). Raises `EngineError`."""
    number, slash, of = (text or "1/1").partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of) <= max(most, 1)):
        raise EngineError(f"--part {text!r}; expected e.g. 3/10, with at most as many parts as tasks")
    return int(number), int(of)


class RayEngine:
    """Ray at ``address`` (or RAY_ADDRESS), or else started here with ``workers`` cores.

    A task that sends no heartbeat for ``timeout`` seconds is ended; its last note is lost. The workers need assay
    installed. Raises `EngineError` if ray can't be reached, and `NotInstalled`.
    """

    def __init__(self, workers: int | None = None, *, address: str = "", timeout: float = 300.0) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray, self._timeout = optional("ray", purpose="--engine ray", extra="ray"), timeout
        self._ours = not self._ray.is_initialized()
        address = address or os.environ.get("RAY_ADDRESS", "")
        here = {"num_cpus": workers, "object_store_memory": _OBJECT_STORE, "include_dashboard": False}
        if self._ours:
            try:
                settings = {"address": address} if address else here
                self._ray.init(log_to_driver=False, logging_level="error", **settings)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = f"at {address}" if address else "here"
                raise EngineError(f"ray can't be used {where}: {first_line(error)}") from None
        self._quiet = redirect_stdout(sys.stderr)  # Ray's messages; standard output is for the report
        self._limit = _AHEAD * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def __enter__(self) -> RayEngine:
        self._quiet.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._ours:
            self._ray.shutdown()
        self._quiet.__exit__(None, None, None)

    def run(
        self, task: Task, items: Iterable[Any], *, until: float = float("inf")
    ) -> Iterator[tuple[int, Any | Lost | Raised]]:
        remote = self._ray.remote(_work).options(max_retries=0, num_cpus=1)
        waiting, flying = enumerate(items), dict[Any, int]()
        try:
            while True:
                while len(flying) < self._limit and time.monotonic() < until:
                    if (following := next(waiting, None)) is None:
                        break
                    flying[remote.remote(task, following[1], self._timeout)] = following[0]
                if not flying:
                    return
                for done in self._ray.wait(list(flying), num_returns=1)[0]:
                    yield flying.pop(done), self._answer(done)
        finally:
            for reference in flying:
                self._ray.cancel(reference, force=True)

    def _answer(self, reference: Any) -> Any | Lost:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            what = f"its worker was lost, or took longer than {self._timeout:g} s ({type(error).__name__})"
            return Lost("crash", what)


def _work(task: Task, item: Any, timeout: float) -> Any | Raised:
    """Run a task in a worker of Ray, which ends itself if the task hangs."""

    def heartbeat(note: str = "", seconds: float = 0.0) -> None:
        faulthandler.dump_traceback_later(seconds or timeout, exit=True, file=2)

    heartbeat()
    try:
        return task(item, heartbeat)
    except Exception as error:
        return Raised.of(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
