"""Evaluate a fault model in any arithmetic, or as the kernel with its fault."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic
from assay.golden.evaluation.call import bind, run
from assay.golden.inputs.values import torch_dtype
from assay.golden.lowering.choices import Answered
from assay.golden.registry import spec
from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.fault_model import FaultModel, Kernel
from assay.verify.explanation.fault_models.single import Single

Tensor = torch.Tensor


def evaluate(
    fault: FaultModel | None,
    case: Case,
    values: Mapping[str, Tensor],
    arithmetic: type[Arithmetic],
    *settings: Any,
    chosen: Mapping[str, Tensor] | None = None,
) -> tuple[Any, ...]:
    """Return the fault's results for these tensors, in numbers of ``arithmetic(*settings)``; None: no fault.

    Raises the errors of the right definition for tensors and options that it can't take.
    """
    definition, options, values = case.definition, dict(case.options), dict(values)
    if fault is not None:
        arithmetic = with_mixin(fault.arithmetic, arithmetic)
        options = fault.options(options, case) if fault.options else options
        values = fault.inputs(values, case) if fault.inputs else values
        definition = replace(definition, definition=fault.definition) if fault.definition else definition
    xp = arithmetic(*settings)
    xp.case, xp.given = case, dict(values)  # type: ignore[attr-defined]  # read by the mixin of an alteration
    keywords = {tensor.name: values.pop(tensor.name) for tensor in case.signature.tensors if tensor.keyword}
    results = run(definition, xp, list(values.values()), options | keywords, chosen, Answered())
    return fault.results(xp, results, case) if fault is not None and fault.results else results


@cache
def with_mixin(mixin: type | None, base: type[Arithmetic]) -> type[Arithmetic]:
    """Return ``base`` with the operations of ``mixin``."""
    return base if mixin is None else type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})


def kernel_of(fault: FaultModel | None, op: str, out_dtype: str | None = None) -> Kernel:
    """Return the kernel with the fault, in float32 inside, as a function for `examine`; None: the right kernel."""

    def kernel(*tensors: Tensor, **keywords: Any) -> Any:
        case, values = _call(op, tensors, keywords, out_dtype)
        present = fault if fault is not None and fault.concerns(case) else None
        results = evaluate(present, case, values, Single)
        store = present.store if present is not None and present.store else stored
        outputs = tuple(
            result.to(torch_dtype(dtype)) if tensor.is_integer else store(result, dtype)
            for tensor, result, dtype in zip(case.signature.returns, results, case.result_dtypes, strict=True)
        )
        return outputs if len(outputs) > 1 else outputs[0]

    kernel.__name__ = kernel.__qualname__ = fault.name if fault else f"{op} in float32"
    return fault.side_effects(kernel) if fault is not None and fault.side_effects else kernel


def stored(result: Tensor, dtype: str) -> Tensor:
    """Return the result, rounded once to the dtype, as a contiguous tensor."""
    return result.to(torch_dtype(dtype)).contiguous()


def _call(
    op: str, tensors: tuple[Tensor, ...], keywords: Mapping[str, Any], out_dtype: str | None
) -> tuple[Case, dict[str, Tensor]]:
    """Return the case of a call, and its tensors by name."""
    definition = spec(op)
    given = {name: value for name, value in keywords.items() if value is not None or name in definition.options}
    flags = {name for name, option in definition.options.items() if option.tensor}
    given = {name: False if name in flags and value is None else value for name, value in given.items()}
    call = bind(definition, tensors, given)
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in call.tensors.items()}
    return Case(op, call.sizes, dtypes, call.options, out_dtype=out_dtype), dict(call.tensors)
