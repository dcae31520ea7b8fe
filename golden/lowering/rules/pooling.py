"""Pooling over windows, and resampling, whose weights are those of PyTorch's own code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.rules.choices import ranked
from assay.golden.lowering.rules.products import as_list, contiguous, padded, windows_of
from assay.golden.lowering.table import rule

Tensor = torch.Tensor


def _windows(
    evaluation: Evaluation,
    x: Tensor,
    axes: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    value: float,
) -> tuple[Any, tuple[int, ...]]:
    """Windows [..., *out, kernel] of x padded with ``value``, and the shape of out."""
    xp = evaluation.xp
    after = list(padding)
    out = []
    for place, size in enumerate(x.shape[-axes:]):
        reach = dilation[place] * (kernel[place] - 1) + 1
        free = size + 2 * padding[place] - reach
        count = -(-free // stride[place]) + 1 if ceil_mode else free // stride[place] + 1
        if ceil_mode and (count - 1) * stride[place] >= size + padding[place]:
            count -= 1
        after[place] = max(
            (count - 1) * stride[place] + reach - size - padding[place], 0 if ceil_mode else padding[place]
        )
        out.append(count)
    number = contiguous(xp, padded(xp, evaluation.number(x), padding, after, value))
    windows = windows_of(xp, number, kernel, stride, dilation)
    lead = x.ndim - axes
    windows = windows[(slice(None),) * lead + tuple(slice(0, n) for n in out)]
    return windows.reshape((*x.shape[:lead], *out, math.prod(kernel))), tuple(out)


def _max_pool(axes: int) -> None:
    @rule(f"max_pool{axes}d_with_indices")
    def pooled(
        evaluation: Evaluation,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor]:
        xp, kernel = evaluation.xp, as_list(kernel_size, axes)
        steps = as_list(stride, axes) if stride else kernel
        sides, apart = as_list(padding, axes), as_list(dilation, axes)
        windows, out = _windows(evaluation, x, axes, kernel, steps, sides, apart, ceil_mode, -math.inf)
        shape = (*x.shape[: x.ndim - axes], *out)

        def places() -> Any:
            _, *ends = ranked(xp, windows, 1, True)
            flat = [_flat(end, out, kernel, steps, sides, apart, x.shape[-axes:]) for end in ends]
            return xp.interval(*(end.double().reshape(shape) for end in flat))

        values = evaluation.made(xp.largest_of(windows).reshape(shape), x.dtype)
        return values, evaluation.later(places, torch.int64, shape)


def _flat(
    place: Tensor,
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
) -> Tensor:
    """The place in the plane of x that a window's place is."""
    rest, total = place[..., 0], torch.zeros_like(place[..., 0])
    weight = 1
    for axis in reversed(range(len(out))):
        inner = rest % kernel[axis]
        rest = rest // kernel[axis]
        start = torch.arange(out[axis]).reshape((-1,) + (1,) * (len(out) - 1 - axis))
        total = total + (start * stride[axis] - padding[axis] + inner * dilation[axis]) * weight
        weight *= size[axis]
    return total


for _axes in (2, 3):
    _max_pool(_axes)


def _avg_pool(axes: int) -> None:
    @rule(f"avg_pool{axes}d")
    def pooled(
        evaluation: Evaluation,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        xp, kernel = evaluation.xp, as_list(kernel_size, axes)
        steps = as_list(stride, axes) if stride else kernel
        sides = as_list(padding, axes)
        windows, out = _windows(evaluation, x, axes, kernel, steps, sides, [1] * axes, ceil_mode, 0.0)
        total = xp.in_blocks(xp.sum, windows, whole=1)
        counts = torch.ones((), dtype=torch.float64)
        for axis in range(axes):
            start = torch.arange(out[axis]) * steps[axis] - sides[axis]
            size = x.shape[x.ndim - axes + axis]
            most = size + sides[axis] if count_include_pad else size
            end = (start + kernel[axis]).clamp(max=most)
            begin = start if count_include_pad else start.clamp(min=0)
            counts = counts[..., None] * (end - begin).double()
        if divisor_override is not None:
            counts = torch.full_like(counts, float(divisor_override))
        mean = total.reshape((*x.shape[: x.ndim - axes], *out)) / xp.exact(counts)
        return evaluation.made(mean, x.dtype)


for _axes in (1, 2, 3):
    _avg_pool(_axes)


def _adaptive(axes: int) -> None:
    @rule(f"_adaptive_avg_pool{axes}d adaptive_avg_pool{axes}d")
    def pooled(evaluation: Evaluation, x: Tensor, output_size: Any) -> Tensor:
        xp = evaluation.xp
        number = evaluation.number(x)
        lead = x.ndim - axes
        targets = [x.shape[lead + a] if n is None else n for a, n in enumerate(as_list(output_size, axes))]
        parts = _parts(number, lead, x.shape[lead:], targets)
        cells = []
        for cell in parts:
            count = math.prod(int(n) for n in cell.shape[lead:])
            cells.append(xp.sum(cell.reshape((*x.shape[:lead], count))) / float(count))
        mean = xp.concatenate(cells, -1) if cells else number
        return evaluation.made(mean.reshape((*x.shape[:lead], *targets)), x.dtype)


def _adaptive_max(axes: int) -> None:
    @rule(f"adaptive_max_pool{axes}d")
    def pooled(evaluation: Evaluation, x: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
        xp, number = evaluation.xp, evaluation.number(x)
        lead = x.ndim - axes
        targets = [x.shape[lead + a] if n is None else n for a, n in enumerate(as_list(output_size, axes))]
        shape = (*x.shape[:lead], *targets)
        flat = torch.arange(math.prod(x.shape[lead:])).reshape(x.shape[lead:])
        values, firsts, finals = [], [], []
        for cell, inside in zip(
            _parts(number, lead, x.shape[lead:], targets), _parts(flat, 0, x.shape[lead:], targets), strict=True
        ):
            count = inside.numel()
            rows = cell.reshape((*x.shape[:lead], count))
            _, first, final = ranked(xp, rows, 1, True)
            values.append(xp.largest_of(rows))
            firsts.append(inside.reshape(-1)[first])
            finals.append(inside.reshape(-1)[final])
        low, high = torch.cat(firsts, -1).reshape(shape), torch.cat(finals, -1).reshape(shape)
        index = (
            low if torch.equal(low, high) else evaluation.made(xp.interval(low.double(), high.double()), torch.int64)
        )
        return evaluation.made(xp.concatenate(values, -1).reshape(shape), x.dtype), index


def _parts(number: Any, lead: int, sizes: Sequence[int], targets: Sequence[int]) -> list[Any]:
    """The cells of an adaptive pool in row-major order: from floor(i n / m) to ceil((i + 1) n / m)."""
    cells: list[tuple[slice, ...]] = [()]
    for size, target in zip(sizes, targets, strict=True):
        ranges = [slice(i * size // target, -(-(i + 1) * size // target)) for i in range(target)]
        cells = [(*cell, part) for cell in cells for part in ranges]
    return [number[(slice(None),) * lead + cell] for cell in cells]


for _axes in (1, 2, 3):
    _adaptive(_axes)
    _adaptive_max(_axes)
