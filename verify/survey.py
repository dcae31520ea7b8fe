"""The survey: every kernel of a table against its contract, in each of its dtypes.

Results are data; nothing is printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from assay.golden.isolate import Lost, Raised, Remember, Workers
from assay.golden.registry import spec
from assay.verify.contract import contract_from_table
from assay.verify.examination import examine
from assay.verify.interpreter import emulating
from assay.verify.repro import load_target, parse_line
from assay.verify.result import Failure
from assay.verify.survey_table import Entry
from assay.verify.verdict import Verdict


@dataclass(frozen=True)
class Job:
    """An entry in one dtype, and how hard to try.

    ``threads`` 0: as many as torch takes by itself. ``faithful`` names the device whose tensor cores are emulated.
    """

    entry: Entry
    dtype: Any = None
    examples: int = 200
    seed: int = 0
    device: str = "cpu"
    timeout: float = 30.0
    threads: int = 0
    faithful: str = ""

    @property
    def dtype_name(self) -> str:
        """The dtype as a report shows it."""
        if isinstance(self.dtype, Mapping):
            return ", ".join(dict.fromkeys(self.dtype.values()))
        return self.dtype or ""

    @property
    def effort(self) -> float:
        """About how long it takes, in units of a softmax's case: what is slow is begun first."""
        sets = min(math.prod(map(len, self.entry.options.values())), 4)
        cases = self.examples + 30 + 30 * sets
        return cases * self.entry.effort * (3.0 if spec(self.entry.spec).work else 1.0)


@dataclass(frozen=True)
class Row:
    """What became of a job: a verdict, or the reason why there is none.

    ``outcome`` is the verdict's, or "NOT HERE" (this build or machine hasn't got the kernel), "NOT RUN" (it wasn't its
    turn yet), "ERROR" (the entry can't be examined as it stands; ``reason`` says how to mend it).
    """

    entry: Entry
    dtype: str
    outcome: str
    verdict: Verdict | None = None
    reason: str = ""
    trace: str = ""

    @property
    def words(self) -> str:
        """The first violation, or whatever else there is to say, in one short line."""
        if self.verdict is None:
            return self.reason
        return failure_in_words(self.verdict.failure) if self.verdict.failure else self.verdict.note

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report as JSON."""
        entry = {name: getattr(self.entry, name) for name in ("name", "group", "target", "spec")}
        content = entry | {"dtype": self.dtype, "outcome": self.outcome, "words": self.words, "reason": self.reason}
        return content | {"verdict": self.verdict.as_dict() if self.verdict else None}


def plan(chosen: Iterable[Entry], **settings: Any) -> list[Job]:
    """A job for each entry, each of its dtypes and seeds; ``settings`` are those of `Job`, an entry's own go first."""
    jobs = []
    for entry in chosen:
        own = {"examples": entry.examples} if entry.examples is not None else {}
        for dtype in entry.dtypes:
            jobs += [
                Job(entry, dtype, **(settings | own | ({"seed": seed} if seed is not None else {})))
                for seed in entry.seeds or (None,)
            ]
    return jobs


def run(jobs: Sequence[Job], workers: Workers, *, until: float = math.inf) -> Iterator[tuple[int, Row]]:
    """``(place in jobs, row)`` for every job as it is done; the longest begin first, none after ``until``."""
    absent = {place: job.entry.absence(job.device) for place, job in enumerate(jobs)}
    for place, reason in absent.items():
        if reason:
            yield place, _row(jobs[place], "NOT HERE", reason=reason)
    order = sorted((place for place in absent if not absent[place]), key=lambda place: -jobs[place].effort)
    left = set(order)
    for position, answer in workers.each(examine_job, [jobs[place] for place in order], until=until):
        place = order[position]
        left.discard(place)
        yield place, _answered(jobs[place], answer)
    for place in sorted(left):
        yield place, not_run(jobs[place], "the time was up")


def examine_job(job: Job, remember: Remember) -> Verdict:
    """A job's verdict, in a worker; the repro line of the case under way is what a lost worker leaves behind."""
    if job.threads:
        torch.set_num_threads(job.threads)
    done, known = 0, ""

    def watch(line: str, seconds: float) -> None:
        nonlocal done, known
        if line != known:
            done, known = done + 1, line
        remember(f"{done} {_named(line, job.entry.target)}", seconds)

    with emulating(job.faithful):
        verdict = examine(
            load_target(job.entry.target),
            job.entry.spec,
            dtype=job.dtype,
            options=job.entry.options,
            contract=contract_from_table(job.entry.contract),
            examples=job.examples,
            seed=job.seed,
            device=job.device,
            timeout=job.timeout,
            watch=watch,
            **job.entry.settings,
        )
    return replace(verdict, kernel=job.entry.name, repro=_named(verdict.repro, job.entry.target))


def _named(line: str, target: str) -> str:
    """The repro line with the entry's target, where the kernel's own name can't be imported."""
    return line.replace('{"target":""', f'{{"target":{json.dumps(target)}', 1)


def failure_in_words(failure: Failure) -> str:
    """A failure in one short line: the sizes other than 1, what came, what is right, and how far off it may be."""
    case = failure.case
    setting = [f"{symbol}={size}" for symbol, size in case.sizes.items() if size != 1]
    defaults = case.definition.complete({})
    setting += [f"{name}={value}" for name, value in case.options.items() if value != defaults[name]]
    setting += [f"{name}{list(index)}={value:g}" for name, index, value in case.edits if value != 0]
    return f"{', '.join(setting) or 'all sizes 1'}: {_what_came(failure)}"


def _what_came(failure: Failure) -> str:
    if failure.got is None or failure.golden is None or failure.kind in ("layout", "unwritten_output"):
        return f"{failure.kind}: {failure.message}"
    place = f"{failure.output}{list(failure.index)}"
    allowed = "" if failure.radius is None else f", allowed ±{failure.radius:.2g}"
    return f"{place} came {failure.got:.6g}, right {failure.golden:.6g}{allowed}"


def _row(job: Job, outcome: str, *, reason: str, trace: str = "") -> Row:
    return Row(job.entry, job.dtype_name, outcome, reason=reason, trace=trace)


def not_run(job: Job, reason: str) -> Row:
    """The row of a job that was not begun, or not ended."""
    return _row(job, "NOT RUN", reason=reason)


def _answered(job: Job, answer: Verdict | Lost | Raised) -> Row:
    if isinstance(answer, Verdict):
        return Row(job.entry, job.dtype_name or answer.dtype, answer.outcome, answer)
    if isinstance(answer, Raised):
        return _row(job, "ERROR", reason=answer.message, trace=answer.trace)
    return _lost(job, answer)


def _lost(job: Job, lost: Lost) -> Row:
    """A process that died is a finding, as any other; one that died before the first case examined nothing."""
    done, _, line = lost.note.partition(" ")
    if not line:
        return _row(job, "ERROR", reason=f"before the first case, {lost.message}")
    verdict = Verdict(
        outcome="FAIL",
        kernel=job.entry.name,
        spec=job.entry.spec,
        dtype=job.dtype_name,
        contract=str(contract_from_table(job.entry.contract)),
        cases=int(done),
        worst=math.inf,
        failure=Failure(lost.kind, parse_line(line)[1], lost.message),
        seed=job.seed,
        repro=line,
    )
    return Row(job.entry, job.dtype_name, "FAIL", verdict)
