"""The options of a judgement, and its report: problem, solution, sizes and speed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Literal

from assay.judge.problems.problem import Answer, Problem
from assay.judge.problems.sizes import limits, small
from assay.judge.reference_model import ReferenceModel
from assay.judge.run import Run
from assay.judge.solution.solution_process import SolutionHost, SolutionProcess
from assay.judge.solution.trials import Trial
from assay.judge.speed import Speed
from assay.judge.verdict import Workload
from assay.verify.cases.case import Case
from assay.verify.contract import Contract
from assay.verify.errors import SettingError

EFFORTS = ("quick", "usual", "thorough")


@dataclass(frozen=True)
class Options:
    """The options of a judgement, as the parameters of `assay.verify.judge`."""

    effort: str = "usual"
    seed: int = 0
    device: str = "cpu"
    contract: Contract = field(default_factory=Contract)
    timeout: float = 30.0
    memory: float = 8.0
    timed: bool | Literal["all"] = True
    compiled: bool | None = None
    seconds: float | None = None
    sandbox: str = "auto"

    def __post_init__(self) -> None:
        """Raise `SettingError` for values that are not allowed."""
        if self.timed not in (True, False, "all"):
            raise SettingError(f'timed={self.timed!r}; expected True, False, or "all"')
        if self.effort not in EFFORTS:
            raise SettingError(f"effort={self.effort!r}; expected one of {', '.join(EFFORTS)}")

    def host(self, problem: Problem) -> SolutionHost:
        """Return where a judgement's processes run, which don't see the problem's folder. Raises `SettingError`."""
        return SolutionHost(self.sandbox, problem.path.parent, gpus=self.device != "cpu")

    def process(self, answer: Answer, host: SolutionHost) -> SolutionProcess:
        """Return a new process for a solution."""
        return SolutionProcess(answer, host, device=self.device, timeout=self.timeout, memory=self.memory)


@dataclass
class Report:
    """A problem, a solution (``path`` as the user gave it), where it runs, and the results so far: sizes, speed."""

    problem: Problem
    answer: Answer
    options: Options
    path: str
    host: SolutionHost
    sizes: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    workloads: list[Workload] = field(default_factory=list)
    speed: Speed | None = None

    def repro(self, trial: Trial) -> str:
        """Return the command that repeats one call."""
        seed = ["--seed", str(self.options.seed)] if self.options.seed else []
        line = trial.as_line().replace("'", "\\u0027")
        return shlex.join(["assay", "judge", str(self.problem.path), self.path, *seed, "--trial", line])

    def some_case(self, run: Run) -> Case:
        """Return the last case that was tried, or a small one if there is none."""
        if run.observations:
            return run.observations[-1].result.case
        given = self.problem.given[0]
        choice = small(self.problem, given, limits("quick")["small"])
        instance = self.problem.make(choice.sizes if choice else given, self.options.seed)
        return ReferenceModel.of(instance, self.options.contract, self.problem.name).case(
            instance.draw(self.options.seed)
        )
