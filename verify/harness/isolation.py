"""Isolation: the kernel runs in a worker process, so that whatever it does to that process becomes a finding.

The worker builds a case's inputs from their recipe, and returns the outputs as bytes; goldens and tolerances are
evaluated in the judging process, which never runs a kernel. A segmentation fault, ``os._exit``, an endless loop outside
of Python, or unlimited memory use costs one worker; the next case starts a new one.

On a CPU the worker is a fork, so that any callable can be isolated; torch uses one thread there, because a forked
thread pool would hang. A device's context and JAX's threads don't survive a fork: for those the kernel must have an
importable name, and the worker is a new process, which calls it in the numeric environment of this one.

On a device that a kernel's fault takes from its whole process (`lost_device`) every kernel that a new process can
import is isolated. An error that loses the device ends the worker, even if Python could go on. There the new process is
a fork of a plain interpreter, which has imported torch and never used the device, so that one costs little more than
the start of the device's driver and the import of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from assay.golden.inputs.values import torch_dtype
from assay.golden.registry import spec
from assay.interpreter import emulating
from assay.runtime.deadline import WALL_FACTOR
from assay.runtime.environment import with_setting
from assay.runtime.output import as_data, warn_again
from assay.runtime.process import (
    GIB,
    MOST_PROCESSES,
    ForkServer,
    Lost,
    Parent,
    Process,
    left_by,
    limit_memory,
)
from assay.runtime.sandbox import has_namespaces
from assay.runtime.tensors import pack, unpack
from assay.verify.cases.case import Case, build
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.findings import KINDS, Failure
from assay.verify.harness import lost_device
from assay.verify.harness.call import GRACE, Call
from assay.verify.harness.clean_process import START
from assay.verify.harness.compilation import Compiled, as_plain, compiled, unpacked
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.target import load_target, target_of
from assay.verify.harness.time_limit import COMPILATION, MOST, KernelTimeout
from assay.verify.harness.variants import Axis, Question, Variants, longest, unpacked_variants, variants_of

_REFUSED = ("MemoryError", "can't allocate memory", "bad_alloc", "RESOURCE_EXHAUSTED")
_SERVER = "from assay.verify.harness.isolation import serve_fork"
_HEARTBEATS = 1000  # of one case: each call sends three
_IMPORTS = 300.0  # seconds that a new worker may take to import the kernel's module
_MOST_LEFT = max(64, 2 * (os.cpu_count() or 1))  # processes that a kernel may keep, such as a pool's
_SENT = ("kind", "message", "output", "index", "device_lost", "aspect")  # of a failure

Answer = tuple[torch.Tensor, ...] | Failure
T = TypeVar("T")


@dataclass
class Isolation:
    """A kernel's worker process, started on first use. As a context manager it ends the worker on exit.

    ``memory`` limits the bytes that the worker may allocate beyond those it starts with; 0 sets no limit. ``target``
    is the kernel's importable name, if another is known than its own. Raises `SettingError` if the kernel can't be
    isolated, `RuntimeError` if the harness itself fails in the worker.
    """

    harness: KernelHarness
    memory: int = 4 * GIB
    target: str = ""
    _worker: Process | None = field(default=None, repr=False)
    _blocks: bool = field(default=False, repr=False)
    _given_up: str = field(default="", repr=False)
    """Why the kernel isn't called again: it has started or left too many processes, or left its pipe, which takes long
    each time."""

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """End the worker and its children."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    @property
    def is_of_device(self) -> bool:
        """Whether the worker has a device that can be lost; the next case then gets a new worker."""
        return lost_device.can_be_lost(self.harness.device)

    def takes_kernel(self, op: str) -> bool:
        """Return whether a new process can import the kernel and the op of this name; the worker has then started."""
        if not (self.target or target_of(self.harness.call.kernel)):
            return False
        try:
            self._worker = self._started()
            why = self._cannot_begin(op)
        except OSError as error:
            why = str(error)
        if why:
            self.end()
        return not why

    def _cannot_begin(self, op: str) -> str:
        """Return why the new worker can't import the kernel, or the op of this name; empty if it can."""
        assert self._worker is not None
        memory, self._worker.memory = self._worker.memory, 0  # what imports take isn't counted
        self._worker.submit(pickle.dumps(op), _IMPORTS)
        result = self._worker.result()
        self._worker.memory = memory
        if isinstance(result, Lost):
            return result.message
        answer = unpack(result)
        return "" if answer is None else str(answer["message"]).strip().splitlines()[-1]

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Use new workers inside, in which each launch on CUDA waits for its end (CUDA_LAUNCH_BLOCKING=1)."""
        self.end()
        self._blocks = True
        try:
            yield
        finally:
            self._blocks = False
            self.end()

    def observe(self, case: Case, ignored_aspects: frozenset[str] = frozenset()) -> Answer:
        """Run `KernelHarness.observe` in the worker, with these aspects ignored; a lost worker, or device, is a failure
        of the case."""
        call = self.harness.call
        if self._given_up:
            return Failure("crash", case, self._given_up)
        if self._worker is None:
            self._worker = self._started()
            if self.is_of_device and (why := self._cannot_begin(case.spec)):
                self.end()
                raise SettingError(
                    f"isolate: a new process can't run the kernel: {why}; expected one that it can import"
                )
        worker = self._worker
        worker.heartbeats = _HEARTBEATS
        worker.longest = max(MOST * call.timeout + GRACE, WALL_FACTOR * (call.timeout + START))
        worker.on_heartbeat = lambda seconds: call.report(case, WALL_FACTOR * seconds)  # this process only waits
        submitted = worker.submit(pickle.dumps((case, ignored_aspects)), call.timeout + GRACE)
        call.report(case, WALL_FACTOR * submitted)
        result = worker.result()
        if isinstance(result, Lost):
            self.end()
            if result.broke in ("processes", "pipe"):
                self._given_up = f"in an earlier call {result.message}"
            if result.kind == "timeout":
                silence = f"no result within {call.timeout:g} s, and it could not be interrupted"
                return Failure("timeout", case, silence)
            error = next(filter(lost_device.says_lost, worker.printed()), "").removeprefix("what():").strip()
            message = f"{result.message.partition(' (')[0]}: {error}" if error else result.message
            return Failure(result.kind, case, message, device_lost=self.is_of_device)
        try:
            answer = _answer_of(result, case)
        except Exception as error:  # the kernel may have written to the worker's pipe
            self.end()
            return Failure("crash", case, f"its process answered with what is no answer ({type(error).__name__})")
        call.left_changed.update(dict.fromkeys(answer.pop("left_changed", ())))
        call.watch.launches |= answer.pop("launches", False)
        call.watch.unloaded = answer.pop("unloaded", "") or call.watch.unloaded
        call.assignment.take(answer.pop("assigned", {}))
        warn_again(answer.pop("warned", ()))
        left, detached = left_by(worker.pid)
        if left > _MOST_LEFT:
            self._given_up = f"an earlier call has left {left} processes running"
        if left > _MOST_LEFT or (detached and "conduct" not in ignored_aspects):
            self.end()  # with them
            count, where = (left, "") if left > _MOST_LEFT else (detached, " outside of its session")
            words = f"the kernel leaves {count} process{'es' if count > 1 else ''} running{where}"
            return Failure("conduct", case, words, aspect="conduct")
        if "outputs" in answer:
            return tuple(answer["outputs"])
        refused = self._has_limit and any(words in answer["message"] for words in _REFUSED)
        stuck = self.is_of_device and answer["kind"] == "timeout"  # what it has launched may still run
        if refused or stuck or answer["device_lost"]:
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
        return self._answer_beforehand(list(cases), COMPILATION, unpacked, Compiled())

    def variants(self, axes: Sequence[Axis], seconds: float, *, dense: bool) -> Variants:
        """Observe the kernel's variants in the worker (`assay.verify.harness.variants`)."""
        question = Question(tuple(axes), seconds, dense)
        return self._answer_beforehand(question, longest(seconds) + GRACE, unpacked_variants, Variants())

    def _answer_beforehand(
        self, question: list[Case] | Question, seconds: float, read: Callable[[Mapping[str, Any]], T], nothing: T
    ) -> T:
        """Return the worker's answer to a question that concerns no single case; ``nothing`` if it gives none."""
        worker = self._worker = self._worker or self._started()
        worker.longest = seconds
        worker.submit(pickle.dumps(question), seconds)
        result = worker.result()
        with contextlib.suppress(Exception):  # the kernel may have written to the worker's pipe
            if not isinstance(result, Lost):
                return read(unpack(result))
        self.end()  # the cases will show why
        return nothing

    @property
    def _has_limit(self) -> bool:
        """Whether the system enforces the worker's memory limit; a device's driver may allocate without one."""
        return torch.device(self.harness.device).type == "cpu"

    def _started(self) -> Process:
        harness, call = self.harness, self.harness.call
        if self._has_limit and not self.is_of_device and call.framework != "jax" and hasattr(os, "fork"):
            worker = Process.fork(
                lambda parent: _serve_copy(parent, harness, self.memory), own_namespace=has_namespaces()
            )
            worker.processes = MOST_PROCESSES
            return worker
        target = self.target or target_of(call.kernel)
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
        arguments = (memory, target, how, harness.contract, str(harness.device))
        worker = self._forked(arguments) if self.is_of_device else Process.start(_serve_new, *arguments)
        worker.memory, worker.processes = self.memory - memory, MOST_PROCESSES
        return worker

    def _forked(self, arguments: tuple[Any, ...]) -> Process:
        """Return a new process of this path, folder and environment, which serves with these arguments."""
        # JAX would else take most of the device's memory, of which other processes have some
        variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        if self._blocks:
            variables["CUDA_LAUNCH_BLOCKING"] = "1"
        worker = ForkServer.kept(_SERVER, "serve_fork", os.environ, quiet=False).fork(quiet=self._blocks)
        with contextlib.suppress(OSError):  # the first question will notice that it has ended
            worker.pipe.send_bytes(pickle.dumps((sys.path, os.getcwd(), variables, pickle.dumps(arguments))))
        return worker


_KINDS = frozenset((*KINDS, "error"))


def _answer_of(result: bytes, case: Case) -> dict[str, Any]:
    """Return an answer of `_serve` to a case, whose forms are checked. Raises an exception of any class for another."""
    answer = unpack(result)
    if "outputs" in answer:
        shapes = [case.shape(tensor) for tensor in case.signature.returns]
        dtypes = list(map(torch_dtype, case.result_dtypes))
        if [(tuple(output.shape), output.dtype) for output in answer["outputs"]] != list(
            zip(shapes, dtypes, strict=True)
        ):
            raise TypeError
    elif answer["kind"] not in _KINDS or not isinstance(answer["message"], str):
        raise ValueError
    if not all(isinstance(name, str) for name in answer.get("left_changed", ())):
        raise TypeError
    return dict(answer)


def _serve_copy(parent: Parent, harness: KernelHarness, memory: int) -> None:
    """Serve as a forked worker."""
    torch.set_num_threads(1)
    # A fork of a process that used its thread pool would hang with more threads than one.
    environment = with_setting(harness.call.environment, torch.get_num_threads, 1)
    call = replace(harness.call, heartbeat=_heartbeat(parent), environment=environment)
    _serve(parent, lambda: replace(harness, call=call, isolation=None, goldens=None), memory)


def serve_fork(pipe: Connection) -> None:
    """Serve as a fork of an interpreter that has imported this module, and must not have used a device."""
    sys.path[:], folder, variables, arguments = pickle.loads(pipe.recv_bytes())
    os.chdir(folder)
    os.environ.clear()
    os.environ |= variables  # which drivers and libraries read when they first use a device
    _serve_new(Parent(pipe), *pickle.loads(arguments))


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
    """Receive cases, and which aspects to ignore; send outputs or failures. ``memory`` 0 sets no limit.

    The answer to an op's name is None, if the kernel and that op can be imported here; to a list of cases it is what
    was compiled for them, to a `Question` the kernel's variants.
    """

    def unraisable(what: Any) -> None:
        if what.exc_type is not KernelTimeout:  # which comes again at the next look
            sys.__unraisablehook__(what)

    sys.unraisablehook = unraisable

    @cache
    def ready() -> KernelHarness:
        harness = make_harness()
        if memory:
            limit_memory(memory)
        return harness

    def seen_in(case: Case, ignored_aspects: frozenset[str]) -> bytes:
        harness = replace(ready(), ignored_aspects=ignored_aspects)
        try:
            with warnings.catch_warnings(record=True) as caught:
                seen = harness.observe(case, build(case, harness.device))
            seen_of_call = {
                "left_changed": list(harness.call.left_changed),
                "launches": harness.call.watch.launches,
                "unloaded": harness.call.watch.unloaded,
                "assigned": harness.call.assignment.as_data(),
                "warned": as_data(caught),
            }
            if not isinstance(seen, Failure):
                return pack(seen_of_call | {"outputs": seen})
        except Exception as error:
            if not lost_device.is_lost(error):
                raise
            seen, seen_of_call = lost_device.failure_by(error, case), {"assigned": harness.call.assignment.as_data()}
        return pack(seen_of_call | {name: getattr(seen, name) for name in _SENT})

    def answer(message: bytes) -> bytes:
        try:
            ready()  # first: a kernel's module may define the op
            content = pickle.loads(message)
            if isinstance(content, str):
                spec(content)
                return pack(None)
            if isinstance(content, list):
                made = compiled(ready(), content)
                ready().call.assignment.take({"refused": made.refused})
                return pack(as_plain(made))
            if isinstance(content, Question):
                return pack(asdict(variants_of(ready(), content.axes, content.seconds, dense=content.dense)))
            return seen_in(*content)
        except Exception:
            return pack({"kind": "error", "message": traceback.format_exc(), "device_lost": False})

    parent.serve(answer)
