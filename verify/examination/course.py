"""The course of an examination: its phases in turn, each of which tries cases of aspects that may still be kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from assay.golden.evaluation.golden import Golden
from assay.runtime.patience import Patience, own_time
from assay.verify.cases.at_shape import PROTOCOL as AT
from assay.verify.cases.at_shape import at_cases
from assay.verify.cases.case import Case
from assay.verify.cases.stored import stored_cases
from assay.verify.comparison.result import Result
from assay.verify.comparison.sampled import asked
from assay.verify.comparison.suspicion import second_look
from assay.verify.examination import phases
from assay.verify.examination.aspects import aspects_of, blamed, without
from assay.verify.examination.fuzz import fuzz
from assay.verify.examination.lengths import QUICKEST, detectable, length_cases
from assay.verify.examination.order import Fixed, arranged
from assay.verify.examination.question import Question
from assay.verify.examination.tally import Tally
from assay.verify.findings import Aspect, Detectable, Failure
from assay.verify.harness.runner import Bench, suspicion

_PATIENCE = 4.0  # seconds that a case of growing size may take at most, as the one before it tells
_LONG_CASE, _TELLING = 1.0, 1000  # seconds that a longer case may take, and lengths whose time tells of it
_HIDDEN = 3  # cases of an aspect that fail by another, after which it can't be seen
_OF_NUMBERS = {"numbers", "range", "subnormals", "shapes", "layouts"}  # aspects that a flushed subnormal may break
Progress = Callable[[str, int, int], None]


@dataclass
class Course:
    """An examination under way; ``progress(phase, done, of)`` is told of each case."""

    question: Question
    progress: Progress
    tally: Tally = field(default_factory=Tally)
    hidden: Counter[str] = field(default_factory=Counter)
    """Of each aspect, how many of its cases failed by another."""
    detectable: list[Detectable] = field(default_factory=list)
    """What the check notices at each length tried."""
    bench: Bench = field(init=False)
    """How cases are tried: of what is broken already, what can be passed over is."""
    ended: bool = False
    """Whether no more cases are tried: after the first failure, where that is all that was asked, or a call that never
    came back, or what the interpreter can't do."""

    def __post_init__(self) -> None:
        self.bench = self.question.bench

    @property
    def closed(self) -> set[str]:
        """The aspects that are broken, or hidden by one that is."""
        hidden = {name for name, cases in self.hidden.items() if cases >= _HIDDEN}
        return self.spoiled | hidden

    @property
    def spoiled(self) -> set[str]:
        """The aspects that are broken, and those that can't be told from them: cases are tried without these."""
        broken = self.tally.broken
        if "memory" in broken:  # a second call may have other inputs
            broken |= {"determinism"}
        if "determinism" in broken:
            broken |= {"conduct"}
        return broken | ({"bias"} if "numbers" in broken else set())

    def run(self, phases: Container[str] | None = None) -> Tally:
        """What all phases saw, or those of these names."""
        self._size()
        for name, phase in PHASES:
            if not self.ended and (phases is None or name in phases):
                phase(self, name)
        return self.tally

    def _size(self) -> None:
        """Try a first ordinary case; if that shows the kernel to be interpreted, all others are sized for it."""
        for case in islice(phases.gate_cases(self.question.sampler, "small"), 1):
            self.attempt("first", case)
        if self.bench.call.watch.launches:
            self.question = replace(self.question, sampler=self.question.sampler.for_interpreter())

    def attempt(self, phase: str, case: Case, goldens: tuple[Golden, ...] | None = None) -> Result | None:
        """Try a case without what is known to be broken, by goldens known already or evaluated now.

        None where nothing is left that it could show.
        """
        question, closed = self.question, self.closed
        case = question.sampler.tied(case)
        if self.ended or aspects_of(case) <= closed:
            return None
        given = case
        for aspect in self.spoiled if case.protocol != AT else ():
            case = question.sampler.tied(without(aspect, case, question.sampler))
        result = replace(self.bench, goldens=goldens if case == given else None).try_case(case)
        if result.failure is not None and result.failure.kind == "not_interpreted":
            self.tally += Tally(not_interpreted=(result.failure.message,))
            self.ended = True
            return None
        if result.failure is not None and result.failure.kind == "refused":
            sampled = (f"{asked(case)}: refused, {result.failure.message}",) if case.protocol == AT else ()
            self.tally += Tally(refused=Counter({result.failure.message: 1}), at=sampled)
            return None
        shown = aspects_of(case)
        if result.failure is None:
            self.tally += Tally.of(phase, result, shown)
        else:
            self._add_failure(phase, result, result.failure, shown)
        return result

    def _add_failure(self, phase: str, result: Result, failure: Failure, shown: set[str]) -> None:
        """Put a failure down to one of the aspects that its case showed; the others were hidden by it."""
        every = self.question.settings.every_aspect
        aspect = blamed(failure, self._failure_of, self.question.sampler)
        if aspect in _OF_NUMBERS:
            flushing = replace(self.bench, contract=replace(self.bench.contract, subnormals="flush"))
            if failure.golden is not None and flushing.try_case(failure.case).failure is None:
                aspect, self.bench = "subnormals", flushing
            elif aspect == "subnormals":  # wrong among subnormal inputs, and not by what a flush does
                aspect = "range"
        self.tally += Tally.of(phase, result, {aspect})
        same = {"determinism"} & shown - {aspect} if failure.golden is not None else set()  # the bits were compared
        self.tally += Tally(aspects=dict.fromkeys(same, Aspect("kept", 1)))
        self.hidden.update(shown - same - {aspect})
        self.ended = not every or failure.kind == "timeout" or failure.device_lost
        self.bench = self.bench.passing_over(frozenset(self.tally.broken & {"memory", "conduct"}))

    def _failure_of(self, case: Case) -> Failure | None:
        return self.bench.try_case(self.question.sampler.tied(case)).failure

    def is_slow(self, phase: str, case: Case, seconds: float) -> bool:
        """Try a case; whether that takes so many seconds, however busy the machine is."""
        patience = Patience(seconds, own_time)
        self.attempt(phase, case)
        return patience.is_over()

    def look_twice(self, phase: str, case: Case) -> tuple[Result, Result] | None:
        """Try a case, and what it gave by what rounding is likely to do; None where it failed or showed no more."""
        case = self.question.sampler.tied(case)
        result = self.attempt(phase, case)
        if result is None or result.failure is not None or result.case != case:
            return None
        second = second_look(self.bench.oracle, case, result)
        if second.failure is not None:
            aspect = blamed(second.failure, self.suspicion, self.question.sampler)
            self.tally += Tally(aspects={aspect: Aspect("suspect", failure=second.failure)})
        return result, second

    def suspicion(self, case: Case) -> Failure | None:
        """What makes a case suspect, or fail."""
        return suspicion(self.bench, self.question.sampler.tied(case))


def fixed_cases(question: Question) -> Iterator[Fixed]:
    """The cases that are fixed beforehand, phase by phase."""
    for name, cases_of in FIXED.items():
        for case in cases_of(question):
            yield name, case


def _fixed(course: Course, name: str) -> None:
    """The cases that are fixed beforehand, the best first."""
    cases = arranged(fixed_cases(course.question), course.question.settings.effort)
    for done, (phase, case) in enumerate(cases, 1):
        course.attempt(phase, case)
        course.progress(name, done, len(cases))


def _emitted(course: Course, name: str) -> None:
    """Calls of an interpreted kernel as a compiler has it."""
    if course.bench.call.watch.launches:
        for case in phases.emitted_cases(course.question.sampler):
            course.attempt(name, case)


def _outside(course: Course, name: str) -> None:
    """A call in a process where nothing tells of an examination."""
    if course.question.is_callable_outside:
        for case in phases.outside_cases(course.question.sampler):
            course.attempt(name, case)


def _stored(course: Course, name: str) -> None:
    """The cases of a store, judged by its goldens."""
    question = course.question
    if question.settings.goldens is None:
        return
    course.tally += Tally(phases={name: 0})
    results = list(stored_cases(question.settings.goldens, question.sampler))
    for done, stored in enumerate(results, 1):
        course.attempt(name, stored.case, stored.goldens)
        course.progress(name, done, len(results))


def _fuzz(course: Course, name: str) -> None:
    """Cases that are searched for."""
    examples, done = course.question.settings.fuzzed, 0

    def one(case: Case) -> float | None:
        nonlocal done
        done += 1
        course.progress(name, done, examples)
        result = course.attempt(name, case)
        return None if result is None else result.worst

    if examples:
        fuzz(course.question.sampler, examples, one)


def _grow(course: Course, name: str) -> None:
    """Cases of growing size, each series as far as the next case won't take long."""
    patience = _PATIENCE / (4 if course.question.settings.effort == "quick" else 1)
    longest = min(patience, course.question.settings.timeout / 4) / phases.GROWTH
    for series in phases.beyond_cases(course.question.sampler):
        for done, case in enumerate(series, 1):
            tries = 2 if done == 1 else 1  # the first call may compile
            slow = all(course.is_slow(name, case, longest) for _ in range(tries))
            course.progress(name, done, len(series))
            if slow or course.ended:
                break


def _at(course: Course, name: str) -> None:
    """Cases at sizes of production."""
    cases = list(at_cases(course.question.sampler, course.question.settings.at))
    for done, case in enumerate(cases, 1):
        if course.attempt(name, case) is None:
            closed = " and ".join(sorted(aspects_of(case)))
            course.tally += Tally(at=(f"{asked(case)}: not tried, as {closed} are broken or hidden already",))
        course.progress(name, done, len(cases))


def _lengths(course: Course, name: str) -> None:
    """Cases of growing length, as far as the next won't take long; then series of calls with the longest.

    Also with the longest of a quick effort, so that no more effort finds less.
    """
    last: dict[bool, Case] = {}
    series = length_cases(course.question.sampler, quick=course.question.settings.effort == "quick")
    for done, (length, cases) in enumerate(series, 1):
        growth = series[done][0] / length if done < len(series) and length >= _TELLING else 1.0
        seen, slow = [], True
        for case in cases:
            patience = Patience(min(_LONG_CASE, course.question.settings.timeout / 4) / growth, own_time)
            seen.append(course.look_twice(name, case))
            slow = slow and patience.is_over()  # one of them may compile
        result = detectable(length, [pair for pair in seen if pair is not None])
        course.detectable += [result] if result is not None else []
        course.progress(name, done, len(series))
        last[length > QUICKEST[-1]] = cases[-1]
        if course.ended or slow:
            break
    for case in last.values():
        course.attempt("bias", replace(case, protocol="bias"))


FIXED: Mapping[str, Callable[[Question], Iterable[Case]]] = {
    "exact": lambda question: phases.exact_cases(question.sampler),
    "invariants": lambda question: phases.invariant_cases(question.sampler, question.settings.contract),
    "range": lambda question: phases.range_cases(question.sampler),
    "lone": lambda question: phases.lone_cases(question.sampler),
    "seams": lambda question: phases.seam_cases(question.sampler),
    "aligned": lambda question: phases.aligned_cases(question.sampler),
    "special": lambda question: phases.special_cases(question.sampler),
    "every": lambda question: phases.every_cases(question.sampler),
    "bias": lambda question: phases.bias_cases(question.sampler),
}
"""The phases of cases that are fixed beforehand, by name."""

PHASES: tuple[tuple[str, Callable[[Course, str], None]], ...] = (
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
