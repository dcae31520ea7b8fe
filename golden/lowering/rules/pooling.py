"""Pooling over windows, and linear and cubic resampling with the weights of PyTorch's own code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from assay.golden.lowering.dispatch import Lowering, calling_line
from assay.golden.lowering.rule_table import rule
from assay.golden.lowering.rules.comparisons import ranked
from assay.golden.lowering.rules.products import as_list, padded, windows_of
from assay.golden.lowering.tensor import axis_last, permuted

Tensor = torch.Tensor


def _windows(
    ctx: Lowering,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    value: float,
) -> tuple[Any, tuple[int, ...]]:
    """Return windows [..., *out, kernel] of x padded with ``value``, and the shape [..., *out]."""
    axes = len(kernel)
    after, out = [], []
    for size, k, step, pad, d in zip(x.shape[-axes:], kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) + 1
        free = size + 2 * pad - reach
        count = -(-free // step) + 1 if ceil_mode else free // step + 1
        if ceil_mode and (count - 1) * step >= size + pad:  # a window that starts in the padding is dropped
            count -= 1
        after.append(max((count - 1) * step + reach - size - pad, 0 if ceil_mode else pad))
        out.append(count)
    windows = windows_of(ctx.xp, padded(ctx.xp, ctx.number(x), padding, after, value), kernel, stride, dilation)
    lead = x.ndim - axes
    windows = windows[(slice(None),) * lead + tuple(slice(0, n) for n in out)]
    shape = (*x.shape[:lead], *out)
    return windows.reshape((*shape, math.prod(kernel))), shape


def _register_max_pool(axes: int) -> None:
    @rule(f"max_pool{axes}d_with_indices")
    def max_pool(
        ctx: Lowering,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor]:
        kernel, pads, dilations = (as_list(value, axes) for value in (kernel_size, padding, dilation))
        steps = as_list(stride, axes) if stride else kernel
        windows, shape = _windows(ctx, x, kernel, steps, pads, dilations, ceil_mode, -math.inf)

        def flat_index(index: Tensor) -> Tensor:
            """Return the index in the plane of x for an index in a window."""
            rest, flat, weight = index[..., 0], torch.zeros_like(index[..., 0]), 1
            for axis in reversed(range(axes)):
                start = torch.arange(shape[axis - axes]).reshape((-1,) + (1,) * (axes - 1 - axis))
                within = rest % kernel[axis]
                flat = flat + (start * steps[axis] - pads[axis] + within * dilations[axis]) * weight
                rest = rest // kernel[axis]
                weight *= x.shape[axis - axes]
            return flat

        def index() -> Any:
            first, last = ctx.choices.take(ranked(ctx.xp, windows, 1, True)[1], calling_line)
            return ctx.xp.interval(*(flat_index(end).double().reshape(shape) for end in (first, last)))

        values = ctx.wrap(ctx.xp.largest_of(windows).reshape(shape), x.dtype)
        return values, ctx.deferred(index, torch.int64, shape)


def _register_average_pool(axes: int) -> None:
    @rule(f"avg_pool{axes}d")
    def average_pool(
        ctx: Lowering,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        xp, kernel, pads = ctx.xp, as_list(kernel_size, axes), as_list(padding, axes)
        steps = as_list(stride, axes) if stride else kernel
        windows, shape = _windows(ctx, x, kernel, steps, pads, [1] * axes, ceil_mode, 0.0)
        total = xp.in_blocks(xp.sum, windows, whole=1)
        counts = torch.ones((), dtype=torch.float64)
        for axis in range(axes):
            start = torch.arange(shape[axis - axes]) * steps[axis] - pads[axis]
            limit = x.shape[axis - axes] + (pads[axis] if count_include_pad else 0)
            end = (start + kernel[axis]).clamp(max=limit)
            start = start if count_include_pad else start.clamp(min=0)
            counts = counts[..., None] * (end - start).double()
        if divisor_override is not None:
            counts = torch.full_like(counts, float(divisor_override))
        return ctx.wrap(total.reshape(shape) / xp.exact(counts), x.dtype)


def _cells(number: Any, lead: int, sizes: Sequence[int], targets: Sequence[int]) -> list[Any]:
    """Return the cells of an adaptive pool in row-major order: from floor(i n / m) to ceil((i + 1) n / m)."""
    cells: list[tuple[slice, ...]] = [()]
    for size, target in zip(sizes, targets, strict=True):
        ranges = [slice(i * size // target, -(-(i + 1) * size // target)) for i in range(target)]
        cells = [(*cell, part) for cell in cells for part in ranges]
    return [number[(slice(None),) * lead + cell] for cell in cells]


def _register_adaptive_pools(axes: int) -> None:
    def targets_of(x: Tensor, output_size: Any) -> list[int]:
        return [x.shape[axis - axes] if n is None else n for axis, n in enumerate(as_list(output_size, axes))]

    @rule(f"_adaptive_avg_pool{axes}d adaptive_avg_pool{axes}d")
    def average_pool(ctx: Lowering, x: Tensor, output_size: Any) -> Tensor:
        xp, number, targets = ctx.xp, ctx.number(x), targets_of(x, output_size)
        lead = x.shape[: x.ndim - axes]
        means = []
        for cell in _cells(number, len(lead), x.shape[-axes:], targets):
            count = math.prod(map(int, cell.shape[len(lead) :]))
            means.append(xp.sum(cell.reshape((*lead, count))) / float(count))
        mean = xp.concatenate(means, -1) if means else number
        return ctx.wrap(mean.reshape((*lead, *targets)), x.dtype)

    @rule(f"adaptive_max_pool{axes}d")
    def max_pool(ctx: Lowering, x: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
        xp, targets = ctx.xp, targets_of(x, output_size)
        lead, plane = x.shape[: x.ndim - axes], x.shape[-axes:]
        flat = torch.arange(math.prod(plane)).reshape(plane)
        cells = zip(_cells(ctx.number(x), len(lead), plane, targets), _cells(flat, 0, plane, targets), strict=True)
        values, firsts, lasts = [], [], []
        for cell, index in cells:
            elements = cell.reshape((*lead, index.numel()))
            first, last = ctx.choices.take(ranked(xp, elements, 1, True)[1], calling_line)
            values.append(xp.largest_of(elements))
            firsts.append(index.reshape(-1)[first])
            lasts.append(index.reshape(-1)[last])
        shape = (*lead, *targets)
        ends = (torch.cat(parts, -1).reshape(shape).double() for parts in (firsts, lasts))
        index = ctx.wrap(xp.interval(*ends), torch.int64)
        return ctx.wrap(xp.concatenate(values, -1).reshape(shape), x.dtype), index


for _axes in (1, 2, 3):
    if _axes > 1:
        _register_max_pool(_axes)
    _register_average_pool(_axes)
    _register_adaptive_pools(_axes)


_STEEPEST = 8.0  # bounds the slope of a weight, linear or cubic, times the four roundings of its position


def _resampled(xp: Any, number: Any, axis: int, weights: Tensor, width: int) -> Any:
    """Combine the elements along one axis by weights [n, m], of which each column has at most ``width`` neighbours.

    Kernels compute the positions, (i + 1/2) n / m - 1/2, in the arithmetic's own precision, so each weight is off by
    the steepest slope times n u. At a cell's edge the weight of the next neighbour starts at zero: it is continuous.
    """
    count, targets = weights.shape
    moved, back = axis_last(xp, number, axis)
    width = min(width, count)
    first = (weights != 0).to(torch.int64).argmax(0) - 1
    neighbours = first.clamp(min=0, max=count - width)[:, None] + torch.arange(width)
    weight = weights[neighbours, torch.arange(targets)[:, None]]
    error = torch.full_like(weight, _STEEPEST * count * max(getattr(xp, "u", 2.0**-53), 2.0**-53))
    exact = bool((weights == weights.round()).all())
    factor = xp.exact(weight) if exact else xp.interval(weight - error, weight + error)
    index = xp.integers(neighbours)
    terms = xp.rearranged(lambda a: a[0][..., index], [moved]) * factor
    return permuted(xp, xp.sum(terms)[..., 0], back)


def _weights(count: int, targets: int, corners: bool, scale: float | None, cubic: bool) -> Tensor:
    """Return PyTorch's own weights [n, m] in float64, by resampling unit vectors."""
    unit = torch.eye(count, dtype=torch.float64)[None]
    if not cubic:
        return torch.ops.aten.upsample_linear1d(unit, [targets], corners, scale)[0]
    return torch.ops.aten.upsample_bicubic2d(unit[..., None], [targets, 1], corners, scale, None)[0, :, :, 0]


def _register_resampling(name: str, axes: int, cubic: bool) -> None:
    def resample(ctx: Lowering, x: Tensor, size: Any, corners: bool, scales: Any) -> Tensor:
        number = ctx.number(x)
        for axis in range(axes):
            weights = _weights(x.shape[axis - axes], int(size[axis]), corners, scales[axis], cubic)
            number = _resampled(ctx.xp, number, x.ndim - axes + axis, weights, 6 if cubic else 4)
        return ctx.wrap(number, x.dtype)

    @rule(name)
    def by_size(ctx: Lowering, x: Tensor, size: Any, corners: bool, *scales: Any, **named: Any) -> Tensor:
        given = [*scales, *named.values()]
        return resample(ctx, x, size, corners, [*given, *[None] * (axes - len(given))])

    @rule(f"{name}.vec")
    def by_factor(ctx: Lowering, x: Tensor, size: Any, corners: bool, factors: Any) -> Tensor:
        sizes = size or [int(n * f) for n, f in zip(x.shape[-axes:], factors, strict=True)]
        return resample(ctx, x, sizes, corners, list(factors) if factors else [None] * axes)


_register_resampling("upsample_linear1d", 1, False)
_register_resampling("upsample_bilinear2d", 2, False)
_register_resampling("upsample_trilinear3d", 3, False)
_register_resampling("upsample_bicubic2d", 2, True)
