"""Functions that `torch.compile` made, where they launch Triton kernels: the launch itself isn't compiled.

The compiler would trace into the interpreter, or call what it made of a kernel for a GPU. So a launch is an operator of
a graph, and a graph that holds one runs operator by operator; others are compiled as always.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _triton

from assay.interpreter.replacing import Change

_LAUNCHES = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that the compiler traces neither from outside nor within."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(before)

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # of earlier versions
        frames.skip_code(call.__code__)
    else:
        action = frames._FrameAction
        frames.set_code_exec_strategy(call.__code__, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    call.__dict__["_torchdynamo_disable"] = True
    call.__dict__["_torchdynamo_disable_msg"] = "Triton kernels are interpreted"
    return call


def changes() -> list[Change]:
    """What is replaced in torch."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    return [(wrapper, "__call__", _uncompiled(wrapper.__call__)), (_triton, "has_triton", _known(_triton.has_triton))]


def _known(original: Callable[[], bool]) -> Callable[[], bool]:
    """Whether there is a GPU for Triton: the part of the compiler that looks for launches in a function is told so."""
    return lambda: sys._getframe(1).f_globals.get("__name__") == "torch._dynamo.variables.builder" or original()


def _uncompiled(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        if any(map(_launches, _targets(graph))):
            disable: Any = torch.compiler.disable
            return disable(graph.forward)  # what it calls isn't to be traced
        return original(self, graph, inputs, **options)

    return call


def _targets(graph: torch.fx.GraphModule) -> Iterator[Any]:
    """What is called in the graph, and in those that it holds."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node.target for node in module.graph.nodes)


def _launches(target: Any) -> bool:
    """Whether it is a launch, or an operator that `torch.library.triton_op` made."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name in getattr(torch._library.triton, "triton_ops_to_kernels", {})
    return getattr(target, "_name", "") in _LAUNCHES
