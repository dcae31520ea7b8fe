"""Rearrangements: joining, flipping, indexing, gathering, and the forms that write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import constant, rule
from assay.golden.lowering.tensor import broadcast, overwritten, read

Tensor = torch.Tensor


def _flat_indices(x: Tensor) -> Tensor:
    """Return the flat index of each element of x, in its shape."""
    return torch.arange(x.numel()).reshape(x.shape)


def rearranged(ctx: Lowering, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``change``, a rearrangement of torch's tensors, to numbers, which are not yet rounded if x isn't."""
    traced = ctx.traced(x)
    index = ctx.xp.integers(change(_flat_indices(x)))
    flat = read(traced, unrounded=True).reshape((-1,))
    number = ctx.xp.rearranged(lambda arrays: arrays[0][index], [flat])
    return ctx.wrap(number, traced.dtype, traced.memory.stage)


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


@rule("cat concat concatenate")
def _cat(ctx: Lowering, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    tensors = [x for x in tensors if x.ndim != 1 or x.shape[0]] or list(tensors)  # PyTorch skips empty vectors
    number = ctx.xp.concatenate([ctx.number(x) for x in tensors], dim % tensors[0].ndim)
    return ctx.wrap(number, _common_dtype(tensors))


@rule("stack")
def _stack(ctx: Lowering, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    number = ctx.xp.stack([ctx.number(x) for x in tensors], dim % (tensors[0].ndim + 1))
    return ctx.wrap(number, _common_dtype(tensors))


def _register_rearrangement(name: str, *, nearest: bool = False) -> None:
    """Apply PyTorch's operation to indices; resampling by the nearest element takes floats, and float64 holds them."""
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")

    @rule(name)
    def compute(ctx: Lowering, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        known = tree_map(lambda arg: ctx.concrete(arg) if isinstance(arg, Tensor) else arg, args)
        if nearest:
            return rearranged(ctx, x, lambda index: function(index.double(), *known, **kwargs).long())
        return rearranged(ctx, x, lambda index: function(index, *known, **kwargs))


_REARRANGEMENTS = """flip roll rot90 repeat repeat_interleave.self_int repeat_interleave.self_Tensor pixel_shuffle
pixel_unshuffle channel_shuffle diagonal_copy unfold_copy index_select take index.Tensor gather masked_select"""
for _name in _REARRANGEMENTS.split():
    _register_rearrangement(_name)
for _axes in (1, 2, 3):
    _register_rearrangement(f"upsample_nearest{_axes}d", nearest=True)
    _register_rearrangement(f"_upsample_nearest_exact{_axes}d", nearest=True)


def _concrete_indices(ctx: Lowering, indices: Sequence[Any]) -> list[Any]:
    return [None if index is None else ctx.concrete(index) for index in indices]


def _put(ctx: Lowering, x: Tensor, index: Tensor, values: Any, accumulate: bool = False) -> Tensor:
    """Return x with ``values`` at distinct flat indices; ``accumulate``: added at indices that may repeat."""
    x = ctx.traced(x)
    if accumulate:
        return _reduce_at(ctx, x, index, values, "sum")
    flat, index = ctx.number(x).reshape((-1,)), ctx.xp.integers(index.reshape(-1))
    return ctx.wrap(overwritten(ctx.xp, flat, index, values.reshape((-1,))).reshape(tuple(x.shape)), x.dtype)


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf}


def _reduce_at(ctx: Lowering, x: Tensor, index: Tensor, values: Any, reduce: str, include_self: bool = True) -> Tensor:
    """Return x with all ``values`` of each flat index reduced there, and with the old element if ``include_self``.

    The order is any. Each index has as many terms as the most frequent one, filled with neutral elements.
    """
    xp, flat = ctx.xp, index.reshape(-1)
    base = ctx.number(x).reshape((-1, 1))
    if not flat.numel():
        return ctx.wrap(base.reshape(tuple(x.shape)), x.dtype)
    order = torch.argsort(flat, stable=True)
    ordered = flat[order]
    depth = torch.arange(len(ordered)) - torch.searchsorted(ordered, ordered)
    table = torch.full((x.numel(), int(depth.max()) + 1), int(flat.numel()), dtype=torch.int64)
    table[ordered, depth] = order
    neutral = xp.exact(torch.full((1,), _NEUTRAL[reduce], dtype=torch.float64))
    terms, columns = xp.concatenate([values.reshape((-1,)), neutral], 0), xp.integers(table)
    terms = xp.rearranged(lambda arrays: arrays[0][columns], [terms])
    terms = xp.concatenate([base, terms], 1) if include_self else terms
    if reduce == "amax":
        result = xp.largest_of(terms)
    elif reduce == "amin":
        result = -xp.largest_of(-terms)
    else:
        result = xp.prod(terms) if reduce == "prod" else xp.sum(terms)
    counts = torch.bincount(flat, minlength=x.numel())[:, None]
    if reduce == "mean":
        result = result / xp.exact((counts + int(include_self)).clamp(min=1))
    result = xp.chosen(counts > 0, result, base)
    return ctx.wrap(result.reshape(tuple(x.shape)), x.dtype)


def _cast_number(ctx: Lowering, values: Any, dtype: torch.dtype) -> Any:
    return ctx.number(ctx.cast(values, dtype) if values.dtype != dtype else values)


def _scatter_indices(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return the flat index in x of each element of an index along ``dim``."""
    within = tuple(slice(0, n) if axis != dim % x.ndim else slice(None) for axis, n in enumerate(index.shape))
    return torch.gather(_flat_indices(x)[within], dim, index)


@rule("scatter_reduce.two")
def _scatter_reduce(
    ctx: Lowering, x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    traced, concrete = ctx.traced(x), ctx.concrete(index)
    if not x.ndim:
        with ctx:
            return _scatter_reduce(ctx, x[None], 0, index[None], src[None], reduce, include_self=include_self)[0]
    values = _cast_number(ctx, src, x.dtype)[tuple(slice(0, n) for n in concrete.shape)]
    return _reduce_at(ctx, traced, _scatter_indices(x, dim, concrete), values, reduce, include_self=include_self)


@rule("scatter.src scatter.value scatter.reduce scatter.value_reduce")
def _scatter(ctx: Lowering, x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str = "", **_: Any) -> Tensor:
    """Write, add or multiply values at the indices along ``dim``."""
    traced, concrete = ctx.traced(x), ctx.concrete(index)
    if not x.ndim:
        raise ctx.unsupported(torch.ops.aten.scatter.src, "of a single number has no lowering rule")
    flat = _scatter_indices(x, dim, concrete)
    if isinstance(src, Tensor):
        values = _cast_number(ctx, src, x.dtype)[tuple(slice(0, n) for n in concrete.shape)]
    else:
        values = broadcast(ctx.xp, constant(ctx.xp, src), concrete.shape)
    if reduce == "add":
        return _reduce_at(ctx, traced, flat, values, "sum")
    if reduce == "multiply":
        return _reduce_at(ctx, traced, flat, values, "prod")
    if reduce:
        raise ctx.unsupported(torch.ops.aten.scatter.reduce, f"with reduce={reduce!r} has no lowering rule")
    return _put(ctx, traced, flat, values)


@rule("scatter_add")
def _scatter_add(ctx: Lowering, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter(ctx, x, dim, index, src, reduce="add")


@rule("put")
def _put_flat(ctx: Lowering, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = ctx.concrete(index) % max(x.numel(), 1)
    return _put(ctx, x, flat, _cast_number(ctx, source, x.dtype), accumulate)


@rule("index_put")
def _index_put(ctx: Lowering, x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Tensor:
    flat = torch.ops.aten.index.Tensor(_flat_indices(x), _concrete_indices(ctx, indices))
    return _put(ctx, x, flat, broadcast(ctx.xp, _cast_number(ctx, values, x.dtype), flat.shape), accumulate)


@rule("index_reduce")
def _index_reduce(
    ctx: Lowering, x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    flat = torch.index_select(_flat_indices(x), dim, ctx.concrete(index))
    return _reduce_at(ctx, ctx.traced(x), flat, _cast_number(ctx, source, x.dtype), reduce, include_self)


@rule("masked_scatter")
def _masked_scatter(ctx: Lowering, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    with ctx:
        x = x.expand(torch.broadcast_shapes(x.shape, mask.shape)).clone()  # type: ignore[no-untyped-call]
    flat = _flat_indices(x)[ctx.concrete(mask).expand(x.shape)]
    return _put(ctx, x, flat, ctx.number(source).reshape((-1,))[: flat.numel()])


def _register_view_scatter(name: str, view: Callable[..., Tensor]) -> None:
    @rule(name)
    def put(ctx: Lowering, x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        flat = view(_flat_indices(x), *args, **kwargs)
        number = broadcast(ctx.xp, _cast_number(ctx, source, x.dtype), flat.shape)
        return _put(ctx, x, flat, number)


_register_view_scatter("slice_scatter", torch.ops.aten.slice.Tensor)
_register_view_scatter("select_scatter", torch.ops.aten.select.int)
_register_view_scatter("diagonal_scatter", torch.ops.aten.diagonal.default)
_register_view_scatter("as_strided_scatter", torch.ops.aten.as_strided.default)


@rule("nonzero")
def _nonzero(ctx: Lowering, x: Tensor) -> Tensor:
    with ctx:
        mask = x != 0
    return torch.nonzero(ctx.concrete(mask))
