"""Comparisons, three-valued masks and selection by them, orders and the indices of extremes.

Where numbers tie within their radii, a mask is open and any of the tied indices is admissible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic.base import Order
from assay.golden.lowering.choices import Between, Decision, Ranking
from assay.golden.lowering.dispatch import Lowering, middle
from assay.golden.lowering.rule_table import constant, promoted, rule
from assay.golden.lowering.tensor import axis_last, permuted

Tensor = torch.Tensor
Ternary = tuple[Tensor, Tensor]  # certainly true, possibly true


def _number(ctx: Lowering, x: Any) -> Any:
    return ctx.number(x) if isinstance(x, Tensor) else constant(ctx.xp, x)


def _register_comparison(name: str, certain: Callable[[Order], Tensor], excluded: Callable[[Order], Tensor]) -> None:
    function: Any = getattr(torch, name)

    @rule(f"{name}.Tensor {name}.Scalar")
    def compare(ctx: Lowering, x: Any, y: Any) -> Tensor:
        a, b = _number(ctx, x), _number(ctx, y)
        order = ctx.xp.compare(a, b) if x is not y else _with_itself(ctx, a)
        return ctx.decided_mask(
            certain(order), ~excluded(order), lambda: function(middle(ctx.xp, a), middle(ctx.xp, b))
        )


def _with_itself(ctx: Lowering, number: Any) -> Order:
    """Compare a number with itself, which is PyTorch's test for NaN: equal, however large its radius."""
    low, high = ctx.xp.enclosure(number)
    nan, unknown = low.isnan() & high.isnan(), (low.isinf() | high.isinf()) & (low != high)
    never = torch.zeros_like(nan)
    return Order(never, never, ~nan & ~unknown, nan)


_register_comparison("lt", lambda o: o.less, lambda o: o.more | o.same | o.unordered)
_register_comparison("gt", lambda o: o.more, lambda o: o.less | o.same | o.unordered)
_register_comparison("le", lambda o: o.less | o.same, lambda o: o.more | o.unordered)
_register_comparison("ge", lambda o: o.more | o.same, lambda o: o.less | o.unordered)
_register_comparison("eq", lambda o: o.same, lambda o: o.less | o.more | o.unordered)
_register_comparison("ne", lambda o: o.less | o.more | o.unordered, lambda o: o.same)


def mask(ctx: Lowering, certain: Tensor, possible: Tensor) -> Tensor:
    """Return a mask; a plain one if nothing is open."""
    if torch.equal(certain, possible):
        return certain
    return ctx.wrap(ctx.xp.interval(certain.double(), possible.double()), torch.bool)


def truth(ctx: Lowering, x: Any) -> Ternary:
    """Return where a tensor, or a scalar, is certainly and possibly true, that is other than zero."""
    if not isinstance(x, Tensor):
        scalar = torch.tensor(bool(x))
        return scalar, scalar
    if x.dtype != torch.bool:
        x = ctx.cast(x, torch.bool)
    if type(x) is Tensor:
        return x, x
    low, high = ctx.xp.enclosure(ctx.number(x))
    return low > 0, high > 0


@rule("logical_not bitwise_not")
def _not(ctx: Lowering, x: Tensor) -> Tensor:
    certain, possible = truth(ctx, x)
    return mask(ctx, ~possible, ~certain)


def _register_connective(names: str, function: Callable[[Ternary, Ternary], Ternary]) -> None:
    @rule(names)
    def connect(ctx: Lowering, x: Any, y: Any) -> Tensor:
        return mask(ctx, *function(truth(ctx, x), truth(ctx, y)))


_register_connective(
    "logical_and bitwise_and.Tensor bitwise_and.Scalar __and__.Tensor", lambda x, y: (x[0] & y[0], x[1] & y[1])
)
_register_connective(
    "logical_or bitwise_or.Tensor bitwise_or.Scalar __or__.Tensor", lambda x, y: (x[0] | y[0], x[1] | y[1])
)
_register_connective(
    "logical_xor bitwise_xor.Tensor",
    lambda x, y: ((x[0] & ~y[1]) | (~x[1] & y[0]), (x[1] & ~y[0]) | (~x[0] & y[1])),
)


def _register_quantifier(name: str) -> None:
    function: Any = getattr(torch, name)

    @rule(f"{name} {name}.dim {name}.dims")
    def quantify(ctx: Lowering, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return mask(ctx, *(function(end) if dim is None else function(end, dim, keepdim) for end in truth(ctx, x)))


_register_quantifier("any")
_register_quantifier("all")


@rule("equal")
def _equal(ctx: Lowering, x: Tensor, y: Tensor) -> bool:
    with ctx:
        return x.shape == y.shape and bool((x == y).all().item())


@rule("allclose")
def _allclose(ctx: Lowering, *args: Any, **options: Any) -> bool:
    with ctx:
        return bool(torch.isclose(*args, **options).all().item())


@rule("signbit")
def _signbit(ctx: Lowering, x: Tensor) -> Tensor:
    low, high = ctx.xp.enclosure(ctx.number(x))
    certain, possible = (high < 0) | (torch.signbit(low) & (low == high)), (low < 0) | torch.signbit(low)
    return ctx.decided_mask(certain, possible, lambda: torch.signbit(middle(ctx.xp, ctx.number(x))))


@rule("where.self where.ScalarOther where.ScalarSelf where.Scalar")
def _where(ctx: Lowering, condition: Tensor, x: Any, y: Any) -> Tensor:
    result = ctx.xp.select(*truth(ctx, condition), _number(ctx, x), _number(ctx, y))
    return ctx.wrap(result, promoted((x, y), floating=False))


@rule("masked_fill.Scalar masked_fill.Tensor")
def _masked_fill(ctx: Lowering, x: Tensor, where: Tensor, value: Any) -> Tensor:
    return ctx.wrap(ctx.xp.select(*truth(ctx, where), _number(ctx, value), ctx.number(x)), x.dtype)


def ranked(xp: Any, number: Any, k: int, largest: bool, stable: bool = False) -> tuple[Any, Ranking]:
    """Return the first k of the last axis in order, and their indices. NaN is above all numbers, as in PyTorch."""
    nan = xp.enclosure(number)[0].isnan()
    if bool(nan.any()):
        values, ranking = ranked(xp, xp.chosen(nan, constant(xp, torch.inf), number), k, largest, stable)
        order, nan_count = torch.arange(values.shape[-1]), nan.sum(-1, keepdim=True)
        are_nan = order < nan_count if largest else order >= nan.shape[-1] - nan_count
        return xp.chosen(are_nan, constant(xp, torch.nan), values), ranking
    signed = -number if largest else number
    low, high = xp.enclosure(signed)
    values = xp.ordered(signed)[..., :k]
    index = torch.argsort(middle(xp, signed), dim=-1, stable=True)[..., :k]
    return (-values if largest else values), Ranking(low, high, index, stable)


def indices(ctx: Lowering, least: Tensor, most: Tensor, guess: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return integers between two ends, which agree with ``guess`` where they agree."""
    return ctx.decided(Between(least, most, guess), dtype)


def _along(
    ctx: Lowering, x: Tensor, dim: int, select: Callable[[Any], tuple[Any, Decision]], keepdim: bool = True
) -> tuple[Tensor, Tensor]:
    """Apply ``select``, which returns values and their indices along the last axis, along any axis."""
    if not x.ndim:
        return ctx.wrap(ctx.number(x), x.dtype), torch.zeros((), dtype=torch.int64)
    number, back = axis_last(ctx.xp, ctx.number(x), dim % x.ndim)
    values, ranking = select(number)
    index = ctx.decided(ranking, torch.int64)
    shape = tuple(n for axis, n in enumerate(x.shape) if axis != dim % x.ndim)
    with ctx:
        index = index.permute(*back).contiguous() if keepdim else index.reshape(shape)
    return ctx.wrap(permuted(ctx.xp, values, back) if keepdim else values.reshape(shape), x.dtype), index


@rule("topk")
def _topk(ctx: Lowering, x: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any) -> tuple[Tensor, Tensor]:
    return _along(ctx, x, dim, lambda number: ranked(ctx.xp, number, k, largest))


@rule("sort sort.stable")
def _sort(
    ctx: Lowering, x: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    return _along(ctx, x, dim, lambda number: ranked(ctx.xp, number, int(number.shape[-1]), descending, bool(stable)))


@rule("argsort argsort.stable")
def _argsort(ctx: Lowering, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return _sort(ctx, x, *args, **options)[1]


def _register_extremes(name: str, largest: bool) -> None:
    def extreme(xp: Any, number: Any) -> tuple[Any, Ranking]:
        """Return the extreme of the last axis, NaN if there is one, and its index."""
        values, ranking = ranked(xp, number if largest else -number, 1, True)
        return (values if largest else -values), ranking

    @rule(f"{name}.dim")
    def along(ctx: Lowering, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return _along(ctx, x, dim, lambda number: extreme(ctx.xp, number), keepdim)

    @rule(f"arg{name}")
    def argument(ctx: Lowering, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is not None:
            return along(ctx, x, dim, keepdim)[1]
        index = ctx.decided(extreme(ctx.xp, ctx.number(x).reshape((-1,)))[1], torch.int64)
        with ctx:
            return index.reshape((1,) * x.ndim if keepdim else ())

    @rule(f"cum{name}")
    def running(ctx: Lowering, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        def select(number: Any) -> tuple[Any, Between]:
            signed = number if largest else -number
            values, (low, high) = ctx.xp.cummax(signed), ctx.xp.enclosure(signed)
            index = torch.arange(low.shape[-1]).expand(low.shape)
            last = torch.where(high >= low.cummax(-1).values, index, 0).cummax(-1).values
            certain = torch.where(low >= high.cummax(-1).values, index, 0).cummax(-1).values
            guess = middle(ctx.xp, signed).cummax(-1).indices.clamp(certain, last)
            return (values if largest else -values), Between(certain, last, guess)

        return _along(ctx, x, dim, select)


_register_extremes("max", True)
_register_extremes("min", False)


@rule("searchsorted.Tensor searchsorted.Scalar")
def _searchsorted(
    ctx: Lowering, boundaries: Tensor, values: Any, *, out_int32: bool = False, right: bool = False, **options: Any
) -> Tensor:
    """Count the boundaries below a value, or at most it."""
    xp = ctx.xp
    if options.get("sorter") is not None:
        with ctx:
            boundaries = boundaries.gather(-1, options["sorter"])
    sequence, queries = ctx.number(boundaries), _number(ctx, values)
    if len(queries.shape):
        lead = tuple(map(int, sequence.shape[:-1])) if boundaries.ndim > 1 else (1,) * len(queries.shape[:-1])
        sequence = sequence.reshape((*lead, 1, int(boundaries.shape[-1])))
        order = xp.compare(sequence, queries.reshape((*map(int, queries.shape), 1)))
    else:
        order = xp.compare(sequence, queries)
    inclusive = right or options.get("side") == "right"
    certain = order.less | order.same if inclusive else order.less
    # Where a boundary is NaN the count depends on the binary search, so it is only possible.
    possible = ~order.more if inclusive else ~(order.more | order.same)
    nan = xp.compare(queries, queries).unordered  # a value of NaN is above all boundaries
    certain = certain | (nan[..., None] if nan.ndim else nan)
    least, most = certain.sum(-1), possible.sum(-1)
    return indices(ctx, least, most, (least + most) // 2, torch.int32 if out_int32 else torch.int64)


@rule("bucketize.Tensor")
def _bucketize(ctx: Lowering, values: Tensor, boundaries: Tensor, **options: Any) -> Tensor:
    return _searchsorted(ctx, boundaries, values, **options)


@rule("kthvalue")
def _kthvalue(ctx: Lowering, x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, index = _sort(ctx, x, dim)
    with ctx:
        values, index = (t if not t.ndim else t.narrow(dim, k - 1, 1).clone() for t in (values, index))
        return (values, index) if keepdim or not x.ndim else (values.squeeze(dim), index.squeeze(dim))


@rule("median.dim")
def _median_along(ctx: Lowering, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values, index = _kthvalue(ctx, x, ((x.shape[dim] if x.ndim else 1) + 1) // 2, dim, keepdim)
    with ctx:
        return torch.where(x.isnan().any(dim, keepdim), torch.nan, values), index


@rule("median")
def _median(ctx: Lowering, x: Tensor) -> Tensor:
    with ctx:
        return x.reshape(-1).median(0).values
