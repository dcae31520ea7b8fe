"""What a judgement is about, and what it has come to so far beside what was seen of single calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from assay.judge.problems.problem import Answer, Problem
from assay.judge.problems.sizes import limits, small
from assay.judge.reference_model import ReferenceModel
from assay.judge.run import Run
from assay.judge.solution.solution_process import SolutionProcess
from assay.judge.solution.trials import Trial
from assay.judge.speed import Speed
from assay.judge.verdict import Workload
from assay.verify.cases.case import Case
from assay.verify.contract import Contract
from assay.verify.errors import SettingError

EFFORTS = ("quick", "usual", "thorough")


@dataclass(frozen=True)
class Options:
    """How a judgement is made; see `assay.verify.judge`."""

    effort: str = "usual"
    seed: int = 0
    device: str = "cpu"
    contract: Contract = field(default_factory=Contract)
    timeout: float = 30.0
    memory: float = 8.0
    timed: bool | Literal["all"] = True
    compiled: bool | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Raises `SettingError`."""
        if self.timed not in (True, False, "all"):
            raise SettingError(f'timed={self.timed!r}; expected True, False, or "all"')
        if self.effort not in EFFORTS:
            raise SettingError(f"effort={self.effort!r}; expected one of {', '.join(EFFORTS)}")

    def process(self, answer: Answer) -> SolutionProcess:
        """A process for a solution."""
        return SolutionProcess(answer, device=self.device, timeout=self.timeout, memory=self.memory)


@dataclass
class Report:
    """A problem and a solution, ``path`` as it was given; sizes that were judged and that weren't; speed."""

    problem: Problem
    answer: Answer
    options: Options
    path: str
    sizes: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)
    workloads: list[Workload] = field(default_factory=list)
    speed: Speed | None = None

    def repro(self, trial: Trial) -> str:
        """The command that makes one call again."""
        seed = f" --seed {self.options.seed}" if self.options.seed else ""
        line = trial.as_line().replace("'", "\\u0027")
        return f"assay judge {self.problem.path} {self.path}{seed} --trial '{line}'"

    def some_case(self, run: Run) -> Case:
        """The last case that was tried, or else a small one."""
        if run.observations:
            return run.observations[-1].result.case
        given = self.problem.given[0]
        choice = small(self.problem, given, limits("quick")["small"])
        instance = self.problem.make(choice.sizes if choice else given, self.options.seed)
        return ReferenceModel.of(instance, self.options.contract, self.problem.name).case(
            instance.draw(self.options.seed)
        )
