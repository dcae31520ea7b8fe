"""Converts verdicts on solutions to the lines of a bench record: one for each solution and stated size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from assay.bench.timing.contest import REFERENCE, Line
from assay.judge.speed import Time
from assay.judge.verdict import SolutionVerdict, Workload


def lines_of(runs: Sequence[Sequence[SolutionVerdict]]) -> list[Line]:
    """Return the bench lines of several runs of the same solutions of one problem.

    Each run has a verdict for each solution. A solution that failed in any run has no times. The reference, eager and
    compiled, has lines of its own.
    """
    results: dict[str, list[Line]] = {}
    for solution in zip(*runs, strict=True):
        bad = next((verdict for verdict in solution if not verdict.passed), None)
        stated = [{workload.sizes: workload for workload in verdict.workloads} for verdict in solution]
        for sizes in dict.fromkeys(size for one in stated for size in one):
            results.setdefault(sizes, []).append(_line(solution[0], sizes, [one.get(sizes) for one in stated], bad))
        for words in solution[0].not_judged:
            results.setdefault(words, []).append(replace(_empty(solution[0], words), outcome="NOT JUDGED"))
        if not stated[0] and not solution[0].not_judged:
            results.setdefault("", []).append(_empty(solution[0], "", bad or solution[0]))
    for sizes, lines in results.items():
        lines += _references([verdict for run in runs for verdict in run], sizes)
    return [line for lines in results.values() for line in lines]


def _empty(verdict: SolutionVerdict, sizes: str, bad: SolutionVerdict | None = None) -> Line:
    why = _reason(bad) if bad is not None else ""
    outcome = bad.outcome if bad is not None else verdict.outcome
    return Line(verdict.kernel, verdict.spec, verdict.dtype, f"{verdict.spec}; {sizes}", outcome, why)


def _line(
    first: SolutionVerdict, sizes: str, workloads: Sequence[Workload | None], bad: SolutionVerdict | None
) -> Line:
    """Return the line of one solution at one choice of sizes."""
    known = [workload for workload in workloads if workload is not None]
    line = replace(
        _empty(first, sizes, bad),
        judged=sum(workload.judged for workload in known),
        worst=_finite(max(workload.worst for workload in known)),
        bits=_finite(min((w.bits for w in known if not math.isnan(w.bits)), default=math.nan)),
    )
    speeds = [workload.speed for workload in known if workload.speed is not None]
    if bad is not None or not speeds:
        return line
    compared = [speed for speed in speeds if speed.reference is not None]
    return replace(
        _timed(line, [speed.solution for speed in speeds]),
        runs=[[speed.solution.median / 1e3] for speed in compared],
        yardstick=[[speed.reference.median / 1e3] for speed in compared if speed.reference is not None],
        gap=speeds[0].note,
    )


def _references(verdicts: Sequence[SolutionVerdict], sizes: str) -> list[Line]:
    """Return the lines of the reference, eager and compiled, at these sizes."""
    speeds = [w.speed for verdict in verdicts for w in verdict.workloads if w.sizes == sizes and w.speed is not None]
    times = {
        "reference": [speed.reference for speed in speeds if speed.reference is not None],
        "reference (torch.compile)": [speed.compiled for speed in speeds if speed.compiled is not None],
    }
    named = replace(_empty(verdicts[0], sizes), outcome=REFERENCE)
    return [_timed(replace(named, kernel=name), every) for name, every in times.items() if every]


def _timed(line: Line, times: Sequence[Time]) -> Line:
    """Return the line with the medians over all runs of time and spread, in seconds."""
    seconds, spread = (statistics.median(getattr(time, name) for time in times) / 1e3 for name in ("median", "spread"))
    return replace(line, seconds=seconds, spread=spread, calls=sum(time.calls for time in times))


def _reason(verdict: SolutionVerdict) -> str:
    reasons = [str(cheat) for cheat in verdict.cheats]
    if verdict.failure is not None:
        reasons.append(f"{verdict.failure.kind}: {verdict.failure.message}")
    return "; ".join(reasons) or verdict.note


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
