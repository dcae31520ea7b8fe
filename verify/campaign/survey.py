"""The survey: examine every kernel of a table against its contract, in each of its dtypes.

Results are data; nothing is printed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from assay.interpreter import emulating
from assay.runtime.engines import Engine, run_retried
from assay.runtime.pool import Heartbeat, Raised
from assay.runtime.process import Lost
from assay.verify.campaign.table import Entry
from assay.verify.examination.procedure import examination, observed_variants
from assay.verify.examination.repro import parse_line
from assay.verify.findings import Failure, Variant, broken_by
from assay.verify.harness.target import load_target
from assay.verify.report.text import failure_in_words
from assay.verify.settings import Settings
from assay.verify.verdict import Verdict


@dataclass(frozen=True)
class Job:
    """An entry, and the settings of one examination of it, with ``threads`` torch threads; 0: torch's default."""

    entry: Entry
    settings: Settings
    threads: int = 0

    @property
    def cost(self) -> float:
        """Return the approximate time, relative to a softmax's case; expensive jobs begin first."""
        sets = min(math.prod(map(len, self.settings.options.values())), 4)
        cases = self.settings.fuzzed + 30 + 30 * sets
        return cases * self.entry.cost * (3.0 if self.settings.definition.sizes.work else 1.0)


@dataclass(frozen=True)
class Row:
    """The outcome of a job: a verdict, or the reason why there is none.

    ``outcome`` is the verdict's, or "NOT HERE" (the kernel is missing in this build or on this machine), "NOT RUN" (the
    job was not begun), or "ERROR" (the entry can't be examined; ``reason`` says how to correct it).
    """

    entry: Entry
    dtype: str
    outcome: str
    verdict: Verdict | None = None
    reason: str = ""
    trace: str = ""

    @property
    def words(self) -> str:
        """Return the first violation, or the reason, in one short line."""
        if self.verdict is None:
            return self.reason
        return failure_in_words(self.verdict.failure) if self.verdict.failure else self.verdict.note

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a report as JSON."""
        entry = {name: getattr(self.entry, name) for name in ("name", "group", "target")}
        content = entry | {
            "spec": self.entry.settings.definition.name,
            "dtype": self.dtype,
            "outcome": self.outcome,
            "words": self.words,
            "reason": self.reason,
            "package": self.entry.package,
            "version": self.entry.version,
        }
        return content | {"verdict": self.verdict.as_dict() if self.verdict else None}


def plan(chosen: Iterable[Entry], *, threads: int = 0, **settings: Any) -> list[Job]:
    """Return a job for each entry, dtype and seed; ``settings`` apply to all, but an entry's own settings override
    them.

    If the device is "cuda" and present, no entry pretends it.
    """
    jobs = []
    for entry in chosen:
        own = settings | ({"examples": entry.examples} if entry.examples is not None else {})
        on_gpu = str(own.get("device", "")).startswith("cuda")
        own |= {"pretend": own.get("pretend") or ("" if on_gpu else entry.settings.pretend)}
        for dtype in entry.dtypes:
            for seed in entry.seeds or (own.get("seed", Settings.seed),):
                jobs.append(Job(entry, replace(entry.settings, **(own | {"dtype": dtype, "seed": seed})), threads))
    return jobs


def run(jobs: Sequence[Job], engine: Engine, *, until: float = math.inf) -> Iterator[tuple[int, Row]]:
    """Yield ``(index in jobs, row)`` as each job ends; the most expensive begin first, none after ``until``.

    A job that lost its worker before any case could be blamed, for example because the machine stopped, runs once more.
    """
    absent = {index: job.entry.absence(job.settings.device) for index, job in enumerate(jobs)}
    for index, reason in absent.items():
        if reason:
            yield index, _row(jobs[index], "NOT HERE", reason=reason)
    order = sorted((index for index in absent if not absent[index]), key=lambda index: -jobs[index].cost)
    left = set(order)
    ordered = [jobs[index] for index in order]
    for position, answer in run_retried(engine, examine_job, ordered, until=until, again=_blames_no_case):
        index = order[position]
        left.discard(index)
        yield index, row_of(jobs[index], answer)
    for index in sorted(left):
        yield index, not_run(jobs[index], "the time was up")


def _blames_no_case(lost: Lost) -> bool:
    return not lost.note


def examine_job(job: Job, heartbeat: Heartbeat) -> Verdict:
    """Return a job's verdict, in a worker; if the worker is lost, the repro line of its current case remains."""
    if job.threads:
        torch.set_num_threads(job.threads)
    done, known = 0, ""

    def watch(line: str, seconds: float) -> None:
        nonlocal done, known
        if line != known:
            done, known = done + 1, line
        heartbeat(f"{done} {line}", seconds)

    with emulating(job.settings.faithful, job.settings.pretend, job.settings.emission):
        kernel = load_target(job.entry.target)
        verdict = examination(kernel, job.settings, watch=watch, target=job.entry.target)
    return replace(verdict, kernel=job.entry.name)


def variants_of_job(job: Job) -> tuple[Variant, ...]:
    """Return what a job's kernel runs at which sizes, in this process."""
    with emulating(job.settings.faithful, job.settings.pretend, job.settings.emission):
        return observed_variants(load_target(job.entry.target), job.settings, job.entry.target)


def _row(job: Job, outcome: str, *, reason: str, trace: str = "") -> Row:
    return Row(job.entry, job.settings.dtype_name, outcome, reason=reason, trace=trace)


def not_run(job: Job, reason: str) -> Row:
    """Return the row of a job that did not begin or did not end."""
    return _row(job, "NOT RUN", reason=reason)


def row_of(job: Job, answer: Verdict | Lost | Raised) -> Row:
    """Return the row for a job's result."""
    if isinstance(answer, Verdict):
        return Row(job.entry, job.settings.dtype_name or answer.dtype, answer.outcome, answer)
    if isinstance(answer, Raised):
        return _row(job, "ERROR", reason=answer.message, trace=answer.trace)
    return _lost(job, answer)


def _lost(job: Job, lost: Lost) -> Row:
    """Return the row for a process that died: a finding, unless it died before the first case."""
    done, _, line = lost.note.partition(" ")
    if not line:
        return _row(job, "ERROR", reason=f"before the first case, {lost.message}")
    verdict = Verdict(
        outcome="FAIL",
        kernel=job.entry.name,
        spec=job.settings.definition.name,
        dtype=job.settings.dtype_name,
        contract=str(job.settings.contract),
        cases=int(done),
        worst=math.inf,
        aspects=broken_by(Failure(lost.kind, parse_line(line)[2], lost.message), line),
        seed=job.settings.seed,
        target=job.entry.target,
    )
    return Row(job.entry, job.settings.dtype_name, "FAIL", verdict)
