"""Tensors created inside a reference, copies, casts, and Python numbers taken out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.lowering.dispatch import CREATIONS, Lowering
from assay.golden.lowering.rule_table import constant, overloads, result_type, rule
from assay.golden.lowering.tensor import TracedMemory, TracedTensor, broadcast, contiguous_strides, read

Tensor = torch.Tensor


def _filled(ctx: Lowering, size: Any, value: Any, dtype: torch.dtype | None) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point:
        return torch.full(tuple(size), value, dtype=dtype)
    number = broadcast(ctx.xp, constant(ctx.xp, value), tuple(size))
    return TracedTensor(ctx, TracedMemory(number), dtype, tuple(size), contiguous_strides(size), 0)


def _creation(names: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorate ``function(ctx, overload, *arguments, **options)``, which computes these operations."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        CREATIONS.update(dict.fromkeys(overloads(names), function))
        return function

    return register


def _register_fill(names: str, value: float) -> None:
    @_creation(names)
    def create(ctx: Lowering, func: Any, size: Any, *args: Any, dtype: Any = None, **_: Any) -> Tensor:
        integer = dtype is not None and not dtype.is_floating_point
        return _filled(ctx, size, 0 if math.isnan(value) and integer else value, dtype)


_register_fill("zeros", 0.0)
_register_fill("ones", 1.0)
_register_fill("empty.memory_format empty_strided empty_permuted", math.nan)


@_creation("full")
def _full(ctx: Lowering, func: Any, size: Any, value: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _filled(ctx, size, value, dtype or torch.full((), value).dtype)


@_creation("scalar_tensor")
def _scalar_tensor(ctx: Lowering, func: Any, value: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _filled(ctx, (), value, dtype)


@rule("full_like")
def _full_like(ctx: Lowering, x: Tensor, value: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _filled(ctx, x.shape, value, dtype or x.dtype)


@rule("new_empty_strided")
def _new_empty_strided(ctx: Lowering, x: Tensor, size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return _filled(ctx, size, math.nan, dtype or x.dtype)


@_creation("arange arange.start arange.start_step")
def _arange(ctx: Lowering, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """start + i step of a floating-point range; PyTorch's own range of integers."""
    plain = func(*args, **kwargs)
    if not plain.is_floating_point():
        return plain
    start, step = (0 if len(args) == 1 else args[0]), (args[2] if len(args) > 2 else kwargs.get("step", 1))
    number = ctx.xp.exact(torch.arange(plain.numel()))
    return ctx.wrap(number * float(step) + float(start), plain.dtype)


@_creation("linspace")
def _linspace(ctx: Lowering, func: Any, start: float, end: float, steps: int, **kwargs: Any) -> Tensor:
    plain = func(start, end, steps, **kwargs)
    if not plain.is_floating_point():
        return plain
    number = ctx.xp.exact(torch.arange(steps))
    number = number * (float(end) - float(start)) / float(max(steps - 1, 1)) + float(start)
    return ctx.wrap(number, plain.dtype)


@rule("lift lift_fresh lift_fresh_copy")
def _lift(ctx: Lowering, x: Tensor) -> Tensor:
    return ctx.traced(x) if x.is_floating_point() or isinstance(x, TracedTensor) else x


@rule("result_type.Tensor result_type.Scalar result_type.Scalar_Tensor result_type.Scalar_Scalar")
def _result_type(ctx: Lowering, x: Any, y: Any) -> torch.dtype:
    return result_type([x, y])


@rule("clone contiguous")
def _clone(ctx: Lowering, x: Tensor, **_: Any) -> Tensor:
    traced = ctx.traced(x)
    return ctx.wrap(read(traced, unrounded=True), traced.dtype, traced.memory.stage, traced.memory.is_softmax)


@rule("_to_copy")
def _to_copy(ctx: Lowering, x: Tensor, dtype: Any = None, **_: Any) -> Tensor:
    return ctx.cast(x, dtype or x.dtype)


@rule("copy")
def _copy(ctx: Lowering, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    result = ctx.cast(source, x.dtype)
    with ctx:
        return result.expand(x.shape).clone()


@rule("copy_")
def _copy_(ctx: Lowering, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    ctx.assign(x, source)
    return x


@rule("_local_scalar_dense item")
def _item(ctx: Lowering, x: Tensor) -> Any:
    """Return a Python number that is known, or branch into the integers or truth values that it may be."""
    low, high = (end.item() for end in ctx.xp.enclosure(ctx.number(x)))
    kind: Any = float if x.is_floating_point() else bool if x.dtype == torch.bool else int
    if low == high:
        return kind(low)
    if x.is_floating_point() or not math.isfinite(high - low):
        raise ctx.undecided(f"the digits of a number between {low:g} and {high:g}, taken out as Python's,")
    return ctx.branch([kind(value) for value in range(math.ceil(low), math.floor(high) + 1)])


@rule("is_nonzero")
def _is_nonzero(ctx: Lowering, x: Tensor) -> bool:
    with ctx:
        return bool((x != 0).item())
