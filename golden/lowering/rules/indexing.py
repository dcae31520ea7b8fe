"""Rearrangements: joining, flipping, indexing, gathering, and their forms that write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.table import constant, rule
from assay.golden.lowering.tensor import NumberTensor, read

Tensor = torch.Tensor


def rearranged(evaluation: Evaluation, x: Tensor, change: Callable[[Any], Any]) -> Tensor:
    """What a rearrangement of torch's tensors makes of the numbers, by their places."""
    held = evaluation.adopted(x)
    places = change(torch.arange(x.numel()).reshape(x.shape))
    return taken(evaluation, held, places)


def taken(evaluation: Evaluation, x: NumberTensor, places: Tensor) -> Tensor:
    """The numbers at flat ``places``, not yet rounded where x isn't."""
    xp = evaluation.xp
    flat = read(x, unrounded=True).reshape((-1,))
    index = xp.integers(places)
    number = xp.rearranged(lambda arrays: arrays[0][index], [flat])
    return evaluation.made(number, x.dtype, x.box.stage)


@rule("cat concat concatenate")
def _cat(evaluation: Evaluation, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    tensors = [x for x in tensors if x.ndim != 1 or x.shape[0]] or list(tensors)
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    axis = dim % tensors[0].ndim
    return evaluation.made(evaluation.xp.concatenate([evaluation.number(x) for x in tensors], axis), dtype)


@rule("stack")
def _stack(evaluation: Evaluation, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    axis = dim % (tensors[0].ndim + 1)
    return evaluation.made(evaluation.xp.stack([evaluation.number(x) for x in tensors], axis), dtype)


def _register(names: str) -> None:
    function = getattr(torch.ops.aten, names.partition(".")[0].partition(" ")[0])

    @rule(names)
    def computed(evaluation: Evaluation, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rearranged(evaluation, x, lambda places: function(places, *args, **kwargs))


for _name in (
    "flip",
    "roll",
    "rot90",
    "repeat",
    "repeat_interleave.self_int",
    "repeat_interleave.self_Tensor",
    "pixel_shuffle",
    "pixel_unshuffle",
    "channel_shuffle",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
    "diagonal_copy",
    "unfold_copy",
    "index_select",
    "take",
):
    _register(_name)


def _resampled(name: str) -> None:
    """Resampling that copies the nearest number: of the places as numbers, which float64 holds."""
    function = getattr(torch.ops.aten, name).default

    @rule(name)
    def computed(evaluation: Evaluation, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rearranged(evaluation, x, lambda places: function(places.double(), *args, **kwargs).long())


for _axes in (1, 2, 3):
    _resampled(f"upsample_nearest{_axes}d")
    _resampled(f"_upsample_nearest_exact{_axes}d")


def _indices(evaluation: Evaluation, indices: Sequence[Any]) -> list[Any]:
    return [None if index is None else evaluation.known(index) for index in indices]


@rule("index.Tensor _unsafe_index.Tensor")
def _index(evaluation: Evaluation, x: Tensor, indices: Sequence[Any]) -> Tensor:
    known = _indices(evaluation, indices)
    return rearranged(evaluation, x, lambda places: torch.ops.aten.index.Tensor(places, known))


@rule("embedding")
def _embedding(evaluation: Evaluation, weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
    known = evaluation.known(indices)
    return rearranged(evaluation, weight, lambda places: places[known])


@rule("gather")
def _gather(evaluation: Evaluation, x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    known = evaluation.known(index)
    return rearranged(evaluation, x, lambda places: torch.gather(places, dim, known))


@rule("masked_select")
def _masked_select(evaluation: Evaluation, x: Tensor, mask: Tensor) -> Tensor:
    known = evaluation.known(mask)
    return rearranged(evaluation, x, lambda places: torch.masked_select(places, known))


def _triangle(name: str) -> None:
    @rule(name)
    def kept(evaluation: Evaluation, x: Tensor, diagonal: int = 0) -> Tensor:
        mask = getattr(torch.ones(x.shape[-2:], dtype=torch.bool), name)(diagonal)
        zero = constant(evaluation.xp, 0.0)
        return evaluation.made(evaluation.xp.chosen(mask.expand(x.shape), evaluation.number(x), zero), x.dtype)


_triangle("tril")
_triangle("triu")


def _put(evaluation: Evaluation, x: Tensor, places: Tensor, values: Any) -> Tensor:
    """x with ``values`` at distinct flat places."""
    xp = evaluation.xp
    index = xp.integers(places.reshape(-1))

    def change(arrays: Sequence[Any]) -> Any:
        flat = arrays[0].reshape(-1)
        flat = flat.clone() if isinstance(flat, torch.Tensor) else flat.copy()
        flat[index] = arrays[1].reshape(-1)
        return flat.reshape(tuple(x.shape))

    return evaluation.made(xp.rearranged(change, [evaluation.number(x), values]), x.dtype)


def _added(evaluation: Evaluation, x: Tensor, places: Tensor, values: Any) -> Tensor:
    """x with ``values`` added at flat places, which may come again: each a sum of all that meet there, in any order."""
    return met(evaluation, x, places, values, "sum", include_self=True)


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf}


def met(evaluation: Evaluation, x: Tensor, places: Tensor, values: Any, reduce: str, *, include_self: bool) -> Tensor:
    """x with all that meet at a flat place reduced there, and with what was there if ``include_self``.

    In any order; each as if it had as many terms as the longest: places are put side by side, neutral numbers behind.
    """
    xp = evaluation.xp
    flat = places.reshape(-1)
    base = evaluation.number(x).reshape((-1, 1))
    if not flat.numel():
        return evaluation.made(base.reshape(tuple(x.shape)), x.dtype)
    order = torch.argsort(flat, stable=True)
    ordered = flat[order]
    first = torch.searchsorted(ordered, ordered)
    depth = torch.arange(len(ordered)) - first
    most = int(depth.max()) + 1
    table = torch.full((x.numel(), most), int(flat.numel()), dtype=torch.int64)
    table[ordered, depth] = order
    neutral = xp.exact(torch.full((1,), _NEUTRAL[reduce], dtype=torch.float64))
    terms = xp.concatenate([values.reshape((-1,)), neutral], 0)
    index = xp.integers(table)
    picked = xp.rearranged(lambda arrays: arrays[0][index], [terms])
    together = xp.concatenate([base, picked], 1) if include_self else picked
    if reduce == "amax":
        total = xp.largest_of(together)
    elif reduce == "amin":
        total = -xp.largest_of(-together)
    elif reduce == "prod":
        total = xp.prod(together)
    else:
        total = xp.sum(together)
    counts = torch.bincount(flat, minlength=x.numel())[:, None]
    if reduce == "mean":
        total = total / xp.exact((counts + int(include_self)).clamp(min=1))
    total = xp.chosen(counts > 0, total, base)
    return evaluation.made(total.reshape(tuple(x.shape)), x.dtype)


@rule("scatter_reduce.two")
def _scatter_reduce(
    evaluation: Evaluation,
    x: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    held, known = evaluation.adopted(x), evaluation.known(index)
    if not x.ndim:
        with evaluation:
            return _scatter_reduce(evaluation, x[None], 0, index[None], src[None], reduce, include_self=include_self)[0]
    number = _cast_number(evaluation, src, x.dtype)[tuple(slice(0, n) for n in known.shape)]
    return met(evaluation, held, _scattered_places(x, dim, known), number, reduce, include_self=include_self)


@rule("index_reduce")
def _index_reduce(
    evaluation: Evaluation,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    number = _cast_number(evaluation, source, x.dtype)
    places = _along(x, dim, evaluation.known(index))
    return met(evaluation, evaluation.adopted(x), places, number, reduce, include_self=include_self)


@rule("put")
def _put_flat(evaluation: Evaluation, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    places = evaluation.known(index) % max(x.numel(), 1)
    number = _cast_number(evaluation, source, x.dtype)
    return (_added if accumulate else _put)(evaluation, evaluation.adopted(x), places, number)


def _spread(values: Any, like: Sequence[int], xp: Any) -> Any:
    return xp.rearranged(lambda arrays: xp.native.broadcast_to(arrays[0], tuple(like)), [values])


def _cast_number(evaluation: Evaluation, values: Any, dtype: torch.dtype) -> Any:
    return evaluation.number(evaluation.cast(values, dtype) if values.dtype != dtype else values)


@rule("index_put _unsafe_index_put")
def _index_put(
    evaluation: Evaluation, x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Tensor:
    held = evaluation.adopted(x)
    known = _indices(evaluation, indices)
    places = torch.ops.aten.index.Tensor(torch.arange(x.numel()).reshape(x.shape), known)
    number = _spread(_cast_number(evaluation, values, x.dtype), places.shape, evaluation.xp)
    return (_added if accumulate else _put)(evaluation, held, places, number)


def _scattered_places(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """The flat place of x that each element of an index along ``dim`` names."""
    places = torch.arange(x.numel()).reshape(x.shape)
    cut = places[tuple(slice(0, n) if a != dim % x.ndim else slice(None) for a, n in enumerate(index.shape))]
    return torch.gather(cut, dim, index)


@rule("scatter.src scatter.value scatter.reduce scatter.value_reduce")
def _scatter(
    evaluation: Evaluation, x: Tensor, dim: int, index: Tensor, src: Any, *, reduce: str = "", **_: Any
) -> Tensor:
    return scattered(evaluation, x, dim, index, src, reduce)


def scattered(evaluation: Evaluation, x: Tensor, dim: int, index: Tensor, src: Any, reduce: str) -> Tensor:
    """Values written, or added, to the places along ``dim`` that an index names."""
    held, known, xp = evaluation.adopted(x), evaluation.known(index), evaluation.xp
    if not x.ndim:
        raise evaluation.refusal(torch.ops.aten.scatter.src, "of a single number has no lowering rule")
    places = _scattered_places(x, dim, known)
    if isinstance(src, Tensor):
        number = _cast_number(evaluation, src, x.dtype)
        number = number[tuple(slice(0, n) for n in known.shape)]
    else:
        number = _spread(constant(xp, src), known.shape, xp)
    if reduce == "add":
        return _added(evaluation, held, places, number)
    if reduce == "multiply":
        return met(evaluation, held, places, number, "prod", include_self=True)
    if reduce:
        raise evaluation.refusal(torch.ops.aten.scatter.reduce, f"with reduce={reduce!r} has no lowering rule")
    return _put(evaluation, held, places, number)


@rule("scatter_add")
def _scatter_add(evaluation: Evaluation, x: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return scattered(evaluation, x, dim, index, src, "add")


def _along(x: Tensor, dim: int, index: Tensor) -> Tensor:
    places = torch.arange(x.numel()).reshape(x.shape)
    return torch.index_select(places, dim, index)


@rule("index_add")
def _index_add(
    evaluation: Evaluation, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    number = _cast_number(evaluation, source, x.dtype)
    number = number if alpha == 1 else number * float(alpha)
    return _added(evaluation, evaluation.adopted(x), _along(x, dim, evaluation.known(index)), number)


@rule("index_copy")
def _index_copy(evaluation: Evaluation, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    places = _along(x, dim, evaluation.known(index))
    return _put(evaluation, evaluation.adopted(x), places, _cast_number(evaluation, source, x.dtype))


@rule("masked_scatter")
def _masked_scatter(evaluation: Evaluation, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    with evaluation:
        x = x.expand(torch.broadcast_shapes(x.shape, mask.shape)).clone()  # type: ignore[no-untyped-call]
    places = torch.arange(x.numel()).reshape(x.shape)[evaluation.known(mask).expand(x.shape)]
    number = evaluation.number(source).reshape((-1,))[: places.numel()]
    return _put(evaluation, evaluation.adopted(x), places, number)


def _into(name: str, view: Callable[..., Tensor]) -> None:
    @rule(name)
    def put(evaluation: Evaluation, x: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        places = view(torch.arange(x.numel()).reshape(x.shape), *args, **kwargs)
        number = _spread(_cast_number(evaluation, source, x.dtype), places.shape, evaluation.xp)
        return _put(evaluation, evaluation.adopted(x), places, number)


_into("slice_scatter", torch.ops.aten.slice.Tensor)
_into("select_scatter", torch.ops.aten.select.int)
_into("diagonal_scatter", torch.ops.aten.diagonal.default)
_into("as_strided_scatter", torch.ops.aten.as_strided.default)


@rule("nonzero")
def _nonzero(evaluation: Evaluation, x: Tensor) -> Tensor:
    with evaluation:
        mask = x != 0
    return torch.nonzero(evaluation.known(mask))
