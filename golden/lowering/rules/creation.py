"""Tensors that are made inside a reference, copies, and casts."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.golden.lowering.evaluation import CREATIONS, Evaluation
from assay.golden.lowering.table import constant, overloads, result_type, rule
from assay.golden.lowering.tensor import Box, NumberTensor, broadcast, contiguous_strides, read

_IGNORED = ("layout", "device", "pin_memory", "memory_format")


def _filled(evaluation: Evaluation, size: Any, value: Any, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.full(tuple(size), value, dtype=dtype)
    number = broadcast(evaluation.xp, constant(evaluation.xp, value), tuple(size))
    return NumberTensor(evaluation, Box(number), dtype, tuple(size), contiguous_strides(size), 0)


def _made_by(names: str, value: float) -> None:
    def created(evaluation: Evaluation, func: Any, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return _filled(evaluation, size, 0 if math.isnan(value) and not dtype.is_floating_point else value, dtype)

    for overload in overloads(names):
        CREATIONS[overload] = created

    like = [f"{name.partition('.')[0]}_like" for name in names.split()]
    new = [f"new_{name.partition('.')[0]}" for name in names.split()]

    @rule(" ".join(like))
    def alike(evaluation: Evaluation, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return created(evaluation, None, x.shape, dtype=kwargs.get("dtype") or x.dtype)

    @rule(" ".join(new))
    def anew(evaluation: Evaluation, x: torch.Tensor, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return created(evaluation, None, size, dtype=kwargs.get("dtype") or x.dtype)


_made_by("zeros", 0.0)
_made_by("ones", 1.0)
_made_by("empty.memory_format empty", math.nan)


def _full(evaluation: Evaluation, func: Any, size: Any, value: Any, **kwargs: Any) -> torch.Tensor:
    dtype = kwargs.get("dtype") or torch.full((), value).dtype
    return _filled(evaluation, size, value, dtype)


def _scalar_tensor(evaluation: Evaluation, func: Any, value: Any, **kwargs: Any) -> torch.Tensor:
    return _filled(evaluation, (), value, kwargs.get("dtype") or torch.get_default_dtype())


@rule("full_like")
def _full_like(evaluation: Evaluation, x: torch.Tensor, value: Any, **kwargs: Any) -> torch.Tensor:
    return _filled(evaluation, x.shape, value, kwargs.get("dtype") or x.dtype)


@rule("new_full")
def _new_full(evaluation: Evaluation, x: torch.Tensor, size: Any, value: Any, **kwargs: Any) -> torch.Tensor:
    return _filled(evaluation, size, value, kwargs.get("dtype") or x.dtype)


@rule("empty_strided")
def _empty_strided(evaluation: Evaluation, size: Any, stride: Any, **kwargs: Any) -> torch.Tensor:
    return _filled(evaluation, size, math.nan, kwargs.get("dtype") or torch.get_default_dtype())


@rule("new_empty_strided")
def _new_empty_strided(evaluation: Evaluation, x: torch.Tensor, size: Any, stride: Any, **kwargs: Any) -> torch.Tensor:
    return _filled(evaluation, size, math.nan, kwargs.get("dtype") or x.dtype)


def _spaced(evaluation: Evaluation, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """start + i step, as numbers, of a floating-point range; of whole numbers PyTorch's own."""
    plain = func(*args, **kwargs)
    if not plain.is_floating_point():
        return plain
    ends = [*args[:3]]
    if len(ends) == 1:
        ends = [0, ends[0]]
    start, step = ends[0], ends[2] if len(ends) > 2 else kwargs.get("step", 1)
    return _progression(evaluation, plain, start, step)


def _linspace(evaluation: Evaluation, func: Any, start: float, end: float, steps: int, **kwargs: Any) -> torch.Tensor:
    plain = func(start, end, steps, **kwargs)
    if not plain.is_floating_point():
        return plain
    places = evaluation.xp.exact(torch.arange(steps))
    number = places * (float(end) - float(start)) / float(max(steps - 1, 1)) + float(start)
    return evaluation.made(number, plain.dtype)


def _progression(evaluation: Evaluation, plain: torch.Tensor, start: float, step: float) -> torch.Tensor:
    places = evaluation.xp.exact(torch.arange(plain.numel()))
    return evaluation.made(places * float(step) + float(start), plain.dtype)


for _overload in overloads("full"):
    CREATIONS[_overload] = _full
for _overload in overloads("scalar_tensor"):
    CREATIONS[_overload] = _scalar_tensor
for _overload in overloads("arange arange.start arange.start_step"):
    CREATIONS[_overload] = _spaced
for _overload in overloads("linspace"):
    CREATIONS[_overload] = _linspace


@rule("lift lift_fresh lift_fresh_copy")
def _lift(evaluation: Evaluation, x: torch.Tensor) -> torch.Tensor:
    return evaluation.adopted(x) if x.is_floating_point() or isinstance(x, NumberTensor) else x


@rule("result_type.Tensor result_type.Scalar result_type.Scalar_Tensor result_type.Scalar_Scalar")
def _result_type(evaluation: Evaluation, x: Any, y: Any) -> torch.dtype:
    return result_type([x, y])


@rule("clone contiguous")
def _clone(evaluation: Evaluation, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    held = evaluation.adopted(x)
    return evaluation.made(read(held, unrounded=True), held.dtype, held.box.stage, held.box.weights)


@rule("_to_copy")
def _to_copy(evaluation: Evaluation, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return evaluation.cast(x, kwargs.get("dtype") or x.dtype)


@rule("copy")
def _copy(evaluation: Evaluation, x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    found = evaluation.cast(source, x.dtype)
    with evaluation:
        return found.expand(x.shape).clone()


@rule("copy_")
def _copy_(evaluation: Evaluation, x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    evaluation.assign(x, source)
    return x


@rule("fill_.Scalar fill_.Tensor")
def _fill(evaluation: Evaluation, x: torch.Tensor, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        value = _filled(evaluation, (), value, x.dtype)
    evaluation.assign(x, value)
    return x


@rule("zero_")
def _zero(evaluation: Evaluation, x: torch.Tensor) -> torch.Tensor:
    return _fill(evaluation, x, 0)


@rule("_local_scalar_dense item")
def _item(evaluation: Evaluation, x: torch.Tensor) -> Any:
    """A Python number: one that is known, or one of a few whole ones or truths that it may be."""
    least, most = (end.item() for end in evaluation.xp.enclosure(evaluation.number(x)))
    if least == most:
        return int(least) if not (x.is_floating_point() or x.dtype == torch.bool) else _plain(least, x)
    if x.is_floating_point() or not math.isfinite(most - least):
        raise evaluation.undecided(f"the digits of a number between {least:g} and {most:g}, taken out as Python's,")
    kind = bool if x.dtype == torch.bool else int
    return evaluation.answer([kind(value) for value in range(math.ceil(least), math.floor(most) + 1)])


def _plain(value: float, x: torch.Tensor) -> Any:
    return bool(value) if x.dtype == torch.bool else value


@rule("is_nonzero")
def _is_nonzero(evaluation: Evaluation, x: torch.Tensor) -> bool:
    with evaluation:
        return bool((x != 0).item())
