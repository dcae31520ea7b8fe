"""Confirming a suspect: fresh data on which the known fault gives wrong numbers, and whether the kernel gives these.

A fault model that accounts for one failing case may do so because it predicts something else that is wrong there too
(NaN has one value, and a result far off is as far from everything). Before it is named, cases are looked for on which a
kernel with the fault would break the contract: the failing case with other data, and ordinary calls of several
distributions. On each the kernel's results have to be those of the fault, and on the others right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.execution.runner import Bench
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.fault_tolerance import given_by, limits_of, observation_of
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Failure
from assay.verify.judgement.judge import judge

ENOUGH = 2
"""Calls in which a fault shows, and the kernel shows it."""
_SEEDS = 3  # of the failing case
_KINDS = ("normal", "wide", "steep", "small", "loud", "positive", "below")  # distributions of ordinary calls
_STYLES = ("small", "tile")
_MOST_WORK = 2**21


def is_confirmed(
    fault: FaultModel, bench: Bench, failure: Failure, first: Case, sampler: Sampler, inquiry: Inquiry
) -> bool:
    """Whether the kernel gives what a kernel with this fault gives wherever that is wrong, as far as time allows.

    A fault that shows on no fresh data (of one NaN, one layout) is confirmed by the failing case alone.
    """
    shown = 0
    for case in _cases(failure.case, first, sampler):
        if shown >= ENOUGH or inquiry.is_over():
            break
        observation = observation_of(bench, case) if fault.concerns(case) else None
        if observation is None:
            continue
        given = given_by(fault, case, observation.values, observation.chosen)
        real = [not tensor.is_integer for tensor in case.signature.returns]
        wrong = any(
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
        shown += wrong
    return True


def _cases(failing: Case, first: Case, sampler: Sampler) -> Iterator[Case]:
    """The failing case with other data, and ordinary calls under its options and layouts."""
    for place in range(_SEEDS):
        for case in (failing, first) if first != failing else (failing,):
            if case.definition.cost(case.sizes) <= _MOST_WORK:
                yield replace(case, protocol="once", seed=case.seed + 31 * (place + 1))
    choose = seeded(failing.seed + 5)
    for kind in _KINDS:
        for style in _STYLES:
            drawn = sampler.case(choose, style=style, options=failing.options)
            if drawn.definition.cost(drawn.sizes) <= _MOST_WORK:
                yield with_values(
                    drawn, kind, layouts=failing.layouts, unused="plain", protocol="once", memory=failing.memory
                )
