"""`jax.lax.gather` and `scatter`: places of an operand that integers name, by PyTorch's indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from assay.golden.lowering.jax.primitives import primitive

Tensor = torch.Tensor


def _places(
    shape: Sequence[int], starts: Tensor, sizes: Sequence[int], dims: Any, window: Sequence[int], mode: str
) -> tuple[Tensor, Tensor]:
    """The flat place in an operand of each element of each part [parts..., window...], and which lie inside.

    ``starts`` [parts..., n] are where parts begin along ``dims.start``; ``window`` are the operand's axes that stay.
    Mode "clip" moves parts inside.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    parts = starts.shape[:-1]
    inside = torch.ones(parts, dtype=torch.bool)
    flat = torch.zeros(parts, dtype=torch.int64)
    for place, axis in enumerate(dims.start):
        start, most = starts[..., place].to(torch.int64), shape[axis] - sizes[axis]
        if mode == "clip":
            start = start.clamp(0, max(most, 0))
        inside = inside & (start >= 0) & (start <= most)
        flat = flat + start * strides[axis]
    for axis, along in zip(dims.batch, dims.starts_batch, strict=True):
        line = [1] * len(parts)
        line[along] = parts[along]
        flat = flat + torch.arange(shape[axis]).reshape(tuple(line)) * strides[axis]
    flat = flat.reshape((*parts, *[1] * len(window)))
    for place, axis in enumerate(window):
        line = [1] * len(window)
        line[place] = sizes[axis]
        flat = flat + torch.arange(sizes[axis]).reshape(tuple(line)) * strides[axis]
    return flat, inside.reshape((*parts, *[1] * len(window))).expand(flat.shape)


class _Dimensions:
    """The dimension numbers of gather and scatter under one set of names."""

    def __init__(self, numbers: Any, rank: int) -> None:
        scatter = hasattr(numbers, "update_window_dims")
        self.offset = tuple(numbers.update_window_dims if scatter else numbers.offset_dims)
        dropped = numbers.inserted_window_dims if scatter else numbers.collapsed_slice_dims
        self.start = tuple(numbers.scatter_dims_to_operand_dims if scatter else numbers.start_index_map)
        self.batch = tuple(numbers.operand_batching_dims)
        self.starts_batch = tuple(
            numbers.scatter_indices_batching_dims if scatter else numbers.start_indices_batching_dims
        )
        self.window = [axis for axis in range(rank) if axis not in (*dropped, *self.batch)]

    def order(self, rank: int) -> list[int]:
        """The permutation from [parts..., window...] to the result, whose axes ``offset`` are those of the window."""
        parts = iter(range(rank - len(self.offset)))
        window = iter(range(rank - len(self.offset), rank))
        return [next(window) if axis in self.offset else next(parts) for axis in range(rank)]


def _mode(mode: Any) -> str:
    return "clip" if "CLIP" in str(mode).upper() else "drop"


@primitive("gather")
def _gather(
    x: Tensor,
    starts: Tensor,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> Tensor:
    dims = _Dimensions(dimension_numbers, x.ndim)
    flat, inside = _places(x.shape, starts, slice_sizes, dims, dims.window, _mode(mode))
    taken = x.reshape(-1)[flat.clamp(0, max(x.numel() - 1, 0))]
    if not bool(inside.all()):
        fill = math.nan if fill_value is None and x.is_floating_point() else fill_value
        fill = torch.iinfo(x.dtype).min if fill is None else fill
        taken = torch.where(inside, taken, torch.full((), fill, dtype=x.dtype))
    return taken.permute(dims.order(taken.ndim))


@primitive(
    "scatter",
    "scatter-add",
    "scatter_add",
    "scatter_mul",
    "scatter-mul",
    "scatter_max",
    "scatter-max",
    "scatter_min",
    "scatter-min",
)
def _scatter(
    x: Tensor, starts: Tensor, updates: Tensor, *, dimension_numbers: Any, mode: Any, primitive: str, **_: Any
) -> Tensor:
    dims = _Dimensions(dimension_numbers, x.ndim)
    sizes = [1] * x.ndim
    for axis, place in zip(dims.window, dims.offset, strict=True):
        sizes[axis] = updates.shape[place]
    flat, inside = _places(x.shape, starts, sizes, dims, dims.window, _mode(mode))
    order = dims.order(updates.ndim)
    source = updates.permute([order.index(axis) for axis in range(updates.ndim)])
    known = inside.reshape(-1)
    places, values = flat.reshape(-1)[known], source.reshape(-1)[known]
    memory = x.reshape(-1).clone()
    kind = primitive.replace("-", "_").removeprefix("scatter").lstrip("_")
    if kind in ("", "add"):
        memory = memory.index_put((places,), values, accumulate=kind == "add")
    else:
        reduction = {"mul": "prod", "max": "amax", "min": "amin"}[kind]
        memory = memory.scatter_reduce(0, places, values, reduction)
    return memory.reshape(x.shape)
