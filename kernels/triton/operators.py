"""Kernels as operators of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch


def custom_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that writes no argument as the operator ``name`` ("assay::softmax"), with what it returns as
    new tensors of the same shapes and dtypes (``fake``), and give that operator.

    As `torch.library.custom_op`, whose operators import torch's compiler in their first call: over a second.
    """

    def registered(function: Callable[..., Any]) -> Any:
        untraced = cache(lambda: torch.compiler.disable(function))  # type: ignore[no-untyped-call]

        @wraps(function)
        def call(*args: Any) -> Any:
            return (untraced() if "torch._dynamo" in sys.modules else function)(*args)

        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "default", call)
        torch.library.register_fake(name, fake)
        namespace, _, own = name.partition("::")
        return getattr(getattr(torch.ops, namespace), own).default

    return registered
