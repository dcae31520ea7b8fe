"""Orders and places: sort, top-k, arguments of extremes; where numbers tie within their radii, any of the places."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.rules.reductions import transposed
from assay.golden.lowering.table import constant, rule

Tensor = torch.Tensor


def _last(evaluation: Evaluation, x: Tensor, dim: int) -> tuple[Any, list[int]]:
    """The number with ``dim`` as its last axis, and the order that puts it back."""
    order = list(range(x.ndim))
    order.append(order.pop(dim % x.ndim))
    number = evaluation.xp.rearranged(lambda a: transposed(a[0], order), [evaluation.number(x)])
    return number, [order.index(place) for place in range(x.ndim)]


def ranked(xp: Any, number: Any, k: int, largest: bool) -> tuple[Any, Tensor, Tensor]:
    """The k first of the last axis in order, and the least and the largest place that each may be at.

    Place j may be the i-th if no more than i numbers certainly precede it and, with those that may, at least i do. Ties
    of exact numbers leave the place open too: kernels differ there. NaN is larger than all numbers, as PyTorch has it.
    """
    nan = xp.enclosure(number)[0].isnan()
    if bool(nan.any()):
        values, first, final = ranked(xp, xp.chosen(nan, constant(xp, torch.inf), number), k, largest)
        order, many = torch.arange(values.shape[-1]), nan.sum(-1, keepdim=True)
        are_nan = order < many if largest else order >= nan.shape[-1] - many
        return xp.chosen(are_nan, constant(xp, torch.nan), values), first, final
    signed = -number if largest else number
    least, most = xp.enclosure(signed)
    ordered = xp.ordered(signed)[..., :k]
    values = -ordered if largest else ordered
    low, high = least.sort(-1).values[..., :k], most.sort(-1).values[..., :k]
    count = least.shape[-1]
    exact = torch.argsort(least / 2 + most / 2, dim=-1, stable=True)[..., :k]
    picked_low, picked_high = torch.gather(least, -1, exact), torch.gather(most, -1, exact)
    alone = (picked_low == low) & (picked_high == high)
    before = torch.cat([torch.full_like(high[..., :1], -torch.inf), most.sort(-1).values[..., : k - 1]], -1)
    after = torch.cat([least.sort(-1).values, torch.full_like(low[..., :1], torch.inf)], -1)[..., 1 : k + 1]
    alone &= (before < picked_low) & (after > picked_high)
    if bool(alone.all()):
        return values, exact, exact
    first, final = exact.clone(), exact.clone()
    for index in (~alone).nonzero():
        *rest, place = (int(i) for i in index)
        where = tuple(rest)
        may = (least[where] <= high[(*where, place)]) & (most[where] >= low[(*where, place)])
        open_places = may.nonzero()[:, 0] if count else exact[where]
        first[(*where, place)], final[(*where, place)] = open_places.min(), open_places.max()
    return values, first, final


def extreme(xp: Any, number: Any, largest: bool) -> tuple[Any, Tensor, Tensor]:
    """The largest or least of the last axis, NaN where there is one, and where it may be, as `ranked` has it."""
    values, first, final = ranked(xp, number if largest else -number, 1, True)
    return (values if largest else -values), first, final


def _places(evaluation: Evaluation, first: Tensor, final: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    if torch.equal(first, final):
        return first.to(dtype)
    return evaluation.made(evaluation.xp.interval(first.double(), final.double()), dtype)


def _chosen(
    evaluation: Evaluation, x: Tensor, k: int, dim: int, largest: bool, drop: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The k first along an axis; ``drop`` says that the extreme alone is meant, and whether its axis goes."""
    xp = evaluation.xp
    if not x.ndim:
        return evaluation.made(evaluation.number(x), x.dtype), torch.zeros((), dtype=torch.int64)
    number, back = _last(evaluation, x, dim)
    values, first, final = extreme(xp, number, largest) if drop is not None else ranked(xp, number, k, largest)
    if drop:
        axis = dim % x.ndim
        shape = tuple(n for a, n in enumerate(x.shape) if a != axis)
        return evaluation.made(values.reshape(shape), x.dtype), _places(
            evaluation, first.reshape(shape), final.reshape(shape)
        )
    values = xp.rearranged(lambda a: transposed(a[0], back), [values])
    places = _places(evaluation, first.permute(*back).contiguous(), final.permute(*back).contiguous())
    return evaluation.made(values, x.dtype), places


@rule("topk")
def _topk(
    evaluation: Evaluation, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    return _chosen(evaluation, x, k, dim, largest)


@rule("sort")
def _sort(evaluation: Evaluation, x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return _chosen(evaluation, x, x.shape[dim] if x.ndim else 1, dim, descending)


@rule("sort.stable")
def _sort_stable(
    evaluation: Evaluation, x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    return _chosen(evaluation, x, x.shape[dim] if x.ndim else 1, dim, descending)


@rule("argsort argsort.stable")
def _argsort(evaluation: Evaluation, x: Tensor, dim: int = -1, descending: bool = False, **_: Any) -> Tensor:
    return _chosen(evaluation, x, x.shape[dim] if x.ndim else 1, dim, descending)[1]


def _extreme(largest: bool) -> None:
    name = "max" if largest else "min"

    @rule(f"{name}.dim")
    def along(evaluation: Evaluation, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return _chosen(evaluation, x, 1, dim, largest, drop=not keepdim)

    @rule(f"arg{name}")
    def argument(evaluation: Evaluation, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None:
            return _chosen(evaluation, x, 1, dim, largest, drop=not keepdim)[1]
        number = evaluation.number(x).reshape((-1,))
        _, first, final = extreme(evaluation.xp, number, largest)
        shape = (1,) * x.ndim if keepdim else ()
        return _places(evaluation, first.reshape(shape), final.reshape(shape))


_extreme(True)
_extreme(False)


@rule("searchsorted.Tensor searchsorted.Scalar")
def _searchsorted(
    evaluation: Evaluation,
    ordered: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """How many of the ordered numbers lie below a value, or at it too."""
    xp = evaluation.xp
    row_of = evaluation.number(ordered)
    given = evaluation.number(values) if isinstance(values, Tensor) else constant(xp, values)
    if sorter is not None:
        with evaluation:
            row_of = evaluation.number(ordered.gather(-1, sorter))
    size = int(ordered.shape[-1])
    lead = tuple(map(int, row_of.shape[:-1])) if ordered.ndim > 1 else (1,) * len(given.shape[:-1])
    line = row_of.reshape((*lead, 1, size)) if len(given.shape) else row_of
    order = xp.compare(line, given.reshape((*map(int, given.shape), 1)) if len(given.shape) else given)
    at_or_below = side == "right" or right
    certain = order.less | order.same if at_or_below else order.less
    possible = ~order.more if at_or_below else ~(order.more | order.same)  # what NaN is among them hangs on the search
    nan = xp.compare(given, given).unordered  # the largest
    certain = certain | (nan[..., None] if nan.ndim else nan)
    return _places(evaluation, certain.sum(-1), possible.sum(-1), torch.int32 if out_int32 else torch.int64)


@rule("bucketize.Tensor")
def _bucketize(
    evaluation: Evaluation, values: Tensor, ordered: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    return _searchsorted(evaluation, ordered, values, out_int32=out_int32, right=right)


@rule("kthvalue")
def _kthvalue(evaluation: Evaluation, x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = _chosen(evaluation, x, x.shape[dim] if x.ndim else 1, dim, False)
    with evaluation:
        values, places = (t if not t.ndim else t.narrow(dim, k - 1, 1).clone() for t in (values, places))
        return (values, places) if keepdim or not x.ndim else (values.squeeze(dim), places.squeeze(dim))


@rule("median.dim")
def _median_along(evaluation: Evaluation, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, places = _kthvalue(evaluation, x, ((x.shape[dim] if x.ndim else 1) + 1) // 2, dim, keepdim)
    with evaluation:
        return torch.where(x.isnan().any(dim, keepdim), torch.nan, values), places


@rule("median")
def _median(evaluation: Evaluation, x: Tensor) -> Tensor:
    with evaluation:
        return x.reshape(-1).median(0).values


def _running(largest: bool) -> None:
    @rule("cummax" if largest else "cummin")
    def so_far(evaluation: Evaluation, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        xp = evaluation.xp
        if not x.ndim:
            return _chosen(evaluation, x, 1, 0, largest)
        number, back = _last(evaluation, x, dim)
        values = xp.cummax(number) if largest else -xp.cummax(-number)
        least, most = xp.enclosure(number if largest else -number)
        place = torch.arange(least.shape[-1]).expand(least.shape)
        best = least.cummax(-1).values
        final = torch.where(most >= best, place, 0).cummax(-1).values
        certain = torch.where(least >= most.cummax(-1).values, place, 0).cummax(-1).values
        restored = xp.rearranged(lambda a: transposed(a[0], back), [values])
        ends = (certain.permute(*back).contiguous(), final.permute(*back).contiguous())
        return evaluation.made(restored, x.dtype), _places(evaluation, *ends)


_running(True)
_running(False)
