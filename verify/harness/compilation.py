"""Compilation beforehand: the Triton programs of an examination's cases, found without running them, side by side.

All of it happens in a fork of the process that runs the kernel. There the cases' calls are made on the CPU, with an
emulated device and with launches recorded instead of run, as `assay inspect` does; further forks compile what was
recorded, one on each core, into Triton's cache (TRITON_CACHE_DIR), from which the kernel's process then loads. So a
call that fails, and a compiler that crashes, cost nothing but that compilation, and no state of the kernel's module or
of a device changes.

A configuration that the compiler refuses is listed and gives way to the next one. One that no case has by itself is
pinned to a case, so that every configuration which its tuner's pruning leaves is examined.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from assay.formats.devices import CudaProperties
from assay.interpreter import Assignment, Choice, Configs, Watch, assigned, pretend_cuda
from assay.runtime.environment import with_setting
from assay.runtime.pool import core_count
from assay.runtime.process import Lost, Parent, Process, wait_for
from assay.verify.cases.case import Case, build
from assay.verify.harness.compilers import counted
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.time_limit import COMPILATION, Pace

_BY_CASE = ("chosen", "pinned")
_FILLED = "huge"  # what recorded calls find in memory that no kernel writes: floats of 2^100, integers of 1


@dataclass(frozen=True)
class Compiled:
    """What was compiled beforehand: ``programs`` in ``seconds``.

    ``instructions`` are the most of each instruction of configs/compilers.toml in one program. By the index of a case,
    ``chosen`` are its configurations and ``pinned`` those that are pinned to it; ``refused`` is
    what an assignment knows of refusals (`Assignment.as_data`).
    """

    programs: int = 0
    seconds: float = 0.0
    chosen: Mapping[int, Configs] = field(default_factory=dict)
    pinned: Mapping[int, Configs] = field(default_factory=dict)
    refused: Mapping[str, Any] = field(default_factory=dict)
    instructions: Mapping[str, int] = field(default_factory=dict)

    def case(self, case: Case, cases: Sequence[Case]) -> Case:
        """Return a case with what is pinned to it among ``cases``."""
        for index, configs in self.pinned.items():
            if cases[index] == case:
                return replace(case, configs=configs)
        return case

    def named(self, case: Case, cases: Sequence[Case]) -> Case:
        """Return a case with its configurations among ``cases``, if its call hasn't told them: it lost its process."""
        known = (configs for index, configs in self.chosen.items() if cases[index] == case)
        return case if case.configs else replace(case, configs=next(known, {}))


def compiled(harness: KernelHarness, cases: Sequence[Case]) -> Compiled:
    """Compile the programs of these cases, in a fork of this process; the first case tells whether there are any."""
    if not hasattr(os, "fork") or not cases:
        return Compiled()
    device = _properties(harness)
    process = Process.fork(lambda parent: parent.serve(lambda _: _compiled_here(parent, harness, cases, device)))
    try:
        process.submit(b"", COMPILATION)
        answer = process.result()
    finally:
        process.kill()
    if isinstance(answer, Lost):  # the calls themselves will show why
        return Compiled()
    return unpacked(json.loads(answer))


def as_plain(made: Compiled) -> dict[str, Any]:
    """Return plain data for `unpacked`."""
    by_case = {name: {str(index): configs for index, configs in getattr(made, name).items()} for name in _BY_CASE}
    return vars(made) | by_case


def unpacked(data: Mapping[str, Any]) -> Compiled:
    """Return a `Compiled` from plain data, in which keys are text."""
    by_case = {
        name: {
            int(index): {kernel: tuple(each) for kernel, each in configs.items()}
            for index, configs in data[name].items()
        }
        for name in _BY_CASE
    }
    return Compiled(**{**data, **by_case})


def _properties(harness: KernelHarness) -> str | CudaProperties:
    """Return the device to emulate: the one on which the kernel runs, or the one that it is told it runs on."""
    if harness.call.pretend or torch.device(harness.device).type == "cpu":
        return harness.call.pretend or "cuda"
    return CudaProperties.of(torch.cuda.get_device_properties(harness.device))


def _compiled_here(
    parent: Parent, harness: KernelHarness, cases: Sequence[Case], device: str | CudaProperties
) -> bytes:
    """Do the work of `compiled`, in the fork; return JSON."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    recorder = Recorder()

    def compile(programs: Sequence[Program]) -> list[Made]:
        return side_by_side(programs, parent)

    environment = with_setting(harness.call.environment, torch.get_num_threads, 1)
    call = replace(
        harness.call,
        heartbeat=lambda case, seconds: parent.heartbeat(seconds=max(seconds, COMPILATION)),
        environment=environment,
        pretend=device,
        pace=Pace(),
        watch=Watch(),
        assignment=Assignment(on_device=True),
        launching=recorder.recording,
    )
    harness = replace(harness, call=call, device="cpu", isolation=None, goldens=None)
    with pretend_cuda(device):
        return json.dumps(as_plain(Search(harness, cases, recorder, compile).result(started))).encode()


class Search:
    """Finds the programs of cases, compiles them, and pins configurations that no case has.

    The calls of ``harness`` are recorded by ``recorder``; ``compile`` compiles programs.
    """

    def __init__(
        self,
        harness: KernelHarness,
        cases: Sequence[Case],
        recorder: Recorder,
        compile: Callable[[Sequence[Program]], Sequence[Made]],
    ) -> None:
        self._harness, self._cases, self._recorder, self._compiler = harness, cases, recorder, compile
        self._assignment = harness.call.assignment
        self._choices: dict[int, list[Choice]] = {}
        self._chosen: dict[int, Configs] = {}
        self._keys: dict[int, set[str]] = {}
        self._pinned: dict[int, Configs] = {}
        self._errors: dict[str, str] = {}
        self._instructions: Counter[str] = Counter()

    def result(self, started: float) -> Compiled:
        """Return what was compiled since ``started``."""
        self._record(0)
        if not self._recorder.programs:
            return Compiled()
        for index in range(1, len(self._cases)):
            self._record(index)
        self._compile()
        for index, configs in missing(self._choices, self._cases, self._assignment).items():
            self._pinned[index] = configs
            self._record(index)
        self._compile()
        programs = sum(not error for error in self._errors.values())
        seconds, refused = time.perf_counter() - started, self._assignment.as_data()["refused"]
        chosen = {index: configs for index, configs in self._chosen.items() if configs}
        return Compiled(programs, seconds, chosen, self._pinned, refused, self._instructions)

    def _record(self, index: int) -> None:
        """Make the calls of a case, with launches recorded."""
        case = replace(self._cases[index], memory=_FILLED, configs=self._pinned.get(index, {}))
        self._recorder.keys = set()
        self._assignment.begin(case.configs)
        try:
            self._harness.observe(case, build(case))
        except Exception:  # the examination will meet it too
            return
        finally:
            self._keys[index] = self._recorder.keys
            self._choices[index] = list(self._assignment.choices.values())
            self._chosen[index] = self._assignment.used

    def _compile(self) -> None:
        """Compile what was recorded; of refused configurations, until others have taken their turns."""
        while new := [key for key in self._recorder.programs if key not in self._errors]:
            programs = [self._recorder.programs[key] for key in new]
            refused = set()
            for key, (error, instructions) in zip(new, self._compiler(programs), strict=True):
                self._errors[key] = error
                self._instructions |= Counter(instructions)
                tuned = self._recorder.programs[key].tuned
                if error and tuned is not None and self._assignment.refuse(*tuned, error):
                    refused.add(key)
            for index, keys in self._keys.items():
                if keys & refused:
                    self._record(index)


def missing(
    choices: Mapping[int, Sequence[Choice]], cases: Sequence[Case], assignment: Assignment
) -> dict[int, Configs]:
    """Return configurations to pin, by the index of a case, so that every candidate is some case's.

    They are pinned to the largest cases of one call that may have them, and whose own configurations others have too.
    """
    counts = Counter((choice.kernel, choice.config) for each in choices.values() for choice in each)
    wanted = {(choice.kernel, name) for each in choices.values() for choice in each for name in choice.candidates}
    refused = {(refusal.kernel, refusal.config) for refusal in assignment.refused.values()}
    results: dict[int, Configs] = {}
    for kernel, config in sorted(wanted - counts.keys() - refused):
        possible = [
            (
                all(counts[choice.kernel, choice.config] > 1 for choice in own),
                cases[index].protocol == "once",
                prod(cases[index].sizes.values()),
                -index,
            )
            for index, each in choices.items()
            if index not in results
            and (own := [choice for choice in each if choice.kernel == kernel])
            and any(config in choice.candidates for choice in own)
        ]
        if possible:
            index = -max(possible)[-1]
            own = [choice for choice in choices[index] if choice.kernel == kernel]
            names = tuple(config if config in choice.candidates else choice.config for choice in own)
            counts.subtract((choice.kernel, choice.config) for choice in own)
            counts.update((kernel, name) for name in names)
            results[index] = {kernel: names}
    return results


@dataclass(frozen=True)
class Program:
    """A launch to be compiled; ``tuned``: its digest, kernel and configuration, if a tuner has chosen that one."""

    owner: Any
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    tuned: tuple[str, str, str] | None


class Recorder:
    """Records launches by Triton's own keys, which tell what would be compiled."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self.keys: set[str] = set()
        """The keys of launches since it was last emptied."""
        self._caches: dict[int, Any] = {}

    @contextmanager
    def recording(self, assignment: Assignment) -> Iterator[None]:
        """Record launches inside, in the configurations that are assigned, and run none."""
        with self.launches(assignment), assigned(assignment):
            yield

    @contextmanager
    def launches(self, assignment: Assignment) -> Iterator[None]:
        """Record launches inside, whatever chooses their configurations, and run none."""
        from triton.runtime.jit import JITFunction

        from assay.interpreter.launch import Launched
        from assay.interpreter.replacing import replaced

        def run(owner: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
            key = self.key(owner, args, kwargs)
            if key is not None:
                self.keys.add(key)
                self.programs.setdefault(key, Program(owner, args, kwargs, assignment.launched))
            return Launched(owner, args, kwargs, lambda *launch: None)

        with replaced([(JITFunction, "run", run)]):
            yield

    def key(self, owner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
        """Return what tells a launch's program from others: source, types, constants, attributes and options.

        None if Triton would compile nothing.
        """
        from triton import knobs

        from assay.interpreter.launch import compiling_run

        keys = []

        def note(*, compile: Mapping[str, Any], **_: Any) -> bool:
            options = json.loads(compile["specialization_data"])["options"]
            keys.append(repr((compile["signature"], compile["constants"], compile["configs"], sorted(options.items()))))
            return True  # don't compile

        before, hook = owner.device_caches, knobs.runtime.jit_cache_hook
        owner.device_caches = self._caches.setdefault(id(owner), defaultdict(owner.create_binder))
        knobs.runtime.jit_cache_hook = note
        try:
            compiling_run(owner, *arguments, grid=(1, 1, 1), warmup=True, **keywords)
        finally:
            owner.device_caches, knobs.runtime.jit_cache_hook = before, hook
        return f"{owner.cache_key} {keys[0]}" if keys else None


Made = tuple[str, Mapping[str, int]]
"""The error by which a tuner would rule a program out, else nothing; and how many of which instructions it has."""


def side_by_side(programs: Sequence[Program], parent: Parent | None = None) -> list[Made]:
    """Compile programs in forks of this process, one on each core.

    ``parent`` gets a sign of life for each.
    """
    results, waiting = list[Made](("", {}) for _ in programs), iter(range(len(programs)))
    workers = [_compiler(programs) for _ in range(min(core_count(), len(programs)))]
    busy: dict[int, int] = {}  # the number of a program, by that of its worker
    try:
        while True:
            for number in range(len(workers)):
                if number not in busy and (index := next(waiting, None)) is not None:
                    workers[number].submit(str(index).encode(), COMPILATION)
                    busy[number] = index
            if not busy:
                return results
            wait_for([workers[number] for number in busy])
            for number in list(busy):
                if (answer := workers[number].poll()) is None:
                    continue
                index = busy.pop(number)
                if isinstance(answer, Lost):
                    results[index] = f"the compiler crashed: {answer.message}", {}
                    workers[number] = _compiler(programs)
                else:
                    error, instructions = json.loads(answer)
                    results[index] = error, instructions
                if parent is not None:
                    parent.heartbeat(seconds=COMPILATION)
    finally:
        for worker in workers:
            worker.kill()


def _compiler(programs: Sequence[Program]) -> Process:
    """Return a fork of this process that compiles programs by their numbers."""
    return Process.fork(
        lambda parent: parent.serve(lambda number: json.dumps(compile_one(programs[int(number)])).encode())
    )


def compile_one(program: Program) -> Made:
    """Compile a program into Triton's cache."""
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    from assay.interpreter.configurations import REFUSALS, in_one_line
    from assay.interpreter.launch import compiling_run

    owner = program.owner
    owner.device_caches = defaultdict(owner.create_binder)
    try:
        kernel = compiling_run(owner, *program.arguments, grid=(1, 1, 1), warmup=True, **program.keywords)
        limit = driver.active.utils.get_device_properties(0)["max_shared_mem"]
        if kernel is not None and kernel.metadata.shared > limit:  # which Triton sees when it loads a kernel
            raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
    except REFUSALS as error:
        return in_one_line(error), {}
    except Exception:  # the kernel's own mistake, which its calls will show
        return "", {}
    return "", {} if kernel is None else counted(str(kernel.asm.get("ptx", "")))


__all__ = ["Compiled", "Program", "Recorder", "Search", "as_plain", "compiled", "missing", "side_by_side", "unpacked"]
