"""Kernels as operators of torch, and their gradients.

An operator is whole to a compiler. `torch.library.triton_op` would let it see inside, but traces an operator by running
its function on tensors without memory, which an interpreted kernel needs: torch.compile and opcheck fail (torch 2.13,
`wrap_triton`: "Cannot access data pointer of Tensor"). Without the interpreter and without a GPU every call does ("0
active drivers"), so that nothing of it could be tested on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch

_GRADIENTS: dict[str, Gradients] = {}
"""Of the operators that have any, by name."""


def custom_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function that writes no argument as the operator ``name`` ("assay::softmax"), with what it returns as
    new tensors of the same shapes and dtypes (``fake``), and give that operator.

    It runs with the device of its first tensor as the current one, which is where Triton and CUDA launch kernels. A
    backward pass through it raises NotImplementedError unless it has gradients (`differentiate`).
    As `torch.library.custom_op`, whose operators import torch's compiler in their first call: over a second.
    """

    def registered(function: Callable[..., Any]) -> Any:
        untraced = cache(lambda: torch.compiler.disable(function))  # type: ignore[no-untyped-call]

        @wraps(function)
        def call(*args: Any) -> Any:
            there = next(argument for argument in args if isinstance(argument, torch.Tensor))
            try:
                with torch.cuda.device_of(there):  # type: ignore[no-untyped-call]
                    return (untraced() if "torch._dynamo" in sys.modules else function)(*args)
            except RuntimeError as error:
                if "active drivers" not in str(error):  # Triton's words where there is no GPU
                    raise
                expected = "expected tensors on a GPU, or a call within assay.interpreter.faithful()"
                raise RuntimeError(f"{name}: {expected}, got tensors on {there.device}") from None

        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "default", call)
        torch.library.register_fake(name, fake)
        namespace, _, own = name.partition("::")
        operator = getattr(getattr(torch.ops, namespace), own).default
        names = [argument.name for argument in operator._schema.arguments]

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if name in _GRADIENTS:
                _GRADIENTS[name].save(ctx, dict(zip(names, inputs, strict=True)), output)

        def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
            if name not in _GRADIENTS:
                raise NotImplementedError(f"{name} has no gradient: detach its arguments, or run it under no_grad")
            return _GRADIENTS[name].of(ctx, names, upstream)

        torch.library.register_autograd(name, backward, setup_context=save)
        return operator

    return registered


def differentiate(name: str, gradients: Callable[..., Any], saves: str) -> None:
    """Give the operator ``name`` a gradient: ``gradients(saved, *upstream)``, that of its first argument or a tuple of
    those of the first few; the others have none.

    ``saved`` has those arguments as attributes that ``saves`` names ("x weight"), and options all; "result" is the
    operator's own result, or the first of several, and "last_result" the last. ``saved.needs`` says of each argument
    whether its gradient is asked for (not that of a frozen weight): what is given for another is dropped, and best not
    computed. The gradients are operators themselves, and have none.
    """
    _GRADIENTS[name] = Gradients(gradients, saves.split())


@dataclass(frozen=True)
class Gradients:
    """What `differentiate` is told of an operator."""

    function: Callable[..., Any]
    saves: list[str]

    def save(self, ctx: Any, given: dict[str, Any], output: Any) -> None:
        """Keep in ``ctx`` what the gradients need of the arguments and the results."""
        ctx.options = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        results = output if isinstance(output, tuple) else (output,)
        given |= {"result": results[0], "last_result": results[-1]}
        ctx.save_for_backward(*(given[name] for name in self.saves))

    def of(self, ctx: Any, names: list[str], upstream: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """The gradients that are needed of the arguments, from what was kept and the gradients of the results."""
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))  # torch passes the operator one argument more
        saved = ctx.options | dict(zip(self.saves, ctx.saved_tensors, strict=True))
        found = self.function(SimpleNamespace(**saved, needs=SimpleNamespace(**needs)), *upstream)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(gradient if needs[name] else None for name, gradient in zip_longest(names, found))
