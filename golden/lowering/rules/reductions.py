"""Sums, means, variances, products, extremes and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.table import rule
from assay.golden.lowering.tensor import NumberTensor

Tensor = torch.Tensor


def axes_of(x: Tensor, dim: Any) -> list[int]:
    """The axes that ``dim`` names, all of them where it is None or empty."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.ndim))
    return [axis % max(x.ndim, 1) for axis in (dim if isinstance(dim, (list, tuple)) else [dim])] if x.ndim else []


def last(xp: Any, number: Any, axes: Sequence[int]) -> Any:
    """The number with ``axes`` as one at the end."""
    shape = tuple(map(int, number.shape))
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    order = [*kept, *axes]
    if order != list(range(len(shape))):
        number = xp.rearranged(lambda arrays: transposed(arrays[0], order), [number])
    return number.reshape((*(shape[axis] for axis in kept), math.prod(shape[axis] for axis in axes)))


def transposed(array: Any, order: Sequence[int]) -> Any:
    """Axes in another order, of torch's arrays or numpy's."""
    return array.permute(*order) if isinstance(array, torch.Tensor) else array.transpose(*order)


def reduced(
    evaluation: Evaluation,
    x: Tensor,
    dim: Any,
    keepdim: bool,
    function: Callable[[Any], Any],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``function`` of numbers along a last axis, which it keeps with size one, along any axes."""
    axes, xp = axes_of(x, dim), evaluation.xp
    number = evaluation.number(x)
    shape = tuple(x.shape)
    if not axes and not x.ndim:
        number, axes = number.reshape((1,)), [0]
        result = function(number).reshape(())
    else:
        result = xp.in_blocks(function, last(xp, number, axes), whole=1)
        kept = [1 if axis in axes else size for axis, size in enumerate(shape)]
        result = result.reshape(tuple(kept) if keepdim else tuple(n for a, n in enumerate(shape) if a not in axes))
    return evaluation.made(result, dtype or x.dtype)


def _summed_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype or (x.dtype if x.is_floating_point() else torch.int64)


@rule("sum sum.dim_IntList")
def _sum(
    evaluation: Evaluation, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return reduced(evaluation, x, dim, keepdim, evaluation.xp.sum, _summed_dtype(x, dtype))


@rule("mean mean.dim")
def _mean(
    evaluation: Evaluation, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    xp = evaluation.xp
    count = float(math.prod(x.shape[axis] for axis in axes_of(x, dim)))
    return reduced(evaluation, x, dim, keepdim, lambda n: xp.sum(n) / count, dtype or x.dtype)


@rule("prod prod.dim_int")
def _prod(
    evaluation: Evaluation, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return reduced(evaluation, x, dim, keepdim, evaluation.xp.prod, _summed_dtype(x, dtype))


def variance(xp: Any, number: Any, correction: float) -> tuple[Any, Any]:
    """The variance along the last axis and the mean: sum (x - m)^2 / (n - correction), by two passes or Welford's."""
    return xp.variance(number, correction), xp.sum(number) / float(number.shape[-1])


def _correction(unbiased: Any, correction: Any) -> float:
    if isinstance(unbiased, bool):
        return float(unbiased)
    return 1.0 if correction is None else float(correction)


@rule("var.correction var var.dim")
def _var(
    evaluation: Evaluation,
    x: Tensor,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Tensor:
    dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
    by = _correction(unbiased, correction)
    return reduced(evaluation, x, dim, keepdim, lambda n: evaluation.xp.variance(n, by))


@rule("std.correction std std.dim")
def _std(
    evaluation: Evaluation,
    x: Tensor,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Tensor:
    dim, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
    by, xp = _correction(unbiased, correction), evaluation.xp
    return reduced(evaluation, x, dim, keepdim, lambda n: xp.root(xp.variance(n, by)))


def _with_mean(name: str, spread: Callable[..., Tensor]) -> None:
    @rule(f"{name}_mean.correction")
    def both(
        evaluation: Evaluation, x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        found = spread(evaluation, x, dim, None, keepdim, correction=correction)
        return found, _mean(evaluation, x, dim, keepdim)


_with_mean("var", _var)
_with_mean("std", _std)


@rule("amax")
def _amax(evaluation: Evaluation, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return reduced(evaluation, x, dim, keepdim, evaluation.xp.largest_of)


@rule("amin")
def _amin(evaluation: Evaluation, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    return reduced(evaluation, x, dim, keepdim, lambda n: -evaluation.xp.largest_of(-n))


@rule("max")
def _max(evaluation: Evaluation, x: Tensor) -> Tensor:
    return reduced(evaluation, x, None, False, evaluation.xp.largest_of)


@rule("min")
def _min(evaluation: Evaluation, x: Tensor) -> Tensor:
    return reduced(evaluation, x, None, False, lambda n: -evaluation.xp.largest_of(-n))


@rule("linalg_vector_norm")
def _vector_norm(
    evaluation: Evaluation,
    x: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    xp = evaluation.xp

    def norm(n: Any) -> Any:
        size = xp.larger_of(n, -n)
        if ord == math.inf:
            return xp.largest_of(size)
        if ord == -math.inf:
            return -xp.largest_of(-size)
        if ord == 0:
            order = xp.compare(n, n * 0.0)
            return xp.sum(xp.interval((~(order.same | order.open)).double(), (~order.same).double()))
        if ord == 1:
            return xp.sum(size)
        if ord == 2:
            return xp.root(xp.sum(n * n))
        return xp.power(xp.sum(xp.power(size, float(ord))), 1.0 / float(ord))

    return reduced(evaluation, x, dim, keepdim, norm, dtype or x.dtype)


def beyond_rows(xp: Any, eager: Callable[[Tensor], Tensor], y: Any, x: Any) -> Any:
    """``y``, and what PyTorch's function says of rows of x whose largest is no number: rules, no arithmetic."""
    least, most = xp.enclosure(x)
    if not least.shape[-1]:
        return y
    largest = least.amax(-1, keepdim=True)
    special = ~largest.isfinite() & (largest.isnan() | (largest == most.amax(-1, keepdim=True)))
    if not bool(special.any()):
        return y
    found = eager(torch.where(special, least, 0.0))
    return xp.chosen(special.expand(found.shape), xp.exact(found), y)


def logsumexp_of(xp: Any, x: Any) -> Any:
    """Along the last axis, which is kept; of a row of -inf alone it is that."""
    return beyond_rows(xp, lambda a: a.logsumexp(-1, keepdim=True), xp.logsumexp(x), x)


@rule("logsumexp")
def _logsumexp(evaluation: Evaluation, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return reduced(evaluation, x, dim, keepdim, lambda n: logsumexp_of(evaluation.xp, n))


def along(evaluation: Evaluation, x: Tensor, dim: int, function: Callable[[Any], Any], dtype: Any = None) -> Tensor:
    """``function`` of numbers along a last axis, of the same length, along any axis."""
    xp, number = evaluation.xp, evaluation.number(x)
    if not x.ndim:
        return evaluation.made(function(number.reshape((1,))).reshape(()), dtype or x.dtype)
    order = list(range(x.ndim))
    axis = dim % x.ndim
    order.append(order.pop(axis))
    if axis == x.ndim - 1:
        return evaluation.made(xp.in_blocks(function, number, whole=1), dtype or x.dtype)
    back = [order.index(place) for place in range(x.ndim)]
    moved = xp.in_blocks(function, xp.rearranged(lambda arrays: transposed(arrays[0], order), [number]), whole=1)
    return evaluation.made(xp.rearranged(lambda arrays: transposed(arrays[0], back), [moved]), dtype or x.dtype)


@rule("cumsum")
def _cumsum(evaluation: Evaluation, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return along(evaluation, x, dim, evaluation.xp.cumsum, _summed_dtype(x, dtype))


@rule("cumprod")
def _cumprod(evaluation: Evaluation, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    xp = evaluation.xp

    def products(n: Any) -> Any:
        parts = [xp.prod(n[..., : place + 1]) for place in range(n.shape[-1])]
        return xp.concatenate(parts, -1) if parts else n

    return along(evaluation, x, dim, products, _summed_dtype(x, dtype))


@rule("logcumsumexp")
def _logcumsumexp(evaluation: Evaluation, x: Tensor, dim: int) -> Tensor:
    xp = evaluation.xp

    def sums(n: Any) -> Any:
        parts = [logsumexp_of(xp, n[..., : place + 1]) for place in range(n.shape[-1])]
        return xp.concatenate(parts, -1) if parts else n

    return along(evaluation, x, dim, sums)


@rule("_softmax softmax.int")
def _softmax(evaluation: Evaluation, x: Tensor, dim: int, half_to_float: Any = False) -> Tensor:
    dtype = half_to_float if isinstance(half_to_float, torch.dtype) else torch.float32 if half_to_float else x.dtype
    found = along(evaluation, x, dim, evaluation.xp.softmax, dtype)
    if isinstance(found, NumberTensor):
        found.box.weights = True
    return found


@rule("_log_softmax log_softmax.int")
def _log_softmax(evaluation: Evaluation, x: Tensor, dim: int, half_to_float: Any = False) -> Tensor:
    dtype = half_to_float if isinstance(half_to_float, torch.dtype) else torch.float32 if half_to_float else x.dtype
    xp = evaluation.xp

    def logarithms(n: Any) -> Any:
        return beyond_rows(xp, lambda a: a.log_softmax(-1), xp.log_softmax(n), n)

    return along(evaluation, x, dim, logarithms, dtype)
