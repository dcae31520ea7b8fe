"""Explaining a failure: which known faults account for what the kernel gave, and the tightest contract that it keeps.

The kernel is called on the failing case, on the case as it was before shrinking, and on a few ordinary ones. A suspect
explains it if every output lies within the suspect's own radius under the contract, on all of these cases, and some
element that breaks the contract of the right definition does so no longer. Several may: the one that leaves an output
the least room comes first (the fewest numbers of the output's format lie within its radius, on the average element),
which is the likeliest where an output is as likely to lie anywhere within. So a looser contract, which explains much,
stands behind an altered definition that predicts the output to its last bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from assay.golden.arithmetic import BallArithmetic
from assay.golden.run import Golden, golden_of_ball
from assay.precision.formats import Format, format_named
from assay.precision.rounding import next_down, next_up
from assay.verify.accounts import MOST, NUMBERS, Deadline, described, explained_by_bias, explained_by_conduct, loosened
from assay.verify.appraisal import Appraiser, one_thread
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case, build, work
from assay.verify.inputs.sampler import Sampler, seeded, with_values
from assay.verify.judge import Judgement, Tolerance, judge, tolerance
from assay.verify.result import Failure
from assay.verify.suspects import suspects_of
from assay.verify.suspects.evaluation import evaluate
from assay.verify.suspects.single import Single
from assay.verify.suspects.suspect import Suspect
from assay.verify.trial import Bench
from assay.verify.verdict import Explanation

Tensor = torch.Tensor

_CONDUCT = ("nondeterministic", "batch_variant", "input_mutated", "out_of_bounds_write")
_MOST_WORK = 2**21  # of a case that is evaluated for every suspect
_UNSAID = 24.0  # bits of room of an element of which an explanation says nothing
_ENOUGH = 2  # cases, after which one suspect that is left needs no more
_NEAR = (("tile", "normal"), ("tile", "steep"), ("tile", "normal"), ("small", "small"))  # sizes and distributions
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
    for place, case in enumerate(_cases(failure, first, sampler)):
        if deadline.is_over():
            return _ranked(alive, bench.contract) if place else ()
        scene = scene_of(bench, case)
        if scene is None or (place == 0 and not scene.breaks):
            if place == 0:
                return ()
            continue
        seen = []
        for fit in alive:
            if deadline.is_over():
                break
            fit = fit.on(scene)
            if place or fit.explained:
                seen.append(fit)
        whole = [fit for fit in seen if fit.left == 0]
        if not whole:
            alive = [fit for fit in seen if fit.explained > fit.left]
            alive = sorted(alive, key=lambda fit: fit.left)[:1] if place == 0 else []
            break
        alive = whole
        if deadline.is_over() or (place >= _ENOUGH and len(alive) == 1):
            break
    return _ranked(alive, bench.contract)


@dataclass(frozen=True)
class Scene:
    """One call of the kernel: its tensors, what it gave, and how that breaks the contract."""

    case: Case
    contract: Contract
    values: Mapping[str, Tensor]
    outputs: tuple[Tensor, ...]
    limits: tuple[Tolerance, ...]

    @cached_property
    def broken(self) -> tuple[Tensor, ...]:
        """Where the outputs break the contract of the right definition."""
        return tuple(judgement.broken for judgement in map(judge, self.outputs, self.limits))

    @cached_property
    def breaks(self) -> int:
        """How many elements do."""
        return sum(int(part.sum()) for part in self.broken) + int(self.chooses_wrongly)

    @cached_property
    def chooses_wrongly(self) -> bool:
        """Whether the kernel's own choices are none that the exact values allow."""
        definition = self.case.definition
        if definition.admissible is None:
            return False
        xp = BallArithmetic(self.contract.model(definition, _input_format(self.case)))
        chosen = self.chosen[definition.chosen[0]].to(torch.int64)
        tensors = [xp.exact(value) for value in self.values.values()]
        return not bool(definition.admissible(xp, *tensors, chosen, **self.case.options).all())

    @cached_property
    def chosen(self) -> dict[str, Tensor]:
        """The kernel's own choices, by name."""
        names = [tensor.name for tensor in self.case.signature.returns]
        return {name: self.outputs[names.index(name)].cpu() for name in self.case.definition.chosen}


@dataclass(frozen=True)
class _Fit:
    """How well a suspect accounts for calls: what it explains and leaves, its room in bits, the worst ratio."""

    suspect: Suspect
    order: int
    left: int = 0
    explained: int = 0
    room: float = 0.0
    elements: int = 0
    ratio: float = 0.0

    @property
    def rank(self) -> tuple[float, int]:
        """The less room, the likelier; among equals the earlier."""
        return round(4 * self.room / max(self.elements, 1)), self.order

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
        return replace(
            self,
            left=self.left + sum(int(now.broken.sum()) for now in judgements),
            explained=self.explained + here + scene.chooses_wrongly,
            room=self.room + sum(map(_room, judgements)),
            elements=self.elements + sum(now.broken.numel() for now in judgements),
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


def scene_of(bench: Bench, case: Case) -> Scene | None:
    """A call of the kernel, unless it doesn't end in results."""
    outputs = bench.outputs(case)
    if outputs is None:
        return None
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    scene = Scene(case, bench.contract, values, tuple(output.detach().cpu() for output in outputs), ())
    chosen = None if scene.chooses_wrongly else scene.chosen
    return replace(scene, limits=tuple(Appraiser(bench.contract).tolerances(case, values, chosen)))


def _candidates(failure: Failure) -> Iterator[Suspect]:
    """The suspects that may account for a failure of this kind."""
    for suspect in suspects_of(failure.case.spec):
        if suspect.conduct is None and (suspect.family != "unwritten" or failure.kind == "unwritten_output"):
            yield suspect


def limits_of(suspect: Suspect, scene: Scene) -> tuple[Tolerance, ...] | None:
    """What a kernel with this fault may give; None where it chooses otherwise than the kernel did."""
    case, contract = scene.case, scene.contract
    if suspect.contract:
        looser = loosened(contract, suspect)
        if scene.chooses_wrongly:
            return None
        return tuple(Appraiser(looser).tolerances(case, scene.values, scene.chosen))
    chosen: Mapping[str, Tensor] | None = scene.chosen
    if case.definition.admissible is not None:
        own = evaluate(suspect, case, scene.values, Single)
        names = [tensor.name for tensor in case.signature.returns]
        for name, ids in scene.chosen.items():
            if scene.chooses_wrongly and not bool((own[names.index(name)] == ids).all()):
                return None
        chosen = None if scene.chooses_wrongly else chosen
    formats = _formats(case)
    roles = [tensor.role == "rounded" for tensor in case.signature.returns]
    if suspect.emulated:
        given = evaluate(suspect, case, scene.values, Single)
        stores = suspect.store or (lambda result, dtype: result)
        exact = [
            Golden(stores(result, dtype).double(), torch.zeros(result.shape, dtype=torch.float64))
            for result, dtype in zip(given, case.result_dtypes, strict=True)
        ]
        allowed = [
            Golden(golden.value, torch.where(limit.inner.isfinite(), limit.inner, 0.0))
            for golden, limit in zip(exact, scene.limits, strict=True)
        ]
    else:
        model = contract.model(case.definition, _input_format(case))
        results = evaluate(suspect, case, scene.values, BallArithmetic, model, chosen=chosen)
        allowed = [_flat(golden_of_ball(result)) for result in results]
        exact = [Golden(golden.value, torch.zeros_like(golden.radius)) for golden in allowed]
    return tuple(
        tolerance(golden, permitted, out, contract, rounded=rounded)
        for golden, permitted, out, rounded in zip(exact, allowed, formats, roles, strict=True)
    )


def _flat(golden: Golden) -> Golden:
    return Golden(golden.value.double(), golden.radius)


def _formats(case: Case) -> list[Format]:
    """The format of each result; integers are judged as numbers."""
    results = zip(case.signature.returns, case.result_dtypes, strict=True)
    return [format_named("float64" if tensor.is_integer else dtype) for tensor, dtype in results]


def _input_format(case: Case) -> Format:
    return format_named(next(iter(case.dtypes.values())))


def _room(judgement: Judgement) -> float:
    """Bits of room: the logarithm of how many numbers of the output's format lie within, over all elements."""
    allowed = judgement.tolerance
    golden = torch.where(allowed.golden.isfinite(), allowed.golden, 0.0)
    gap = torch.maximum(next_up(golden, allowed.out) - golden, golden - next_down(golden, allowed.out))
    span = (allowed.high - allowed.low) / gap.clamp(min=5e-324)
    bits = torch.log2(1 + span.nan_to_num(nan=0.0, posinf=2.0**_UNSAID)).clamp(max=_UNSAID)
    return float(torch.where(allowed.judged, bits, _UNSAID).sum())


def _ranked(fits: list[_Fit], contract: Contract) -> tuple[Explanation, ...]:
    """The sharpest first; of looser contracts the tightest only."""
    found, contracts = [], 0
    for fit in sorted(fits, key=lambda fit: fit.rank):
        contracts += bool(fit.suspect.contract)
        if not fit.suspect.contract or contracts == 1:
            found.append(Explanation(fit.suspect.name, described(fit.suspect, contract), fit.ratio))
    return tuple(found[:MOST])
