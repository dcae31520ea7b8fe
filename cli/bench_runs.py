"""Runs of `assay bench`: kernels of one op, or solutions of a problem; each run is a separate process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.cli.progress import ProgressBar, note
from assay.runtime.pool import Heartbeat, Raised, run_alone
from assay.runtime.process import Lost
from assay.verify.errors import BenchError, TargetError

if TYPE_CHECKING:
    from assay.bench.inspection.calls import Request
    from assay.bench.timing.contest import Line, TimingOptions
    from assay.judge.verdict import SolutionVerdict
    from assay.verify.campaign.table import Entry

_SILENT = 3600.0  # seconds without a message after which a run is stopped


@dataclass(frozen=True)
class Timed:
    """The results of all runs, the clock used, and the device's peak in words."""

    lines: Sequence[Line]
    clock: str
    peak: str = ""


def is_problem(target: str) -> bool:
    """Return whether a target is the path of a problem, not a kernel's name or table."""
    return Path(target).exists() and not target.endswith(".toml")


def of_kernels(
    kernels: Sequence[Entry], sizes: Request, options: TimingOptions, count: int, *, against: str, compiles: bool
) -> Timed:
    """Time kernels in turns with alternatives for the same op. Raises `TargetError` and `BenchError`."""
    from assay.bench.timing.contest import Run, contests_of, lines_of, run

    contests = tuple(contests_of(kernels, sizes, options, against=against, compiles=compiles))
    if not contests:
        raise TargetError(f"bench: none of these kernels can be timed on {options.device}")
    runs = _in_processes(run, Run(contests, options), count, "assay.bench.timing.contest")
    first = runs[0][0]
    peak = f"{first.peak.device}, {first.peak.source}" if first.peak else ""
    return Timed(lines_of(contests, runs), first.clock, peak)


def of_solutions(
    problem: str, solutions: Sequence[str], request: Mapping[str, Any], count: int, trace: Path | None
) -> Timed:
    """Time solutions of a problem, each in turns with the reference, at all stated sizes.

    ``trace``: file for the last run's results in the format of FlashInfer Bench. Raises `BenchError` and
    `ProblemError`.
    """
    from assay.judge.lines import lines_of
    from assay.judge.problems.reading import read
    from assay.judge.trace import write_traces

    if not solutions:
        raise BenchError(f"{problem}: is a problem; expected its solutions behind it: assay bench PROBLEM SOLUTION...")
    for solution in solutions:
        read(problem, solution)
    runs = _in_processes(_judged, (problem, tuple(solutions), dict(request)), count, "assay.judge.procedure")
    if trace is not None:
        note(f"wrote {write_traces(trace, *runs[-1])}")
    return Timed(lines_of(runs), "time.perf_counter in processes of their own, by turns with the reference")


def _judged(item: tuple[str, tuple[str, ...], dict[str, Any]], heartbeat: Heartbeat) -> list[SolutionVerdict]:
    from assay.judge.procedure import judge

    problem, solutions, request = item
    results = []
    for solution in solutions:
        heartbeat(solution, _SILENT)
        results.append(judge(problem, solution, timed="all", **request))
    return results


def _in_processes(function: Callable[[Any, Heartbeat], Any], item: Any, count: int, preload: str) -> list[Any]:
    """Return the results of ``count`` processes that run one after another. Raises `BenchError`."""
    results = []
    with ProgressBar("run", count) as bar:
        for _ in range(count):
            answer = run_alone(function, item, preload=preload, timeout=_SILENT)
            if isinstance(answer, Raised):
                raise answer.again(BenchError, "bench: ")
            if isinstance(answer, Lost):
                raise BenchError(f"bench: {answer.message}")
            results.append(answer)
            bar.advance()
    return results
