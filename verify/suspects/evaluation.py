"""Evaluating a suspect: in any arithmetic, or as the kernel that has its fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic
from assay.golden.inputs.values import torch_dtype
from assay.golden.registry import spec
from assay.golden.run import run, split_keywords
from assay.verify.inputs.cases import Case
from assay.verify.suspects.single import Single
from assay.verify.suspects.suspect import Kernel, Suspect

Tensor = torch.Tensor


def evaluate(
    suspect: Suspect | None,
    case: Case,
    values: Mapping[str, Tensor],
    arithmetic: type[Arithmetic],
    *settings: Any,
    chosen: Mapping[str, Tensor] | None = None,
) -> tuple[Any, ...]:
    """The results that the fault gives for these tensors, in numbers of ``arithmetic(*settings)``; None: no fault.

    Raises what the right definition raises of tensors and options that it can't take.
    """
    definition, options, values = case.definition, dict(case.options), dict(values)
    if suspect is not None:
        arithmetic = with_mixin(suspect.arithmetic, arithmetic)
        options = suspect.options(options, case) if suspect.options else options
        values = suspect.inputs(values, case) if suspect.inputs else values
        definition = replace(definition, definition=suspect.definition) if suspect.definition else definition
    xp = arithmetic(*settings)
    xp.case = case  # type: ignore[attr-defined]  # for the mixin of an alteration
    keywords = {tensor.name: values.pop(tensor.name) for tensor in case.signature.tensors if tensor.keyword}
    options |= {name: True for name in keywords if name in options}
    options = {name: value for name, value in options.items() if name not in keywords or value is True}
    found = run(definition, xp, list(values.values()), options, keywords, chosen)
    results = found if isinstance(found, tuple) else (found,)
    return suspect.results(xp, results, case) if suspect is not None and suspect.results else results


@cache
def with_mixin(mixin: type | None, base: type[Arithmetic]) -> type[Arithmetic]:
    """``base`` with the operations of ``mixin``."""
    return base if mixin is None else type(f"{mixin.__name__}{base.__name__}", (mixin, base), {})


def kernel_of(suspect: Suspect | None, op: str, out_dtype: str | None = None) -> Kernel:
    """The kernel that has the fault, in float32 inside: a function for `examine`. None: the right one."""

    def kernel(*tensors: Tensor, **keywords: Any) -> Any:
        case, values = _call(op, tensors, keywords, out_dtype)
        fault = suspect if suspect is not None and suspect.concerns(case) else None
        results = evaluate(fault, case, values, Single)
        store = fault.store if fault is not None and fault.store else stored
        outputs = tuple(
            result.to(torch_dtype(dtype)) if tensor.is_integer else store(result, dtype)
            for tensor, result, dtype in zip(case.signature.returns, results, case.result_dtypes, strict=True)
        )
        return outputs if len(outputs) > 1 else outputs[0]

    kernel.__name__ = kernel.__qualname__ = suspect.name if suspect else f"{op} in float32"
    return suspect.conduct(kernel) if suspect is not None and suspect.conduct else kernel


def stored(result: Tensor, dtype: str) -> Tensor:
    """Rounded once into the dtype, as a tensor of its own."""
    return result.to(torch_dtype(dtype)).contiguous()


def _call(
    op: str, tensors: tuple[Tensor, ...], keywords: Mapping[str, Any], out_dtype: str | None
) -> tuple[Case, dict[str, Tensor]]:
    """A call's tensors by name, and what is known of it beside them."""
    definition = spec(op)
    given = {name: value for name, value in keywords.items() if value is not None or name in definition.options}
    given = {name: False if name == "sinks" and value is None else value for name, value in given.items()}
    plain, named = split_keywords(definition, given)
    options = definition.complete(plain)
    signature = definition.signature(options)
    order = [tensor.name for tensor in signature.tensors if not tensor.keyword]
    values = dict(zip(order, tensors, strict=True))
    values |= {tensor.name: named[tensor.name] for tensor in signature.tensors if tensor.keyword}
    sizes = signature.bind(op, [tuple(value.shape) for value in values.values()])
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in values.items()}
    return Case(op, sizes, dtypes, options, out_dtype=out_dtype), values
