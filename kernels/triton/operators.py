"""Kernels as operators of torch, and their gradients.

An operator is whole to a compiler. `torch.library.triton_op` would let it see inside, but traces an operator by running
its function on tensors without memory, which an interpreted kernel needs: torch.compile and opcheck fail (torch 2.13,
`wrap_triton`: "Cannot access data pointer of Tensor"). Without the interpreter and without a GPU every call does ("0
active drivers"), so that nothing of it could be tested on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace
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


def differentiate(name: str, gradients: Callable[..., Any], saves: str) -> None:
    """Give the operator ``name`` a gradient: ``gradients(saved, *upstream)``, of each of its arguments one, or None.

    ``saved`` has those arguments as attributes that ``saves`` names ("x weight"), and options all; "result" is the
    operator's own result, or the first of several, and "last_result" the last.
    The gradients are operators themselves, and have none.
    """
    kept = saves.split()
    namespace, _, own = name.partition("::")
    names = [argument.name for argument in getattr(getattr(torch.ops, namespace), own).default._schema.arguments]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(names, inputs, strict=True))
        ctx.options = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        results = output if isinstance(output, tuple) else (output,)
        given |= {"result": results[0], "last_result": results[-1]}
        ctx.save_for_backward(*(given[name] for name in kept))

    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        saved = ctx.options | dict(zip(kept, ctx.saved_tensors, strict=True))
        return gradients(SimpleNamespace(**saved), *upstream)

    torch.library.register_autograd(name, backward, setup_context=save)
