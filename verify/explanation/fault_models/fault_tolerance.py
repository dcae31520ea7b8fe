"""The tolerances of a kernel with a known fault in a call, compared with those of a right kernel."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.golden import Golden, golden_of
from assay.verify.cases.case import Case, build
from assay.verify.comparison.judge import Tolerance, judge
from assay.verify.comparison.oracle import Oracle, tolerances_of
from assay.verify.contract import Contract
from assay.verify.explanation.fault_models.error_distribution import ErrorDistribution
from assay.verify.explanation.fault_models.evaluation import evaluate, stored
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.single import Single
from assay.verify.harness.runner import KernelHarness

Tensor = torch.Tensor
_FEW = 16 * 2.0**-24  # a few float32 roundings of the result


@dataclass(frozen=True)
class Observation:
    """One call of the kernel: its tensors, its outputs, and their tolerances under the contract.

    ``aside`` marks elements that aren't judged because they are taken to be another fault's.
    """

    case: Case
    contract: Contract
    values: Mapping[str, Tensor]
    outputs: tuple[Tensor, ...]
    limits: tuple[Tolerance, ...]
    aside: tuple[Tensor, ...] = ()

    @cached_property
    def broken(self) -> tuple[Tensor, ...]:
        """Return masks of the elements that break the contract of the right definition."""
        return tuple(judgement.broken for judgement in map(judge, self.outputs, self.limits))

    @cached_property
    def breaks(self) -> int:
        """Return how many elements break it."""
        return sum(int(part.sum()) for part in self.broken) + int(self.chooses_wrongly)

    @cached_property
    def chooses_wrongly(self) -> bool:
        """Return whether the exact values exclude the kernel's own choices."""
        right = Oracle(self.contract).admitted(self.case, self.values, self.chosen)
        return right is not None and not bool(right.all())

    @cached_property
    def chosen(self) -> dict[str, Tensor]:
        """Return the kernel's own choices by name."""
        names = [tensor.name for tensor in self.case.signature.returns]
        return {name: self.outputs[names.index(name)].cpu() for name in self.case.definition.outputs.chosen}


def observation_of(harness: KernelHarness, case: Case) -> Observation | None:
    """Return a call of the kernel, or None if it returns no outputs."""
    outputs = harness.outputs(case)
    if outputs is None:
        return None
    values = {name: guarded.tensor for name, guarded in build(case).guarded.items()}
    observation = Observation(case, harness.contract, values, tuple(output.detach().cpu() for output in outputs), ())
    chosen = None if observation.chooses_wrongly else observation.chosen
    limits = tuple(Oracle(harness.contract).tolerances(case, values, chosen))
    if not harness.aside:
        return replace(observation, limits=limits)
    aside = tuple(
        _of_another_fault(output, part, harness.aside) for output, part in zip(observation.outputs, limits, strict=True)
    )
    return replace(observation, limits=_without(limits, aside), aside=aside)


def _of_another_fault(output: Tensor, limits: Tolerance, aside: str) -> Tensor:
    """Return the wrong elements that are finite, or those that aren't and should be."""
    is_finite = output.double().isfinite()
    wrong = judge(output, limits).broken
    return wrong & (is_finite if aside == "finite" else ~is_finite & limits.golden.isfinite())


def _without(limits: Iterable[Tolerance], aside: Sequence[Tensor]) -> tuple[Tolerance, ...]:
    return tuple(replace(part, judged=part.judged & ~mask) for part, mask in zip(limits, aside, strict=True))


def limits_of(fault: FaultModel, observation: Observation) -> tuple[Tolerance, ...] | None:
    """Return the tolerances of a kernel with this fault; None if its choices differ from the kernel's."""
    limits = _limits_of(fault, observation)
    return _without(limits, observation.aside) if limits is not None and observation.aside else limits


def _limits_of(fault: FaultModel, observation: Observation) -> tuple[Tolerance, ...] | None:
    case = observation.case
    if fault.is_looser:
        if observation.chooses_wrongly:
            return None
        looser = Oracle(fault.loosened(observation.contract))
        return tuple(looser.tolerances(case, observation.values, observation.chosen))
    chosen: Mapping[str, Tensor] | None = observation.chosen
    if case.definition.outputs.accepts is not None:
        if observation.chooses_wrongly and not _chooses_alike(fault, observation):
            return None
        chosen = None if observation.chooses_wrongly else chosen
    exact, allowed = _emulated(fault, observation) if fault.emulated else _enclosed(fault, observation, chosen)
    return tuple(tolerances_of(case, observation.contract, exact, allowed))


def _chooses_alike(fault: FaultModel, observation: Observation) -> bool:
    """Return whether a kernel with this fault makes the same choices."""
    own = evaluate(fault, observation.case, observation.values, Single)
    names = [tensor.name for tensor in observation.case.signature.returns]
    return all(bool((own[names.index(name)] == ids).all()) for name, ids in observation.chosen.items())


def _emulated(fault: FaultModel, observation: Observation) -> tuple[list[Golden], list[Golden]]:
    """Return the fault's float32 results, and the same with the tolerance of a right kernel around them.

    If the right result is not finite, the tolerance is a few roundings of the fault's result.
    """
    given = evaluate(fault, observation.case, observation.values, Single)
    given = _stored(fault, observation.case, given) if fault.store else given  # otherwise the results before the store
    exact = [Golden(result.double(), torch.zeros(result.shape, dtype=torch.float64)) for result in given]
    allowed = [
        Golden(
            golden.value,
            torch.where(limit.pre_store_radius.isfinite(), limit.pre_store_radius, 0.0) + _roundings(golden, limit),
        )
        for golden, limit in zip(exact, observation.limits, strict=True)
    ]
    return exact, allowed


def _roundings(given: Golden, limits: Tolerance) -> Tensor:
    return torch.where(~limits.golden.isfinite() & given.value.isfinite(), _FEW * given.value.abs(), 0.0)


def _enclosed(
    fault: FaultModel, observation: Observation, chosen: Mapping[str, Tensor] | None
) -> tuple[list[Golden], list[Golden]]:
    """Return the altered definition in balls, exact and under the contract's model."""
    model = observation.contract.model(observation.case.definition, observation.case.input_format)
    results = evaluate(fault, observation.case, observation.values, BallArithmetic, model, chosen=chosen)
    allowed = [Golden(golden.value.double(), golden.radius) for golden in map(golden_of, results)]
    return [Golden(golden.value, torch.zeros_like(golden.radius)) for golden in allowed], allowed


def error_distributions_of(
    fault: FaultModel, observation: Observation, so_far: tuple[ErrorDistribution, ...]
) -> tuple[ErrorDistribution, ...]:
    """Add this call to the error distributions of the kernel and of each arithmetic of a looser contract."""
    loose = Oracle(fault.loosened(observation.contract)).tolerances(
        observation.case, observation.values, observation.chosen
    )
    variants = [replace(fault, arithmetic=kind) for kind in (fault.arithmetic, *fault.like)]
    given = [
        observation.outputs,
        *(given_by(variant, observation.case, observation.values, observation.chosen) for variant in variants),
    ]
    results = []
    for distribution, outputs in zip(so_far or (ErrorDistribution(),) * len(given), given, strict=True):
        for output, tight, wide in zip(outputs, observation.limits, loose, strict=True):
            distribution = distribution.plus(output, tight, wide)
        results.append(distribution)
    return tuple(results)


def given_by(
    fault: FaultModel, case: Case, values: Mapping[str, Tensor], chosen: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, ...]:
    """Return the results of a kernel with this fault; ``chosen`` results are used where known."""
    return _stored(fault, case, evaluate(fault, case, values, Single, chosen=chosen))


def _stored(fault: FaultModel, case: Case, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    stores = (stored if tensor.is_integer else fault.store or stored for tensor in case.signature.returns)
    return tuple(store(x, dtype) for store, x, dtype in zip(stores, results, case.result_dtypes, strict=True))
