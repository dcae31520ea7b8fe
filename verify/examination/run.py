"""The run of an examination: its phases in order, a tally of their results, and the order of the fixed cases.

A phase tries cases as long as they can still show an aspect that isn't broken.

The order of the fixed cases is measured (``./dev bench order``, into configs/case_order.toml) over kernels with one
planted fault each. It is greedy: the next kind of case is the one that finds the most faults not yet found per second.
A kind names how a case differs from an ordinary call, whatever the op.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import islice
from typing import TypeVar

from assay.configs import table
from assay.golden.errors import DefinitionError
from assay.golden.evaluation.golden import Golden
from assay.golden.inputs.distributions import EVERY, EXACT, EXTREME, MIDPOINTS
from assay.interpreter import DependentPrograms
from assay.runtime.deadline import CpuLimit, Deadline, thread_clock
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.at_shape import at_cases
from assay.verify.cases.case import Case
from assay.verify.cases.factors import Covering, Factors
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.cases.production import GROWTH, LEVELS, large_pairs, load_of, production_cases
from assay.verify.cases.sampler import SMALL, TILE, Sampler
from assay.verify.cases.stored import stored_cases
from assay.verify.comparison.error_map import map_of
from assay.verify.comparison.result import UNDECIDED, UNRESOLVED, Counts, Result, by_reason
from assay.verify.comparison.sampled import case_label
from assay.verify.comparison.statistics import INDEPENDENT, detectable, is_hollow, is_ordinary, judge_statistically
from assay.verify.examination import phases
from assay.verify.examination.aspects import aspects_of, attributed_to, without_aspect
from assay.verify.examination.plan import Plan
from assay.verify.examination.variants import Search
from assay.verify.findings import Aspect, Detectable, Failure, Pairs, Variant
from assay.verify.harness import lost_device
from assay.verify.harness.compilation import Compiled, compiled
from assay.verify.harness.runner import KernelHarness, failure_or_suspicion
from assay.verify.harness.time_limit import COMPILATION

T = TypeVar("T")
Fixed = tuple[str, Case]
"""The name of a phase, and one of its cases."""

_THEMES = EXTREME | {*EXACT, MIDPOINTS, EVERY, "zeros", "positive"}


def kind_of(fixed: Fixed) -> str:
    """Return the kind of a case: its phase, how it differs from an ordinary call, and its size class."""
    phase, case = fixed
    size = max(case.sizes.values(), default=0)
    words = (
        phase,
        *sorted(_THEMES & set(case.values.values())),
        *sorted({str(value) for _, _, value in case.edits}),
        *(word for word in (case.protocol, case.memory, case.unused) if word not in ("once", "plain")),
        next((name for name in case.layouts.values() if name != LAYOUTS[0]), ""),
        "empty"
        if 0 in case.sizes.values()
        else "small"
        if size <= SMALL[-1]
        else "tile"
        if size <= TILE[-1]
        else "long",
    )
    return " ".join(filter(None, words))


@cache
def _measured() -> tuple[dict[str, int], frozenset[str]]:
    """Return the rank of each kind, and the kinds that a quick effort tries."""
    measured = table("case_order")
    kinds = measured["kinds"]
    return {kind: rank for rank, kind in enumerate(kinds)}, frozenset(kinds[: measured["quick"]])


def arranged(cases: Iterable[Fixed], effort: str) -> list[Fixed]:
    """Return the cases in the measured order; kinds that weren't measured come last, in their own order.

    A quick effort keeps the cases of the best kinds, of each phase's best kind, and those of `_always`; option sets
    take turns (`_in_turn`). Where the caller's sizes admit a best kind in another size class only, it is kept in that.
    """
    ranks, quick = _measured()
    ordered = sorted(cases, key=lambda fixed: ranks.get(kind_of(fixed), len(ranks)))
    if effort != "quick":
        return ordered
    best = {phase: kind_of((phase, case)) for phase, case in reversed(ordered)}
    kinds = dict.fromkeys(map(kind_of, ordered))
    have = {_unsized(kind) for kind in kinds if kind in quick}
    lacking = {_unsized(kind) for kind in quick} - have
    others = {_unsized(kind): kind for kind in reversed(kinds) if _unsized(kind) in lacking}
    kept = quick | {*best.values()} | {*others.values()}
    return _in_turn([fixed for fixed in ordered if kind_of(fixed) in kept or _always(fixed)])


def _unsized(kind: str) -> str:
    """Return a kind without its size class."""
    return kind.rpartition(" ")[0]


def _always(fixed: Fixed) -> bool:
    """Whether a quick effort keeps a case whatever its rank.

    These are: the protocol "alone" (few contracts promise batch invariance), whole tiles (kernels often have a separate
    path for them), what one tensor alone may have, a peak in the last element of a long row, long rows far below zero,
    rows about an epsilon, rows with one peak in all tensors, logits of +-88, of which an exponential is subnormal, and
    factors over their whole range, of both signs and zero.
    """
    phase, case = fixed
    values = {*case.values.values()}
    kept = {
        "block_boundary": bool(case.edits) or "below" in values,
        "range": bool({"vast", "cycled", "faint", "one_peak", "steep"} & values),
    }
    return case.protocol == "alone" or phase in ("aligned", "domain") or kept.get(phase, False)


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
    # a Latin square: the cases of a group come in rounds of one per option set; group t keeps set t + r of its round r
    for turn, group in enumerate(alike.values()):
        sets = len({repr(case.options) for _, case in group})
        left_out |= {id(fixed) for at, fixed in enumerate(group) if at % sets != (turn + at // sets) % sets}
    return [fixed for fixed in cases if id(fixed) not in left_out]


@dataclass(frozen=True, kw_only=True)
class Tally(Counts):
    """Counts over the cases of an examination, and the state of each aspect.

    ``at`` describes what was judged of each large case. ``not_interpreted`` names what the interpreter lacks.
    ``refused`` counts the documented refusals by message, ``refused_chosen`` those of cases of chosen sizes (`CHOSEN`).
    ``nonzero`` adds up, for each case, the share of judged elements whose golden isn't zero, so that a large case of
    zeros counts as one case. ``mostly_left`` counts, by output, the cases that leave more than half of it unjudged.

    A broken or suspect aspect holds its first failure, and the error map of that output.
    """

    cases: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    aspects: Mapping[str, Aspect] = field(default_factory=dict)
    at: tuple[str, ...] = ()
    not_interpreted: tuple[str, ...] = ()
    refused: Counter[str] = field(default_factory=Counter)
    refused_chosen: int = 0
    mostly_left: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(phase: str, result: Result, aspects: Iterable[str]) -> Tally:
        """Return the tally of one case of a phase that shows these aspects."""
        status = "kept" if result.failure is None else "broken"
        aspect = Aspect(status, 1, result.worst, result.failure, map=map_of(result))
        at = (result.sampled,) if result.sampled else ()
        tally = Tally(cases=1, phases={phase: 1}, aspects=dict.fromkeys(aspects, aspect), at=at).counting(result)
        left = Counter[str]()
        for (output, _), count in result.left_out.items():
            left[output] += count
        mostly_left = Counter(output for output, count in left.items() if count > result.judged_of[output])
        return replace(tally, nonzero=result.nonzero / max(result.judged, 1), mostly_left=mostly_left)

    @property
    def mostly_refused(self) -> str:
        """How many cases were refused, if more than were decided; else empty.

        Cases of chosen sizes don't count: a refused variant has none, so that they are mostly what the kernel takes.
        """
        refused = self.refused.total() - self.refused_chosen
        decided = self.cases - sum(self.phases.get(phase, 0) for phase in CHOSEN)
        return f"{refused} of {refused + decided} cases were refused" if refused > decided else ""

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
        """Why elements are undecided or unresolved, if over a tenth of all are; else empty."""
        reasons = {reason: n for reason, n in by_reason(self.left_out).items() if reason.startswith(UNDECIDED)}
        total = self.judged + sum(reasons.values())
        reasons[UNRESOLVED] = self.unresolved
        left = sum(reasons.values())
        if left <= _UNDECIDED_SHARE * total:
            return ""
        return f"{left} of {total} elements, {max(reasons, key=lambda reason: reasons[reason])}"

    @property
    def mostly_left_out(self) -> str:
        """The first output of which more than half isn't judged, in all and in most cases, with the reasons; empty if
        there is none."""
        for output in dict.fromkeys(output for output, _ in self.left_out):
            reasons = {reason: count for (name, reason), count in self.left_out.items() if name == output}
            left, judged = sum(reasons.values()), self.judged_of[output]
            if left > judged and self.mostly_left[output] > self.cases / 2:
                words = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
                return f"{left} of {left + judged} elements of {output} were not judged: {words}"
        return ""

    def __add__(self, other: Tally) -> Tally:
        aspects, phases = dict(self.aspects), Counter(self.phases)
        for name, new in other.aspects.items():
            old = aspects.get(name, new)
            gravest = max(old, new, key=lambda aspect: _RISING.index(aspect.status))  # the earlier of equals
            cases = new.cases + (old.cases if name in aspects else 0)
            aspects[name] = replace(gravest, cases=cases, worst=max(old.worst, new.worst))
        phases.update(other.phases)
        names = ("cases", "at", "not_interpreted", "refused", "refused_chosen", "mostly_left")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self.counting(other), aspects=aspects, phases=phases, **sums)


CHOSEN = ("variants", "large_pairs", "production")
"""The phases whose cases have sizes that were chosen by observing the kernel, or that are large."""
_RISING = ("not tried", "kept", "suspect", "broken")
_UNDECIDED_SHARE = 0.1  # more undecided and unresolved elements than this are too many for a PASS
_TIME_LIMIT = 4.0  # the most seconds of a case in a growing series, extrapolated from the case before it
# of the processor time of the cases before, that variants, triples, two large sizes and sizes of models may take
_VARIANTS_SHARE = {"quick": 0.1, "usual": 0.1, "thorough": 0.25}
_TRIPLES_SHARE = {"quick": 0.0, "usual": 0.0, "thorough": 1.0}
_MOST_TRIPLES = 4000  # cases of triples; an isolated kernel takes its time in another process
_PAIRS_SHARE = {"quick": 0.0, "usual": 0.05, "thorough": 1.0}
_PRODUCTION_SHARE = {"quick": 0.0, "usual": 0.05, "thorough": 1.0}
_FIRST_SHARES = 2.0  # of such a share that the first case may take, lest there is none
_PRODUCTION_ALWAYS = {"quick": 0, "usual": 0, "thorough": 2}  # levels that are tried whatever they take
_FEW_PROGRAMS = 12  # of each interpreted launch at such sizes
_VARIANTS_LEAST = 0.75  # seconds besides, for fifty small cases on a busy machine, and
_LARGE_LEAST = 0.05  # those of the other two
_LONG_CASE = 1.0  # the most seconds of a case at the next length
_SERIES_CASE = 0.25  # the most seconds of a case that is called in a series, but at the least length
_OVERHEAD = 1000  # sums shorter than this take about as long whatever their length: their time isn't extrapolated
_MOST_MASKED = 3  # an aspect is given up after this many of its cases failed by another aspect
_LOSS_COSTS = {"crash": 1, "timeout": 3}  # a hang also costs its time limit
_NUMBERS_AND_TUPLES = re.compile(r"-?\d+(,? -?\d+)*,?")
_OF_NUMBERS = {"numbers", "range", "subnormals", "shapes", "layouts"}  # aspects that a flushed subnormal may break
Progress = Callable[[str, int, int], None]


@dataclass
class Run:
    """An examination in progress. ``progress(phase, done, of)`` is called for each case."""

    plan: Plan
    progress: Progress
    tally: Tally = field(default_factory=Tally)
    masked_by_other_failure: Counter[str] = field(default_factory=Counter)
    """How many cases of each aspect failed by another aspect."""
    detectable: list[Detectable] = field(default_factory=list)
    """What the check notices at each length tried."""
    hollow: list[Detectable] = field(default_factory=list)
    """The lengths of other ordinary cases at which it doesn't notice that a tenth of the output is wrong."""
    search: Search | None = None
    """What was observed of the kernel's variants; None until their phase."""
    tried_variants: set[int] = field(default_factory=set)
    """The numbers of variants of which a case was judged."""
    beforehand: Sequence[Case] = ()
    """The cases whose programs were compiled beforehand."""
    compiled: Compiled = field(default_factory=Compiled)
    """What was compiled for them."""
    harness: KernelHarness = field(init=False)
    """Calls the kernel; it skips checks of properties that are already broken."""
    models: dict[str, bool] = field(default_factory=dict)
    """The models whose sizes the op has: whether a case was tried at some of a model's."""
    dependent: str = ""
    """Why programs can't be judged by themselves, if that left a model's sizes out."""
    planned: Sequence[Case] = ()
    """The cases of the fixed phases, whose pairs of factors the fuzzed cases need not cover."""
    judged: list[Case] = field(default_factory=list)
    """The cases that gave a result."""
    started: tuple[float, float] = field(default_factory=thread_clock)
    """The thread's processor time when the run began."""
    losses: int = 0
    """How many processes, other than this one, the kernel has lost or left hanging."""
    loss_budget: int = 6
    """How many more of these are borne, each of which costs a new one."""
    device_lost: bool = False
    """True once this process itself has lost the kernel's device: whatever is tried on it then fails."""
    deadline: Deadline | None = None
    """When the budget of the examination is over."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many cases of each phase came after it; where a phase plans no cases then, one."""
    largest: tuple[int, float, float] = (1, 1.0, 0.0)
    """The load of the plain case of most elements, and the seconds that it took."""
    ended: bool = False
    """True once the run must stop: a single failure was requested and found, a call hung, the device is lost, or the
    interpreter lacks a feature. Where the kernel has a device and a process of its own, a few of these are borne."""

    def __post_init__(self) -> None:
        self.harness = self.plan.harness

    @property
    def removed(self) -> set[str]:
        """The aspects that are removed from later cases: the broken ones, and any that can't be distinguished from
        them."""
        broken = self.tally.broken
        if "memory" in broken:  # a second call may have other inputs
            broken |= {"determinism"}
        if "determinism" in broken:
            broken |= {"conduct"}
        return broken | ({"bias"} if "numbers" in broken else set())

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What the kernel runs at which sizes; empty where it wasn't observed."""
        return () if self.search is None else self.search.listed(self.tried_variants)

    def observe_variants(self) -> Search:
        """Observe the kernel at many sizes, the first time."""
        if self.search is None:
            self.search = Search.of(self.harness, self.plan.sampler, self.plan.settings.effort)
        return self.search

    def compile_beforehand(self) -> None:
        """On a device compile the programs that the cases need, all at once, before the first case."""
        assignment, isolation = self.harness.call.assignment, self.harness.isolation
        if not assignment.on_device or self.plan.settings.framework != "torch":
            return
        with self.plan.steps.step("compiling beforehand"):
            variants = self.observe_variants().cases(self.plan.settings.effort)
            self.beforehand = [*cases_beforehand(self.plan), *(case for case, _ in variants)]
            cases = self.beforehand
            self.harness.call.report(cases[0], COMPILATION)
            self.compiled = isolation.compiled(cases) if isolation is not None else compiled(self.harness, cases)
            self.harness.call.report(cases[0])
            assignment.take({"refused": self.compiled.refused})

    def execute(self, names: Container[str] | None = None) -> Tally:
        """Run all phases, or those of these names, and return the tally.

        First of all, and so not among `PHASES`, comes one ordinary case; if it shows that the kernel is interpreted,
        sizes are limited for all phases.
        """
        self.attempt("first", next(phases.ordinary_cases(self.plan.sampler, "small")))
        if self.harness.call.watch.launches:
            sampler = self.plan.sampler.for_interpreter()
            if ":" in self.plan.settings.spec:  # an op says what is run one by one; of a reference the launches do
                with self.plan.steps.step("observing the kernel at many sizes"):
                    sampler = sampler.with_steps(self.observe_variants().programs())
            self.plan = replace(self.plan, sampler=sampler)
        for name, phase in PHASES:
            if not self.ended and (names is None or name in names):
                with self.plan.steps.step(f"the phase {name}", looks_for_faults=True):
                    phase(self, name)
        return self.tally

    def is_over(self, phase: str) -> bool:
        """Return whether the budget of seconds is over; then count what the phase was about to try as left out."""
        over = self.deadline is not None and not self.deadline.left
        self.left_out[phase] += over and not self.ended
        return over

    @property
    def untried_for_time(self) -> list[str]:
        """The aspects that have no case as the budget was over; but for a bias, which takes series of calls."""
        planned = set[str]().union(*map(aspects_of, self.planned)) if self.cut else set()
        return sorted(planned - self.tally.aspects.keys() - {"bias"})

    @property
    def cut(self) -> str:
        """What the budget left out, in words; empty if nothing."""
        left = ", ".join(f"{count} of {phase}" for phase, count in self.left_out.items() if count)
        return f"after {self.plan.settings.budget:.3g} s; cases left out: {left}" if left else ""

    def allowance(self, shares: Mapping[str, float], least: float) -> float:
        """Return the seconds that this effort's share of the time until now is, and ``least``."""
        return least + shares[self.plan.settings.effort] * (thread_clock()[0] - self.started[0])

    def load(self, case: Case) -> tuple[int, float]:
        """Return the elements of all tensors of a case, and the operations of as many programs as run."""
        return load_of(case, self.harness.most_programs if self.harness.call.watch.launches else 0)

    def seconds_of(self, case: Case) -> float:
        """Return about how long a case takes: as the largest before it, and longer as the root of its load, of which
        programs that load whole blocks notice less than in proportion."""
        load = max(new / old for new, old in zip(self.load(case), self.largest, strict=False))
        return self.largest[2] * math.sqrt(max(1.0, load))

    def attempt(self, phase: str, case: Case, goldens: tuple[Golden, ...] | None = None) -> Result | None:
        """Try a case with the broken aspects removed; ``goldens`` are its goldens, if already known.

        Return None if all its aspects are broken or given up already, or if it gave no result that counts.
        """
        result, before = None, thread_clock()[0]
        with self.plan.steps.step(f"a case of {phase}", looks_for_faults=True):
            result = self._attempted(phase, case, goldens)
        if result is not None and case.protocol in ("once", AT) and (load := self.load(case))[0] > self.largest[0]:
            self.largest = (*load, thread_clock()[0] - before)
        return result

    def _attempted(self, phase: str, case: Case, goldens: tuple[Golden, ...] | None) -> Result | None:
        """Try a case as `attempt` does."""
        plan = self.plan
        case = original = self.compiled.case(plan.sampler.tied(case), self.beforehand)
        given_up = {name for name, cases in self.masked_by_other_failure.items() if cases >= _MOST_MASKED}
        if self.ended or aspects_of(case) <= self.removed | given_up or self.is_over(phase):
            return None
        for aspect in self.removed if case.protocol != AT else ():
            case = plan.sampler.tied(without_aspect(aspect, case, plan.sampler))
        result = replace(self.harness, goldens=goldens if case == original else None).try_case(case)
        if result.failure is not None and result.failure.device_lost and not self.harness.outlives_device:
            self.device_lost = lost_device.can_be_lost(self.harness.device)
            words = f"{result.failure.message}; {lost_device.LOST}" if self.device_lost else result.failure.message
            result = replace(result, failure=replace(result.failure, message=words))
        failure, shown = result.failure, aspects_of(case)
        if failure is None or failure.kind not in ("not_interpreted", "refused"):
            self.judged.append(case)
        if failure is not None and self.compiled.chosen:
            failure = replace(failure, case=self.compiled.named(failure.case, self.beforehand))
        if failure is None:
            self.tally += Tally.of(phase, result, shown)
            self._measure(phase, result)
        elif failure.kind == "not_interpreted":
            self.tally += Tally(not_interpreted=(failure.message,))
            self.ended = True
            return None
        elif failure.kind == "refused":
            sampled = (f"{case_label(case)}: refused, {failure.message}",) if case.protocol == AT else ()
            words = next((each for each in self.tally.refused if _alike(each, failure.message)), failure.message)
            self.tally += Tally(refused=Counter({words: 1}), refused_chosen=int(phase in CHOSEN), at=sampled)
            return None
        else:
            self._add_failure(phase, result, failure, shown)
        return result

    def _add_failure(self, phase: str, result: Result, failure: Failure, shown: set[str]) -> None:
        """Count a failure under one aspect of its case; it masks the case's other aspects."""
        aspect = failure.aspect or "numbers"
        with self.plan.steps.step("finding what a failure depends on"):
            aspect = self._attributed(failure)
        self.tally += Tally.of(phase, result, {aspect})
        same = {"determinism"} & shown - {aspect} if failure.golden is not None else set()  # the bits were compared
        self.tally += Tally(aspects=dict.fromkeys(same, Aspect("kept", 1)))
        self.masked_by_other_failure.update(shown - same - {aspect})
        if failure.kind == "timeout" or failure.device_lost:
            self.losses += self.harness.outlives_device
            self.loss_budget -= _LOSS_COSTS[failure.kind] if self.harness.outlives_device else self.loss_budget
        self.ended = not self.plan.settings.every_aspect or self.loss_budget <= 0
        self.harness = replace(self.harness, ignored_aspects=frozenset(self.tally.broken & {"memory", "conduct"}))

    def _attributed(self, failure: Failure) -> str:
        """Return the aspect that a failure breaks; from a flushed subnormal on, such are flushed in goldens too."""
        sampler = self.plan.sampler
        aspect = attributed_to(failure, lambda case: self.harness.try_case(sampler.tied(case)).failure, sampler)
        if aspect in _OF_NUMBERS:
            flushing = replace(self.harness, contract=replace(self.harness.contract, subnormals="flush"))
            if failure.golden is not None and flushing.try_case(failure.case).failure is None:
                aspect, self.harness = "subnormals", flushing
            elif aspect == "subnormals":  # wrong among subnormal inputs, and not by what a flush does
                aspect = "range"
        return aspect

    def _measure(self, phase: str, result: Result) -> None:
        """Note the length of an ordinary case of which the worst case says nothing; there the statistical bound decides
        too, but of samples."""
        length = phases.length_of(result.case)
        if phase == "lengths" or length < phases.LENGTHS[0] or not is_ordinary(result.case):
            return
        parts = result.parts or (result,)
        if not all(map(is_hollow, parts)):
            return
        seconds = parts if result.parts else (self._judged_statistically(result),)
        level = detectable(length, list(zip(parts, seconds, strict=True)))
        if level is not None and level.vacuous:
            self.hollow.append(level)

    @property
    def levels(self) -> list[Detectable]:
        """What the check notices at each length tried, and the longer ones at which it notices nothing."""
        longest = max((level.length for level in self.detectable if not level.vacuous), default=0)
        known = {level.length: level for level in self.detectable}
        longer = {level.length: level for level in self.hollow if level.length > longest}
        return sorted((longer | known).values(), key=lambda level: level.length)

    def try_with_statistics(self, phase: str, case: Case) -> tuple[Result, Result] | None:
        """Try a case, then judge its outputs by the statistical bound. Return both results, or None if the case failed
        or was changed."""
        sampler = self.plan.sampler
        case = sampler.tied(case)
        result = self.attempt(phase, case)
        if result is None or result.failure is not None or result.case != case:
            return None
        with self.plan.steps.step(f"a case of {phase}", looks_for_faults=True):
            return result, self._judged_statistically(result)
        return None

    def _judged_statistically(self, result: Result) -> Result:
        """Return the result of the statistical bound; a failure makes its aspect suspect."""
        second, sampler = judge_statistically(self.harness.oracle, result.case, result), self.plan.sampler
        if second.failure is not None:
            aspect = attributed_to(
                second.failure, lambda case: failure_or_suspicion(self.harness, sampler.tied(case)), sampler
            )
            self.tally += Tally(aspects={aspect: Aspect("suspect", failure=second.failure)})
        return second

    @cached_property
    def factors(self) -> Factors:
        """The factors of its cases; read once the first case has shown whether the kernel is interpreted."""
        return Factors(self.plan.sampler)

    def pairs(self) -> Pairs:
        """Return the pairs of factors that the judged cases cover."""
        with self.plan.steps.step("counting what was covered"):
            return self._pairs()
        return Pairs()

    def _pairs(self) -> Pairs:
        thorough = self.plan.settings.effort == "thorough"
        covering = Covering(self.factors, map(self.plan.sampler.tied, self.judged), triples=thorough)
        covered, feasible = covering.pairs
        untried = [model for model, tried in self.models.items() if not tried]
        words = f"sizes of {', '.join(untried)}: not tried{self.dependent}" if untried else ""
        return Pairs(covered, feasible, "; ".join(filter(None, (covering.left_out, words))))

    def reporting(self, phase: str, items: Sequence[T]) -> Iterator[T]:
        """Yield the items, and report the progress after each."""
        for done, item in enumerate(items, 1):
            yield item
            self.progress(phase, done, len(items))


def _alike(one: str, other: str) -> bool:
    """Whether two messages are the same but for numbers, such as sizes."""
    return one == other or _NUMBERS_AND_TUPLES.sub("#", one) == _NUMBERS_AND_TUPLES.sub("#", other)


def fixed_cases(plan: Plan) -> Iterator[Fixed]:
    """Yield the cases of the phases that are fixed beforehand, each with the name of its phase."""
    sampler = plan.sampler
    by_phase: dict[str, Callable[[Sampler], Iterator[Case]]] = {
        "exact": phases.exact_cases,
        "invariants": partial(phases.invariant_cases, contract=plan.settings.contract),
        "range": phases.range_cases,
        "single_operand": phases.single_operand_cases,
        "domain": phases.domain_cases,
        "block_boundary": phases.block_boundary_cases,
        "aligned": phases.aligned_cases,
        "special": phases.special_cases,
        "every_number": phases.every_cases,
        "bias": phases.bias_cases,
    }
    for name, cases in by_phase.items():
        with plan.steps.step(f"drawing the cases of {name}", looks_for_faults=True):
            yield from ((name, case) for case in cases(sampler))


def cases_beforehand(plan: Plan) -> list[Case]:
    """Return the cases of an examination in which nothing fails.

    Of the fuzzed ones these are the cases that don't follow from results.
    """
    sampler, settings = plan.sampler, plan.settings
    drawn: list[Case] = []
    if settings.goldens is not None:
        drawn += [stored.case for stored in stored_cases(settings.goldens, sampler)]
    fixed = [case for _, case in arranged(fixed_cases(plan), settings.effort)]
    drawn += fixed
    for _, cases in phases.length_cases(sampler, quick=settings.effort == "quick"):
        drawn += cases
    thorough = settings.effort == "thorough"
    drawn += (rows := list(phases.covering_cases(Factors(sampler), fixed, settings.fuzzed, triples=thorough)))
    if len(rows) < settings.fuzzed:
        phases.fuzz(sampler, settings.fuzzed - len(rows), drawn.append)
    for series in phases.over_limit_cases(sampler):
        drawn += series
    if settings.effort != "quick":
        drawn += large_pairs(sampler)
        drawn += [case for level in range(len(LEVELS)) for _, case in production_cases(sampler, level)]
    drawn += at_cases(sampler, settings.at)
    return [sampler.tied(case) for case in (next(phases.ordinary_cases(sampler, "small")), *drawn)]


def _fixed(run: Run, name: str) -> None:
    """Try the cases of all fixed phases, the best kinds first."""
    fixed = arranged(fixed_cases(run.plan), run.plan.settings.effort)
    run.planned = [case for _, case in fixed]
    for phase, case in run.reporting(name, fixed):
        run.attempt(phase, case)


def _variants(run: Run, name: str) -> None:
    """Try the cases of the kernel's variants, the first of each before any second, until time is up.

    An isolated kernel takes its time in another process; there the number of cases is the limit.
    """
    if run.is_over(name):
        return
    cases = run.observe_variants().cases(run.plan.settings.effort)
    limit = CpuLimit(run.allowance(_VARIANTS_SHARE, _VARIANTS_LEAST), thread_clock)
    for case, number in run.reporting(name, cases):
        result = None
        with suppress(DefinitionError):  # a reference may refuse a size that nobody asked for
            result = None if limit.is_over() else run.attempt(name, case)
        if result is not None and number is not None:
            run.tried_variants.add(number)


def _emitted(run: Run, name: str) -> None:
    """Try ordinary cases with the arithmetic that NVIDIA's backend emits, if the kernel is interpreted."""
    for case in phases.emitted_cases(run.plan.sampler) if run.harness.call.watch.launches else ():
        run.attempt(name, case)


def _plain_process(run: Run, name: str) -> None:
    """Try a case in a plain process, where the kernel can't detect the examination."""
    for case in phases.plain_process_cases(run.plan.sampler) if run.plan.is_callable_outside else ():
        run.attempt(name, case)


def _stored(run: Run, name: str) -> None:
    """Try the cases of a golden store, judged by the stored goldens."""
    if run.plan.settings.goldens is not None:
        run.tally += Tally(phases={name: 0})
        for stored in run.reporting(name, list(stored_cases(run.plan.settings.goldens, run.plan.sampler))):
            run.attempt(name, stored.case, stored.goldens)


def _fuzz(run: Run, name: str) -> None:
    """Try the cases that cover what the fixed ones leave, then a search towards larger ratios of error to radius."""
    examples, done = run.plan.settings.fuzzed, 0

    def one(case: Case) -> float | None:
        nonlocal done
        done += 1
        run.progress(name, done, examples)
        result = run.attempt(name, case)
        return None if result is None else result.worst

    thorough = run.plan.settings.effort == "thorough"
    for case in phases.covering_cases(run.factors, run.planned, examples, triples=thorough):
        one(case)
    if done < examples:
        phases.fuzz(run.plan.sampler, examples - done, one)


def _triples(run: Run, name: str) -> None:
    """Try cases of every triple of a size, a distribution and an option that is left, until time is up."""
    settings = run.plan.settings
    if not _TRIPLES_SHARE[settings.effort] or not settings.fuzzed:
        return
    limit = CpuLimit(run.allowance(_TRIPLES_SHARE, _LARGE_LEAST), thread_clock)
    cases = phases.triple_cases(run.factors, map(run.plan.sampler.tied, run.judged))
    for done, case in enumerate(islice(cases, _MOST_TRIPLES), 1):
        if limit.is_over() or run.ended:
            break
        run.attempt(name, case)
        run.progress(name, done, done)


def _over_limit(run: Run, name: str) -> None:
    """Try each series of growing cases until the next case would take too long."""
    most = _TIME_LIMIT / (4 if run.plan.settings.effort == "quick" else 1)
    # the next case, GROWTH times as long at most, then stays within a quarter of a call's time limit
    longest = min(most, run.plan.settings.timeout / 4) / phases.GROWTH
    for series in phases.over_limit_cases(run.plan.sampler):
        for done, case in enumerate(series, 1):
            slow = True
            for _ in range(2 if done == 1 else 1):  # the first call may compile
                if slow:
                    limit = CpuLimit(longest, thread_clock)
                    run.attempt(name, case)
                    slow = limit.is_over()
            run.progress(name, done, len(series))
            if slow or run.ended:
                break


def _large_pairs(run: Run, name: str) -> None:
    """Try cases of two large sizes at once, those of least work first, as long as there is time for one more."""
    if not _PAIRS_SHARE[run.plan.settings.effort]:
        return
    run.harness = replace(run.harness, most_programs=_FEW_PROGRAMS)
    begun, seconds, tried = thread_clock()[0], run.allowance(_PAIRS_SHARE, _LARGE_LEAST), False
    for case in run.reporting(name, sorted(large_pairs(run.plan.sampler), key=lambda case: run.load(case)[1])):
        spent = thread_clock()[0] - begun
        with suppress(DependentPrograms, DefinitionError):  # a reference may refuse sizes that nobody asked for
            if spent + run.seconds_of(case) < seconds * (1 if tried else _FIRST_SHARES):
                tried |= run.attempt(name, case) is not None
    run.harness = replace(run.harness, most_programs=0)


def _production(run: Run, name: str) -> None:
    """Try cases at sizes of published models, the smallest first, as long as there is time for one more.

    How long a case takes follows from the largest before it, and from those that are `GROWTH` times smaller; the first
    may take `_FIRST_SHARES`. Of interpreted launches a few programs run; cases in which these can't be judged by
    themselves count as not tried.
    """
    run.harness = replace(run.harness, most_programs=_FEW_PROGRAMS)
    effort, sampler = run.plan.settings.effort, run.plan.sampler
    begun, longest, expected, seconds = thread_clock()[0], 0.0, 0.0, run.allowance(_PRODUCTION_SHARE, _LARGE_LEAST)
    most = 0 if effort == "quick" else len(LEVELS) - run.plan.settings.isolate  # that kernel's memory has a limit
    levels = [list(production_cases(sampler, level)) for level in range(most)]
    if run.harness.call.watch.launches:
        levels = [sorted(cases, key=lambda each: run.load(each[1])[1]) for cases in levels]
    run.models = {model: False for cases in levels for model, _ in cases}
    for level, cases in enumerate(levels):
        expected, longest = GROWTH * (longest or expected), 0.0  # of a level without a case: as expected
        for model, case in run.reporting(name, cases):
            before = thread_clock()[0]
            if any(run.models.values()):
                fits = before - begun + max(expected, longest) < seconds
            else:
                fits = before - begun + run.seconds_of(case) < _FIRST_SHARES * seconds
            if fits or level < _PRODUCTION_ALWAYS[effort]:
                try:
                    run.models[model] |= run.attempt(name, case) is not None
                except DependentPrograms as error:
                    run.dependent = f", as {error}"
                longest = max(longest, thread_clock()[0] - before)
        if cases and not any(run.models.values()):
            break
    run.harness = replace(run.harness, most_programs=0)


def _at(run: Run, name: str) -> None:
    """Try the cases at production sizes."""
    for case in run.reporting(name, list(at_cases(run.plan.sampler, run.plan.settings.at))):
        cut = run.left_out[name]
        if run.attempt(name, case) is None:
            why = f"{' and '.join(sorted(aspects_of(case)))} are broken or hidden already"
            why = why if run.left_out[name] == cut else "the budget was over"
            run.tally += Tally(at=(f"{case_label(case)}: not tried, as {why}",))


def _lengths(run: Run, name: str) -> None:
    """Try sums of growing length until the next would take too long; then series of calls with the longest.

    A longer effort also tries the series of the longest length of a quick effort, so that it finds no less.
    """
    longest_quick: Case | None = None  # as a quick effort would have it
    longest: Case | None = None
    series = phases.length_cases(run.plan.sampler, quick=run.plan.settings.effort == "quick")
    for done, (length, cases) in enumerate(series, 1):
        growth = series[done][0] / length if done < len(series) and length >= _OVERHEAD else 1.0
        seen, slow, short = [], True, done == 1
        for case in cases:
            limit = CpuLimit(min(_LONG_CASE, run.plan.settings.timeout / 4) / growth, thread_clock)
            for_series = CpuLimit(_SERIES_CASE, thread_clock)
            seen.append(run.try_with_statistics(name, case))
            slow = slow and limit.is_over()  # one of them may compile
            short |= not for_series.is_over()
        result = detectable(length, [pair for pair in seen if pair is not None])
        if result is not None and result.vacuous and len(cases) < len(INDEPENDENT):  # perhaps on these data alone
            others = dict(phases.length_cases(run.plan.sampler)).get(length, cases)
            seen += [run.try_with_statistics(name, case) for case in others if case.values != cases[0].values]
            result = detectable(length, [pair for pair in seen if pair is not None])
        run.detectable += [result] if result is not None else []
        run.progress(name, done, len(series))
        if length > phases.QUICK_LENGTHS[-1]:
            longest = cases[-1] if short else longest
        else:
            longest_quick = cases[-1] if short else longest_quick
        if run.ended or slow:
            break
    for case in filter(None, (longest_quick, longest)):
        run.attempt("bias", replace(case, protocol="bias"))


PHASES: tuple[tuple[str, Callable[[Run, str], None]], ...] = (
    ("stored", _stored),
    ("fixed", _fixed),
    ("variants", _variants),
    ("emitted", _emitted),
    ("plain_process", _plain_process),
    ("lengths", _lengths),
    ("fuzz", _fuzz),
    ("triples", _triples),
    ("over_limit", _over_limit),
    ("large_pairs", _large_pairs),
    ("production", _production),
    ("at", _at),
)
"""The phases in turn: name, and what it does. Those of `fixed_cases` are one, "fixed", whose cases come in the order of
`arranged`; a verdict counts them by their own names."""
