"""A contest: kernels of one op at one case. A run is one process that holds all contests, one after another."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from assay.bench.inspection.calls import Asked, calls
from assay.bench.timing.clocks import clock_for
from assay.bench.timing.roofline import Least, Peak, least_of, peak_of
from assay.bench.timing.timed import Entrant, Timing, timed_and_judged
from assay.runtime.pool import Heartbeat
from assay.verify.campaign.table import Entry, entries
from assay.verify.cases.case import Case
from assay.verify.errors import SettingError
from assay.verify.harness.compiled import compiled
from assay.verify.harness.target import load_target
from assay.verify.settings import Settings

_PACKAGES = ("torch", "triton", "jax", "liger-kernel", "flash-attn", "vllm", "kernel-assay")
SILENT = 3600.0
"""Seconds that a worker may take for a contest."""
PYTORCH = ("torch", "torch-composed")
"""The groups of the survey's table that are PyTorch's own kernels, and model code in eager mode."""


@dataclass(frozen=True)
class Runner:
    """A kernel of a contest by what can be sent to another process; ``compiles``: by torch.compile."""

    name: str
    target: str
    settings: Settings
    compiles: bool = False

    def load(self) -> Entrant:
        """The kernel; raises `TargetError`."""
        kernel = load_target(self.target)
        return Entrant(self.name, compiled(kernel) if self.compiles else kernel, self.settings)


@dataclass(frozen=True)
class Contest:
    """Kernels, and the case at which they are called."""

    runners: tuple[Runner, ...]
    case: Case


@dataclass(frozen=True)
class Ways:
    """How contests are run: ``seconds`` of each kernel in each contest, in so many ``rounds``."""

    device: str = "cpu"
    seconds: float = 0.5
    rounds: int = 5
    cold: bool = False
    graph: bool = False


@dataclass(frozen=True)
class Found:
    """What one run showed of a contest."""

    timings: list[Timing]
    clock: str
    peak: Peak | None
    least: Least | None


def contests_of(
    chosen: Sequence[Entry], asked: Asked, ways: Ways, *, against: str = "usual", compiles: bool = True
) -> Iterator[Contest]:
    """A contest for each op, dtype, option and size of the ``chosen`` kernels, with what else does the same here.

    ``against``: "usual" are PyTorch's own kernels and what of Liger, vLLM and others is here and needs no interpreter,
    "none" adds nothing, "all" also those that an interpreter runs. ``compiles``: PyTorch's by torch.compile as well.
    """
    known = [] if against == "none" else [*entries(), *entries("others")]
    on_gpu = ways.device.startswith("cuda")
    rivals = [
        each
        for each in known
        if each.name not in {one.name for one in chosen}
        and not each.absence(ways.device)
        and (on_gpu or against == "all" or each.group in PYTORCH)
    ]
    done: set[str] = set()
    problem: SettingError | None = None
    for entry in chosen:
        for dtype in entry.dtypes:
            usual = entry.settings.definition.default_settings["dtype"] if dtype is None else dtype
            try:
                cases = list(calls(replace(entry.settings, dtype=usual), asked))
            except SettingError as error:  # of several kernels, one that hasn't such a dimension
                problem = error
                continue
            for case in cases:
                if str(case) not in done:
                    done.add(str(case))
                    yield _contest(chosen, rivals, case, usual, compiles=compiles)
    if problem is not None and not done:
        raise problem


def _contest(chosen: Sequence[Entry], rivals: Sequence[Entry], case: Case, dtype: Any, *, compiles: bool) -> Contest:
    """Who can take a case; of PyTorch's own the first is compiled as well."""
    fitting = [each for each in (*chosen, *rivals) if _takes(each, case, dtype)]
    runners = [Runner(each.name, each.target, replace(each.settings, dtype=dtype)) for each in fitting]
    pytorch = [one for one, each in zip(runners, fitting, strict=True) if each.group in PYTORCH]
    composed = [replace(one, name=f"{one.name} (torch.compile)", compiles=True) for one in pytorch[:1] if compiles]
    return Contest((*runners, *composed), case)


def _takes(entry: Entry, case: Case, dtype: Any) -> bool:
    """Whether a kernel implements a case's op in its dtype and under its options."""
    settings = entry.settings
    if settings.definition.name != case.definition.name or (dtype not in entry.dtypes and None not in entry.dtypes):
        return False
    defaults = case.definition.complete({})
    for name, value in case.options.items():
        listed = settings.options.get(name, (defaults[name],))
        if value not in listed:
            return False
    return all(size in settings.shapes.get(symbol, (size,)) for symbol, size in case.sizes.items())


@dataclass(frozen=True)
class Run:
    """All contests, in a process of their own."""

    contests: tuple[Contest, ...]
    ways: Ways


def run(job: Run, heartbeat: Heartbeat) -> list[Found]:
    """Every contest in turn, in a worker."""
    results = []
    for contest in job.contests:
        heartbeat(str(contest.case), SILENT)
        clock = clock_for(job.ways.device, cold=job.ways.cold, graph=job.ways.graph)
        peak = peak_of(job.ways.device, contest.case)
        timings = timed_and_judged(
            [runner.load() for runner in contest.runners],
            contest.case,
            device=job.ways.device,
            seconds=job.ways.seconds,
            rounds=job.ways.rounds,
            clock=clock,
        )
        results.append(Found(timings, clock.words, peak, least_of(contest.case, peak)))
    return results


def versions() -> dict[str, str]:
    """Of Python and of what computes, as far as it is here."""
    results = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            results[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        results["cuda"] = str(torch.version.cuda)
    return results


def machine(device: str) -> str:
    """What the times hold for: the GPU's name, or the CPU's and its cores."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
