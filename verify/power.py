"""Power: which known faults an examination, or a test with a plain tolerance, would have caught.

Every fault model of a spec runs as a kernel, in float32 inside, and is examined. A fault that is not caught names the
input that would have revealed it. The kernel without a fault is examined first: if a check fails that kernel too, its
failures say nothing about the faults.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from assay.golden.arithmetic import Real
from assay.golden.inputs.values import torch_dtype
from assay.runtime.errors import unknown
from assay.verify.cases.case import Case, build
from assay.verify.cases.sampler import seeded, with_values
from assay.verify.errors import SettingError
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.procedure import examination
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.evaluation import evaluate, kernel_of
from assay.verify.explanation.fault_models.fault_model import FAMILIES, FaultModel
from assay.verify.findings import Failure
from assay.verify.power_report import PowerReport, Tried
from assay.verify.reference import Reference, spec_name_of
from assay.verify.settings import Settings

_CHECK = re.compile(r"\s*(allclose|assert_close)\s*(?:\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\))?\s*")
_ALLCLOSE = (1e-5, 1e-8)  # torch.allclose's defaults
_ASSERT_CLOSE = {
    "float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7),
}  # fmt: skip  # torch.testing.assert_close's defaults
Progress = Callable[[str, int, int], None]


def power(
    op: str | Reference | Sequence[Reference],
    *,
    tensors: str | None = None,
    examples: int = 50,
    families: Sequence[str] | None = None,
    against: str = "",
    progress: Progress | None = None,
    **settings: Any,
) -> PowerReport:
    """Examine every fault model of spec ``op``, or of a reference with its ``tensors``, that these settings admit.

    ``settings`` are dtype, out_dtype, options, shapes, contract, seed and layouts, as in `assay.verify.examine`.
    ``families`` are the fault families to examine, by default all. ``against`` is a plain check to compare with:
    "allclose(rtol, atol)" or "assert_close(rtol, atol)" against a float64 reference on normal numbers of one size, by
    default with torch's tolerances. ``progress(name, done, of)`` is called before each fault.

    Raises the errors of `examine`, and `SettingError` if ``against`` can't be parsed or if the kernel without a fault
    fails the examination or the plain check.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    spec = spec_name_of(op, tensors)
    return measured(Settings(spec, examples=examples, **given), families=families, against=against, progress=progress)


def measured(
    settings: Settings, *, families: Sequence[str] | None = None, against: str = "", progress: Progress | None = None
) -> PowerReport:
    """Return the `power` for settings given as a record; settings of how a kernel runs are ignored."""
    started = time.perf_counter()
    settings = replace(settings.anywhere(), every_aspect=False, at=())
    definition, out_dtype = settings.definition, settings.out_dtype
    op = definition.qualified_name if definition.needs_dtypes else definition.name
    plan = make_plan(kernel_of(None, op), settings)
    tolerances = _tolerances(against) if against else None
    for family in families or ():
        if family not in FAMILIES:
            raise SettingError(f"families: {unknown('family', family, FAMILIES)}")
    faults = [fault for fault in _admitted(plan, op) if fault.family in (families or FAMILIES)]
    _require_a_pass(plan, op, against, tolerances)
    trials = []
    for index, fault in enumerate(faults):
        if progress is not None:
            progress(fault.name, index, len(faults))
        verdict = examination(kernel_of(fault, op, out_dtype), settings)
        trials.append(
            Tried(
                fault.name,
                fault.family,
                fault.description,
                fault.origin,
                fault.needs,
                caught=verdict.failure is not None and fault.shows(verdict.failure.kind),
                kind=verdict.failure.kind if verdict.failure else "",
                cases=verdict.cases,
                against=None if tolerances is None else _plain_check_fails(plan, fault, tolerances),
            )
        )
    contract, seconds = str(settings.contract), time.perf_counter() - started
    return PowerReport(op, plan.dtype, contract, settings.fuzzed, tuple(trials), against, seconds)


def _require_a_pass(plan: Plan, op: str, against: str, check: tuple[str, tuple[float, float] | None] | None) -> None:
    """Raise `SettingError` unless the kernel without a fault, in float32 inside, passes the faults' checks."""
    verdict = examination(kernel_of(None, op, plan.settings.out_dtype), plan.settings)
    if not verdict.passed:
        why = verdict.failure.message if verdict.failure is not None else verdict.note
        raise SettingError(
            f"power: {op} in {plan.dtype} under {plan.harness.contract}: expected that the kernel without a "
            f"fault, in float32 inside, passes; got {verdict.outcome} ({why}), so that a rate would tell nothing; "
            "ask in float32 or narrower, or under a contract that float32 keeps"
        )
    if check is not None and _plain_check_fails(plan, None, check):
        raise SettingError(
            f"power: against={against!r} fails the kernel without a fault ({op} in {plan.dtype}), so that a rate "
            "would tell nothing; ask with larger tolerances"
        )


def _admitted(plan: Plan, op: str) -> list[FaultModel]:
    """Return the fault models that some set of options admits and that break the contract."""
    sampler, choose = plan.sampler, seeded(0)
    cases = [sampler.case(choose, style="tile", options=options) for options in sampler.option_sets()]
    kept = plan.harness.contract.changed()
    return [
        fault
        for fault in fault_models_of(op)
        if any(fault.concerns(case) for case in cases)
        and not (fault.contract and all(kept.get(name) == value for name, value in fault.contract.items()))
    ]


def _tolerances(text: str) -> tuple[str, tuple[float, float] | None]:
    """Return the check that ``text`` names, and its tolerances."""
    expected = f"against={text!r}; expected allclose(1e-2,1e-2) or assert_close(1e-2,1e-2): rtol and atol"
    match = _CHECK.fullmatch(text)
    if match is None:
        raise SettingError(expected)
    name, rtol, atol = match.groups()
    try:
        tolerances = None if rtol is None else (float(rtol), float(atol))
    except ValueError:
        raise SettingError(expected) from None
    if tolerances is not None and not all(0 <= tolerance < math.inf for tolerance in tolerances):
        raise SettingError(expected)
    return name, tolerances


def _plain_check_fails(plan: Plan, fault: FaultModel | None, check: tuple[str, tuple[float, float] | None]) -> bool:
    """Return whether a comparison with a float64 reference on normal numbers catches the fault (None: no fault).

    The comparison uses one size and each set of options; any of these may catch the fault.
    """
    kernel = kernel_of(fault, plan.definition.name, plan.sampler.out_dtype)
    call = plan.harness.call
    for options in plan.sampler.option_sets():
        case = plan.sampler.case(seeded(plan.sampler.seed), style="tile", options=options)
        case = with_values(case, "normal", layouts={}, protocol="once", memory="plain", unused="plain")
        inputs = build(case)
        outputs = type(call)(kernel, call.listed)(case, inputs)
        if isinstance(outputs, Failure):
            if fault is None or fault.shows(outputs.kind):
                return True
        elif _differ(case, inputs.guarded, outputs, check):
            return True
    return False


def _differ(case: Case, guarded: Any, outputs: tuple[Any, ...], check: tuple[str, tuple[float, float] | None]) -> bool:
    name, stated = check
    values = {tensor: part.tensor for tensor, part in guarded.items()}
    right = evaluate(None, case, values, Real)
    for got, want, dtype in zip(outputs, right, case.result_dtypes, strict=True):
        rtol, atol = stated or (_ALLCLOSE if name == "allclose" else _ASSERT_CLOSE.get(dtype, (0.0, 0.0)))
        stored = want.to(torch_dtype(dtype)).double()
        if not torch.allclose(got.double(), stored, rtol=rtol, atol=atol, equal_nan=name == "assert_close"):
            return True
    return False
