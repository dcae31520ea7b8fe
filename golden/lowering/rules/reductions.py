"""Sums, means, variances, products, extremes, norms, running sums and softmax along axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import rule
from assay.golden.lowering.rules.elementwise import quotient
from assay.golden.lowering.tensor import TracedTensor, axis_last, permuted

Tensor = torch.Tensor


def axes_of(x: Tensor, dim: Any) -> list[int]:
    """Return the axes that ``dim`` names, all of them if it is None or empty."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.ndim))
    return [axis % max(x.ndim, 1) for axis in (dim if isinstance(dim, (list, tuple)) else [dim])] if x.ndim else []


def flattened_last(xp: Any, number: Any, axes: Sequence[int]) -> Any:
    """Merge ``axes`` into one at the end."""
    shape = tuple(map(int, number.shape))
    others = [axis for axis in range(len(shape)) if axis not in axes]
    order = [*others, *axes]
    if order != list(range(len(shape))):
        number = permuted(xp, number, order)
    return number.reshape((*(shape[axis] for axis in others), math.prod(shape[axis] for axis in axes)))


def reduced(
    ctx: Lowering, x: Tensor, dim: Any, keepdim: bool, function: Callable[[Any], Any], dtype: Any = None
) -> Tensor:
    """Reduce along any axes by ``function``, which reduces the last axis and keeps it with size one."""
    axes, xp, number = axes_of(x, dim), ctx.xp, ctx.number(x)
    if not x.ndim:
        return ctx.wrap(function(number.reshape((1,))).reshape(()), dtype or x.dtype)
    result = xp.in_blocks(function, flattened_last(xp, number, axes), whole=1)
    sizes = [(1 if axis in axes else size) for axis, size in enumerate(x.shape) if keepdim or axis not in axes]
    return ctx.wrap(result.reshape(tuple(sizes)), dtype or x.dtype)


def along(ctx: Lowering, x: Tensor, dim: int, function: Callable[[Any], Any], dtype: Any = None) -> Tensor:
    """Apply ``function``, which maps the last axis to one of the same length, along any axis."""
    xp, number = ctx.xp, ctx.number(x)
    if not x.ndim:
        return ctx.wrap(function(number.reshape((1,))).reshape(()), dtype or x.dtype)
    if dim % x.ndim == x.ndim - 1:
        return ctx.wrap(xp.in_blocks(function, number, whole=1), dtype or x.dtype)
    moved, back = axis_last(xp, number, dim % x.ndim)
    return ctx.wrap(permuted(xp, xp.in_blocks(function, moved, whole=1), back), dtype or x.dtype)


def _sum_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (x.dtype if x.is_floating_point() else torch.int64)


@rule("sum sum.dim_IntList")
def _sum(ctx: Lowering, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    total = reduced(ctx, x, dim, keepdim, ctx.xp.sum, _sum_dtype(x, dtype))
    if isinstance(total, TracedTensor) and total.is_floating_point():
        total.memory.divided = lambda y: ctx.number(
            reduced(ctx, x, dim, keepdim, lambda n: ctx.xp.sum(quotient(ctx.xp, n, y)))
        )
    return total


@rule("mean mean.dim")
def _mean(ctx: Lowering, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Return the mean: a sum that is divided, or a sum of divided terms, as of programs that add their share."""
    count, xp = float(math.prod(x.shape[axis] for axis in axes_of(x, dim))), ctx.xp

    def mean(n: Any) -> Any:
        return xp.any_formula(lambda: quotient(xp, xp.sum(n), count), lambda: xp.sum(quotient(xp, n, count)))

    return reduced(ctx, x, dim, keepdim, mean, dtype)


@rule("prod prod.dim_int")
def _prod(ctx: Lowering, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return reduced(ctx, x, dim, keepdim, ctx.xp.prod, _sum_dtype(x, dtype))


@rule("var.correction var var.dim")
def _variance(
    ctx: Lowering, x: Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Tensor:
    """Return the variance; an early overload has ``unbiased`` where a later one has ``correction``."""
    dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
    correction = unbiased if isinstance(unbiased, bool) else correction
    return reduced(ctx, x, dim, keepdim, lambda n: ctx.xp.variance(n, 1.0 if correction is None else float(correction)))


@rule("amax max")
def _max(ctx: Lowering, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return reduced(ctx, x, dim, keepdim, ctx.xp.largest_of)


@rule("amin min")
def _min(ctx: Lowering, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return reduced(ctx, x, dim, keepdim, lambda n: -ctx.xp.largest_of(-n))


def p_norm(xp: Any, x: Any, p: float) -> Any:
    """Return the p-norm along the last axis, which is kept; of p = 0 the number of elements other than zero."""
    size = xp.larger_of(x, -x)
    if p == math.inf:
        return xp.largest_of(size)
    if p == -math.inf:
        return -xp.largest_of(-size)
    if p == 0:
        order = xp.compare(x, x * 0.0)
        return xp.sum(xp.interval((~(order.same | order.open)).double(), (~order.same).double()))
    if p == 1:
        return xp.sum(size)
    if p == 2:
        return xp.root(xp.sum(x * x))
    return xp.power(xp.sum(xp.power(size, float(p))), 1.0 / float(p))


@rule("linalg_vector_norm")
def _vector_norm(
    ctx: Lowering, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    return reduced(ctx, x, dim, keepdim, lambda n: p_norm(ctx.xp, n, ord), dtype)


def _eager_at_special_rows(xp: Any, eager: Callable[[Tensor], Tensor], y: Any, x: Any) -> Any:
    """Return ``y``, but PyTorch's own result for rows of x whose maximum is infinite or NaN."""
    low, high = xp.enclosure(x)
    if not low.shape[-1]:
        return y
    maximum = low.amax(-1, keepdim=True)
    special = ~maximum.isfinite() & (maximum.isnan() | (maximum == high.amax(-1, keepdim=True)))
    if not bool(special.any()):
        return y
    result = eager(torch.where(special, low, 0.0))
    return xp.chosen(special.expand(result.shape), xp.exact(result), y)


def _logsumexp_last(xp: Any, x: Any) -> Any:
    return _eager_at_special_rows(xp, lambda a: a.logsumexp(-1, keepdim=True), xp.logsumexp(x), x)


@rule("logsumexp")
def _logsumexp(ctx: Lowering, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return reduced(ctx, x, dim, keepdim, lambda n: _logsumexp_last(ctx.xp, n))


@rule("cumsum")
def _cumsum(ctx: Lowering, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    return along(ctx, x, dim, ctx.xp.cumsum, _sum_dtype(x, dtype))


def _of_prefixes(xp: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Apply a reduction to each prefix of the last axis."""

    def running(n: Any) -> Any:
        parts = [function(n[..., :stop]) for stop in range(1, n.shape[-1] + 1)]
        return xp.concatenate(parts, -1) if parts else n

    return running


@rule("cumprod")
def _cumprod(ctx: Lowering, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    return along(ctx, x, dim, _of_prefixes(ctx.xp, ctx.xp.prod), _sum_dtype(x, dtype))


@rule("logcumsumexp")
def _logcumsumexp(ctx: Lowering, x: Tensor, dim: int) -> Tensor:
    return along(ctx, x, dim, _of_prefixes(ctx.xp, lambda n: _logsumexp_last(ctx.xp, n)))


def _softmax_dtype(x: Tensor, half_to_float: Any) -> torch.dtype:
    """Read the third argument: a dtype in one overload, in the other whether float16 gives float32."""
    return half_to_float if isinstance(half_to_float, torch.dtype) else torch.float32 if half_to_float else x.dtype


@rule("_softmax softmax.int")
def _softmax(ctx: Lowering, x: Tensor, dim: int, half_to_float: Any = False) -> Tensor:
    result = along(ctx, x, dim, ctx.xp.softmax, _softmax_dtype(x, half_to_float))
    if isinstance(result, TracedTensor):
        result.memory.is_softmax = True
    return result


@rule("_log_softmax log_softmax.int")
def _log_softmax(ctx: Lowering, x: Tensor, dim: int, half_to_float: Any = False) -> Tensor:
    def log_softmax(n: Any) -> Any:
        return _eager_at_special_rows(ctx.xp, lambda a: a.log_softmax(-1), ctx.xp.log_softmax(n), n)

    return along(ctx, x, dim, log_softmax, _softmax_dtype(x, half_to_float))
