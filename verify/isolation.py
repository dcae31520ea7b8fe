"""Isolation: the kernel runs in a process of its own, so that whatever it does to that process becomes a finding.

The worker builds a case's inputs itself, from their recipe, and hands back the outputs as bytes; goldens and tolerances
are evaluated in the process that judges, which no kernel ever enters. A segmentation fault, an ``os._exit``, an endless
loop outside of Python, or memory without end costs one worker; the next case has a new one.

On a CPU the worker is a fork, so that any callable can be isolated; torch keeps to one thread there, because a forked
thread pool would hang. A device's context and JAX's threads don't survive a fork: there the kernel must have an
importable name, and the worker is a new process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from assay.golden.isolate import ending
from assay.verify.calls import GRACE
from assay.verify.inputs.cases import Case
from assay.verify.result import Failure
from assay.verify.worker import forked, started

if TYPE_CHECKING:
    from assay.verify.trial import Bench

GIB = 2**30
_TICK = 0.05  # seconds between two looks at a worker's memory
_START = 300.0  # seconds that a new process may take to import torch and the kernel
_DEVICE_LOST = ("device-side assert", "CUDA error", "HIP error", "illegal memory access")

Answer = tuple[torch.Tensor, ...] | Failure


@dataclass
class Isolation:
    """A kernel's worker, started on first use; a context manager, which ends it.

    ``memory`` is how many bytes beyond those it started with the worker may hold. Raises `SettingError` where the
    kernel can't be isolated, `RuntimeError` where the harness itself fails in the worker.
    """

    bench: Bench
    memory: int = 4 * GIB
    _worker: _Worker | None = field(default=None, repr=False)

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """End the worker, and what it has started."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def observe(self, case: Case) -> Answer:
        """What `Bench.observe` gives, from the worker; a lost worker is a failure of the case."""
        worker = self._worker = self._worker or _Worker(self.bench)
        answer = worker.ask(case, self.memory, self.bench.call.tell)
        if not worker.alive or (isinstance(answer, Failure) and any(s in answer.message for s in _DEVICE_LOST)):
            self.end()
        return answer


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, bench: Bench) -> None:
        self.timeout = bench.call.timeout
        self.pipe, other = multiprocessing.Pipe()
        can_fork = torch.device(bench.device).type == "cpu" and bench.call.framework != "jax" and hasattr(os, "fork")
        self.process = forked(bench, other, self.pipe) if can_fork else started(bench, other)
        self.is_new = not can_fork
        other.close()
        self.resident = 0

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def end(self) -> None:
        self.process.kill()
        self.pipe.close()

    def ask(self, case: Case, memory: int, tell: Callable[[Case, float], None]) -> Answer:
        """The worker's answer, or how it was lost; ``tell`` is told as `Call.before` is."""
        self.resident = self.resident or resident(self.process.pid)
        patience = self.timeout + GRACE
        within = patience + (_START if self.is_new else 0.0)
        try:
            self.pipe.send_bytes(pickle.dumps(case))
            while True:
                tell(case, within + GRACE)
                lost = self._lost_within(within, case, memory)
                if lost is not None:
                    return lost
                head = json.loads(self.pipe.recv_bytes())
                if "within" not in head:
                    break
                within = head["within"] or patience
            answer = received(self.pipe, head, case)
        except (EOFError, OSError):
            return Failure("crash", case, ending(self.process.ended(GRACE)))
        self.is_new = False
        return answer

    def _lost_within(self, seconds: float, case: Case, memory: int) -> Failure | None:
        """How the worker was lost while it said nothing, if it was."""
        until = time.monotonic() + seconds
        while True:
            said = self.pipe.poll(_TICK)
            if resident(self.process.pid) - self.resident > memory:
                return self._lost("crash", case, f"the kernel held more than {memory / GIB:.3g} GiB of memory")
            if said:
                return None
            if time.monotonic() > until:
                return self._lost(
                    "timeout", case, f"no result within {self.timeout:g} s, and it could not be interrupted"
                )

    def _lost(self, kind: str, case: Case, message: str) -> Failure:
        self.process.kill()
        return Failure(kind, case, message)


def received(pipe: Connection, head: dict[str, Any], case: Case) -> Answer:
    """An answer as `assay.verify.worker` sends it: a line of JSON, the ``head``, then the bytes of each output.

    No object that a kernel made is unpickled where it is judged.
    """
    if "error" in head:
        raise RuntimeError(f"isolation: the worker failed before or after the kernel's call:\n{head['error']}")
    if "kind" in head:
        return Failure(head["kind"], case, head["message"], head["output"], tuple(head["index"]))
    return tuple(_tensor(pipe.recv_bytes(), dtype, shape) for dtype, shape in head["outputs"])


def _tensor(data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    return flat.reshape(shape)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system doesn't say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
