"""Facts about a failure, measured on the kernel: they hold of the calls that were made, whatever the cause is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from assay.runtime.errors import AssayError
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, with_values
from assay.verify.explanation.begins import beginnings, calls_in_words
from assay.verify.explanation.earlier_calls import kept_from_earlier
from assay.verify.explanation.explain import NUMBERS, fresh_cases
from assay.verify.explanation.fault_budget import FaultBudget
from assay.verify.explanation.fault_models.fault_tolerance import Observation, observation_of
from assay.verify.explanation.reads import reads
from assay.verify.explanation.relations import relations
from assay.verify.explanation.residuals import residuals
from assay.verify.findings import Fact, Failure
from assay.verify.harness.runner import KernelHarness

_SECONDS = 2.0  # for the calls of relations, and as much for what is read
_OF_FACTS, _CALLS = 8, 14  # that show the fault
_OF_ONE_SIZE = 2  # of those; the further ones, by which experiments are told from each other, are of other sizes
_LEAST, _MOST_CALLS = 4, 32  # in all


def breaking_calls(
    harness: KernelHarness, failure: Failure, first: Case, sampler: Sampler, seconds: float = _SECONDS
) -> list[Observation]:
    """Return calls of the kernel that show a failure of numbers: of many sizes, and few of each; empty for others.

    ``first`` is the failing case before shrinking. After ``seconds`` of processor time only the least calls are made.
    """
    if failure.kind not in NUMBERS or failure.case.protocol != "once":
        return []
    return list(_breaking(harness, failure, first, sampler, FaultBudget(seconds)))


def measured_facts(
    harness: KernelHarness,
    observations: Sequence[Observation],
    aspect: str,
    *,
    is_explained: bool,
    seconds: float = _SECONDS,
) -> tuple[Fact, ...]:
    """Return what the `breaking_calls` show about wrong numbers, and what the kernel reads if nothing explains it."""
    observations = observations[:_OF_FACTS]
    facts = relations(observations, aspect)
    if observations and not is_explained:
        facts += residuals(observations, aspect, is_related=bool(facts))
        facts += reads(harness, observations, aspect, FaultBudget(seconds))
    return tuple(facts)


def further_facts(
    harness: KernelHarness,
    failure: Failure,
    first: Case,
    sampler: Sampler,
    observations: Sequence[Observation],
    aspect: str,
    *,
    is_steady: bool,
    seconds: float = _SECONDS,
) -> tuple[Fact, ...]:
    """Return whether a shrunk failure is an earlier call's result, and where it begins.

    ``first`` is its case before shrinking, ``observations`` are the `breaking_calls`, and ``is_steady`` says what
    `is_steady` does: of a kernel that isn't, only its calls say where it is wrong.
    """
    if failure.kind not in (*NUMBERS, "nondeterministic"):
        return ()
    budget = FaultBudget(seconds)
    if is_steady and failure.case.protocol == "once":
        return tuple(beginnings(harness, failure, first, sampler, observations[:_OF_FACTS], aspect, budget))
    facts = kept_from_earlier(harness, failure, sampler, aspect, budget)
    if not facts and (words := calls_in_words(harness, failure.case, budget)):
        facts = [Fact("calls", words, aspect)]
    return tuple(facts)


def is_steady(harness: KernelHarness, failure: Failure) -> bool:
    """Whether equal calls, one with other data among them, are wrong alike: else it depends on earlier calls."""
    if failure.kind not in NUMBERS:
        return failure.kind != "nondeterministic"
    own = replace(failure.case, protocol="once", before=())
    calls = (own, with_values(own, "normal", seed=own.seed + 31, edits=()), own, own)
    wrong = [harness.try_case(case).failure is not None for case in calls]
    return wrong[0] == wrong[2] == wrong[3]


def _breaking(
    harness: KernelHarness, failure: Failure, first: Case, sampler: Sampler, budget: FaultBudget
) -> Iterator[Observation]:
    """Yield calls of the kernel that show the fault: of many sizes, and few of each."""
    seen, tried = Counter[str](), 0
    for case in chain([first], (case for _, case in fresh_cases(failure.case, first, sampler))):
        if (tried >= _LEAST and budget.is_over()) or tried == _MOST_CALLS or seen.total() == _CALLS:
            return
        case = sampler.tied(case)
        sizes = str(sorted(case.sizes.items()))
        if seen[sizes] == (_OF_ONE_SIZE if seen.total() < _OF_FACTS else 1):
            continue
        tried += 1
        observation = None
        with suppress(AssayError):  # a reference may refuse other sizes or data, or leave open what it computes of them
            observation = observation_of(harness, case)
        if observation is not None and observation.breaks and not observation.chooses_wrongly:
            seen[sizes] += 1
            yield observation
