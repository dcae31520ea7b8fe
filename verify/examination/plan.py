"""The plan of an examination: checked settings, the kernel's harness and the sampler of cases, before the first
call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from assay.formats.accumulator import accumulator_named
from assay.golden.registry import Spec
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.examination.steps import Steps
from assay.verify.harness.clean_process import is_there
from assay.verify.harness.frameworks import check_device, check_dtypes, check_framework, layouts_of
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.target import target_of
from assay.verify.settings import Settings


@dataclass(frozen=True)
class Plan:
    """What an examination needs to run: settings, harness and sampler.

    ``dtype`` is worded as in reports. ``refusal`` is the reason why the contract doesn't apply, empty if it does.
    ``steps`` has what went wrong in the examination's own steps.
    """

    settings: Settings
    kernel: str
    dtype: str
    harness: KernelHarness
    sampler: Sampler
    refusal: str
    steps: Steps = field(default_factory=Steps)

    @property
    def definition(self) -> Spec:
        """The spec of the op."""
        return self.sampler.definition

    @property
    def is_callable_outside(self) -> bool:
        """Whether the kernel is isolated and can be called in a plain process: importable by name, and called with
        torch tensors."""
        settings, kernel = self.settings, self.harness.call.kernel
        return settings.isolate and settings.framework == "torch" and is_there(target_of(kernel))


def make_plan(
    kernel: Callable[..., Any], settings: Settings, heartbeat: Callable[[Case, float], None] | None = None
) -> Plan:
    """Return the plan of an examination with these settings. ``heartbeat`` is the callback of `Call`.

    Raises `SettingError` or `ContractError` if this machine or the contract doesn't admit the settings.
    """
    if not callable(kernel):
        raise SettingError(f"kernel: expected a callable, got {type(kernel).__name__}")
    definition, contract = settings.definition, settings.contract
    check_device(settings.device)
    check_framework(settings.framework, settings.device)
    free = [tensor.name for tensor in definition.tensors if tensor.dtype is None]
    if settings.dtype is None and free:
        raise SettingError(f"dtype: {definition.name} needs the dtype of {', '.join(free)}, e.g. dtype='bfloat16'")
    sampler = Sampler(
        definition,
        settings.dtype or "float8_e4m3fn",  # of the dtypes that an op fixes only fp8's may vary
        settings.options,
        settings.sizes,
        layouts_of(settings.framework, settings.layouts),
        settings.seed,
        settings.out_dtype,
        ties=settings.ties,
    )
    first = sampler.case(lambda values: values[0], style="small")
    contract.model(definition, first.input_format)
    results = zip((tensor.name for tensor in first.signature.returns), first.result_dtypes, strict=True)
    check_dtypes(settings.framework, {**first.dtypes, **dict(results)})
    return Plan(
        settings,
        kernel=getattr(kernel, "__qualname__", None) or getattr(kernel, "__name__", None) or repr(kernel),
        dtype=", ".join(dict.fromkeys(first.dtypes.values())),
        harness=KernelHarness.of(kernel, settings, heartbeat, sampler),
        sampler=sampler,
        refusal=_refusal(contract, first),
    )


def _refusal(contract: Contract, case: Case) -> str:
    """Return why the contract doesn't apply to this case; empty if it does."""
    unit = accumulator_named(contract.accumulate)
    first = next(iter(case.dtypes.values()))
    if not unit.takes(first):
        known = ", ".join(unit.inputs)
        return f"the accumulator {contract.accumulate!r} takes {known}; the contract says nothing about {first}"
    return ""
