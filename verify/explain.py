"""Explaining a failure: which known faults account for what the kernel gave, and the tightest contract that it keeps.

The kernel is called on the failing case, on the case as it was before shrinking, and on a few ordinary ones. A suspect
explains it if every output lies within the suspect's own radius under the contract, on all of these cases, and some
element that breaks the contract of the right definition does so no longer. Several may: then cases follow on which the
likeliest two would give different outputs. The one that leaves an output the least room comes first (the fewest numbers
of the output's format lie within its radius, on the average element that breaks the contract), which is the likeliest
where an output is as likely to lie anywhere within. So a looser contract, which explains much, stands behind an altered
definition that predicts the output to its last bits; and it is named only if the kernel's errors are spread over
ordinary outputs as the suspect's own are (`assay.verify.suspects.spread`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from assay.precision.rounding import next_down, next_up
from assay.verify.accounts import MOST, NUMBERS, Deadline, described, explained_by_bias, explained_by_conduct
from assay.verify.appraisal import one_thread
from assay.verify.inputs.cases import Case, build, work
from assay.verify.inputs.sampler import Sampler, seeded, with_values
from assay.verify.judge import Judgement, judge
from assay.verify.result import Failure
from assay.verify.suspects import suspects_of
from assay.verify.suspects.allowance import Scene, given_by, limits_of, scene_of, spreads_of
from assay.verify.suspects.spread import Spread
from assay.verify.suspects.suspect import Suspect
from assay.verify.trial import Bench, same_bits
from assay.verify.verdict import Explanation

Tensor = torch.Tensor

_CONDUCT = ("nondeterministic", "batch_variant", "input_mutated", "out_of_bounds_write")
_MOST_WORK = 2**21  # of a case that is evaluated for every suspect
_UNSAID = 24.0  # bits of room of an element of which an explanation says nothing
_ENOUGH = 2  # cases, after which one suspect that is left needs no more
_NEAR = (("tile", "normal"), ("tile", "steep"), ("tile", "normal"), ("small", "small"))  # sizes and distributions
_TELLING = (None, "small", "wide", "powers")  # distributions that tell suspects apart; None: that of the failure
_MORE = 24  # such cases, at most
_LIKE = 0.125  # by which an arithmetic that is not a suspect's own is further away
_OTHER_OPTIONS = 7  # sets of them


def explain(
    bench: Bench, failure: Failure, first: Case, sampler: Sampler, *, seconds: float = 3.0
) -> tuple[Explanation, ...]:
    """The known faults that account for a shrunk ``failure``, the likeliest first; none where none does.

    ``first`` is the case as it failed at first. What isn't tried within so many
    ``seconds`` of processor time is left out.
    """
    deadline = Deadline(seconds)
    if failure.kind not in (*NUMBERS, *_CONDUCT, "bias"):
        return ()
    with one_thread():
        if failure.kind == "bias":
            return explained_by_bias(bench, failure, deadline)
        found: tuple[Explanation, ...] = ()
        if failure.kind in NUMBERS and failure.case.protocol == "once":
            found = _explained_by_numbers(bench, failure, first, sampler, deadline)
        return found or explained_by_conduct(bench, failure, sampler, deadline)


def _explained_by_numbers(
    bench: Bench, failure: Failure, first: Case, sampler: Sampler, deadline: Deadline
) -> tuple[Explanation, ...]:
    """Suspects whose altered mathematics accounts for the outputs, case by case fewer."""
    alive = [_Fit(suspect, order) for order, suspect in enumerate(_candidates(failure))]
    scenes: list[Scene] = []
    for place, case in enumerate(_cases(failure, first, sampler)):
        if deadline.is_over():
            return _ranked(alive, scenes, deadline) if place else ()
        scene = scene_of(bench, case)
        if place == 0 and (scene is None or not scene.breaks):
            return ()
        if scene is None:
            continue
        scenes.append(scene)
        seen = _after(scene, alive, deadline)
        alive = [fit for fit in seen if fit.left == 0]
        if not alive:
            most = [fit for fit in seen if fit.explained > fit.left and place == 0]
            return _ranked(sorted(most, key=lambda fit: fit.left)[:1], scenes, deadline)
        if place >= _ENOUGH and len(alive) == 1 and alive[0].explained:
            return _ranked(alive, scenes, deadline)
    told_apart, more = _told_apart(bench, alive, first, sampler, deadline)
    return _ranked(told_apart, scenes + more, deadline)


def _after(scene: Scene, fits: list[_Fit], deadline: Deadline) -> list[_Fit]:
    """The suspects after one more call; those that time does not suffice for as they were."""
    seen = []
    for fit in fits:
        if deadline.is_over():
            break
        seen.append(fit.on(scene))
    return seen + fits[len(seen) :]


def _told_apart(
    bench: Bench, alive: list[_Fit], first: Case, sampler: Sampler, deadline: Deadline
) -> tuple[list[_Fit], list[Scene]]:
    """What is left of the suspects after calls for which the likeliest two would give different outputs; the calls."""
    scenes: list[Scene] = []
    choose = seeded(first.seed + 3)
    for place in range(_MORE):
        likeliest = [fit.suspect for fit in sorted(alive, key=lambda fit: fit.rank) if fit.explained][:2]
        if len(likeliest) < 2 or deadline.is_over():
            break
        case = sampler.case(choose, style=("tile", "small", "any")[place % 3], options=first.options)
        kinds = _TELLING[place // 3 % len(_TELLING)]
        case = with_values(case, kinds) if kinds else replace(case, values=first.values)
        case = replace(case, layouts=first.layouts, unused="plain", protocol="once", memory=first.memory)
        if work(first.definition, case.sizes) > _MOST_WORK or not _differ(likeliest, case):
            continue
        scene = scene_of(bench, case)
        if scene is not None:
            scenes.append(scene)
            alive = [fit for fit in _after(scene, alive, deadline) if fit.left == 0]
    return alive, scenes


def _differ(suspects: Sequence[Suspect], case: Case) -> bool:
    """Whether the kernels of two suspects give different bits."""
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    given = (given_by(suspect, case, values) for suspect in suspects)
    return not all(same_bits(a, b) for a, b in zip(*given, strict=True))


@dataclass(frozen=True)
class _Fit:
    """How well a suspect accounts for calls: what it explains and leaves, its room in bits, the worst ratio."""

    suspect: Suspect
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

    def on(self, scene: Scene) -> _Fit:
        """The same with one more call; a suspect that can't be evaluated on it doesn't account for it."""
        judgements: tuple[Judgement, ...] | None = None
        with contextlib.suppress(Exception):  # whatever is wrong with one suspect, the others are still asked
            if not self.suspect.concerns(scene.case):
                return replace(self, left=self.left + scene.breaks)
            limits = limits_of(self.suspect, scene)
            judgements = None if limits is None else tuple(map(judge, scene.outputs, limits))
        if judgements is None:
            return replace(self, left=self.left + max(scene.breaks, 1))
        silent = self.suspect.family == "unwritten"  # which says of some elements that they may be anything
        here = sum(
            int((was & ~now.broken & (now.tolerance.judged | silent)).sum())
            for was, now in zip(scene.broken, judgements, strict=True)
        )
        rooms = [_room(now) for now in judgements]
        broken = sum(float(room[was].sum()) for room, was in zip(rooms, scene.broken, strict=True))
        return replace(
            self,
            left=self.left + sum(int(now.broken.sum()) for now in judgements),
            explained=self.explained + here + scene.chooses_wrongly,
            room=(self.room[0] + broken, self.room[1] + sum(float(room.sum()) for room in rooms)),
            elements=(self.elements[0] + scene.breaks, self.elements[1] + sum(room.numel() for room in rooms)),
            ratio=max(self.ratio, *(now.worst for now in judgements)),
        )


def _cases(failure: Failure, first: Case, sampler: Sampler) -> Iterator[Case]:
    """The failing case, the same before it was shrunk, and ordinary cases under the same options."""
    memory = "nan" if failure.kind == "unwritten_output" else failure.case.memory
    definition = failure.case.definition
    yield replace(failure.case, memory=memory)
    if first != failure.case and work(definition, first.sizes) <= _MOST_WORK:
        yield replace(first, protocol="once", memory=memory)
    choose = seeded(first.seed + 1)
    sets = [options for options in sampler.option_sets() if options != failure.case.options]
    others = sets if len(sets) <= _OTHER_OPTIONS else [choose(sets) for _ in range(_OTHER_OPTIONS)]
    near = [(style, kind, first.options) for style, kind in _NEAR[:2]]
    near += [("small", "normal", options) for options in others]
    near += [(style, kind, failure.case.options) for style, kind in _NEAR[2:]]
    for style, kind, options in near:
        drawn = sampler.case(choose, style=style, options=options)
        if work(definition, drawn.sizes) <= _MOST_WORK:
            yield with_values(drawn, kind, layouts={}, unused="plain", protocol="once", memory=memory)


def _candidates(failure: Failure) -> Iterator[Suspect]:
    """The suspects that may account for a failure of this kind."""
    for suspect in suspects_of(failure.case.spec):
        if suspect.conduct is None and (suspect.family != "unwritten" or failure.kind == "unwritten_output"):
            yield suspect


def _room(judgement: Judgement) -> Tensor:
    """Bits of room of each element: the logarithm of how many numbers of the output's format lie within."""
    allowed = judgement.tolerance
    golden = torch.where(allowed.golden.isfinite(), allowed.golden, 0.0)
    gap = torch.maximum(next_up(golden, allowed.out) - golden, golden - next_down(golden, allowed.out))
    span = (allowed.high - allowed.low) / gap.clamp(min=5e-324)
    bits = torch.log2(1 + span.nan_to_num(nan=0.0, posinf=2.0**_UNSAID)).clamp(max=_UNSAID)
    return torch.where(allowed.judged, bits, _UNSAID)


def _ranked(fits: list[_Fit], scenes: list[Scene], deadline: Deadline) -> tuple[Explanation, ...]:
    """The sharpest first; a looser contract before an altered definition, or none, and only if errors spread alike.

    How they spread is told by ordinary calls, not by those that were looked for because they fail.
    """
    told = sorted((fit for fit in fits if fit.explained and not fit.suspect.contract), key=lambda fit: fit.rank)
    looser = [fit for fit in fits if fit.explained and fit.suspect.contract and (not told or fit.rank < told[0].rank)]
    ordinary = [scene for scene in scenes if scene.case.seed != scenes[0].case.seed]
    unlike = [(_unlike(fit.suspect, ordinary, deadline), fit) for fit in looser]
    alike = sorted((pair for pair in unlike if pair[0] <= 1), key=lambda pair: (round(16 * pair[0]), *pair[1].rank))
    found = [fit for _, fit in alike[:1]] + told
    contract = scenes[0].contract
    return tuple(Explanation(fit.suspect.name, described(fit.suspect, contract), fit.ratio) for fit in found[:MOST])


def _unlike(suspect: Suspect, scenes: list[Scene], deadline: Deadline) -> float:
    """How unlike the kernel's errors spread in these calls; above 1 they are others than the suspect's."""
    spreads: tuple[Spread, ...] = ()
    for scene in scenes:
        if suspect.concerns(scene.case) and not scene.chooses_wrongly and not (spreads and deadline.is_over()):
            spreads = spreads_of(suspect, scene, spreads)
    kernel, own, *like = spreads or (Spread(), Spread())
    return min(kernel.distance(own), *(kernel.distance(spread) + _LIKE for spread in like), math.inf)
