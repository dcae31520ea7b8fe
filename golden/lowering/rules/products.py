"""Products of matrices, and convolutions as such."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.rules.reductions import transposed
from assay.golden.lowering.table import rule
from assay.golden.lowering.tensor import NumberTensor

Tensor = torch.Tensor


def operand(evaluation: Evaluation, x: Tensor) -> Any:
    """A number as a product reads it: kernels round what they have computed to the 16-bit dtype of their inputs."""
    number = evaluation.number(x)
    if evaluation.operands is None:
        return number
    return evaluation.xp.round(number, str(evaluation.operands).removeprefix("torch."))


@rule("mm bmm")
def _mm(evaluation: Evaluation, a: Tensor, b: Tensor) -> Tensor:
    xp = evaluation.xp
    product = xp.weighted if isinstance(a, NumberTensor) and a.box.weights else xp.matmul
    return evaluation.made(product(operand(evaluation, a), operand(evaluation, b)), a.dtype)


def _scaled(number: Any, factor: float) -> Any:
    return number if factor == 1 else number * float(factor)


@rule("addmm baddbmm")
def _addmm(evaluation: Evaluation, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    xp = evaluation.xp
    left, right = operand(evaluation, a), operand(evaluation, b)
    if beta == 0:
        return evaluation.made(_scaled(xp.matmul(left, right), alpha), a.dtype)
    added = _scaled(evaluation.number(c), beta)
    if alpha == 1:
        return evaluation.made(xp.matmul(left, right, added), a.dtype)
    return evaluation.made(xp.matmul(left, right) * float(alpha) + added, a.dtype)


@rule("addbmm")
def _addbmm(evaluation: Evaluation, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The products of all pairs in one sum."""
    left = evaluation.xp.rearranged(lambda n: transposed(n[0], (1, 0, 2)), [operand(evaluation, a)])
    left = left.reshape((a.shape[1], a.shape[0] * a.shape[2]))
    right = operand(evaluation, b).reshape((b.shape[0] * b.shape[1], b.shape[2]))
    product = _scaled(evaluation.xp.matmul(left, right), alpha)
    return evaluation.made(product if beta == 0 else product + _scaled(evaluation.number(c), beta), a.dtype)


@rule("_trilinear")
def _trilinear(
    evaluation: Evaluation,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The sum of products of three tensors over axes of their common shape."""
    with evaluation:
        for dims, place in ((expand1, 0), (expand2, 1), (expand3, 2)):
            for dim in dims:
                a, b, c = (t.unsqueeze(dim) if order == place else t for order, t in enumerate((a, b, c)))
        return (a * b * c).sum(sumdim)


@rule("_pdist_forward")
def _pdist(evaluation: Evaluation, x: Tensor, p: float = 2) -> Tensor:
    rows, columns = torch.triu_indices(x.shape[0], x.shape[0], 1)
    with evaluation:
        return torch.cdist(x[rows][:, None], x[columns][:, None], p)[:, 0, 0]


@rule("mv")
def _mv(evaluation: Evaluation, a: Tensor, x: Tensor) -> Tensor:
    product = evaluation.xp.matmul(operand(evaluation, a), operand(evaluation, x).reshape((-1, 1)))
    return evaluation.made(product.reshape((a.shape[0],)), a.dtype)


@rule("dot vdot")
def _dot(evaluation: Evaluation, x: Tensor, y: Tensor) -> Tensor:
    product = evaluation.xp.matmul(operand(evaluation, x).reshape((1, -1)), operand(evaluation, y).reshape((-1, 1)))
    return evaluation.made(product.reshape(()), x.dtype)


@rule("linear")
def _linear(evaluation: Evaluation, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    xp = evaluation.xp
    rows = operand(evaluation, x).reshape((-1, x.shape[-1]))
    added = None if bias is None else evaluation.number(bias)
    product = xp.matmul(rows, xp.swap(operand(evaluation, weight)), added)
    return evaluation.made(product.reshape((*x.shape[:-1], weight.shape[0])), x.dtype)


def windows_of(xp: Any, x: Any, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """x [..., *spatial] as [..., *out, *kernel], each window of it, as a view."""

    def change(arrays: Sequence[Any]) -> Any:
        array = arrays[0]
        axes = len(kernel)
        shape = array.shape[-axes:]
        out = [
            (size - step_in * (width - 1) - 1) // step + 1
            for size, width, step, step_in in zip(shape, kernel, stride, dilation, strict=True)
        ]
        if isinstance(array, torch.Tensor):
            steps = array.stride()
            own = steps[-axes:]
            return array.as_strided(
                (*array.shape[:-axes], *out, *kernel),
                (*steps[:-axes], *(o * s for o, s in zip(own, stride, strict=True)),
                 *(o * d for o, d in zip(own, dilation, strict=True))),
                array.storage_offset(),
            )  # fmt: skip
        import numpy as np

        steps = array.strides
        own = steps[-axes:]
        return np.lib.stride_tricks.as_strided(
            array,
            (*array.shape[:-axes], *out, *kernel),
            (*steps[:-axes], *(o * s for o, s in zip(own, stride, strict=True)),
             *(o * d for o, d in zip(own, dilation, strict=True))),
            subok=True,
        )  # fmt: skip

    return xp.rearranged(change, [x])


def padded(xp: Any, x: Any, before: Sequence[int], after: Sequence[int], value: float = 0.0) -> Any:
    """x with ``value`` around its last axes; a negative width cuts."""
    if not any((*before, *after)):
        return x
    shape = list(map(int, x.shape))
    axes = len(before)
    wide = [*shape[:-axes], *(n + b + a for n, b, a in zip(shape[-axes:], before, after, strict=True))]
    frame = xp.exact(torch.full(wide, value, dtype=torch.float64))
    places: list[slice] = [slice(None)] * (len(shape) - axes)
    source: list[slice] = [slice(None)] * (len(shape) - axes)
    for size, b, a in zip(shape[-axes:], before, after, strict=True):
        places.append(slice(max(b, 0), max(b, 0) + size + min(b, 0) + min(a, 0)))
        source.append(slice(max(-b, 0), size - max(-a, 0)))

    def change(arrays: Sequence[Any]) -> Any:
        base = arrays[0].clone() if isinstance(arrays[0], torch.Tensor) else arrays[0].copy()
        base[tuple(places)] = arrays[1][tuple(source)]
        return base

    return xp.rearranged(change, [frame, x])


def as_list(value: Any, axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


@rule("convolution _convolution convolution_overrideable")
def _convolution(
    evaluation: Evaluation,
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
    axes = weight.ndim - 2
    unbatched = x.ndim == axes + 1
    xp = evaluation.xp
    number, filters = operand(evaluation, x), operand(evaluation, weight)
    if unbatched:
        number = number.reshape((1, *x.shape))
    added = None if bias is None else evaluation.number(bias)
    stride, padding, dilation = as_list(stride, axes), as_list(padding, axes), as_list(dilation, axes)
    if transposed:
        number, filters, padding, stride = _as_plain(
            xp, number, filters, stride, padding, dilation, as_list(output_padding, axes), groups
        )
        before = padding[0], padding[1]
    else:
        before = padding, padding
    result = convolved(xp, padded(xp, number, *before), filters, added, stride, dilation, groups)
    return evaluation.made(result.reshape(tuple(result.shape[1:])) if unbatched else result, x.dtype)


def convolved(xp: Any, x: Any, w: Any, bias: Any, stride: Any, dilation: Any, groups: int) -> Any:
    """The convolution of padded x [N, C, *spatial] with w [O, C/g, *kernel]."""
    kernel = tuple(map(int, w.shape[2:]))
    count, channels = int(x.shape[0]), int(x.shape[1])
    windows = windows_of(xp, contiguous(xp, x), kernel, stride, dilation)
    axes = len(kernel)
    out = tuple(map(int, windows.shape[2 : 2 + axes]))
    size = math.prod(kernel)
    each, made = channels // groups, int(w.shape[0]) // groups
    windows = windows.reshape((count, groups, each, math.prod(out), size))
    # [N, g, out, C/g * kernel] times [g, C/g * kernel, O/g]
    windows = xp.rearranged(lambda a: transposed(a[0], (0, 1, 3, 2, 4)), [windows])
    windows = windows.reshape((count, groups, math.prod(out), each * size))
    filters = xp.swap(w.reshape((1, groups, made, each * size)))
    added = None if bias is None else bias.reshape((1, groups, 1, made))
    product = xp.matmul(windows, filters, added)
    product = xp.swap(product)
    return product.reshape((count, groups * made, *out))


def contiguous(xp: Any, x: Any) -> Any:
    def change(arrays: Sequence[Any]) -> Any:
        import numpy as np

        array = arrays[0]
        return array.contiguous() if isinstance(array, torch.Tensor) else np.ascontiguousarray(array).view(type(array))

    return xp.rearranged(change, [x])


def _as_plain(
    xp: Any,
    x: Any,
    w: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    more: Sequence[int],
    groups: int,
) -> tuple[Any, Any, tuple[list[int], list[int]], list[int]]:
    """A transposed convolution as one of step one: zeros between the numbers, filters turned round."""
    axes = len(stride)
    shape = tuple(map(int, x.shape))
    wide = [(n - 1) * s + 1 for n, s in zip(shape[2:], stride, strict=True)]
    frame = xp.exact(torch.zeros((*shape[:2], *wide), dtype=torch.float64))
    places = (slice(None), slice(None), *(slice(None, None, s) for s in stride))

    def spread(arrays: Sequence[Any]) -> Any:
        base = arrays[0].clone() if isinstance(arrays[0], torch.Tensor) else arrays[0].copy()
        base[places] = arrays[1]
        return base

    x = xp.rearranged(spread, [frame, x])
    kernel = tuple(map(int, w.shape[2:]))
    each, made = int(w.shape[0]) // groups, int(w.shape[1])
    w = w.reshape((groups, each, made, *kernel))

    def turn(arrays: Sequence[Any]) -> Any:
        array = transposed(arrays[0], (0, 2, 1, *range(3, 3 + axes)))
        flipped = tuple(range(3, 3 + axes))
        if isinstance(array, torch.Tensor):
            return array.flip(flipped)
        return array[(slice(None),) * 3 + (slice(None, None, -1),) * axes]

    w = xp.rearranged(turn, [w]).reshape((groups * made, each, *kernel))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    before = [r - p for r, p in zip(reach, padding, strict=True)]
    after = [r - p + m for r, p, m in zip(reach, padding, more, strict=True)]
    return x, w, (before, after), [1] * axes


@rule("constant_pad_nd")
def _constant_pad(evaluation: Evaluation, x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    axes = len(pad) // 2
    pairs = [pad[2 * place : 2 * place + 2] for place in range(axes)][::-1]
    before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return evaluation.made(padded(evaluation.xp, evaluation.number(x), before, after, float(value)), x.dtype)


@rule("_cdist_forward")
def _cdist(evaluation: Evaluation, x: Tensor, y: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """The p-norm of differences of rows; of the Euclidean one a kernel may also expand |x|^2 + |y|^2 - 2 x y."""
    xp = evaluation.xp
    a, b = evaluation.number(x), evaluation.number(y)
    apart = a.reshape((*x.shape[:-1], 1, x.shape[-1])) - b.reshape((*y.shape[:-2], 1, *y.shape[-2:]))
    size = xp.larger_of(apart, -apart)
    if p == math.inf:
        found = xp.largest_of(size)
    elif p == 0:
        order = xp.compare(apart, apart * 0.0)
        found = xp.sum(xp.interval((~(order.same | order.open)).double(), (~order.same).double()))
    elif p == 1:
        found = xp.sum(size)
    elif p == 2:
        found = xp.root(xp.sum(apart * apart))
    else:
        found = xp.power(xp.sum(xp.power(size, float(p))), 1.0 / float(p))
    return evaluation.made(found[..., 0], x.dtype)
