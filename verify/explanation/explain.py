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

import torch

from assay.formats.rounding import next_down, next_up
from assay.verify.cases.case import Case, build
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.contract import Contract
from assay.verify.execution.runner import Bench, same_bits
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
    limits_of,
    observation_of,
)
from assay.verify.explanation.inquiry import Inquiry
from assay.verify.findings import Explanation, Failure
from assay.verify.judgement.judge import Judgement, judge
from assay.verify.judgement.oracle import one_thread

Tensor = torch.Tensor
Keeps = Callable[[Contract], bool | None]

_SIDE_EFFECTS = ("nondeterministic", "batch_variant", "input_mutated", "out_of_bounds_write")
_MOST_WORK = 2**21  # of a case that is evaluated for every fault model
_UNSAID = 24.0  # bits of room of an element of which an explanation says nothing
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
    if failure.kind not in (*NUMBERS, *_SIDE_EFFECTS, "bias"):
        return Explained()
    found: tuple[Explanation, ...] = ()
    with one_thread():
        if failure.kind == "bias":
            found = explained_by_bias(bench, failure, inquiry)
        elif failure.kind in NUMBERS and failure.case.protocol == "once":
            found = _explained_by_numbers(bench, failure, first, sampler, inquiry, keeps)
        if not found and failure.kind != "bias":
            found = explained_by_side_effects(bench, failure, sampler, inquiry)
    return Explained(found, tuple(inquiry.failed.values()))


def _explained_by_numbers(
    bench: Bench, failure: Failure, first: Case, sampler: Sampler, inquiry: Inquiry, keeps: Keeps
) -> tuple[Explanation, ...]:
    """Fault models whose altered mathematics accounts for the outputs, case by case fewer."""

    def ranked(fits: list[_Fit], seen: list[Observation]) -> tuple[Explanation, ...]:
        """The likeliest of those that fresh data confirm; of a looser contract, those that an examination keeps."""
        found = []
        for fit in _ranked(fits, seen, inquiry):
            with inquiry.asking(fit.fault):
                if is_confirmed(fit.fault, bench, failure, first, sampler, inquiry):
                    kept = keeps(fit.fault.loosened(bench.contract)) if fit.fault.contract else None
                    if kept is not False or not fit.fault.contract:
                        words = described(fit.fault, bench.contract, kept=kept is True)
                        found.append(Explanation(fit.fault.name, words, fit.ratio))
        return tuple(found[:MOST])

    alive = [_Fit(fault, order) for order, fault in enumerate(_candidates(failure))]
    observations: list[Observation] = []
    for place, case in enumerate(_cases(failure, first, sampler)):
        if inquiry.is_over():
            return ranked(alive, observations) if _has_ordinary(observations) else ()
        observation = observation_of(bench, case)
        if place == 0 and (observation is None or not observation.breaks):
            return ()
        if observation is None:
            continue
        observations.append(observation)
        seen = _after(observation, alive, inquiry)
        alive = [fit for fit in seen if fit.left == 0]
        if not alive:
            return ()
        if place >= _ENOUGH and len(alive) == 1 and alive[0].explained:
            return ranked(alive, observations)
    told_apart, more = _told_apart(bench, alive, first, sampler, inquiry)
    return ranked(told_apart, observations + more)


def _has_ordinary(observations: list[Observation]) -> bool:
    """Whether there is a call with other data than the failing one's."""
    return any(observation.case.seed != observations[0].case.seed for observation in observations)


def _after(observation: Observation, fits: list[_Fit], inquiry: Inquiry) -> list[_Fit]:
    """The fault models after one more call; those that time does not suffice for as they were."""
    seen = []
    for fit in fits:
        if inquiry.is_over():
            break
        seen.append(fit.on(observation, inquiry))
    return seen + fits[len(seen) :]


def _told_apart(
    bench: Bench, alive: list[_Fit], first: Case, sampler: Sampler, inquiry: Inquiry
) -> tuple[list[_Fit], list[Observation]]:
    """What is left of the faults after calls for which the likeliest two would give different outputs; the calls."""
    observations: list[Observation] = []
    choose = seeded(first.seed + 3)
    for place in range(_MORE):
        likeliest = [fit.fault for fit in sorted(alive, key=lambda fit: fit.rank) if fit.explained][:2]
        if len(likeliest) < 2 or inquiry.is_over():
            break
        case = sampler.case(choose, style=("tile", "small", "any")[place % 3], options=first.options)
        kinds = _TELLING[place // 3 % len(_TELLING)]
        case = with_values(case, kinds) if kinds else replace(case, values=first.values)
        case = replace(case, layouts=first.layouts, unused="plain", protocol="once", memory=first.memory)
        if first.definition.cost(case.sizes) > _MOST_WORK or not _differ(likeliest, case):
            continue
        observation = observation_of(bench, case)
        if observation is not None:
            observations.append(observation)
            alive = [fit for fit in _after(observation, alive, inquiry) if fit.left == 0]
    return alive, observations


def _differ(faults: Sequence[FaultModel], case: Case) -> bool:
    """Whether the kernels of two fault models give different bits."""
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    given = (given_by(fault, case, values) for fault in faults)
    return not all(same_bits(a, b) for a, b in zip(*given, strict=True))


@dataclass(frozen=True)
class _Fit:
    """How well a fault model accounts for calls: what it explains and leaves, its room in bits, the worst ratio."""

    fault: FaultModel
    order: int
    left: int = 0
    explained: int = 0
    room: tuple[float, float] = (0.0, 0.0)  # of elements that break the contract, of all
    elements: tuple[int, int] = (0, 0)
    ratio: float = 0.0

    @property
    def rank(self) -> tuple[int, ...]:
        """The less room for the mean element that breaks the contract, then for any, the likelier; or the earlier."""
        means = (room / max(count, 1) for room, count in zip(self.room, self.elements, strict=True))
        return (*(round(4 * mean) for mean in means), self.order)

    def on(self, observation: Observation, inquiry: Inquiry) -> _Fit:
        """The same with one more call; a fault model that can't be evaluated on it doesn't account for it."""
        judgements: tuple[Judgement, ...] | None = None
        with inquiry.asking(self.fault):
            if not self.fault.concerns(observation.case):
                return replace(self, left=self.left + observation.breaks)
            limits = limits_of(self.fault, observation)
            judgements = None if limits is None else tuple(map(judge, observation.outputs, limits))
        if judgements is None:
            return replace(self, left=self.left + max(observation.breaks, 1))
        silent = self.fault.family == "unwritten"  # which says of some elements that they may be anything
        here = sum(
            int((was & ~now.broken & (now.tolerance.judged | silent)).sum())
            for was, now in zip(observation.broken, judgements, strict=True)
        )
        rooms = [_room(now) for now in judgements]
        broken = sum(float(room[was].sum()) for room, was in zip(rooms, observation.broken, strict=True))
        return replace(
            self,
            left=self.left + sum(int(now.broken.sum()) for now in judgements),
            explained=self.explained + here + observation.chooses_wrongly,
            room=(self.room[0] + broken, self.room[1] + sum(float(room.sum()) for room in rooms)),
            elements=(self.elements[0] + observation.breaks, self.elements[1] + sum(room.numel() for room in rooms)),
            ratio=max(self.ratio, *(now.worst for now in judgements)),
        )


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


def _room(judgement: Judgement) -> Tensor:
    """Bits of room of each element: the logarithm of how many numbers of the output's format lie within."""
    allowed = judgement.tolerance
    golden = torch.where(allowed.golden.isfinite(), allowed.golden, 0.0)
    gap = torch.maximum(next_up(golden, allowed.out) - golden, golden - next_down(golden, allowed.out))
    span = (allowed.ends.high - allowed.ends.low) / gap.clamp(min=5e-324)
    bits = torch.log2(1 + span.nan_to_num(nan=0.0, posinf=2.0**_UNSAID)).clamp(max=_UNSAID)
    return torch.where(allowed.judged, bits, _UNSAID)


def _ranked(fits: list[_Fit], observations: list[Observation], inquiry: Inquiry) -> list[_Fit]:
    """The sharpest first; a looser contract before an altered definition, or none, and only if errors spread alike.

    How they spread is told by ordinary calls, not by those that were looked for because they fail.
    """
    told = sorted((fit for fit in fits if fit.explained and not fit.fault.contract), key=lambda fit: fit.rank)
    looser = [fit for fit in fits if fit.explained and fit.fault.contract and (not told or fit.rank < told[0].rank)]
    ordinary = [observation for observation in observations if observation.case.seed != observations[0].case.seed]
    unlike = [(_unlike(fit.fault, ordinary, inquiry), fit) for fit in looser]
    alike = sorted((pair for pair in unlike if pair[0] <= 1), key=lambda pair: (round(16 * pair[0]), *pair[1].rank))
    return ([fit for _, fit in alike[:1]] + told)[:MOST]


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
