"""What an examination says first of a faulty kernel, held against the fault that it has."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

from assay.interpreter import faithful
from assay.runtime import deadline
from assay.runtime.tensors import same_numbers
from assay.verify import Verdict, examine
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import seeded, with_values
from assay.verify.comparison.judge import judge
from assay.verify.contract import Contract
from assay.verify.examination import diagnosis
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.fault_tolerance import limits_of, observation_of
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.zoo.entry import Other
from tests.zoo.foreign import FOREIGN

from .fault_cases import sampler_of, settings_for

if find_spec("triton"):
    from tests.zoo.interpreted import INTERPRETED
else:  # pragma: no cover
    INTERPRETED = ()

OTHERS: tuple[Other, ...] = (*FOREIGN, *INTERPRETED)
"""Kernels in styles of their own."""

OUTCOMES = ("right", "same", "wrong", "none", "passes", "no settings")
"""Named first is the fault itself; one that gives the same; another; none; nothing fails; no dtype admits it."""
_CASES = 45  # on which two faults are compared
_KINDS = (None, "normal", "wide", "steep", "small")  # distributions; None: as drawn


@dataclass(frozen=True)
class Told:
    """What was said first of one fault of an op: ``aspect`` and ``kind`` of the failure, processor seconds."""

    op: str
    fault: str
    outcome: str
    named: str = ""
    aspect: str = ""
    kind: str = ""
    seconds: float = 0.0
    explaining: float = 0.0


def explanation_of(op: str, fault: FaultModel, *, every_aspect: bool = False) -> Told:
    """Examine the fault model's kernel at quick effort, and say whether the first explanation is true.

    Without ``every_aspect`` the examination ends with the first failure, which then is what is explained.
    """
    settings = settings_for(op, fault)
    if settings is None:
        return Told(op, fault.name, "no settings")
    kernel, started = kernel_of(fault, op), time.process_time()
    with Stopwatch() as watch:
        verdict = examine(kernel, op, effort="quick", every_aspect=every_aspect, **settings)
    seconds = round(time.process_time() - started, 2), round(watch.seconds, 2)
    failure = verdict.failure
    if failure is None or (failure.kind != "bias" and _fails(op, None, failure.case, settings)):
        return Told(op, fault.name, "passes", "", "", "", *seconds)
    named = first_named(verdict)
    outcome = "right" if named == fault.name else "wrong" if named else "none"
    if outcome == "wrong" and are_alike(op, fault, model(op, named), failure.case):
        outcome = "same"
    return Told(op, fault.name, outcome, named, failure.aspect, failure.kind, *seconds)


def _fails(op: str, fault: FaultModel | None, case: Case, settings: dict[str, Any]) -> bool:
    """Whether the kernel of a fault model, or without one, fails in a case."""
    listed: dict[str, Any] = {name: [] for name in settings["options"]}
    return KernelHarness(Call(kernel_of(fault, op), listed), Contract()).try_case(case).failure is not None


def explanation_of_other(other: Other, *, every_aspect: bool = False) -> Told:
    """The same of a kernel that no fault model was made of: where none is its fault, to name none is right."""
    started = time.process_time()
    with Stopwatch() as watch, faithful() if find_spec("triton") else nullcontext():
        given: dict[str, Any] = {"dtype": other.dtype, "effort": "quick", "every_aspect": every_aspect}
        verdict = examine(other.kernel, other.op, **{**given, **other.settings})
    seconds = round(time.process_time() - started, 2), round(watch.seconds, 2)
    if verdict.failure is None:
        return Told(other.op, other.name, "passes", "", "", "", *seconds)
    broken = [aspect.explanations for aspect in verdict.broken.values()]
    named = [found[0].name for found in broken if found]
    wrong = [name for name in named if name not in other.causes]
    outcome = "wrong" if wrong else "right" if not other.causes or first_named(verdict) else "none"
    return Told(
        other.op, other.name, outcome, ", ".join(wrong or named), verdict.failure.aspect, verdict.failure.kind, *seconds
    )


def first_named(verdict: Verdict) -> str:
    """The first fault that a verdict names, empty where it names none."""
    return verdict.explanations[0].name if verdict.explanations else ""


def model(op: str, name: str) -> FaultModel:
    """A fault model by its name."""
    return next(fault for fault in fault_models_of(op) if fault.name == name)


def are_alike(op: str, fault: FaultModel, other: FaultModel, failing: Case) -> bool:
    """Whether kernels of two faults give the same on fresh cases: bits, or what the other's radius holds.

    Where neither is a side effect or a looser contract, values count as the same if the contract allows one for the
    other: who reads results can't tell the two faults apart then.
    """
    settings = settings_for(op, fault)
    assert settings is not None
    listed: dict[str, Any] = {name: [] for name in settings["options"]}
    first, second = (KernelHarness(Call(kernel_of(each, op), listed), Contract()) for each in (fault, other))
    by_bits = bool(other.contract) or fault.side_effects is not None or other.side_effects is not None
    for case in (replace(failing, protocol="once"), *_fresh(op, fault, settings)):
        if by_bits:
            a, b = (harness.outputs(replace(case, memory="nan")) for harness in (first, second))
            if a is None or b is None or not all(map(same_numbers, a, b)):
                return False
        elif not _holds(other, first, case):
            return False
    return True


def _holds(other: FaultModel, harness: KernelHarness, case: Case) -> bool:
    """Whether what a kernel gives is what one with the other fault may give."""
    observation = observation_of(harness, replace(case, memory="nan"))
    if observation is None or not other.concerns(case):
        return observation is None or not observation.breaks
    limits = limits_of(other, observation)
    silent = other.family == "unwritten"
    return limits is not None and not any(
        bool((judge(output, limit).broken & (limit.judged | silent)).any())
        for output, limit in zip(observation.outputs, limits, strict=True)
    )


def _fresh(op: str, fault: FaultModel, settings: dict[str, Any]) -> Iterator[Case]:
    """Fresh cases of several distributions, each with two seeds, for what a call leaves for the next of its shape."""
    sampler, choose = sampler_of(op, settings), seeded(7)
    for place in range(_CASES):
        case = sampler.case(choose, style=("tile", "small", "any")[place % 3])
        if fault.concerns(case):
            kind = _KINDS[place // 3 % len(_KINDS)]
            case = replace(case if kind is None else with_values(case, kind), protocol="once")
            yield case
            yield replace(case, seed=case.seed + 1)


class Stopwatch:
    """The processor seconds that fault models take to explain while it is open, however busy the machine.

    Experiments explain nothing meanwhile: what fault models say alone is measured.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "Stopwatch":
        explain = diagnosis.explain

        def timed(*given: Any, **settings: Any) -> Any:
            started = time.process_time()
            try:
                return explain(*given, **settings)
            finally:
                self.seconds += time.process_time() - started

        self._patches = (
            mock.patch.object(diagnosis, "explain", timed),
            mock.patch.object(deadline, "BUDGET_WALL_FACTOR", 1e9),
            mock.patch.object(diagnosis.Experiments, "explained", return_value=()),
        )
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
