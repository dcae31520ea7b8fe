"""What a kernel with a known fault may give in a call, beside what a right one may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from assay.golden.arithmetic import BallArithmetic
from assay.golden.run import Golden, golden_of_ball
from assay.precision.formats import format_named
from assay.verify.appraisal import Appraiser
from assay.verify.contract import Contract
from assay.verify.inputs.cases import Case, build
from assay.verify.judge import Tolerance, judge, tolerance
from assay.verify.suspects.evaluation import evaluate, stored
from assay.verify.suspects.single import Single
from assay.verify.suspects.spread import Spread
from assay.verify.suspects.suspect import Suspect
from assay.verify.trial import Bench

Tensor = torch.Tensor


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
        right = Appraiser(self.contract).admitted(self.case, self.values, self.chosen)
        return right is not None and not bool(right.all())

    @cached_property
    def chosen(self) -> dict[str, Tensor]:
        """The kernel's own choices, by name."""
        names = [tensor.name for tensor in self.case.signature.returns]
        return {name: self.outputs[names.index(name)].cpu() for name in self.case.definition.chosen}


def scene_of(bench: Bench, case: Case) -> Scene | None:
    """A call of the kernel, unless it doesn't end in results."""
    outputs = bench.outputs(case)
    if outputs is None:
        return None
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    scene = Scene(case, bench.contract, values, tuple(output.detach().cpu() for output in outputs), ())
    chosen = None if scene.chooses_wrongly else scene.chosen
    return replace(scene, limits=tuple(Appraiser(bench.contract).tolerances(case, values, chosen)))


def limits_of(suspect: Suspect, scene: Scene) -> tuple[Tolerance, ...] | None:
    """What a kernel with this fault may give; None where it chooses otherwise than the kernel did."""
    case = scene.case
    if suspect.contract:
        looser = Appraiser(suspect.loosened(scene.contract))
        return None if scene.chooses_wrongly else tuple(looser.tolerances(case, scene.values, scene.chosen))
    chosen: Mapping[str, Tensor] | None = scene.chosen
    if case.definition.admissible is not None:
        if scene.chooses_wrongly and not _chooses_alike(suspect, scene):
            return None
        chosen = None if scene.chooses_wrongly else chosen
    exact, allowed = _emulated(suspect, scene) if suspect.emulated else _enclosed(suspect, scene, chosen)
    results = zip(case.signature.returns, case.result_dtypes, exact, allowed, strict=True)
    return tuple(
        tolerance(
            golden,
            permitted,
            format_named("float64" if tensor.is_integer else dtype),  # integers are judged as numbers
            scene.contract,
            rounded=tensor.role == "rounded",
        )
        for tensor, dtype, golden, permitted in results
    )


def _chooses_alike(suspect: Suspect, scene: Scene) -> bool:
    """Whether a kernel with this fault makes the choices that the kernel made."""
    own = evaluate(suspect, scene.case, scene.values, Single)
    names = [tensor.name for tensor in scene.case.signature.returns]
    return all(bool((own[names.index(name)] == ids).all()) for name, ids in scene.chosen.items())


def _emulated(suspect: Suspect, scene: Scene) -> tuple[list[Golden], list[Golden]]:
    """What the fault gives in float32, and around it the freedom that the contract leaves a right kernel."""
    exact = [
        Golden(result.double(), torch.zeros(result.shape, dtype=torch.float64)) for result in _unstored(suspect, scene)
    ]
    allowed = [
        Golden(golden.value, torch.where(limit.inner.isfinite(), limit.inner, 0.0))
        for golden, limit in zip(exact, scene.limits, strict=True)
    ]
    return exact, allowed


def _enclosed(suspect: Suspect, scene: Scene, chosen: Mapping[str, Tensor] | None) -> tuple[list[Golden], list[Golden]]:
    """The altered mathematics in balls, and these under the contract's model."""
    model = scene.contract.model(scene.case.definition, Appraiser(scene.contract).input_format(scene.case))
    results = evaluate(suspect, scene.case, scene.values, BallArithmetic, model, chosen=chosen)
    allowed = [Golden(golden.value.double(), golden.radius) for golden in map(golden_of_ball, results)]
    return [Golden(golden.value, torch.zeros_like(golden.radius)) for golden in allowed], allowed


def spreads_of(suspect: Suspect, scene: Scene, so_far: tuple[Spread, ...]) -> tuple[Spread, ...]:
    """How the errors of the kernel, and of each arithmetic of a suspect with a looser contract, spread by now."""
    loose = Appraiser(suspect.loosened(scene.contract)).tolerances(scene.case, scene.values, scene.chosen)
    variants = [replace(suspect, arithmetic=kind) for kind in (suspect.arithmetic, *suspect.like)]
    given = [scene.outputs, *(given_by(variant, scene.case, scene.values, scene.chosen) for variant in variants)]
    found = []
    for spread, outputs in zip(so_far or (Spread(),) * len(given), given, strict=True):
        for output, tight, wide in zip(outputs, scene.limits, loose, strict=True):
            spread = spread.plus(output, tight, wide)
        found.append(spread)
    return tuple(found)


def given_by(
    suspect: Suspect, case: Case, values: Mapping[str, Tensor], chosen: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """What a kernel with this fault gives, for the ``chosen`` results where they are known."""
    given = evaluate(suspect, case, values, Single, chosen=chosen)
    return tuple(
        (suspect.store or stored)(result, dtype) for result, dtype in zip(given, case.result_dtypes, strict=True)
    )


def _unstored(suspect: Suspect, scene: Scene) -> tuple[Tensor, ...]:
    """What a kernel with this fault gives in float32, before the store unless that is altered."""
    given = evaluate(suspect, scene.case, scene.values, Single)
    if suspect.store is None:
        return given
    return tuple(suspect.store(result, dtype) for result, dtype in zip(given, scene.case.result_dtypes, strict=True))
