"""Convolutions and windows of `jax.lax`, in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from assay.golden.lowering.jax.primitives import padded, primitive, torch_dtype

Tensor = torch.Tensor


@primitive("conv_general_dilated")
def _convolve(
    x: Tensor,
    weight: Tensor,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    preferred_element_type: Any = None,
    **_: Any,
) -> Tensor:
    if batch_group_count != 1 or not 1 <= len(window_strides) <= 3:
        raise NotImplementedError("a convolution of groups of batches, or of more than three dimensions")
    x, weight = x.permute(tuple(dimension_numbers.lhs_spec)), weight.permute(tuple(dimension_numbers.rhs_spec))
    if preferred_element_type is not None:
        x, weight = (part.to(torch_dtype(preferred_element_type)) for part in (x, weight))
    config = [(0, 0, 0), (0, 0, 0)]
    config += [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    x = padded(x, torch.zeros((), dtype=x.dtype), padding_config=config)
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[len(window_strides) - 1]
    result = function(x, weight, None, tuple(window_strides), 0, tuple(rhs_dilation), feature_group_count)
    order = dimension_numbers.out_spec  # where batch, feature and each dimension of space stand
    return result.permute([order.index(axis) for axis in range(len(order))])


def _windows(
    x: Tensor,
    empty: float,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Tensor:
    """The windows over x, padded by ``empty``: [places..., window...]."""
    between = base_dilation or [1] * x.ndim
    config = [(low, high, step - 1) for (low, high), step in zip(padding, between, strict=True)]
    x = padded(x, torch.full((), empty, dtype=x.dtype), padding_config=config)
    for axis, (size, step) in enumerate(zip(window_dimensions, window_strides, strict=True)):
        gap = window_dilation[axis] if window_dilation else 1
        x = x.unfold(axis, (size - 1) * gap + 1, step)[..., ::gap]
    return x


@primitive("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_windows(x: Tensor, *, primitive: str, **window: Any) -> Tensor:
    kind = primitive.rpartition("_")[2]
    function: Any = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[kind]
    windows = _windows(x, {"sum": 0.0, "max": -math.inf, "min": math.inf}[kind], **window)
    return function(windows, tuple(range(x.ndim, 2 * x.ndim)))


@primitive("select_and_scatter_add")
def _scatter_to_chosen(source: Tensor, x: Tensor, *, select_prim: Any, **window: Any) -> Tensor:
    """Each element of ``source`` added at the place of the largest (or least) of its window: a pooling's gradient."""
    most = select_prim.name == "ge"
    windows = _windows(x, -math.inf if most else math.inf, **window).flatten(x.ndim)
    chosen = (torch.argmax if most else torch.argmin)(windows, -1)
    places = _windows(torch.arange(x.numel()).reshape(x.shape).double(), -1.0, **window).flatten(x.ndim).long()
    at = torch.gather(places, -1, chosen[..., None])
    zeros = torch.zeros((x.numel(),), dtype=source.dtype)
    return zeros.index_put((at.reshape(-1),), source.reshape(-1), accumulate=True).reshape(x.shape)
