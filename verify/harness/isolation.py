"""Isolation: the kernel runs in a worker process, so that whatever it does to that process becomes a finding.

The worker builds a case's inputs from their recipe, and returns the outputs as bytes; goldens and tolerances are
evaluated in the judging process, which never runs a kernel. A segmentation fault, ``os._exit``, an endless loop outside
of Python, or unlimited memory use costs one worker; the next case starts a new one.

On a CPU the worker is a fork, so that any callable can be isolated; torch uses one thread there, because a forked
thread pool would hang. A device's context and JAX's threads don't survive a fork: for those the kernel must have an
importable name, and the worker is a new process, which calls it in the numeric environment of this one.
"""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from assay.interpreter import emulating
from assay.runtime.deadline import WALL_FACTOR
from assay.runtime.environment import with_setting
from assay.runtime.output import as_data, warn_again
from assay.runtime.process import GIB, Lost, Parent, Process, limit_memory
from assay.runtime.tensors import pack, unpack
from assay.verify.cases.case import Case, build
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.findings import Failure
from assay.verify.harness.call import GRACE, Call
from assay.verify.harness.compilation import Compiled, as_plain, compiled, unpacked
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.target import load_target, target_of
from assay.verify.harness.time_limit import COMPILATION

_REFUSED = ("MemoryError", "can't allocate memory", "bad_alloc", "RESOURCE_EXHAUSTED")
_SENT = ("kind", "message", "output", "index", "device_lost", "aspect")  # of a failure

Answer = tuple[torch.Tensor, ...] | Failure


@dataclass
class Isolation:
    """A kernel's worker process, started on first use. As a context manager it ends the worker on exit.

    ``memory`` limits the bytes that the worker may allocate beyond those it starts with. Raises `SettingError` if the
    kernel can't be isolated, `RuntimeError` if the harness itself fails in the worker.
    """

    harness: KernelHarness
    memory: int = 4 * GIB
    _worker: Process | None = field(default=None, repr=False)

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def pass_over(self, aspects: frozenset[str]) -> None:
        """Tell the worker which aspects to ignore (`KernelHarness.ignored_aspects`)."""
        if aspects != self.harness.ignored_aspects:
            self.harness = replace(self.harness, ignored_aspects=aspects)
            self.end()

    def end(self) -> None:
        """End the worker and its children."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def observe(self, case: Case) -> Answer:
        """Run `KernelHarness.observe` in the worker; a lost worker is a failure of the case."""
        call = self.harness.call
        worker = self._worker = self._worker or self._started()
        worker.on_heartbeat = lambda seconds: call.report(case, WALL_FACTOR * seconds)  # this process only waits
        call.report(case, WALL_FACTOR * worker.submit(pickle.dumps(case), call.timeout + GRACE))
        result = worker.result()
        if isinstance(result, Lost):
            self.end()
            silence = f"no result within {call.timeout:g} s, and it could not be interrupted"
            return Failure(result.kind, case, silence if result.kind == "timeout" else result.message)
        answer = unpack(result)
        call.left_changed.update(dict.fromkeys(answer.pop("left_changed", ())))
        call.watch.launches |= answer.pop("launches", False)
        call.assignment.take(answer.pop("assigned", {}))
        warn_again(answer.pop("warned", ()))
        if "outputs" in answer:
            return tuple(answer["outputs"])
        refused = self._has_limit and any(words in answer["message"] for words in _REFUSED)
        if refused or answer["device_lost"]:
            self.end()  # what it holds, or has broken, is no next case's fault
        if refused:
            what = answer["message"].strip().splitlines()[-1]
            words = f"{what}; isolated, it may hold no more than {self.memory / GIB:.3g} GiB of memory"
            return Failure("crash", case, words)
        if answer["kind"] == "error":
            self.end()
            raise RuntimeError(f"isolation: the worker failed before or after the kernel's call:\n{answer['message']}")
        return Failure(case=case, **answer | {"index": tuple(answer["index"])})

    def compiled(self, cases: Sequence[Case]) -> Compiled:
        """Compile the programs of these cases in the worker (`assay.verify.harness.compilation`)."""
        worker = self._worker = self._worker or self._started()
        worker.submit(pickle.dumps(list(cases)), COMPILATION)
        result = worker.result()
        if isinstance(result, Lost):  # the cases will show why
            self.end()
            return Compiled()
        return unpacked(unpack(result))

    @property
    def _has_limit(self) -> bool:
        """Whether the system enforces the worker's memory limit; a device's driver may allocate without one."""
        return torch.device(self.harness.device).type == "cpu"

    def _started(self) -> Process:
        harness, call = self.harness, self.harness.call
        if self._has_limit and call.framework != "jax" and hasattr(os, "fork"):
            return Process.fork(lambda parent: _serve_copy(parent, harness, self.memory))
        target = target_of(call.kernel)
        if not target:
            raise SettingError(
                "isolate: on a device, and under jax, the kernel runs in a new process, which must import it; "
                "expected a function of a module, got one without an importable name"
            )
        memory = self.memory if self._has_limit else 0
        how = {
            name: getattr(call, name)
            for name in ("listed", "framework", "timeout", "environment", "pretend", "refuses", "assignment")
        }
        worker = Process.start(_serve_new, memory, target, how, harness.contract, str(harness.device))
        worker.memory = self.memory - memory
        return worker


def _serve_copy(parent: Parent, harness: KernelHarness, memory: int) -> None:
    """Serve as a forked worker."""
    torch.set_num_threads(1)
    # A fork of a process that used its thread pool would hang with more threads than one.
    environment = with_setting(harness.call.environment, torch.get_num_threads, 1)
    call = replace(harness.call, heartbeat=_heartbeat(parent), environment=environment)
    _serve(parent, lambda: replace(harness, call=call, isolation=None, goldens=None), memory)


def _serve_new(
    parent: Parent, memory: int, target: str, how: Mapping[str, Any], contract: Contract, device: str
) -> None:
    """Serve as a worker in a new process; ``how`` are fields of `Call`."""

    def harness() -> KernelHarness:
        with emulating("", how["pretend"]):
            kernel = load_target(target)
        return KernelHarness(Call(kernel, heartbeat=_heartbeat(parent), **how), contract, device)

    _serve(parent, harness, memory)


def _heartbeat(parent: Parent) -> Callable[[Case, float], None]:
    """Return a callback that reports each call and its time limit to the judging process."""
    return lambda case, seconds: parent.heartbeat(seconds=seconds)


def _serve(parent: Parent, make_harness: Callable[[], KernelHarness], memory: int) -> None:
    """Receive cases, send outputs or failures; ``memory`` 0 sets no limit."""

    @cache
    def ready() -> KernelHarness:
        harness = make_harness()
        if memory:
            limit_memory(memory)
        return harness

    def answer(message: bytes) -> bytes:
        try:
            harness, case = ready(), pickle.loads(message)
            if isinstance(case, list):
                made = compiled(harness, case)
                harness.call.assignment.take({"refused": made.refused})
                return pack(as_plain(made))
            with warnings.catch_warnings(record=True) as caught:
                seen = harness.observe(case, build(case, harness.device))
            seen_of_call = {
                "left_changed": list(harness.call.left_changed),
                "launches": harness.call.watch.launches,
                "assigned": harness.call.assignment.as_data(),
                "warned": as_data(caught),
            }
            if isinstance(seen, Failure):
                return pack(seen_of_call | {name: getattr(seen, name) for name in _SENT})
            return pack(seen_of_call | {"outputs": seen})
        except Exception:
            return pack({"kind": "error", "message": traceback.format_exc(), "device_lost": False})

    parent.serve(answer)
