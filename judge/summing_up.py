"""From what was seen to a verdict: the outcome, and each aspect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from assay.bench.timing.accuracy import bits_of
from assay.judge.account import Account
from assay.judge.conduct import SUSPECT, Cheat, each_once
from assay.judge.course import Course
from assay.judge.solution.trials import Seen, Trial
from assay.judge.verdict import SolutionVerdict, Workload
from assay.verify.comparison.result import Result, by_reason
from assay.verify.examination.about import about
from assay.verify.findings import ASPECTS, Aspect, Failure

_TRUSTED_SHARE = 0.01  # of the judged elements must be nonzero; of a strided transposed convolution one in 27 is
_STATUSES = {"shape": "INCORRECT_SHAPE", "dtype": "INCORRECT_DTYPE", "crash": "RUNTIME_ERROR", "timeout": "TIMEOUT"}


def verdict_of(account: Account, course: Course | None, outcome: str = "", note: str = "") -> SolutionVerdict:
    """The verdict; ``outcome`` and its reason where they are known beforehand."""
    cheats = each_once(course.cheats) if course is not None else ()
    results = [seen.result for seen in course.seen] if course is not None else []
    if not outcome and course is not None:
        outcome, note = _outcome(course, cheats, results)
    failing = [result.failure.ratio or math.inf for result in results if result.failure is not None]
    left: Counter[str] = Counter()
    for result in results:
        left.update(by_reason(result.left_out))
    notes = [*([note] if note else []), *(course.notes if course is not None else [])]
    return SolutionVerdict(
        outcome=outcome,
        kernel=account.answer.name,
        spec=account.problem.name,
        dtype=", ".join(dict.fromkeys(results[0].case.dtypes.values())) if results else "",
        contract=str(account.ways.contract),
        cases=len(results),
        worst=max([*(result.worst for result in results), *failing], default=0.0),
        aspects=_aspects(account, course, cheats) if course is not None else {},
        phases=dict(Counter("timed" if seen.timed else seen.trial.kind for seen in course.seen)) if course else {},
        elements=sum(result.judged for result in results),
        unjudged=sum(result.unjudged for result in results),
        left_out=dict(left),
        unresolved=sum(result.unresolved for result in results),
        seed=account.ways.seed,
        note="; ".join(notes),
        target=account.path,
        about=about(verdict_of, account.ways.device, ""),
        problem=str(account.problem.path),
        solution=account.path,
        format=account.problem.format,
        cheats=cheats,
        sizes=tuple(dict.fromkeys(account.sizes)),
        not_judged=tuple(dict.fromkeys(account.not_judged)),
        speed=account.speed,
        workloads=tuple(account.workloads),
    )


def _outcome(course: Course, cheats: Sequence[Cheat], results: Sequence[Result]) -> tuple[str, str]:
    """The outcome, and why where it is neither PASS nor FAIL."""
    if course.failures or any(cheat.name not in SUSPECT for cheat in cheats):
        return "FAIL", ""
    if course.refusal and not results:
        return "INCONCLUSIVE", f"it takes only the given sizes, which are beyond this machine: {course.refusal}"
    judged, nonzero = sum(result.judged for result in results), sum(result.nonzero for result in results)
    if not judged:
        return "VACUOUS", "nothing was decided: no element of any call was judged"
    if unresolved := sum(result.unresolved for result in results):
        return "INCONCLUSIVE", f"{unresolved} elements lie within the golden's own radius of the limit"
    if nonzero < _TRUSTED_SHARE * judged:
        return "MISTRUSTED", f"only {nonzero} of {judged} judged elements should be other than zero"
    note = f"it takes no other sizes ({course.refusal})" if course.refusal else ""
    return ("WARN", "; ".join(filter(None, [str(cheats[0]), note]))) if cheats else ("PASS", note)


def _aspects(account: Account, course: Course, cheats: Sequence[Cheat]) -> dict[str, Aspect]:
    """Each aspect: what is broken with its failure, what is kept, what wasn't tried."""
    results = {}
    for name in ASPECTS:
        cases, worst = course.kept.get(name, 0), course.worst.get(name, 0.0)
        if name in course.failures:
            failure, trial = course.failures[name]
            ratio = float(failure.ratio or math.inf)
            results[name] = Aspect("broken", cases + 1, max(worst, ratio), failure, repro=account.repro(trial))
        elif cases:
            results[name] = Aspect("kept", cases, worst)
        else:
            results[name] = Aspect(note=course.refusal if name == "shapes" else "")
    certain = [cheat for cheat in cheats if cheat.name not in SUSPECT]
    if certain:
        words = "; ".join(map(str, certain))
        failure = Failure("conduct", account.some_case(course), words, aspect="conduct")
        line = next((cheat.trial for cheat in certain if cheat.trial), "")
        trial = Trial.of_line(line) if line else Trial()
        results["conduct"] = Aspect("broken", len(certain), math.inf, failure, repro=account.repro(trial))
    elif "conduct" not in course.failures and course.seen:
        status = "suspect" if cheats else "kept"
        results["conduct"] = Aspect(status, len(course.seen), note="; ".join(map(str, cheats)))
    return results


def workload_of(account: Account, sizes: str, given: Any, seen: Seen) -> Workload:
    """What was found at sizes that the problem states."""
    failure, limits = seen.result.failure, seen.result.tolerances
    absolute = relative = radius = 0.0
    bits = math.nan
    if limits and seen.outputs:
        golden = limits[0].golden
        off = (seen.outputs[0].double() - golden).abs()
        off = torch.where(off.isfinite(), off, 0.0)
        inner = limits[0].inner[limits[0].inner.isfinite()]
        absolute, radius = _largest(off), _largest(inner)
        relative = _largest(off / golden.abs().clamp(min=torch.finfo(torch.float32).tiny))
        bits = bits_of(float(off.square().sum()), float(golden[golden.isfinite()].square().sum()))
    worst = seen.result.worst if failure is None else float(failure.ratio or math.inf)
    status = "PASSED" if failure is None else _STATUSES.get(failure.kind, "INCORRECT_NUMERICAL")
    message = failure.message if failure is not None else ""
    repro = account.repro(seen.trial)
    uuid = str(given.get("@uuid", ""))
    return Workload(uuid, status, sizes, message, worst, radius, relative, absolute, bits, repro=repro)


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
