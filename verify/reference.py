"""Names of specs: an op, or a reference (a PyTorch function or module of the caller) that defines the right results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.lowering import example_of, reference_spec
from assay.verify.errors import SettingError

Reference = Callable[..., Any]


def spec_name_of(op: str | Reference | Sequence[Reference], tensors: str | None = None) -> str:
    """Return the spec's name for an op's name, or for a reference, whose spec has the same name in any process.

    Raises `SettingError` or `DefinitionError`.
    """
    if isinstance(op, str) and ":" not in op:
        if tensors is not None:
            raise SettingError(f"tensors: the signature of the op {op!r} is known; leave tensors= out")
        return op
    if isinstance(op, str):
        return op if tensors is None else f"{op}({' '.join(tensors.split())})"
    if tensors is None:
        raise SettingError(
            "tensors: expected what the reference takes and gives, e.g. 'x[T,D], weight[D] -> y[T,D]', or inputs=, a "
            "function that gives example arguments"
        )
    return reference_spec(op, tensors).qualified_name


def spec_name_by_example(
    kernel: Any, op: str | Reference | Sequence[Reference], inputs: Callable[[], Any]
) -> tuple[Any, str, str]:
    """Return the kernel as a function of tensors, the name of its spec, and the dtype of the example inputs.

    Parameters of modules become tensors too, shared by name. Raises `SettingError` or `DefinitionError`.
    """
    if isinstance(op, str):
        raise SettingError(f"inputs: {op!r} is known by its name; expected a reference, a function or a module")
    forms: list[Any] = list(op) if isinstance(op, (list, tuple)) else [op]
    example = example_of(forms[0], inputs)
    name = getattr(forms[0], "__name__", None) or type(forms[0]).__name__
    limits: dict[str, Any] = {"multiples": example.multiples, "sizes": example.allowed}
    if example.plain and not isinstance(kernel, torch.nn.Module):
        return kernel, reference_spec(forms, example.text, **limits).qualified_name, example.dtype
    calls = [example.call.with_target(form) for form in forms]
    made = reference_spec(calls, example.text, name=name, **limits)
    return example.call.with_target(kernel), made.qualified_name, example.dtype
