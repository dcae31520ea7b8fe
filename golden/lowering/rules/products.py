"""Products of matrices, distances, and convolutions as products over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import rule
from assay.golden.lowering.rules.elementwise import scaled
from assay.golden.lowering.rules.reductions import p_norm
from assay.golden.lowering.tensor import TracedTensor, contiguous_strides, overwritten, permuted, strided

Tensor = torch.Tensor


def operand(ctx: Lowering, x: Tensor) -> Any:
    """Return a number as a product reads it: kernels round what they computed to the 16-bit dtype of their inputs."""
    number = ctx.number(x)
    if ctx.operand_dtype is None:
        return number
    return ctx.xp.round(number, str(ctx.operand_dtype).removeprefix("torch."))


@rule("mm bmm")
def _mm(ctx: Lowering, a: Tensor, b: Tensor) -> Tensor:
    is_softmax = isinstance(a, TracedTensor) and a.memory.is_softmax
    product = ctx.xp.weighted if is_softmax else ctx.xp.matmul
    return ctx.wrap(product(operand(ctx, a), operand(ctx, b)), a.dtype)


@rule("addmm baddbmm")
def _addmm(ctx: Lowering, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    matmul, left, right = ctx.xp.matmul, operand(ctx, a), operand(ctx, b)
    if beta == 0:  # c is not read: its NaN don't count
        return ctx.wrap(scaled(matmul(left, right), float(alpha)), a.dtype)
    addend = scaled(ctx.number(c), float(beta))
    if alpha == 1:
        return ctx.wrap(matmul(left, right, addend), a.dtype)
    return ctx.wrap(matmul(left, right) * float(alpha) + addend, a.dtype)


@rule("addbmm")
def _addbmm(ctx: Lowering, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The products of all pairs in one sum."""
    left = permuted(ctx.xp, operand(ctx, a), (1, 0, 2)).reshape((a.shape[1], a.shape[0] * a.shape[2]))
    right = operand(ctx, b).reshape((b.shape[0] * b.shape[1], b.shape[2]))
    product = scaled(ctx.xp.matmul(left, right), float(alpha))
    return ctx.wrap(product if beta == 0 else product + scaled(ctx.number(c), float(beta)), a.dtype)


@rule("_trilinear")
def _trilinear(
    ctx: Lowering,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: Any,
    expand2: Any,
    expand3: Any,
    sumdim: Any,
    unroll_dim: int = 1,
) -> Tensor:
    """The sum of products of three tensors over axes of their common shape."""
    with ctx:
        expanded = [reduce(Tensor.unsqueeze, dims, x) for x, dims in ((a, expand1), (b, expand2), (c, expand3))]
        return (expanded[0] * expanded[1] * expanded[2]).sum(sumdim)


@rule("mv")
def _mv(ctx: Lowering, a: Tensor, x: Tensor) -> Tensor:
    product = ctx.xp.matmul(operand(ctx, a), operand(ctx, x).reshape((-1, 1)))
    return ctx.wrap(product.reshape((a.shape[0],)), a.dtype)


@rule("dot vdot")
def _dot(ctx: Lowering, x: Tensor, y: Tensor) -> Tensor:
    product = ctx.xp.matmul(operand(ctx, x).reshape((1, -1)), operand(ctx, y).reshape((-1, 1)))
    return ctx.wrap(product.reshape(()), x.dtype)


@rule("linear")
def _linear(ctx: Lowering, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    matrix, addend = operand(ctx, x).reshape((-1, x.shape[-1])), None if bias is None else ctx.number(bias)
    product = ctx.xp.matmul(matrix, ctx.xp.swap(operand(ctx, weight)), addend)
    return ctx.wrap(product.reshape((*x.shape[:-1], weight.shape[0])), x.dtype)


@rule("_pdist_forward")
def _pdist(ctx: Lowering, x: Tensor, p: float = 2) -> Tensor:
    i, j = torch.triu_indices(x.shape[0], x.shape[0], 1)
    with ctx:
        return torch.cdist(x[i][:, None], x[j][:, None], p)[:, 0, 0]


@rule("_cdist_forward")
def _cdist(ctx: Lowering, x: Tensor, y: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """The p-norms of differences of rows."""
    a, b = ctx.number(x), ctx.number(y)
    difference = a.reshape((*x.shape[:-1], 1, x.shape[-1])) - b.reshape((*y.shape[:-2], 1, *y.shape[-2:]))
    return ctx.wrap(p_norm(ctx.xp, difference, p)[..., 0], x.dtype)


def windows_of(xp: Any, x: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """Return the windows of x [..., *spatial] as a view [..., *out, *kernel]."""
    axes, shape = len(kernel), tuple(map(int, x.shape))
    steps = contiguous_strides(shape)
    out = [
        (size - d * (width - 1) - 1) // step + 1
        for size, width, step, d in zip(shape[-axes:], kernel, stride, dilation, strict=True)
    ]
    spatial = steps[-axes:]
    strides = (
        *steps[:-axes],
        *(a * s for a, s in zip(spatial, stride, strict=True)),
        *(a * d for a, d in zip(spatial, dilation, strict=True)),
    )
    windows = (*shape[:-axes], *out, *kernel)
    return xp.rearranged(lambda arrays: strided(arrays[0].reshape(-1), windows, strides, 0), [x])


def padded(xp: Any, x: Any, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Any:
    """Pad the last axes of x with ``value``; a negative width cuts."""
    if not any((*before, *after)):
        return x
    shape, axes = list(map(int, x.shape)), len(before)
    padded_shape = [*shape[:-axes], *(n + b + a for n, b, a in zip(shape[-axes:], before, after, strict=True))]
    frame = xp.exact(torch.full(padded_shape, value, dtype=torch.float64))
    lead = [slice(None)] * (len(shape) - axes)
    inside = [
        slice(max(b, 0), max(b, 0) + n + min(b, 0) + min(a, 0))
        for n, b, a in zip(shape[-axes:], before, after, strict=True)
    ]
    source = [slice(max(-b, 0), n - max(-a, 0)) for n, b, a in zip(shape[-axes:], before, after, strict=True)]
    return overwritten(xp, frame, (*lead, *inside), x[(*lead, *source)])


def as_list(value: Any, axes: int) -> list[int]:
    """Return one integer for each axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


@rule("constant_pad_nd")
def _constant_pad(ctx: Lowering, x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    before, after = pad[0::2][::-1], pad[1::2][::-1]  # PyTorch lists the last axis first
    return ctx.wrap(padded(ctx.xp, ctx.number(x), before, after, float(value)), x.dtype)


@rule("convolution _convolution convolution_overrideable")
def _convolution(
    ctx: Lowering,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *_: Any,
) -> Tensor:
    """One product per group: windows [N * out, C/g * kernel] with weights [C/g * kernel, O/g], the bias in its sum."""
    axes, xp = weight.ndim - 2, ctx.xp
    unbatched = x.ndim == axes + 1
    number, filters = operand(ctx, x), operand(ctx, weight)
    if unbatched:
        number = number.reshape((1, *x.shape))
    addend = None if bias is None else ctx.number(bias)
    stride, padding, dilation = as_list(stride, axes), as_list(padding, axes), as_list(dilation, axes)
    before, after = padding, padding
    if transposed:
        filters = _transposed_filters(xp, filters, groups)
        number = _dilated(xp, number, stride)
        reach = [d * (int(k) - 1) for d, k in zip(dilation, filters.shape[2:], strict=True)]
        before = [r - p for r, p in zip(reach, padding, strict=True)]
        after = [b + more for b, more in zip(before, as_list(output_padding, axes), strict=True)]
        stride = [1] * axes
    result = _convolved(xp, padded(xp, number, before, after), filters, addend, stride, dilation, groups)
    return ctx.wrap(result.reshape(tuple(result.shape[1:])) if unbatched else result, x.dtype)


def _convolved(xp: Any, x: Any, w: Any, bias: Any, stride: Any, dilation: Any, groups: int) -> Any:
    """Convolve padded x [N, C, *spatial] with w [O, C/g, *kernel]."""
    kernel = tuple(map(int, w.shape[2:]))
    batch, group_in, group_out = int(x.shape[0]), int(x.shape[1]) // groups, int(w.shape[0]) // groups
    windows = windows_of(xp, x, kernel, stride, dilation)
    out, size = tuple(map(int, windows.shape[2 : 2 + len(kernel)])), math.prod(kernel)
    # [N, g, out, C/g * kernel] times [g, C/g * kernel, O/g]
    windows = windows.reshape((batch, groups, group_in, math.prod(out), size))
    windows = permuted(xp, windows, (0, 1, 3, 2, 4)).reshape((batch, groups, math.prod(out), group_in * size))
    filters = xp.swap(w.reshape((1, groups, group_out, group_in * size)))
    addend = None if bias is None else bias.reshape((1, groups, 1, group_out))
    return xp.swap(xp.matmul(windows, filters, addend)).reshape((batch, groups * group_out, *out))


def _dilated(xp: Any, x: Any, stride: Sequence[int]) -> Any:
    """Put zeros between the elements: the input of a transposed convolution as one of step one."""
    shape = tuple(map(int, x.shape))
    sizes = [(n - 1) * s + 1 for n, s in zip(shape[2:], stride, strict=True)]
    frame = xp.exact(torch.zeros((*shape[:2], *sizes), dtype=torch.float64))
    return overwritten(xp, frame, (slice(None), slice(None), *(slice(None, None, s) for s in stride)), x)


def _transposed_filters(xp: Any, w: Any, groups: int) -> Any:
    """Turn filters [C, O/g, *kernel] of a transposed convolution into flipped ones [O, C/g, *kernel]."""
    kernel = tuple(map(int, w.shape[2:]))
    group_in, group_out, axes = int(w.shape[0]) // groups, int(w.shape[1]), range(3, 3 + len(kernel))
    w = permuted(xp, w.reshape((groups, group_in, group_out, *kernel)), (0, 2, 1, *axes))

    def flip(arrays: Sequence[Any]) -> Any:
        (array,) = arrays
        if isinstance(array, torch.Tensor):  # torch has no negative steps
            return array.flip(tuple(axes))
        return array[(slice(None),) * 3 + (slice(None, None, -1),) * len(axes)]

    return xp.rearranged(flip, [w]).reshape((groups * group_out, group_in, *kernel))
