"""Confirming a suspect: fresh data on which the known fault gives wrong numbers, and whether the kernel gives these.

A fault model that accounts for one failing case may do so because it predicts something else that is wrong there too
(NaN has one value, and a result far off is as far from everything). Before it is named, cases are looked for on which a
kernel with the fault would break the contract: the failing case with other data, and ordinary calls of several
distributions and sizes (a tail of 64 is one of 16 too, at the size that a failure was met at). On each the kernel's
results have to be those of the fault, and on the others right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.comparison.judge import judge
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.fault_tolerance import given_by, limits_of, observation_of
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Failure
from assay.verify.harness.runner import Bench

_ENOUGH = (2, 12)  # calls in which a fault shows, and the kernel shows it: of the failing sizes, and of others
_SEEDS = 3  # of the failing case
_LEAST = 3  # calls, however little time is left
_KINDS = ("normal", "wide", "steep", "small", "loud", "positive", "below")  # distributions of ordinary calls
_STYLES = ("tile", "small", "tile")
_SIZES = (100, 40, 121, 24)  # of one symbol: beyond a tile of 64, of 32, of 16, and odd
_MOST_WORK = 2**21


def is_confirmed(
    fault: FaultModel, bench: Bench, failure: Failure, first: Case, sampler: Sampler, inquiry: Inquiry
) -> bool:
    """Whether the kernel gives what a kernel with this fault gives wherever that is wrong, as far as time allows.

    A fault that shows on no fresh data (of one NaN, one layout) is confirmed by the failing case alone; one for which
    time did not suffice to look isn't.
    """
    shown, tried = [0, 0], 0
    for others, case in _cases(failure.case, first, sampler):
        if tried >= _LEAST and inquiry.is_over():
            return any(shown)
        if shown[others] >= _ENOUGH[others]:
            continue
        observation = observation_of(bench, case) if fault.concerns(case) else None
        if observation is None:
            continue
        tried += 1
        chosen = None if observation.chooses_wrongly else observation.chosen
        given = given_by(fault, case, observation.values, chosen)
        real = [not tensor.is_integer for tensor in case.signature.returns]
        wrong = observation.chooses_wrongly or any(
            bool(judge(output, limits).broken.any())
            for output, limits, judged in zip(given, observation.limits, real, strict=True)
            if judged
        )
        if not wrong and not observation.breaks:
            continue
        limits = limits_of(fault, observation)
        silent = fault.family == "unwritten"
        if limits is None or any(
            bool((judge(output, limit).broken & (limit.judged | silent)).any())
            for output, limit in zip(observation.outputs, limits, strict=True)
        ):
            return False
        shown[others] += wrong
    return True


def _cases(failing: Case, first: Case, sampler: Sampler) -> Iterator[tuple[bool, Case]]:
    """The failing case with other data; ordinary calls of other sizes, which are told by a True."""
    for index in range(_SEEDS):
        for case in (failing, first) if first != failing else (failing,):
            if _is_quick(case):
                yield False, replace(case, protocol="once", seed=case.seed + 31 * (index + 1))
    base = replace(first if _is_quick(first) else failing, layouts=failing.layouts)
    for pair in zip_longest(_of_one_size(base, sampler), _ordinary(failing, sampler)):
        yield from ((True, case) for case in pair if case is not None)


def _of_one_size(case: Case, sampler: Sampler) -> Iterator[Case]:
    """The case with one size another, each that may be any in turn, and ordinary data."""
    for size in _SIZES:
        for symbol in sampler.free_symbols(case):
            sizes = sampler.with_size(case.sizes, symbol, size)
            other = replace(case, sizes=sizes, edits=(), origin={}, protocol="once", unused="plain")
            if sampler.fits(sizes) and _is_quick(other):
                yield with_values(other, "normal")


def _ordinary(failing: Case, sampler: Sampler) -> Iterator[Case]:
    """Calls under the failing one's options and layouts."""
    choose = seeded(failing.seed + 5)
    for kind in _KINDS:
        for style in _STYLES:
            drawn = sampler.case(choose, style=style, options=failing.options)
            case = replace(drawn, layouts=failing.layouts, unused="plain", protocol="once", memory=failing.memory)
            if _is_quick(case):
                yield with_values(case, kind)


def _is_quick(case: Case) -> bool:
    return case.definition.cost(case.sizes) <= _MOST_WORK
