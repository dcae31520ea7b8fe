"""Kernels as custom operators of torch, and their gradients.

A custom operator is opaque to torch.compile. `torch.library.triton_op` isn't, but traces the operator by running its
function on tensors without memory, which an interpreted kernel needs: torch.compile and opcheck fail (torch 2.13,
`wrap_triton`: "Cannot access data pointer of Tensor"). With neither interpreter nor GPU every call fails ("0 active
drivers"), so nothing of it could be tested on a CPU.
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

from assay.kernels.triton.replay import is_recording

_GRADIENTS: dict[str, Gradients] = {}
"""By the name of the operator."""


def custom_op(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function the operator ``name`` ("assay::softmax").

    The function writes no argument. ``fake`` takes the same arguments and returns new tensors of the result's shapes
    and dtypes. The device of the first tensor is the current one during a call: Triton and CUDA launch kernels there. A
    backward pass raises NotImplementedError unless the operator has gradients (`differentiate`).
    Unlike those of `torch.library.custom_op`, the operators don't import torch's compiler in their first call, which
    takes over a second.
    """

    def register(function: Callable[..., Any]) -> Any:
        uncompiled = cache(lambda: torch.compiler.disable(function))  # type: ignore[no-untyped-call]

        @wraps(function)
        def call(*args: Any) -> Any:
            first = next(argument for argument in args if isinstance(argument, torch.Tensor))
            try:
                with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
                    return (uncompiled() if "torch._dynamo" in sys.modules else function)(*args)
            except RuntimeError as error:
                if "active drivers" not in str(error):  # Triton's message without a GPU
                    raise
                expected = "expected tensors on a GPU, or a call within assay.interpreter.faithful()"
                raise RuntimeError(f"{name}: {expected}, got tensors on {first.device}") from None

        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "default", call)
        torch.library.register_fake(name, fake)
        namespace, _, short_name = name.partition("::")
        operator = getattr(getattr(torch.ops, namespace), short_name).default
        names = [argument.name for argument in operator._schema.arguments]

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if name in _GRADIENTS:
                _GRADIENTS[name].save(ctx, dict(zip(names, inputs, strict=True)), output)

        def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
            if name not in _GRADIENTS:
                raise NotImplementedError(f"{name} has no gradient: detach its arguments, or run it under no_grad")
            return _GRADIENTS[name].compute(ctx, names, upstream)

        torch.library.register_autograd(name, backward, setup_context=save)

        @wraps(function)
        def dispatch(*args: Any) -> Any:
            return call(*args) if is_recording() else operator(*args)  # a recorder doesn't see what an operator runs

        return dispatch

    return register


def differentiate(name: str, gradients: Callable[..., Any], saves: str) -> None:
    """Register ``gradients(saved, *upstream)`` as the backward pass of the operator ``name``.

    It returns the gradient of the first argument, or a tuple of those of the first few; other arguments have none.
    ``saved`` has as attributes the tensors that ``saves`` names ("x weight") and all options; the name "result" is the
    operator's result, or the first of several, "last_result" the last. ``saved.needs.x`` tells whether the gradient of
    the argument x is needed (not for a frozen weight); one that isn't is dropped and need not be computed.
    """
    _GRADIENTS[name] = Gradients(gradients, saves.split())


@dataclass(frozen=True)
class Gradients:
    """The backward pass of an operator, and the names of the tensors that it saves."""

    function: Callable[..., Any]
    saves: list[str]

    def save(self, ctx: Any, arguments: dict[str, Any], output: Any) -> None:
        ctx.options = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
        results = output if isinstance(output, tuple) else (output,)
        arguments |= {"result": results[0], "last_result": results[-1]}
        ctx.save_for_backward(*(arguments[name] for name in self.saves))

    def compute(self, ctx: Any, names: list[str], upstream: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))  # torch passes the operator one argument more
        saved = ctx.options | dict(zip(self.saves, ctx.saved_tensors, strict=True))
        gradients = self.function(SimpleNamespace(**saved, needs=SimpleNamespace(**needs)), *upstream)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return tuple(gradient if needs[name] else None for name, gradient in zip_longest(names, gradients))
