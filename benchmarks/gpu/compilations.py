"""What an examination on a device compiles, launches and times, counted without one: `./dev bench compilations`.

A stand-in takes the kernel's place: its host code runs with an emulated H100, launches are counted by Triton's own
specialisations (types, constants, attributes, options) and not run, and every case passes. Once as examinations are,
and once with Triton's autotuners as they come, which time each configuration at each new key.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table
from triton.runtime.autotuner import Autotuner

from assay.interpreter import Assignment, pretend_cuda
from assay.interpreter.fake_cuda.driver import Driver
from assay.interpreter.replacing import replaced
from assay.verify.campaign.table import Entry, entries
from assay.verify.cases.case import Case, build
from assay.verify.comparison.result import Result
from assay.verify.examination.plan import make_plan
from assay.verify.examination.run import Run
from assay.verify.harness.compilation import Compiled, Program, Recorder, Search
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.target import load_target
from assay.verify.harness.variants import Axis, Variants
from assay.verify.settings import Settings

DEVICE = "h100"
Launching = Callable[[Assignment], AbstractContextManager[None]]
MOST = 1.2  # compilations for each program that an examination launches
_SERIES = 3  # calls of a series that tests for bias, in which a correct kernel soon doesn't lean


@dataclass
class Counts:
    """What one examination does.

    ``needed`` are the programs of its launches, ``compiled`` counts each program's compilations, ``beforehand`` how
    many of these came before the first case, ``timed`` the configurations that an autotuner timed.
    """

    cases: int = 0
    launches: int = 0
    timed: int = 0
    beforehand: int = 0
    needed: set[str] = field(default_factory=set)
    compiled: Counter[str] = field(default_factory=Counter)

    @property
    def compilations(self) -> int:
        """Compilations of all programs."""
        return self.compiled.total()

    def problem(self) -> str:
        """Return what an examination with assigned configurations may not do; empty if it doesn't."""
        twice = sum(count > 1 for count in self.compiled.values())
        if self.timed or twice:
            return f"{self.timed} timings, {twice} programs compiled twice; expected none"
        if self.compilations > MOST * len(self.needed):
            return f"{self.compilations} compilations of {len(self.needed)} programs; expected at most {MOST} of each"
        return ""


class CountingRecorder(Recorder):
    """A recorder that counts launches, and compilations of programs that nothing has compiled yet."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def key(self, owner: Any, arguments: Sequence[Any], keywords: Any) -> str | None:
        key = super().key(owner, arguments, keywords)
        if key is not None and self.counts.cases:
            self.counts.launches += 1
            self.counts.needed.add(key)
            if key not in self.counts.compiled:
                self.counts.compiled[key] += 1
        return key


@dataclass(frozen=True)
class StandIn(KernelHarness):
    """A harness whose cases all pass, and whose calls are recorded."""

    counts: Counts | None = None

    def try_case(self, case: Case) -> Result:
        """Make the calls of a case."""
        assert self.counts is not None
        self.counts.cases += 1
        for _ in range(_SERIES if case.protocol == "bias" else 1):
            once = replace(case, protocol="once") if case.protocol == "bias" else case
            self.observe(replace(once, memory="huge"), build(once))
        # another seed: no golden is evaluated to judge the statistics of outputs that don't exist
        return Result(replace(case, seed=case.seed + 1), judged=1, nonzero=1)


class Beforehand:
    """Counts what is compiled before the first case."""

    def __init__(self, harness: StandIn, recorder: CountingRecorder, counts: Counts) -> None:
        self._harness, self._recorder, self._counts = harness, recorder, counts

    def compile(self, programs: Sequence[Program]) -> list[tuple[str, dict[str, int]]]:
        """Count the compilation of programs."""
        keys = {id(program): key for key, program in self._recorder.programs.items()}
        self._counts.compiled.update(keys[id(program)] for program in programs)
        return [("", {}) for _ in programs]

    def compiled(self, cases: Sequence[Case]) -> Compiled:
        """Search the cases' programs as an examination does."""
        result = Search(self._harness, cases, self._recorder, self.compile).result(0.0)
        self._counts.beforehand = self._counts.compilations
        return result

    def variants(self, axes: Sequence[Axis], seconds: float, *, dense: bool) -> Variants:
        """Observe nothing: what the cases of variants compile isn't counted."""
        return Variants()

    def pass_over(self, aspects: frozenset[str]) -> None:
        """Nothing fails."""


def counted(kernel: Callable[..., Any], settings: Settings, *, tuning: bool) -> Counts:
    """Count an examination; ``tuning``: Triton's autotuners time their configurations."""
    counts = Counts()
    recorder = CountingRecorder(counts)
    plan = make_plan(kernel, settings)
    launching: Launching = recorder.launches if tuning else recorder.recording
    call = replace(plan.harness.call, pretend=DEVICE, launching=launching, assignment=Assignment(on_device=not tuning))
    harness = StandIn(call, settings.contract, counts=counts)
    harness = replace(harness, isolation=None if tuning else Beforehand(harness, recorder, counts))  # type: ignore[arg-type]
    run = Run(replace(plan, harness=harness), lambda phase, done, of: None)
    with pretend_cuda(DEVICE), timings_counted(counts), fresh_tuners():
        run.compile_beforehand()
        run.execute()
    return counts


@contextmanager
def timings_counted(counts: Counts) -> Iterator[None]:
    """Count timings instead of making them: each launches once, and all take the same time."""

    def benchmarker(call: Callable[[], Any], quantiles: Iterable[float]) -> list[float]:
        counts.timed += 1
        call()
        return [1.0 for _ in quantiles]

    with replaced([(Driver, "get_benchmarker", lambda self: benchmarker)]):
        yield


@contextmanager
def fresh_tuners() -> Iterator[None]:
    """Let autotuners know nothing inside, and forget it afterwards."""
    tuners = [each for each in gc.get_objects() if issubclass(type(each), Autotuner)]

    def forget() -> None:
        for tuner in tuners:
            tuner.cache.clear()
            vars(tuner).pop("do_bench", None)

    forget()
    try:
        yield
    finally:
        forget()


def available() -> list[Entry]:
    """Return the bundled Triton kernels."""
    return [entry for entry in entries() if entry.target.startswith("assay.kernels.triton.")]


def pair(index: int) -> tuple[Counts, Counts]:
    """Return the counts of a bundled kernel's quick examination, with tuning autotuners and without."""
    entry = available()[index]
    kernel = load_target(entry.target)
    settings = replace(entry.settings, dtype=(entry.survey_dtypes or entry.dtypes)[0], effort="quick")
    tuning, assigned = (counted(kernel, settings, tuning=tuning) for tuning in (True, False))
    return tuning, assigned


def table(pairs: Iterable[tuple[Counts, Counts]]) -> Table:
    """Return the table of counts. Exits with 1 where an assigned examination compiles more than it may."""
    result = Table(title=f"quick examinations for {DEVICE}: autotuners as they come | assigned configurations")
    for name in ("kernel", "cases", "launches", "timed", "compiled", "launches", "programs", "beforehand", "later"):
        result.add_column(name, justify="left" if name == "kernel" else "right")
    problems = []
    for entry, (tuning, assigned) in zip(available(), pairs, strict=True):
        later = assigned.compilations - assigned.beforehand
        row = (tuning.cases, tuning.launches, tuning.timed, tuning.compilations, assigned.launches)
        result.add_row(entry.name, *map(str, (*row, len(assigned.needed), assigned.beforehand, later)))
        problems += [f"{entry.name}: {problem}" for problem in (assigned.problem(),) if problem]
    if problems:
        sys.exit("\n".join(problems))
    return result
