"""The run of an examination: its phases in order, a tally of their results, and the order of the fixed cases.

A phase tries cases as long as they can still show an aspect that isn't broken.

The order of the fixed cases is measured (``./dev bench order``, into configs/case_order.toml) over kernels with one
planted fault each. It is greedy: the next kind of case is the one that finds the most faults not yet found per second.
A kind names how a case differs from an ordinary call, whatever the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice

from assay.configs import table
from assay.golden.evaluation.golden import Golden
from assay.golden.inputs.distributions import EVERY, EXACT, EXTREME, MIDPOINTS
from assay.runtime.deadline import CpuLimit, thread_clock
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.at_shape import at_cases
from assay.verify.cases.case import Case
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.sampler import SMALL, TILE
from assay.verify.cases.stored import stored_cases
from assay.verify.comparison.error_map import map_of, summed
from assay.verify.comparison.result import UNDECIDED, Result, by_reason
from assay.verify.comparison.sampled import case_label
from assay.verify.comparison.statistics import judge_statistically
from assay.verify.examination import phases
from assay.verify.examination.aspects import aspects_of, attributed_to, without_aspect
from assay.verify.examination.lengths import QUICKEST, detectable, length_cases
from assay.verify.examination.phases import fuzz
from assay.verify.examination.plan import Plan
from assay.verify.findings import Aspect, Detectable, Failure
from assay.verify.harness.runner import KernelHarness, suspicion

Fixed = tuple[str, Case]
"""The name of a phase, and one of its cases."""

_THEMES = EXTREME | {*EXACT, MIDPOINTS, EVERY, "zeros", "positive"}


def kind_of(fixed: Fixed) -> str:
    """Return the kind of a case: its phase, how it differs from an ordinary call, and its size class."""
    phase, case = fixed
    layout = next((name for name in case.layouts.values() if name != LAYOUTS[0]), "")
    words = (
        phase,
        *sorted(_THEMES & set(case.values.values())),
        *sorted({str(value) for _, _, value in case.edits}),
        *(word for word in (case.protocol, case.memory, case.unused) if word not in ("once", "plain")),
        layout,
        _extent(case),
    )
    return " ".join(filter(None, words))


def _extent(case: Case) -> str:
    if 0 in case.sizes.values():
        return "empty"
    size = max(case.sizes.values(), default=0)
    return "small" if size <= SMALL[-1] else "tile" if size <= TILE[-1] else "long"


@cache
def _measured() -> tuple[dict[str, int], frozenset[str]]:
    """Return the rank of each kind, and the kinds that a quick effort tries."""
    measured = table("case_order")
    kinds = measured["kinds"]
    return {kind: rank for rank, kind in enumerate(kinds)}, frozenset(kinds[: measured["quick"]])


def arranged(cases: Iterable[Fixed], effort: str) -> list[Fixed]:
    """Return the cases in the measured order; kinds that weren't measured come last, in their own order.

    A quick effort keeps the cases of the best kinds, of each phase's best kind, and those of `_always`; option sets
    take turns (`_in_turn`).
    """
    ranks, quick = _measured()
    ordered = sorted(cases, key=lambda fixed: ranks.get(kind_of(fixed), len(ranks)))
    if effort != "quick":
        return ordered
    best = {phase: kind_of((phase, case)) for phase, case in reversed(ordered)}
    return _in_turn([fixed for fixed in ordered if kind_of(fixed) in quick | {best[fixed[0]]} or _always(fixed)])


def _always(fixed: Fixed) -> bool:
    """Whether a quick effort keeps a case whatever its rank.

    These are: the protocol "alone" (few contracts promise batch invariance), whole tiles (kernels often have a separate
    path for them), a peak in the last element, and factors over their whole range, of both signs and zero.
    """
    phase, case = fixed
    factors = phase == "range" and bool({"vast", "cycled"} & set(case.values.values()))
    return case.protocol == "alone" or phase == "aligned" or (phase == "seams" and bool(case.edits)) or factors


def _in_turn(cases: list[Fixed]) -> list[Fixed]:
    """Return the cases with one option set for each group of cases that differ only in options and sizes.

    The groups take the sets in turn, so that each set comes with many kinds of cases. Whole tiles keep all sets.
    """
    alike: dict[tuple[object, ...], list[Fixed]] = {}
    for fixed in cases:
        phase, case = fixed
        if phase != "aligned":
            ends = tuple((name, not any(index)) for name, index, _ in case.edits)
            alike.setdefault((kind_of(fixed), *sorted(case.values.items()), *ends), []).append(fixed)
    left_out = set()
    for turn, group in enumerate(alike.values()):
        sets = len({repr(case.options) for _, case in group})
        left_out |= {id(fixed) for at, fixed in enumerate(group) if at % sets != (turn + at // sets) % sets}
    return [fixed for fixed in cases if id(fixed) not in left_out]


@dataclass(frozen=True)
class Tally:
    """Counts over the cases of an examination: cases and judged elements, the largest ratio, and the state of each
    aspect.

    ``at`` describes what was judged of each large case. ``not_interpreted`` names what the interpreter lacks.
    ``refused`` counts the documented refusals by message. ``judged_of`` counts judged elements by output, ``left_out``
    the others by output and reason. ``nonzero`` adds up, for each case, the share of judged elements whose golden isn't
    zero, so that a large case of zeros counts as one case.

    A broken or suspect aspect holds its first failure, and the error map of that output.
    """

    cases: int = 0
    worst: float = 0.0
    judged: int = 0
    nonzero: float = 0.0
    unjudged: int = 0
    unresolved: int = 0
    judged_of: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    phases: Mapping[str, int] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()
    aspects: Mapping[str, Aspect] = field(default_factory=dict)
    at: tuple[str, ...] = ()
    not_interpreted: tuple[str, ...] = ()
    refused: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(phase: str, result: Result, aspects: Iterable[str]) -> Tally:
        """Return the tally of one case of a phase that shows these aspects."""
        status = "kept" if result.failure is None else "broken"
        aspect = Aspect(status, 1, result.worst, result.failure, map=map_of(result))
        return Tally(
            cases=1,
            worst=result.worst,
            judged=result.judged,
            nonzero=result.nonzero / max(result.judged, 1),
            unjudged=result.unjudged,
            unresolved=result.unresolved,
            judged_of=result.judged_of,
            left_out=result.left_out,
            phases={phase: 1},
            histogram=result.histogram,
            aspects=dict.fromkeys(aspects, aspect),
            at=(result.sampled,) if result.sampled else (),
        )

    @property
    def broken(self) -> set[str]:
        """The names of the broken aspects."""
        return {name for name, aspect in self.aspects.items() if aspect.status == "broken"}

    @property
    def suspect(self) -> list[str]:
        """The names of the suspect aspects."""
        return [name for name, aspect in self.aspects.items() if aspect.status == "suspect"]

    @property
    def undecided(self) -> str:
        """The reason why elements are undecided, if the reference's own numbers leave over a tenth of them open; else
        empty."""
        reasons = {reason: n for reason, n in by_reason(self.left_out).items() if reason.startswith(UNDECIDED)}
        left = sum(reasons.values())
        if left <= _UNDECIDED_SHARE * (self.judged + left):
            return ""
        return f"{left} of {self.judged + left} elements, {max(reasons, key=lambda reason: reasons[reason])}"

    @property
    def mostly_left_out(self) -> str:
        """The first output of which more than half isn't judged, with the reasons; empty if there is none."""
        for output in dict.fromkeys(output for output, _ in self.left_out):
            reasons = {reason: count for (name, reason), count in self.left_out.items() if name == output}
            left, judged = sum(reasons.values()), self.judged_of[output]
            if left > judged:
                words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                return f"{left} of {left + judged} elements of {output} were not judged: {words}"
        return ""

    def __add__(self, other: Tally) -> Tally:
        phases, aspects = dict(self.phases), dict(self.aspects)
        for name, aspect in other.aspects.items():
            aspects[name] = _together(aspects[name], aspect) if name in aspects else aspect
        for name, cases in other.phases.items():
            phases[name] = phases.get(name, 0) + cases
        return Tally(
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            worst=max(self.worst, other.worst),
            phases=phases,
            histogram=summed(self.histogram, other.histogram),
            aspects=aspects,
            at=self.at + other.at,
            not_interpreted=self.not_interpreted + other.not_interpreted,
        )


def _together(before: Aspect, after: Aspect) -> Aspect:
    first = max(before, after, key=lambda aspect: _RISING.index(aspect.status))  # the earlier of equals
    return replace(first, cases=before.cases + after.cases, worst=max(before.worst, after.worst))


_RISING = ("not tried", "kept", "suspect", "broken")
_UNDECIDED_SHARE = 0.1  # more undecided elements than this are too many for a PASS
_COUNTS = ("cases", "judged", "nonzero", "unjudged", "unresolved", "judged_of", "left_out", "refused")


_TIME_LIMIT = 4.0  # the most seconds of a case in a growing series, extrapolated from the case before it
_LONG_CASE = 1.0  # the most seconds of a case at the next length
_TELLING = 1000  # shorter sums take about as long whatever their length, so their time isn't extrapolated
_HIDDEN = 3  # an aspect is given up as hidden after this many of its cases failed by another aspect
_OF_NUMBERS = {"numbers", "range", "subnormals", "shapes", "layouts"}  # aspects that a flushed subnormal may break
Progress = Callable[[str, int, int], None]


@dataclass
class Run:
    """An examination in progress. ``progress(phase, done, of)`` is called for each case."""

    plan: Plan
    progress: Progress
    tally: Tally = field(default_factory=Tally)
    hidden: Counter[str] = field(default_factory=Counter)
    """Of each aspect, how many of its cases failed by another."""
    detectable: list[Detectable] = field(default_factory=list)
    """What the check notices at each length tried."""
    harness: KernelHarness = field(init=False)
    """Calls the kernel; it skips checks of properties that are already broken."""
    ended: bool = False
    """True once the run must stop: a single failure was requested and found, a call hung, or the interpreter lacks a
    feature."""

    def __post_init__(self) -> None:
        self.harness = self.plan.harness

    @property
    def excluded(self) -> set[str]:
        """The aspects that no case can show any more: broken, or hidden by a broken one."""
        hidden = {name for name, cases in self.hidden.items() if cases >= _HIDDEN}
        return self.avoided | hidden

    @property
    def avoided(self) -> set[str]:
        """The aspects that later cases avoid: the broken ones, and those that can't be distinguished from them."""
        broken = self.tally.broken
        if "memory" in broken:  # a second call may have other inputs
            broken |= {"determinism"}
        if "determinism" in broken:
            broken |= {"conduct"}
        return broken | ({"bias"} if "numbers" in broken else set())

    def execute(self, phases: Container[str] | None = None) -> Tally:
        """Run all phases, or those of these names, and return the tally."""
        self._size()
        for name, phase in PHASES:
            if not self.ended and (phases is None or name in phases):
                phase(self, name)
        return self.tally

    def _size(self) -> None:
        """Try a first ordinary case. If it shows that the kernel is interpreted, limit the sizes of all other cases."""
        for case in islice(phases.gate_cases(self.plan.sampler, "small"), 1):
            self.attempt("first", case)
        if self.harness.call.watch.launches:
            self.plan = replace(self.plan, sampler=self.plan.sampler.for_interpreter())

    def attempt(self, phase: str, case: Case, goldens: tuple[Golden, ...] | None = None) -> Result | None:
        """Try a case with the broken aspects removed; ``goldens`` are its goldens, if already known.

        Return None if the case can't show anything any more, or gave no result that counts.
        """
        plan, excluded = self.plan, self.excluded
        case = plan.sampler.tied(case)
        if self.ended or aspects_of(case) <= excluded:
            return None
        original = case
        for aspect in self.avoided if case.protocol != AT else ():
            case = plan.sampler.tied(without_aspect(aspect, case, plan.sampler))
        result = replace(self.harness, goldens=goldens if case == original else None).try_case(case)
        if result.failure is not None and result.failure.kind == "not_interpreted":
            self.tally += Tally(not_interpreted=(result.failure.message,))
            self.ended = True
            return None
        if result.failure is not None and result.failure.kind == "refused":
            sampled = (f"{case_label(case)}: refused, {result.failure.message}",) if case.protocol == AT else ()
            self.tally += Tally(refused=Counter({result.failure.message: 1}), at=sampled)
            return None
        shown = aspects_of(case)
        if result.failure is None:
            self.tally += Tally.of(phase, result, shown)
        else:
            self._add_failure(phase, result, result.failure, shown)
        return result

    def _add_failure(self, phase: str, result: Result, failure: Failure, shown: set[str]) -> None:
        """Count a failure under one aspect of its case; the case's other aspects count as hidden."""
        every = self.plan.settings.every_aspect
        aspect = attributed_to(failure, self._failure_of, self.plan.sampler)
        if aspect in _OF_NUMBERS:
            flushing = replace(self.harness, contract=replace(self.harness.contract, subnormals="flush"))
            if failure.golden is not None and flushing.try_case(failure.case).failure is None:
                aspect, self.harness = "subnormals", flushing
            elif aspect == "subnormals":  # wrong among subnormal inputs, and not by what a flush does
                aspect = "range"
        self.tally += Tally.of(phase, result, {aspect})
        same = {"determinism"} & shown - {aspect} if failure.golden is not None else set()  # the bits were compared
        self.tally += Tally(aspects=dict.fromkeys(same, Aspect("kept", 1)))
        self.hidden.update(shown - same - {aspect})
        self.ended = not every or failure.kind == "timeout" or failure.device_lost
        self.harness = self.harness.passing_over(frozenset(self.tally.broken & {"memory", "conduct"}))

    def _failure_of(self, case: Case) -> Failure | None:
        return self.harness.try_case(self.plan.sampler.tied(case)).failure

    def is_slow(self, phase: str, case: Case, seconds: float) -> bool:
        """Try a case. Return whether it took more than so many ``seconds`` of processor time."""
        limit = CpuLimit(seconds, thread_clock)
        self.attempt(phase, case)
        return limit.is_over()

    def try_with_statistics(self, phase: str, case: Case) -> tuple[Result, Result] | None:
        """Try a case, then judge its outputs by the statistical bound. Return both results, or None if the case failed
        or was changed."""
        case = self.plan.sampler.tied(case)
        result = self.attempt(phase, case)
        if result is None or result.failure is not None or result.case != case:
            return None
        second = judge_statistically(self.harness.oracle, case, result)
        if second.failure is not None:
            aspect = attributed_to(second.failure, self.suspicion, self.plan.sampler)
            self.tally += Tally(aspects={aspect: Aspect("suspect", failure=second.failure)})
        return result, second

    def suspicion(self, case: Case) -> Failure | None:
        """Return the failure of a case, by the contract or by the statistical bound."""
        return suspicion(self.harness, self.plan.sampler.tied(case))


def fixed_cases(plan: Plan) -> Iterator[Fixed]:
    """Yield the cases of the fixed phases, each with the name of its phase."""
    for name, cases_of in FIXED.items():
        for case in cases_of(plan):
            yield name, case


def _fixed(run: Run, name: str) -> None:
    """Try the fixed cases of all phases, the best kinds first."""
    cases = arranged(fixed_cases(run.plan), run.plan.settings.effort)
    for done, (phase, case) in enumerate(cases, 1):
        run.attempt(phase, case)
        run.progress(name, done, len(cases))


def _emitted(run: Run, name: str) -> None:
    """Try ordinary cases with the arithmetic that NVIDIA's backend emits, if the kernel is interpreted."""
    if run.harness.call.watch.launches:
        for case in phases.emitted_cases(run.plan.sampler):
            run.attempt(name, case)


def _outside(run: Run, name: str) -> None:
    """Try a case in a plain process, where the kernel can't detect the examination."""
    if run.plan.is_callable_outside:
        for case in phases.outside_cases(run.plan.sampler):
            run.attempt(name, case)


def _stored(run: Run, name: str) -> None:
    """Try the cases of a golden store, judged by the stored goldens."""
    plan = run.plan
    if plan.settings.goldens is None:
        return
    run.tally += Tally(phases={name: 0})
    results = list(stored_cases(plan.settings.goldens, plan.sampler))
    for done, stored in enumerate(results, 1):
        run.attempt(name, stored.case, stored.goldens)
        run.progress(name, done, len(results))


def _fuzz(run: Run, name: str) -> None:
    """Try fuzzed cases; the search climbs towards larger ratios of error to radius."""
    examples, done = run.plan.settings.fuzzed, 0

    def one(case: Case) -> float | None:
        nonlocal done
        done += 1
        run.progress(name, done, examples)
        result = run.attempt(name, case)
        return None if result is None else result.worst

    if examples:
        fuzz(run.plan.sampler, examples, one)


def _grow(run: Run, name: str) -> None:
    """Try each series of growing cases until the next case would take too long."""
    limit = _TIME_LIMIT / (4 if run.plan.settings.effort == "quick" else 1)
    longest = min(limit, run.plan.settings.timeout / 4) / phases.GROWTH
    for series in phases.over_limit_cases(run.plan.sampler):
        for done, case in enumerate(series, 1):
            tries = 2 if done == 1 else 1  # the first call may compile
            slow = all(run.is_slow(name, case, longest) for _ in range(tries))
            run.progress(name, done, len(series))
            if slow or run.ended:
                break


def _at(run: Run, name: str) -> None:
    """Try the cases at production sizes."""
    cases = list(at_cases(run.plan.sampler, run.plan.settings.at))
    for done, case in enumerate(cases, 1):
        if run.attempt(name, case) is None:
            excluded = " and ".join(sorted(aspects_of(case)))
            run.tally += Tally(at=(f"{case_label(case)}: not tried, as {excluded} are broken or hidden already",))
        run.progress(name, done, len(cases))


def _lengths(run: Run, name: str) -> None:
    """Try sums of growing length until the next would take too long; then series of calls with the longest.

    A longer effort also tries the series of the longest length of a quick effort, so that it finds no less.
    """
    last: dict[bool, Case] = {}
    series = length_cases(run.plan.sampler, quick=run.plan.settings.effort == "quick")
    for done, (length, cases) in enumerate(series, 1):
        growth = series[done][0] / length if done < len(series) and length >= _TELLING else 1.0
        seen, slow = [], True
        for case in cases:
            limit = CpuLimit(min(_LONG_CASE, run.plan.settings.timeout / 4) / growth, thread_clock)
            seen.append(run.try_with_statistics(name, case))
            slow = slow and limit.is_over()  # one of them may compile
        result = detectable(length, [pair for pair in seen if pair is not None])
        run.detectable += [result] if result is not None else []
        run.progress(name, done, len(series))
        last[length > QUICKEST[-1]] = cases[-1]
        if run.ended or slow:
            break
    for case in last.values():
        run.attempt("bias", replace(case, protocol="bias"))


FIXED: Mapping[str, Callable[[Plan], Iterable[Case]]] = {
    "exact": lambda plan: phases.exact_cases(plan.sampler),
    "invariants": lambda plan: phases.invariant_cases(plan.sampler, plan.settings.contract),
    "range": lambda plan: phases.range_cases(plan.sampler),
    "lone": lambda plan: phases.single_operand_cases(plan.sampler),
    "seams": lambda plan: phases.block_boundary_cases(plan.sampler),
    "aligned": lambda plan: phases.aligned_cases(plan.sampler),
    "special": lambda plan: phases.special_cases(plan.sampler),
    "every": lambda plan: phases.every_cases(plan.sampler),
    "bias": lambda plan: phases.bias_cases(plan.sampler),
}
"""The phases of cases that are fixed beforehand, by name."""

PHASES: tuple[tuple[str, Callable[[Run, str], None]], ...] = (
    ("stored", _stored),
    ("fixed", _fixed),
    ("emitted", _emitted),
    ("outside", _outside),
    ("lengths", _lengths),
    ("fuzz", _fuzz),
    ("beyond", _grow),
    ("at", _at),
)
"""The phases in turn: name, and what it does; those of `FIXED` are one, so that the best of their cases come first."""
