"""Explaining a failure: which known faults account for what the kernel gave, and the tightest contract that it keeps.

The kernel is called on the failing case, on the case as it was before shrinking, and on a few ordinary ones. A fault
explains it if every output lies within the fault model's own radius under the contract, on all of these cases, and some
element that breaks the contract of the right definition does so no longer. Several may: then cases follow on which the
likeliest two would give different outputs. The one that leaves an output the least room comes first (the fewest numbers
of the output's format lie within its radius, on the average element that breaks the contract), which is the likeliest
where an output is as likely to lie anywhere within. So a looser contract, which explains much, stands behind an altered
definition that predicts the output to its last bits; and it is named only if the kernel's errors are spread over
ordinary outputs as the fault model's own are (`assay.verify.explanation.fault_models.error_distribution`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from assay.verify.cases.case import Case, build
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.comparison.oracle import one_thread
from assay.verify.contract import Contract
from assay.verify.explanation.accesses import explained_by_accesses
from assay.verify.explanation.behaviour import (
    MOST,
    NUMBERS,
    described,
    explained_by_bias,
    explained_by_side_effects,
)
from assay.verify.explanation.confirmation import is_confirmed
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.error_distribution import ErrorDistribution
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.fault_tolerance import (
    Observation,
    error_distributions_of,
    given_by,
    observation_of,
)
from assay.verify.explanation.fit import Fit
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Explanation, Failure
from assay.verify.harness.runner import Bench, same_bits

Keeps = Callable[[Contract], bool | None]

_SIDE_EFFECTS = ("nondeterministic", "batch_variant", "input_mutated", "out_of_bounds_write")
_MOST_WORK = 2**21  # of a case that is evaluated for every fault model
_ENOUGH = 2  # cases, after which one fault model that is left needs no more
_NEAR = (("tile", "normal"), ("tile", "steep"), ("tile", "normal"), ("small", "small"))  # sizes and distributions
_TELLING = (
    None,
    "small",
    "wide",
    "powers",
    "steep",
)  # distributions that tell fault models apart; None: that of the failure
_MORE = 24  # such cases, at most
_LIKE = 0.125  # by which an arithmetic that is not a fault model's own is further away
_OTHER_OPTIONS = 7  # sets of them


@dataclass(frozen=True)
class Explained:
    """The known faults that account for a failure, the likeliest first; and which fault models raised when asked."""

    explanations: tuple[Explanation, ...] = ()
    not_asked: tuple[str, ...] = ()


def explain(
    bench: Bench,
    failure: Failure,
    first: Case,
    sampler: Sampler,
    *,
    seconds: float = 3.0,
    keeps: Keeps = lambda contract: None,
) -> Explained:
    """What accounts for a shrunk ``failure``; ``first`` is the case as it failed at first.

    ``keeps`` tells whether the kernel keeps another contract where this one is broken: None where that isn't known, and
    then it isn't said. What isn't tried within so many ``seconds`` of processor time is left out.
    """
    inquiry = Inquiry(seconds)
    if failure.kind == "crash":
        return Explained(explained_by_accesses(bench, failure, sampler, inquiry))
    if failure.kind not in (*NUMBERS, *_SIDE_EFFECTS, "bias"):
        return Explained()
    results: tuple[Explanation, ...] = ()
    with one_thread():
        if failure.kind == "bias":
            results = explained_by_bias(bench, failure, inquiry)
        elif failure.kind in NUMBERS and failure.case.protocol == "once" and not _varies(bench, failure.case, inquiry):
            results = _explained_by_numbers(bench, failure, first, sampler, inquiry, keeps)
        if not results and failure.kind != "bias":
            results = explained_by_side_effects(bench, failure, sampler, inquiry)
    return Explained(results, tuple(inquiry.failed.values()))


def _varies(bench: Bench, case: Case, inquiry: Inquiry) -> bool:
    """Whether the same call gives other bits the second time: no altered mathematics does."""
    if inquiry.is_over():
        return False
    once, again = bench.outputs(case), bench.outputs(case)
    return once is not None and again is not None and not all(map(same_bits, once, again))


def _explained_by_numbers(
    bench: Bench, failure: Failure, first: Case, sampler: Sampler, inquiry: Inquiry, keeps: Keeps
) -> tuple[Explanation, ...]:
    """Fault models whose altered mathematics accounts for the outputs, case by case fewer."""

    def confirmed(fit: Fit) -> Iterator[tuple[Fit, Explanation]]:
        """A fault that fresh data confirm; a looser contract if an examination under it doesn't break it."""
        with inquiry.asking(fit.fault):
            if is_confirmed(fit.fault, bench, failure, first, sampler, inquiry):
                kept = keeps(fit.fault.loosened(bench.contract)) if fit.fault.contract else None
                if kept is not False or not fit.fault.contract:
                    words = described(fit.fault, bench.contract, kept=kept is True)
                    yield fit, Explanation(fit.fault.name, words, fit.ratio)

    def ranked(fits: list[Fit], seen: list[Observation]) -> tuple[Explanation, ...]:
        """The likeliest altered definitions that are confirmed, and before them a looser contract that fits better."""
        altered = sorted((fit for fit in fits if fit.explained and not fit.fault.contract), key=lambda fit: fit.rank)
        told = [results for fit in altered[:MOST] for results in confirmed(fit)]
        looser = _looser(fits, told[0][0] if told else None, seen, inquiry)
        results = [*(results for fit in looser for results in confirmed(fit)), *told]
        return tuple(explanation for _, explanation in results[:MOST])

    alive = [Fit(fault, order) for order, fault in enumerate(_candidates(failure))]
    observations: list[Observation] = []
    for index, case in enumerate(_cases(failure, first, sampler)):
        if inquiry.is_over():
            return ranked(alive, observations) if _has_ordinary(observations) else ()
        observation = observation_of(bench, case)
        if index == 0 and (observation is None or not observation.breaks):
            return ()
        if observation is None:
            continue
        observations.append(observation)
        seen = _after(observation, alive, inquiry)
        alive = [fit for fit in seen if fit.left == 0]
        if not alive:
            return ()
        if index >= _ENOUGH and len(alive) == 1 and alive[0].explained:
            return ranked(alive, observations)
    told_apart, more = _told_apart(bench, alive, first, sampler, inquiry)
    return ranked(told_apart, observations + more)


def _has_ordinary(observations: list[Observation]) -> bool:
    """Whether there is a call with other data than the failing one's."""
    return any(observation.case.seed != observations[0].case.seed for observation in observations)


def _after(observation: Observation, fits: list[Fit], inquiry: Inquiry) -> list[Fit]:
    """The fault models after one more call; those that time does not suffice for as they were."""
    seen = []
    for fit in fits:
        if inquiry.is_over():
            break
        seen.append(fit.on(observation, inquiry))
    return seen + fits[len(seen) :]


def _told_apart(
    bench: Bench, alive: list[Fit], first: Case, sampler: Sampler, inquiry: Inquiry
) -> tuple[list[Fit], list[Observation]]:
    """What is left of the faults after calls for which the likeliest two would give different outputs; the calls."""
    observations: list[Observation] = []
    choose = seeded(first.seed + 3)
    for index in range(_MORE):
        likeliest = _likeliest(alive)
        if len(likeliest) < 2 or inquiry.is_over():
            break
        case = sampler.case(choose, style=("tile", "small", "any")[index % 3], options=first.options)
        kinds = _TELLING[index // 3 % len(_TELLING)]
        case = with_values(case, kinds) if kinds else replace(case, values=first.values)
        case = replace(case, layouts=first.layouts, unused="plain", protocol="once", memory=first.memory)
        if first.definition.cost(case.sizes) > _MOST_WORK or not _differ(likeliest, case):
            continue
        observation = observation_of(bench, case)
        if observation is not None:
            observations.append(observation)
            alive = [fit for fit in _after(observation, alive, inquiry) if fit.left == 0]
    return alive, observations


def _likeliest(fits: list[Fit]) -> list[FaultModel]:
    """The two that are to be told apart; a looser contract behind an altered definition stays behind it."""
    results = [fit.fault for fit in sorted(fits, key=lambda fit: fit.rank) if fit.explained]
    first, others = results[:1], results[1:]
    return first + [fault for fault in others if not fault.contract or first[0].contract][:1]


def _differ(faults: Sequence[FaultModel], case: Case) -> bool:
    """Whether the kernels of two fault models give different bits."""
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    given = (given_by(fault, case, values) for fault in faults)
    return not all(same_bits(a, b) for a, b in zip(*given, strict=True))


def _cases(failure: Failure, first: Case, sampler: Sampler) -> Iterator[Case]:
    """The failing case, the same before it was shrunk, and ordinary cases under the same options."""
    memory = "nan" if failure.kind == "unwritten_output" else failure.case.memory
    definition = failure.case.definition
    yield replace(failure.case, memory=memory)
    if first != failure.case and definition.cost(first.sizes) <= _MOST_WORK:
        yield replace(first, protocol="once", memory=memory)
    choose = seeded(first.seed + 1)
    sets = [options for options in sampler.option_sets() if options != failure.case.options]
    others = sets if len(sets) <= _OTHER_OPTIONS else [choose(sets) for _ in range(_OTHER_OPTIONS)]
    near = [(style, kind, first.options) for style, kind in _NEAR[:2]]
    near += [("small", "normal", options) for options in others]
    near += [(style, kind, failure.case.options) for style, kind in _NEAR[2:]]
    for style, kind, options in near:
        drawn = sampler.case(choose, style=style, options=options)
        if definition.cost(drawn.sizes) <= _MOST_WORK:
            yield with_values(drawn, kind, layouts={}, unused="plain", protocol="once", memory=memory)


def _candidates(failure: Failure) -> Iterator[FaultModel]:
    """The fault models that may account for a failure of this kind."""
    for fault in fault_models_of(failure.case.spec):
        if fault.side_effects is None and (fault.family != "unwritten" or failure.kind == "unwritten_output"):
            yield fault


def _looser(fits: list[Fit], altered: Fit | None, observations: list[Observation], inquiry: Inquiry) -> list[Fit]:
    """The looser contract, or none, that fits better than the altered definition, and as errors of which they spread.

    How they spread is told by ordinary calls, not by those that were looked for because they fail.
    """
    looser = [fit for fit in fits if fit.explained and fit.fault.contract and (not altered or fit.rank < altered.rank)]
    ordinary = [observation for observation in observations if observation.case.seed != observations[0].case.seed]
    unlike = [(_unlike(fit.fault, ordinary, inquiry), fit) for fit in looser]
    alike = sorted((pair for pair in unlike if pair[0] <= 1), key=lambda pair: (round(16 * pair[0]), *pair[1].rank))
    return [fit for _, fit in alike[:1]]


def _unlike(fault: FaultModel, observations: list[Observation], inquiry: Inquiry) -> float:
    """How unlike the kernel's errors spread in these calls; above 1 they are others than the fault model's."""
    distributions: tuple[ErrorDistribution, ...] = ()
    for observation in observations:
        if (
            fault.concerns(observation.case)
            and not observation.chooses_wrongly
            and not (distributions and inquiry.is_over())
        ):
            distributions = error_distributions_of(fault, observation, distributions)
    kernel, own, *like = distributions or (ErrorDistribution(), ErrorDistribution())
    return min(kernel.distance(own), *(kernel.distance(distribution) + _LIKE for distribution in like), math.inf)
