"""Isolation: the kernel runs in a process of its own, so that whatever it does to that process becomes a finding.

The worker builds a case's inputs itself, from their recipe, and hands back the outputs; goldens and tolerances are
evaluated in the process that judges, which no kernel ever enters. A segmentation fault, an ``os._exit``, an endless
loop outside of Python, or memory without end costs one worker; the next case has a new one.

On a CPU the worker is a fork, so that any callable can be isolated; torch keeps to one thread there, because a forked
thread pool would hang. A device's context and JAX's threads don't survive a fork: there the kernel must have an
importable name, and the worker is a new process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from assay.golden.isolate import ending
from assay.verify.errors import SettingError
from assay.verify.inputs.cases import Case, build
from assay.verify.result import Failure

if TYPE_CHECKING:
    from assay.verify.trial import Bench

GIB = 2**30
_TICK = 0.05  # seconds between two looks at a worker's memory
_GRACE = 5.0  # seconds beyond its own limit that a call may take to come back
_START = 300.0  # seconds that a new process may take to import torch and the kernel
_DEVICE_LOST = ("device-side assert", "CUDA error", "HIP error", "illegal memory access")

Answer = tuple[torch.Tensor, ...] | Failure


@dataclass
class Isolation:
    """A kernel's worker, started on first use; a context manager, which ends it.

    ``memory`` is how many bytes beyond those it started with the worker may hold. Raises `SettingError` where the
    kernel can't be isolated.
    """

    bench: Bench
    memory: int = 4 * GIB
    _worker: _Worker | None = field(default=None, repr=False)

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def observe(self, case: Case) -> Answer:
        """What `Bench.observe` gives, from the worker; a lost worker is a failure of the case."""
        worker = self._worker = self._worker or _Worker(self.bench)
        answer = worker.ask(case, self.memory, calls=_CALLS.get(case.protocol, 1))
        lost = isinstance(answer, Failure) and (not worker.alive or any(s in answer.message for s in _DEVICE_LOST))
        if lost:
            self.end()
        return answer


_CALLS = {"repeat": 2, "after_other": 2, "after_refill": 2, "alone": 6, "after_many": 40}  # calls of one trial, at most


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, bench: Bench) -> None:
        self.timeout = bench.call.timeout
        self.pipe, other = multiprocessing.Pipe()
        self.process: Any
        if torch.device(bench.device).type == "cpu" and bench.call.framework != "jax" and hasattr(os, "fork"):
            self.process = _Fork(lambda: _serve(other, self.pipe, lambda: _alone(bench)))
            self.started = True
        else:
            self.process = _spawned(bench, other)
            self.started = False
        other.close()
        self.resident = 0

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def ask(self, case: Case, memory: int, calls: int) -> Answer:
        """The worker's answer, or how it was lost."""
        patience = calls * self.timeout + _GRACE + (0 if self.started else _START)
        self.resident = self.resident or resident(self.process.pid)
        until = time.monotonic() + patience
        try:
            self.pipe.send_bytes(pickle.dumps(case))
            while not self.pipe.poll(_TICK):
                held = resident(self.process.pid) - self.resident
                if held > memory:
                    return self._lost("crash", case, f"the kernel held more than {memory / GIB:.3g} GiB of memory")
                if time.monotonic() > until:
                    return self._lost(
                        "timeout", case, f"no result within {self.timeout:g} s, and it could not be interrupted"
                    )
            answer: Answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            return Failure("crash", case, ending(self.process.exitcode))
        self.started = True
        return answer

    def _lost(self, kind: str, case: Case, message: str) -> Failure:
        self.process.kill()
        self.process.join()
        return Failure(kind, case, message)


def _serve(pipe: Any, parents: Any, bench_of: Callable[[], Bench]) -> None:
    """A worker's life: cases in, outputs or failures out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.disable()  # a fault is the parent's to report
    with suppress(OSError):  # when memory runs out on Linux, better a worker than the parent
        Path("/proc/self/oom_score_adj").write_text("1000")
    if parents is not None:
        parents.close()
    bench = bench_of()
    while True:
        try:
            case = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        answer = bench.observe(case, build(case, bench.device))
        if not isinstance(answer, Failure):
            answer = tuple(output.detach().cpu().contiguous().clone() for output in answer)
        pipe.send_bytes(pickle.dumps(answer))


def _alone(bench: Bench) -> Bench:
    torch.set_num_threads(1)
    return replace(bench, isolation=None, before=None, goldens=None)


class _Fork:
    """A forked child, presented as `multiprocessing.Process` would; daemons may have such children too."""

    def __init__(self, body: Callable[[], None]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.exitcode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of libraries with threads, which the child doesn't enter
            self.pid = os.fork()
        if self.pid == 0:
            try:
                body()
            finally:
                os._exit(0)

    def is_alive(self) -> bool:
        self._reap(os.WNOHANG)
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        self._reap(0)

    def _reap(self, flags: int) -> None:
        if self.exitcode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self.exitcode = os.waitstatus_to_exitcode(status)


def _spawned(bench: Bench, pipe: Any) -> Any:
    """A new process that imports the kernel by its name."""
    from assay.verify.calls import target_of

    target = target_of(bench.call.kernel)
    if not target:
        raise SettingError(
            "isolate: on a device, and under jax, the kernel runs in a new process, which must import it; "
            "expected a function of a module, got one without an importable name"
        )
    settings = (target, dict(bench.call.listed), bench.call.framework, bench.call.timeout, bench.contract, bench.device)
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_spawned, args=(pipe, settings, sys.path), daemon=True
    )
    process.start()
    return process


def _serve_spawned(pipe: Any, settings: tuple[Any, ...], path: list[str]) -> None:
    from assay.verify.calls import Call
    from assay.verify.repro import load_target
    from assay.verify.trial import Bench

    sys.path[:] = path
    target, listed, framework, timeout, contract, device = settings
    _serve(pipe, None, lambda: Bench(Call(load_target(target), listed, framework, timeout), contract, device))


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system doesn't say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
