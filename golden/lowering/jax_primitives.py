"""JAX's primitives in PyTorch: ``PRIMITIVES[name](*operands, **parameters)``, from and to torch tensors.

The semantics are those of `jax.lax`. A jaxpr has resolved weak types: the operands of a primitive have one dtype.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor
Primitive = Callable[..., Any]

PRIMITIVES: dict[str, Primitive] = {}
"""By the primitive's name in a jaxpr; parameters that a function doesn't name change no value."""


def primitive(*names: str) -> Callable[[Primitive], Primitive]:
    """Decorate a function that computes the primitives of these names."""

    def register(function: Primitive) -> Primitive:
        PRIMITIVES.update(dict.fromkeys(names, function))
        return function

    return register


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of torch for one of JAX; float0 and extended dtypes (random keys) raise `TypeError`.

    Unsigned integers, on which PyTorch has few operations, become signed ones of 64 bits.
    """
    name = str(dtype)
    result = torch.int64 if name in ("uint16", "uint32", "uint64") else getattr(torch, name, None)
    if not isinstance(result, torch.dtype):
        raise TypeError(f"dtype {dtype} has no counterpart in PyTorch")
    return result


def _plain(function: Callable[..., Any]) -> Primitive:
    return lambda *operands, **_: function(*operands)


_SAME_NAME = "neg sin cos tan asin acos atan sinh cosh asinh acosh atanh tanh exp exp2 expm1 log log1p sqrt rsqrt erf"
_SAME_NAME += " erfc abs sign floor ceil square atan2 pow eq ne lt le gt ge lgamma digamma add sub mul nextafter"
_RENAMED: dict[str, Callable[..., Any]] = {
    "max": torch.maximum,
    "min": torch.minimum,
    "logistic": torch.sigmoid,
    "erf_inv": torch.erfinv,
    "is_finite": torch.isfinite,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "rem": torch.fmod,
    "shift_left": torch.bitwise_left_shift,
    "shift_right_arithmetic": torch.bitwise_right_shift,
    "cbrt": lambda x: torch.sign(x) * torch.pow(torch.abs(x), 1 / 3),
    "add_any": torch.add,
    "copy": torch.clone,
    "copy_p": torch.clone,
    "stop_gradient": lambda x: x,
    "name": lambda x: x,
    "le_to": torch.le,
    "lt_to": torch.lt,
    "optimization_barrier": lambda *operands: list(operands),
    "clamp": lambda low, x, high: torch.minimum(torch.maximum(x, low), high),
    "div": lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
}
PRIMITIVES |= {name: _plain(getattr(torch, name)) for name in _SAME_NAME.split()}
PRIMITIVES |= {name: _plain(function) for name, function in _RENAMED.items()}
PRIMITIVES["integer_pow"] = lambda x, *, y, **_: torch.pow(x, y)
PRIMITIVES["convert_element_type"] = lambda x, *, new_dtype, **_: x.to(torch_dtype(new_dtype))


@primitive("round")
def _round(x: Tensor, *, rounding_method: Any, **_: Any) -> Tensor:
    to_nearest_even = 1  # of jax.lax.RoundingMethod
    return torch.round(x) if int(rounding_method) == to_nearest_even else torch.trunc(x + torch.sign(x) * 0.5)


@primitive("reduce_precision")
def _reduce_precision(x: Tensor, *, exponent_bits: int, mantissa_bits: int, **_: Any) -> Tensor:
    formats = {(8, 7): torch.bfloat16, (5, 10): torch.float16, (8, 23): torch.float32, (11, 52): torch.float64}
    if (exponent_bits, mantissa_bits) not in formats:
        raise NotImplementedError(f"a format of {exponent_bits} bits of exponent and {mantissa_bits} of mantissa")
    return x.to(formats[exponent_bits, mantissa_bits]).to(x.dtype)


@primitive("platform_index")
def _platform(*_: Any, platforms: Sequence[Sequence[str] | None], **__: Any) -> Tensor:
    """Choose the branch for any platform, else the first."""
    return torch.tensor(next((index for index, names in enumerate(platforms) if names is None), 0))


@primitive("select_n")
def _select(which: Tensor, *cases: Tensor, **_: Any) -> Tensor:
    if which.dtype == torch.bool:
        return torch.where(which, cases[1], cases[0])
    result = cases[-1]
    for index in range(len(cases) - 2, -1, -1):
        result = torch.where(which == index, cases[index], result)
    return result


PRIMITIVES |= {
    "tile": lambda x, *, reps, **_: x.repeat(tuple(reps)),
    "reshape": lambda x, *_, new_sizes, **__: torch.reshape(x, tuple(new_sizes)),
    "transpose": lambda x, *, permutation, **_: x.permute(tuple(permutation)),
    "rev": lambda x, *, dimensions, **_: torch.flip(x, tuple(dimensions)),
    "concatenate": lambda *parts, dimension, **_: torch.cat(parts, dimension),
    "split": lambda x, *, sizes, axis, **_: list(torch.split(x, list(sizes), axis)),
    "stack": lambda *parts, axis, **_: torch.stack(parts, axis),
    "squeeze": lambda x, *, dimensions, **_: x.reshape(
        tuple(size for axis, size in enumerate(x.shape) if axis not in dimensions)
    ),
}


def _spread_over(x: Tensor, axes: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Broadcast x to ``shape``, its axes at ``axes``."""
    line = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        line[axis] = size
    return x.reshape(tuple(line)).expand(tuple(shape))


PRIMITIVES |= {
    "iota": lambda *_, dtype, shape, dimension, **__: _spread_over(
        torch.arange(shape[dimension], dtype=torch_dtype(dtype)), [dimension], shape
    ),
    "broadcast_in_dim": lambda x, *_, shape, broadcast_dimensions, **__: _spread_over(x, broadcast_dimensions, shape),
    "expand_dims": lambda x, *, dimensions, **_: reduce(Tensor.unsqueeze, sorted(dimensions), x),
    "slice": lambda x, *, start_indices, limit_indices, strides, **_: x[
        tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))
    ],
}


def _clamped_slices(x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return slices of these sizes, moved inside x as JAX does."""
    begins = [min(max(int(start), 0), limit - size) for start, limit, size in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


@primitive("dynamic_slice")
def _dynamic_slice(x: Tensor, *starts: Tensor, slice_sizes: Sequence[int], **_: Any) -> Tensor:
    return x[_clamped_slices(x, starts, slice_sizes)]


@primitive("dynamic_update_slice")
def _dynamic_update_slice(x: Tensor, update: Tensor, *starts: Tensor, **_: Any) -> Tensor:
    result = x.clone()
    result[_clamped_slices(x, starts, update.shape)] = update
    return result


@primitive("pad")
def _pad(x: Tensor, value: Tensor, *, padding_config: Sequence[tuple[int, int, int]], **_: Any) -> Tensor:
    """Pad each axis: low, high (negative ones cut), and interior elements between neighbours."""
    for axis, (low, high, interior) in enumerate(tuple(map(int, part)) for part in padding_config):
        size = x.shape[axis]
        shape = list(x.shape)
        if interior and size > 1:
            shape[axis] = size + (size - 1) * interior
            dilated = value.expand(shape).clone()
            dilated[(slice(None),) * axis + (slice(None, None, interior + 1),)] = x
            x = dilated
        for count, in_front in ((low, True), (high, False)):
            if count > 0:
                shape[axis] = count
                border = value.expand(shape)
                x = torch.cat([border, x] if in_front else [x, border], axis)
        x = x.narrow(axis, max(-low, 0), x.shape[axis] - max(-low, 0) - max(-high, 0))
    return x


PRIMITIVES |= {
    "reduce_sum": lambda x, *, axes, **_: torch.sum(x, tuple(axes), dtype=x.dtype) if axes else x,
    "reduce_max": lambda x, *, axes, **_: torch.amax(x, tuple(axes)) if axes else x,
    "reduce_min": lambda x, *, axes, **_: torch.amin(x, tuple(axes)) if axes else x,
    "reduce_prod": lambda x, *, axes, **_: reduce(torch.prod, sorted(axes, reverse=True), x),
    "reduce_and": lambda x, *, axes, **_: reduce(torch.all, sorted(axes, reverse=True), x),
    "reduce_or": lambda x, *, axes, **_: reduce(torch.any, sorted(axes, reverse=True), x),
}


@primitive("argmax", "argmin")
def _arg_extreme(x: Tensor, *, axes: Sequence[int], index_dtype: Any, primitive: str, **_: Any) -> Tensor:
    function: Any = getattr(torch, primitive)
    x = x.to(torch.int64) if x.dtype == torch.bool else x
    return function(x, axes[0]).to(torch_dtype(index_dtype))


@primitive("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _scan(x: Tensor, *, axis: int, reverse: bool, primitive: str, **_: Any) -> Tensor:
    function: Any = torch.logcumsumexp if primitive == "cumlogsumexp" else getattr(torch, primitive)
    result = function(torch.flip(x, (axis,)) if reverse else x, axis)
    result = result if isinstance(result, Tensor) else result[0]
    return torch.flip(result, (axis,)) if reverse else result


@primitive("sort")
def _sort(*operands: Tensor, dimension: int, num_keys: int, **_: Any) -> list[Tensor]:
    order = torch.argsort(operands[num_keys - 1], dim=dimension, stable=True)
    for key in reversed(operands[: num_keys - 1]):
        reorder = torch.argsort(torch.gather(key, dimension, order), dim=dimension, stable=True)
        order = torch.gather(order, dimension, reorder)
    return [torch.gather(operand, dimension, order) for operand in operands]


@primitive("top_k")
def _top_k(x: Tensor, *, k: int, axis: int = -1, **_: Any) -> list[Tensor]:
    values, indices = torch.topk(x, k, axis)
    return [values, indices.to(torch.int32)]


@primitive("dot_general")
def _dot_general(a: Tensor, b: Tensor, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Tensor:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    letters = iter(string.ascii_letters)
    names_a = [next(letters) for _ in range(a.ndim)]
    names_b = [next(letters) for _ in range(b.ndim)]
    for i, j in zip((*contract_a, *batch_a), (*contract_b, *batch_b), strict=True):
        names_b[j] = names_a[i]
    batch = [names_a[i] for i in batch_a]
    free_a = [name for i, name in enumerate(names_a) if i not in (*contract_a, *batch_a)]
    free_b = [name for j, name in enumerate(names_b) if j not in (*contract_b, *batch_b)]
    if preferred_element_type is not None:  # the dtype of the sums
        a, b = (part.to(torch_dtype(preferred_element_type)) for part in (a, b))
    return torch.einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(batch + free_a + free_b)}", a, b)


@primitive("conv_general_dilated")
def _convolve(
    x: Tensor,
    weight: Tensor,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    preferred_element_type: Any = None,
    **_: Any,
) -> Tensor:
    if batch_group_count != 1 or not 1 <= len(window_strides) <= 3:
        raise NotImplementedError("a convolution of groups of batches, or of more than three dimensions")
    x, weight = x.permute(tuple(dimension_numbers.lhs_spec)), weight.permute(tuple(dimension_numbers.rhs_spec))
    if preferred_element_type is not None:
        x, weight = (part.to(torch_dtype(preferred_element_type)) for part in (x, weight))
    config = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation, strict=True)]
    x = _pad(x, torch.zeros((), dtype=x.dtype), padding_config=[(0, 0, 0), (0, 0, 0), *config])
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[len(window_strides) - 1]
    result = function(x, weight, None, tuple(window_strides), 0, tuple(rhs_dilation), feature_group_count)
    order = dimension_numbers.out_spec  # the axes of batch, feature and space in the result
    return result.permute([order.index(axis) for axis in range(len(order))])


def _windows(
    x: Tensor,
    fill: float,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> Tensor:
    """Return the windows over x, padded with ``fill``: [windows..., elements...]."""
    config = [(*pads, step - 1) for pads, step in zip(padding, base_dilation or [1] * x.ndim, strict=True)]
    x = _pad(x, torch.full((), fill, dtype=x.dtype), padding_config=config)
    for axis, (size, step) in enumerate(zip(window_dimensions, window_strides, strict=True)):
        dilation = window_dilation[axis] if window_dilation else 1
        x = x.unfold(axis, (size - 1) * dilation + 1, step)[..., ::dilation]
    return x


@primitive("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _reduce_windows(x: Tensor, *, primitive: str, **window: Any) -> Tensor:
    kinds: Any = {"sum": (torch.sum, 0.0), "max": (torch.amax, -math.inf), "min": (torch.amin, math.inf)}
    function, neutral = kinds[primitive.rpartition("_")[2]]
    return function(_windows(x, neutral, **window), tuple(range(x.ndim, 2 * x.ndim)))


@primitive("select_and_scatter_add")
def _scatter_to_extremes(source: Tensor, x: Tensor, *, select_prim: Any, **window: Any) -> Tensor:
    """Add each element of ``source`` at the maximum (or minimum) of its window: the gradient of pooling."""
    is_max = select_prim.name == "ge"
    windows = _windows(x, -math.inf if is_max else math.inf, **window).flatten(x.ndim)
    selected = (torch.argmax if is_max else torch.argmin)(windows, -1)
    indices = _windows(torch.arange(x.numel()).reshape(x.shape).double(), -1.0, **window).flatten(x.ndim).long()
    targets = torch.gather(indices, -1, selected[..., None])
    zeros = torch.zeros((x.numel(),), dtype=source.dtype)
    return zeros.index_put((targets.reshape(-1),), source.reshape(-1), accumulate=True).reshape(x.shape)


class _Dimensions:
    """The dimension numbers of gather and scatter under one set of names.

    ``window`` axes of the operand stay in each slice; slices start along ``start``; axes ``offset`` of the result are
    the window's.
    """

    def __init__(self, numbers: Any, rank: int) -> None:
        names = ("offset_dims", "collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
        if hasattr(numbers, "update_window_dims"):
            batching = "scatter_indices_batching_dims"
            names = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", batching)
        self.offset, dropped, self.start, self.starts_batch = (tuple(getattr(numbers, name)) for name in names)
        self.batch = tuple(numbers.operand_batching_dims)
        self.window = [axis for axis in range(rank) if axis not in (*dropped, *self.batch)]

    def order(self, rank: int) -> list[int]:
        """Return the permutation from [slices..., window...] to the axes of the result."""
        slices, window = iter(range(rank - len(self.offset))), iter(range(rank - len(self.offset), rank))
        return [next(window) if axis in self.offset else next(slices) for axis in range(rank)]


def _flat_indices(
    shape: Sequence[int], starts: Tensor, sizes: Sequence[int], dims: _Dimensions, mode: Any
) -> tuple[Tensor, Tensor]:
    """Return the flat index of each element of each slice [slices..., window...], and whether the slice is inside.

    ``starts`` [slices..., n] are the slices' starts along ``dims.start``; mode "clip" moves slices inside.
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    slices, window = starts.shape[:-1], dims.window
    inside = torch.ones(slices, dtype=torch.bool)
    flat = torch.zeros(slices, dtype=torch.int64)
    for number, axis in enumerate(dims.start):
        start, limit = starts[..., number].to(torch.int64), shape[axis] - sizes[axis]
        if "CLIP" in str(mode).upper():
            start = start.clamp(0, max(limit, 0))
        inside = inside & (start >= 0) & (start <= limit)
        flat = flat + start * strides[axis]

    def along(axis: int, size: int, position: int, rank: int) -> Tensor:
        line = [1] * rank
        line[position] = size
        return torch.arange(size).reshape(tuple(line)) * strides[axis]

    for axis, position in zip(dims.batch, dims.starts_batch, strict=True):
        flat = flat + along(axis, slices[position], position, len(slices))
    flat = flat.reshape((*slices, *[1] * len(window)))
    for position, axis in enumerate(window):
        flat = flat + along(axis, sizes[axis], position, len(window))
    return flat, inside.reshape((*slices, *[1] * len(window))).expand(flat.shape)


@primitive("gather")
def _gather(
    x: Tensor,
    starts: Tensor,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> Tensor:
    dims = _Dimensions(dimension_numbers, x.ndim)
    flat, inside = _flat_indices(x.shape, starts, slice_sizes, dims, mode)
    result = x.reshape(-1)[flat.clamp(0, max(x.numel() - 1, 0))]
    if not bool(inside.all()):
        fill = math.nan if fill_value is None and x.is_floating_point() else fill_value
        fill = torch.iinfo(x.dtype).min if fill is None else fill
        result = torch.where(inside, result, torch.full((), fill, dtype=x.dtype))
    return result.permute(dims.order(result.ndim))


# JAX spells the scatters with a hyphen or an underscore, depending on its version.
_SCATTER_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}
_SCATTERS = [f"scatter{sign}{kind}" for sign in "-_" for kind in ("add", *_SCATTER_REDUCTIONS)]


@primitive("scatter", *_SCATTERS)
def _scatter(
    x: Tensor, starts: Tensor, updates: Tensor, *, dimension_numbers: Any, mode: Any, primitive: str, **_: Any
) -> Tensor:
    dims = _Dimensions(dimension_numbers, x.ndim)
    sizes = [1] * x.ndim
    for axis, update_axis in zip(dims.window, dims.offset, strict=True):
        sizes[axis] = updates.shape[update_axis]
    flat, inside = _flat_indices(x.shape, starts, sizes, dims, mode)
    order = dims.order(updates.ndim)
    source = updates.permute([order.index(axis) for axis in range(updates.ndim)])
    is_inside = inside.reshape(-1)
    indices, values = flat.reshape(-1)[is_inside], source.reshape(-1)[is_inside]
    memory = x.reshape(-1).clone()
    kind = primitive.replace("-", "_").removeprefix("scatter").lstrip("_")
    if kind in ("", "add"):
        memory = memory.index_put((indices,), values, accumulate=kind == "add")
    else:
        memory = memory.scatter_reduce(0, indices, values, _SCATTER_REDUCTIONS[kind])
    return memory.reshape(x.shape)
