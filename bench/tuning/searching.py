"""The search: every candidate is compiled, examined and timed, in that order, until it is dropped.

1. If the kernel launches Triton kernels, each candidate is compiled for the device's architecture (`assay inspect`).
   Candidates that don't compile, don't fit, or spill where others don't, are pruned before they run.
2. The others are examined under the contract, at sizes, layouts and distributions of the examination's own.
3. The remaining ones are timed alternately in judged calls (`assay.bench.timing`). Without a GPU no time of
   a Triton kernel is known, and modelled times are used.
4. The fastest on the front of speed and error within ``most_error`` wins, if it also passes a usual examination.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from assay.bench.inspection import inspecting
from assay.bench.inspection.arch import Arch, arch_named
from assay.bench.inspection.calls import Request, calls
from assay.bench.timing import contest
from assay.bench.tuning.choice import Choice
from assay.bench.tuning.pruning import configs_of, of_choice, with_resources, without_spills
from assay.bench.tuning.record import Candidate, Question, Record, Winner, bucket
from assay.bench.tuning.space import combined
from assay.runtime.engines import Engine
from assay.runtime.pool import Pool, Raised, run_alone, worker_count
from assay.runtime.process import Lost
from assay.runtime.results import result_key
from assay.verify.campaign.cache import digest
from assay.verify.campaign.survey import Job, plan, run
from assay.verify.campaign.table import Entry
from assay.verify.cases.case import Case
from assay.verify.errors import TuneError
from assay.verify.settings import EFFORTS, Settings

Progress = Callable[[str], None]

_SAME_WORK = 1.01  # a ratio of modelled work below which candidates count as equal


@dataclass(frozen=True)
class Search:
    """A search for a question: ``engine`` examines; compiling and timing run on this machine."""

    question: Question
    engine: Engine
    tell: Progress = print

    @property
    def settings(self) -> Settings:
        """Return the settings of an examination."""
        return Settings.from_table({"spec": self.question.spec, **self.question.settings})

    @property
    def arch(self) -> Arch | None:
        """Return the architecture of the question, or of this machine's device; None without Triton."""
        if find_spec("triton") is None:
            return None
        if self.question.arch:
            return arch_named(self.question.arch)
        if not self.question.device.startswith("cuda"):
            return arch_named("sm_90a")
        import torch

        major, minor = torch.cuda.get_device_capability(self.question.device)
        return arch_named(f"sm_{major}{minor}")

    def cases(self) -> list[Case]:
        """Return a case for each of the sizes, with the first value of each option."""
        settings = self.settings
        first = replace(settings, options={name: values[:1] for name, values in settings.options.items()})
        return list(calls(first, Request(self.question.sizes, self.question.layouts)))

    def key(self) -> str:
        """Return the key of this search: a digest of the question, the kernel's sources, versions and device."""
        job = Job(self._entry(Choice()), replace(self.settings, device=self.question.device))
        sizes = [bucket(case.sizes) for case in self.cases()]
        fields = {**vars(self.question), "sizes": sizes}
        space = [dict(self.question.space.choices), list(self.question.space.without)]
        question = [digest(job), {**fields, "space": space}, self._driver()]
        return result_key(question, __name__, targets=[self.question.target])[:16]

    def run(self) -> Record:
        """Search. Raises `TuneError` where there is nothing to choose, and as what examines and times does."""
        cases = self.cases()
        candidates = self._compiled(cases)
        candidates = self._examined(candidates, self.question.effort)
        candidates = self._timed(cases, candidates)
        candidates, winners = self._won(cases, candidates)
        return Record(
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            question=self.question,
            key=self.key(),
            machine=contest.machine(self.question.device),
            versions=contest.versions(),
            candidates=tuple(candidates),
            winners=tuple(winners),
        )

    def _entry(self, choice: Choice) -> Entry:
        """Return a candidate as an entry of a table."""
        return Entry(str(choice), choice.target(self.question.target), self.settings)

    def _compiled(self, cases: Sequence[Case]) -> list[Candidate]:
        """Return every candidate at every case, pruned by its compiled code if it has any."""
        space = list(self.question.space)
        if not space:
            raise TuneError("every combination of the space is left out; expected at least one")
        arch = self.arch
        compiled = self._inspect(space, cases) if arch else {}
        configs = configs_of(call for results in compiled.values() for call in results)
        if len(space) == 1 and not any(len(every) > 1 for every in configs.values()):
            raise TuneError(
                f"{self.question.target} leaves nothing to choose: it has no autotuner of two configurations or more; "
                "name choices by --choice or --space"
            )
        choices = combined(self.question.space, configs)
        results = []
        for index, case in enumerate(cases):
            own = [Candidate(str(case), choice, "PASS") for choice in choices]
            if arch and any(call.launches for each in compiled.values() for call in each):
                own = [
                    with_resources(one, of_choice(compiled[Choice(one.choice.keywords).key][index], one.choice), arch)
                    for one in own
                ]
                own = without_spills(own)
            results += own
        pruned = sum(one.outcome == "PRUNED" for one in results)
        self.tell(f"{len(results)} candidates, {pruned} pruned by the compiler")
        return results

    def _inspect(self, space: Sequence[Choice], cases: Sequence[Case]) -> dict[str, list[inspecting.Call]]:
        """Return the compiled calls of each choice of keywords, by its key, at each case."""
        arch, request = self.arch, Request(tuple(case.sizes for case in cases), self.question.layouts)
        assert arch is not None
        first = {name: values[:1] for name, values in self.settings.options.items()}
        settings = replace(self.settings, options=first)
        jobs = [
            inspecting.Job(str(choice), choice.target(self.question.target), arch.name, settings, request, pruned=True)
            for choice in space
        ]
        results: dict[str, list[inspecting.Call]] = {}
        with Pool(min(worker_count(), len(jobs)), preload="assay.bench.inspection.inspecting") as pool:
            for index, answer in pool.run(inspecting.inspect_job, jobs):
                if isinstance(answer, Raised) and answer.user_error:
                    raise TuneError(answer.message)
                if isinstance(answer, Raised | Lost):
                    answer = [inspecting.Call("", (), problem=answer.message) for _ in cases]
                results[space[index].key] = answer
        return results

    def _examined(self, candidates: Sequence[Candidate], effort: str) -> list[Candidate]:
        """Examine each remaining choice once; one that fails is dropped at every case."""
        left = {one.choice.key: one.choice for one in candidates if one.outcome == "PASS"}
        jobs = plan(
            [replace(self._entry(choice), dtypes=(self.settings.dtype,)) for choice in left.values()],
            effort=effort,
            device=self.question.device,
            threads=1,
        )
        said: dict[str, dict[str, Any]] = {}
        for index, row in run(jobs, self.engine):
            kept = row.outcome in ("PASS", "WARN")
            said[list(left)[index]] = {
                "outcome": "PASS" if kept else row.outcome,
                "why": "" if kept else f"examined: {row.words}",
                "worst": _known(row.verdict.worst) if row.verdict else None,
            }
        out = sum(each["outcome"] != "PASS" for each in said.values())
        self.tell(f"{len(left)} examined at {effort} effort, {out} are out")
        return [replace(one, **said[one.choice.key]) if one.outcome == "PASS" else one for one in candidates]

    def _timed(self, cases: Sequence[Case], candidates: Sequence[Candidate]) -> list[Candidate]:
        """Time the remaining candidates alternately, in judged calls."""
        results = list(candidates)
        options = contest.TimingOptions(
            self.question.device, self.question.seconds, self.question.rounds, cold=self._on_gpu
        )
        contests, indices = [], []
        for case in cases:
            own = [index for index, one in enumerate(results) if one.case == str(case) and one.outcome == "PASS"]
            if own:
                entries = [self._entry(results[index].choice) for index in own]
                contests.append(
                    contest.Contest(tuple(contest.Runner(e.name, e.target, e.settings) for e in entries), case)
                )
                indices.append(own)
        if not contests or (
            not self._on_gpu and any(one.registers for one in results)
        ):  # an interpreter would run them
            return results
        run = contest.Run(tuple(contests), options)
        answer = run_alone(contest.run, run, preload="assay.bench.timing.contest", timeout=contest.SILENT)
        if isinstance(answer, Raised | Lost):
            raise TuneError(f"timing: {answer.message}")
        for own, of_case in zip(indices, answer, strict=True):
            for index, timing in zip(own, of_case.timings, strict=True):
                one = replace(results[index], worst=_known(timing.worst), bits=_known(timing.bits))
                if timing.outcome == "PASS":
                    one = replace(one, seconds=timing.seconds, spread=_known(timing.spread))
                elif timing.outcome != "NOT TIMED":
                    one = replace(one, outcome=timing.outcome, why=f"timed: {timing.why}")
                results[index] = one
        self.tell(f"{sum(map(len, indices))} timed, {sum(one.why.startswith('timed') for one in results)} are out")
        return results

    def _won(self, cases: Sequence[Case], candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Winner]]:
        """Mark the front of each case; the fastest on it that passes a usual examination wins."""
        result, winners = list(candidates), []
        confirmed: dict[str, tuple[str, str]] = {}
        for case in cases:
            while True:
                own = [one for one in result if one.case == str(case) and one.outcome == "PASS"]
                ahead = front(own)
                best = min((one for one in ahead if (one.worst or 0.0) <= self.question.most_error),
                           key=lambda one: one.time, default=None)  # fmt: skip
                if best is None:
                    break
                if alike := not_told_apart(best, own):
                    words = f"the model can't tell {best.choice} from {len(alike)} others; time them on a GPU"
                    self.tell(f"{case}: no winner, as {words}")
                    break
                if best.choice.key not in confirmed:
                    (again,) = self._examined([best], max(self.question.effort, "usual", key=list(EFFORTS).index))
                    confirmed[best.choice.key] = again.outcome, again.why
                outcome, why = confirmed[best.choice.key]
                if outcome == "PASS":
                    winners.append(Winner(bucket(case.sizes), best.choice, best.seconds is not None))
                    chosen = {one.choice.key for one in ahead}
                    result = [_ranked(one, best, chosen) if one in own else one for one in result]
                    break
                result = [
                    replace(one, outcome=outcome, why=why)
                    if one.choice.key == best.choice.key and one.outcome == "PASS"
                    else one
                    for one in result
                ]
        return result, winners

    @property
    def _on_gpu(self) -> bool:
        return self.question.device.startswith("cuda")

    def _driver(self) -> str:
        if not self._on_gpu:
            return ""
        import torch

        return str(torch.version.cuda)


def not_told_apart(best: Candidate, others: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates whose modelled work is no more than that of the ``best``, which wasn't timed.

    Their modelled times differ by the number of warps alone, which says nothing of the time. Where the work isn't known
    these are all others.
    """
    others = [one for one in others if one.choice.key != best.choice.key]
    if best.seconds is not None or best.work is None:
        return others if best.seconds is None else []
    most = best.work * _SAME_WORK
    return [one for one in others if one.work is not None and one.work <= most]


def front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the Pareto front of time and error."""
    every = list(candidates)

    def error(one: Candidate) -> float:
        return math.inf if one.worst is None else one.worst

    return [
        one
        for one in every
        if not any(
            other.time <= one.time
            and error(other) <= error(one)
            and (other.time < one.time or error(other) < error(one))
            for other in every
        )
    ]


def _ranked(one: Candidate, best: Candidate, ahead: set[str]) -> Candidate:
    """Return a candidate that kept the contract as on the front, or as SLOWER."""
    if one.choice.key in ahead:
        return replace(one, front=True)
    return replace(one, outcome="SLOWER", why=f"neither faster nor more accurate than {best.choice}")


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def changed(before: Record, after: Record) -> list[str]:
    """Return in words where a repeated search differs from its record, apart from slower candidates."""
    old = {(one.case, one.choice.key): one for one in before.candidates}
    results = []
    for one in after.candidates:
        known: Any = old.pop((one.case, one.choice.key), None)
        if known is None:
            results.append(f"{one.choice}: a new candidate")
        elif _kept(known) != _kept(one):
            results.append(f"{one.choice}: {known.outcome} then, now {one.outcome}{f', {one.why}' if one.why else ''}")
    results += [f"{one.choice}: no candidate any more" for one in old.values()]
    now = {json.dumps(winner.sizes, sort_keys=True): winner for winner in after.winners}
    for winner in before.winners:
        new = now.get(json.dumps(winner.sizes, sort_keys=True))
        if new is None or (new.choice.key != winner.choice.key and not _as_fast(winner.choice, new.choice, after)):
            sizes = ", ".join(f"{name}={size}" for name, size in winner.sizes.items())
            results.append(f"at {sizes} {winner.choice} won, now {new.choice if new else 'none'}")
    return results


def _as_fast(choice: Choice, other: Choice, record: Record) -> bool:
    """Return whether a choice is in some case as fast as another, within both spreads and 5 %."""
    times = {
        key: [one for one in record.candidates if one.choice.key == key and _kept(one) == "PASS"]
        for key in (choice.key, other.key)
    }
    return any(
        a.time - (a.spread or 0.0) <= 1.05 * (b.time + (b.spread or 0.0))
        for a, b in zip(times[choice.key], times[other.key], strict=False)
    )


def _kept(one: Candidate) -> str:
    return "PASS" if one.outcome == "SLOWER" else one.outcome
