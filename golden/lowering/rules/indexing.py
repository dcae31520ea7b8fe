"""Rearrangements: joining, flipping, indexing, gathering, and the forms that write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import constant, rule
from assay.golden.lowering.tensor import TracedTensor, broadcast, overwritten, read

Tensor = torch.Tensor
Ends = tuple[Any, Any]
_MOST_REACHED = 4096  # the most indices to which an open one is written, one after another


def _flat_indices(x: Tensor) -> Tensor:
    """Return the flat index of each element of x, in its shape."""
    return torch.arange(x.numel()).reshape(x.shape)


def rearranged(ctx: Lowering, x: Tensor, change: Callable[..., Tensor], *known: Ends) -> Tensor:
    """Apply ``change``, a rearrangement of torch's tensors, to numbers, which are not yet rounded if x isn't.

    ``known``: its further arguments, each by the least and the greatest that it may be; an element of the result that
    isn't the same for both is unknown.
    """
    traced, flat_indices = ctx.traced(x), _flat_indices(x)
    least, most = (change(flat_indices, *(ends[side] for ends in known)) for side in (0, 1))
    if least.shape != most.shape:
        raise ctx.undecided("indices")
    index = ctx.xp.integers(least)
    flat = read(traced, unrounded=True).reshape((-1,))
    number = ctx.xp.rearranged(lambda arrays: arrays[0][index], [flat])
    if not torch.equal(least, most):
        number = ctx.xp.chosen(least != most, _unknown(ctx.xp, least.shape), number)
    return ctx.wrap(number, traced.dtype, traced.memory.stage)


def _unknown(xp: Any, shape: Sequence[int]) -> Any:
    """Return numbers of which nothing is known."""
    ends = torch.full(tuple(shape), torch.inf, dtype=torch.float64)
    return xp.interval(-ends, ends)


def _ends_of(ctx: Lowering, tensor: Tensor) -> Ends:
    """Return the least and the greatest integers of a tensor, the same where they are known."""
    if not isinstance(tensor, TracedTensor):
        return tensor, tensor
    least, most = ctx.xp.enclosure(ctx.number(tensor))
    if not bool((least.isfinite() & most.isfinite()).all()):
        raise ctx.undecided("indices")
    return least.to(tensor.dtype), most.to(tensor.dtype)


def _reachable(ctx: Lowering, position: Callable[..., Tensor], *indices: Ends) -> tuple[Tensor, Tensor]:
    """Return the positions of elements that are written, and those that the open ones may be written to.

    ``position`` makes flat positions of indices.
    """
    least, most = (position(*(ends[side] for ends in indices)) for side in (0, 1))
    if least.shape != most.shape:
        raise ctx.undecided("indices")
    open_ = least != most
    reached = [least[:0].reshape(-1)]
    bounds = [ends for ends in indices if not torch.equal(*ends)]
    if bounds:
        first, last = min(int(low.min()) for low, _ in bounds), max(int(high.max()) for _, high in bounds)
        if last - first > _MOST_REACHED:
            raise ctx.undecided("indices")
        for value in range(first, last + 1):
            reached.append(
                position(*(torch.clamp(torch.full_like(low, value), low, high) for low, high in indices))[open_]
            )
    return least, torch.cat(reached)


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
        leaves, structure = tree_flatten(args)
        ends = [_ends_of(ctx, leaf) if isinstance(leaf, Tensor) else (leaf, leaf) for leaf in leaves]

        def change(index: Tensor, *known: Any) -> Tensor:
            result: Tensor = function(index.double() if nearest else index, *tree_unflatten(known, structure), **kwargs)
            return result.long()

        return rearranged(ctx, x, change, *ends)


_REARRANGEMENTS = """flip roll rot90 repeat repeat_interleave.self_int repeat_interleave.self_Tensor pixel_shuffle
pixel_unshuffle channel_shuffle diagonal_copy unfold_copy index_select take index.Tensor gather masked_select"""
for _name in _REARRANGEMENTS.split():
    _register_rearrangement(_name)
for _axes in (1, 2, 3):
    _register_rearrangement(f"upsample_nearest{_axes}d", nearest=True)
    _register_rearrangement(f"_upsample_nearest_exact{_axes}d", nearest=True)


def _put(ctx: Lowering, x: Tensor, index: Tensor, values: Any, accumulate: bool = False) -> Tensor:
    """Return x with ``values`` at distinct flat indices; ``accumulate``: added at indices that may repeat."""
    x = ctx.traced(x)
    if accumulate:
        return _reduce_at(ctx, x, index, values, "sum")
    flat, index = ctx.number(x).reshape((-1,)), ctx.xp.integers(index.reshape(-1))
    return ctx.wrap(overwritten(ctx.xp, flat, index, values.reshape((-1,))).reshape(tuple(x.shape)), x.dtype)


def _with_unknown(ctx: Lowering, result: Tensor, reached: Tensor) -> Tensor:
    """Return a tensor that is unknown at flat positions."""
    if not len(reached):
        return result
    unknown = torch.zeros(result.numel(), dtype=torch.bool)
    unknown[reached] = True
    shape = tuple(result.shape)
    number = ctx.xp.chosen(unknown.reshape(shape), _unknown(ctx.xp, shape), ctx.number(result))
    return ctx.wrap(number, result.dtype)


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
    if not x.ndim:
        with ctx:
            return _scatter_reduce(ctx, x[None], 0, index[None], src[None], reduce, include_self=include_self)[0]
    flat, reached = _reachable(ctx, lambda i: _scatter_indices(x, dim, i), _ends_of(ctx, index))
    values = _cast_number(ctx, src, x.dtype)[tuple(slice(0, n) for n in flat.shape)]
    result = _reduce_at(ctx, ctx.traced(x), flat, values, reduce, include_self=include_self)
    return _with_unknown(ctx, result, reached)


@rule("scatter.src scatter.value scatter.reduce scatter.value_reduce")
def _scatter(ctx: Lowering, x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str = "", **_: Any) -> Tensor:
    """Write, add or multiply values at the indices along ``dim``."""
    if not x.ndim:
        raise ctx.unsupported(torch.ops.aten.scatter.src, "of a single number has no lowering rule")
    if reduce not in ("", "add", "multiply"):
        raise ctx.unsupported(torch.ops.aten.scatter.reduce, f"with reduce={reduce!r} has no lowering rule")
    flat, reached = _reachable(ctx, lambda i: _scatter_indices(x, dim, i), _ends_of(ctx, index))
    if isinstance(src, Tensor):
        values = _cast_number(ctx, src, x.dtype)[tuple(slice(0, n) for n in flat.shape)]
    else:
        values = broadcast(ctx.xp, constant(ctx.xp, src), flat.shape)
    traced = ctx.traced(x)
    if reduce:
        result = _reduce_at(ctx, traced, flat, values, "sum" if reduce == "add" else "prod")
    else:
        result = _put(ctx, traced, flat, values)
    return _with_unknown(ctx, result, reached)


@rule("scatter_add")
def _scatter_add(ctx: Lowering, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter(ctx, x, dim, index, src, reduce="add")


@rule("put")
def _put_flat(ctx: Lowering, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = ctx.concrete(index) % max(x.numel(), 1)
    return _put(ctx, x, flat, _cast_number(ctx, source, x.dtype), accumulate)


@rule("index_put")
def _index_put(ctx: Lowering, x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Tensor:
    given = [index for index in indices if index is not None]

    def position(*known: Tensor) -> Tensor:
        taken = iter(known)
        return torch.ops.aten.index.Tensor(_flat_indices(x), [i if i is None else next(taken) for i in indices])

    flat, reached = _reachable(ctx, position, *(_ends_of(ctx, index) for index in given))
    result = _put(ctx, x, flat, broadcast(ctx.xp, _cast_number(ctx, values, x.dtype), flat.shape), accumulate)
    return _with_unknown(ctx, result, reached)


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
