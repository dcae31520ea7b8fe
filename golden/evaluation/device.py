"""Where balls are evaluated: on the CPU, or inside `evaluating_on` on a device where that is cheaper.

A judge of large results, such as an examination on a GPU, has goldens and tolerances evaluated there: the same code on
the device's tensors, with the same bounds. What these are proven from holds on CUDA too:

- Sums, products, quotients and square roots of float64 are rounded to nearest. An operation of PyTorch is a kernel of
  its own, so that no product and sum of an error-free transform are contracted.
- Sums and matrix products, in any order and fused or not, are within gamma_n. Of cuBLAS's emulated products that isn't
  known: where `_EMULATED` turns them on, all stays on the CPU.
- NVIDIA's maxima of the elementary functions (configs/cuda_functions.toml) are within what `EVALUATION` allows.
  Functions without a maximum run on the CPU (`arithmetic.real.torch_function`).

`./dev gpu goldens` measures all of this.

What promises its bits (`evaluate`, stores, jobs) stays on the CPU: another order of sums gives other last places.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from assay.golden.arithmetic import Arithmetic, Ball, BallArithmetic

LEAST = 2**17
"""Numbers of arguments and results from which a device is to pay; of fewer its launches take longer than a CPU. It is a
choice: `./dev gpu goldens` prints the times of both."""
_EMULATED = "CUBLAS_EMULATE_DOUBLE_PRECISION"
_FULL = 2**8  # times as many numbers in a block as on a CPU: 2^26, half a GiB, for each of some ten intermediates


@dataclass(frozen=True)
class _Evaluator:
    device: torch.device
    least: int


_EVALUATOR: ContextVar[_Evaluator | None] = ContextVar("evaluator", default=None)


@contextmanager
def evaluating_on(device: torch.device | str, least: int = LEAST) -> Iterator[None]:
    """Let `call.run` evaluate calls of ``least`` numbers or more on ``device`` inside; "cpu": none."""
    device = torch.device(device)
    stays = device.type == "cpu" or os.environ.get(_EMULATED, "0") != "0"
    token = _EVALUATOR.set(None if stays else _Evaluator(device, least))
    try:
        yield
    finally:
        _EVALUATOR.reset(token)


def is_on_device() -> bool:
    """Return whether large calls are evaluated on a device."""
    return _EVALUATOR.get() is not None


def device_for(arithmetic: Arithmetic, numbers: int) -> torch.device | None:
    """Return the device to evaluate a call of so many numbers on; None for the CPU."""
    evaluator = _EVALUATOR.get()
    takes = evaluator is not None and type(arithmetic) is BallArithmetic and numbers >= evaluator.least
    return evaluator.device if evaluator is not None and takes else None


@contextmanager
def placed(arithmetic: Arithmetic, device: torch.device) -> Iterator[Arithmetic]:
    """Return the arithmetic for numbers on a device; new tensors are made there inside."""
    balls: Any = copy(arithmetic)
    balls.block_scale = _FULL
    with device, _Placing(device):  # the former for functions of arrays and lists, and the latter for all others
        yield balls


class _Placing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations that create tensors create them on a device, also for a reference that names the CPU.

    `torch.device` as a context doesn't act in what a reference's operations are lowered to.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise entering the mode imports torch._dynamo, which takes seconds (torch 2.13)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.lift_fresh.default:
            return args[0].to(self._device)
        makes = "device" in _arguments(func) and not any(isinstance(each, torch.Tensor) for each in args)
        if makes and (kwargs.get("device") is None or kwargs["device"].type == "cpu"):
            kwargs["device"] = self._device
        return func(*args, **kwargs)


@cache
def _arguments(func: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in func._schema.arguments)


def on_cpu(result: Any) -> Any:
    """Return a result, a `Ball` or a tensor, on the CPU."""
    if isinstance(result, Ball):
        return Ball(result.mid.cpu(), None if result.rad is None else result.rad.cpu(), result.model)
    return result.cpu()


def release(device: torch.device) -> None:
    """Give memory that PyTorch keeps on a device back, since the kernel's process has the same device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
