"""What each primitive of JAX is in PyTorch: ``PRIMITIVES[name](*operands, **parameters)``, of and to torch tensors.

The semantics are those of `jax.lax`. A jaxpr has resolved weak types: the operands of a primitive have one dtype.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Primitive = Callable[..., Any]

PRIMITIVES: dict[str, Primitive] = {}
"""By the primitive's name in a jaxpr; parameters that a function doesn't name are those that change no value."""


def primitive(*names: str) -> Callable[[Primitive], Primitive]:
    """Decorator: the function computes the primitives of these names."""

    def register(function: Primitive) -> Primitive:
        for name in names:
            PRIMITIVES[name] = function
        return function

    return register


def torch_dtype(dtype: Any) -> torch.dtype:
    """The dtype of torch for one of JAX; float0 and extended dtypes (random keys) raise `TypeError`.

    Unsigned whole numbers, with which PyTorch hardly computes, are signed ones of 64 bits.
    """
    name = str(dtype)
    found = torch.int64 if name in ("uint16", "uint32", "uint64") else getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype {dtype} has no counterpart in PyTorch")
    return found


def _plain(function: Callable[..., Any]) -> Primitive:
    return lambda *operands, **_: function(*operands)


_SAME = "neg sin cos tan asin acos atan sinh cosh asinh acosh atanh tanh exp exp2 expm1 log log1p sqrt rsqrt erf erfc"
_SAME += " abs sign floor ceil square atan2 pow eq ne lt le gt ge lgamma digamma add sub mul nextafter"
_OTHERS: dict[str, Callable[..., Any]] = {
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
    "clamp": lambda least, x, most: torch.minimum(torch.maximum(x, least), most),
}
PRIMITIVES |= {name: _plain(getattr(torch, name)) for name in _SAME.split()}
PRIMITIVES |= {name: _plain(function) for name, function in _OTHERS.items()}


@primitive("div")
def _divide(x: Tensor, y: Tensor, **_: Any) -> Tensor:
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


@primitive("integer_pow")
def _integer_power(x: Tensor, *, y: int, **_: Any) -> Tensor:
    return torch.pow(x, y)


@primitive("round")
def _round(x: Tensor, *, rounding_method: Any, **_: Any) -> Tensor:
    return torch.round(x) if int(rounding_method) == 1 else torch.trunc(x + torch.sign(x) * 0.5)


@primitive("convert_element_type")
def _convert(x: Tensor, *, new_dtype: Any, **_: Any) -> Tensor:
    return x.to(torch_dtype(new_dtype))


@primitive("reduce_precision")
def _reduce_precision(x: Tensor, *, exponent_bits: int, mantissa_bits: int, **_: Any) -> Tensor:
    formats = {(8, 7): torch.bfloat16, (5, 10): torch.float16, (8, 23): torch.float32, (11, 52): torch.float64}
    if (exponent_bits, mantissa_bits) not in formats:
        raise NotImplementedError(f"a format of {exponent_bits} bits of exponent and {mantissa_bits} of mantissa")
    return x.to(formats[exponent_bits, mantissa_bits]).to(x.dtype)


@primitive("platform_index")
def _platform(*_: Any, platforms: Sequence[Sequence[str] | None], **__: Any) -> Tensor:
    """The place of what runs where no platform is named, else the first."""
    return torch.tensor(next((place for place, names in enumerate(platforms) if names is None), 0))


@primitive("select_n")
def _select(which: Tensor, *cases: Tensor, **_: Any) -> Tensor:
    if which.dtype == torch.bool:
        return torch.where(which, cases[1], cases[0])
    chosen = cases[-1]
    for place in range(len(cases) - 2, -1, -1):
        chosen = torch.where(which == place, cases[place], chosen)
    return chosen


@primitive("iota")
def _iota(*_: Any, dtype: Any, shape: Sequence[int], dimension: int, **__: Any) -> Tensor:
    line = [1] * len(shape)
    line[dimension] = shape[dimension]
    return torch.arange(shape[dimension], dtype=torch_dtype(dtype)).reshape(tuple(line)).expand(tuple(shape))


@primitive("broadcast_in_dim")
def _broadcast(x: Tensor, *_: Any, shape: Sequence[int], broadcast_dimensions: Sequence[int], **__: Any) -> Tensor:
    line = [1] * len(shape)
    for axis, place in enumerate(broadcast_dimensions):
        line[place] = x.shape[axis]
    return x.reshape(tuple(line)).expand(tuple(shape))


@primitive("tile")
def _tile(x: Tensor, *, reps: Sequence[int], **_: Any) -> Tensor:
    return x.repeat(tuple(reps))


@primitive("stack")
def _stack(*parts: Tensor, axis: int, **_: Any) -> Tensor:
    return torch.stack(parts, axis)


@primitive("reshape")
def _reshape(x: Tensor, *_: Any, new_sizes: Sequence[int], **__: Any) -> Tensor:
    return torch.reshape(x, tuple(new_sizes))


@primitive("squeeze")
def _squeeze(x: Tensor, *, dimensions: Sequence[int], **_: Any) -> Tensor:
    return x.reshape(tuple(size for axis, size in enumerate(x.shape) if axis not in dimensions))


@primitive("expand_dims")
def _expand_dims(x: Tensor, *, dimensions: Sequence[int], **_: Any) -> Tensor:
    for axis in sorted(dimensions):
        x = x.unsqueeze(axis)
    return x


@primitive("transpose")
def _transpose(x: Tensor, *, permutation: Sequence[int], **_: Any) -> Tensor:
    return x.permute(tuple(permutation))


@primitive("rev")
def _reverse(x: Tensor, *, dimensions: Sequence[int], **_: Any) -> Tensor:
    return torch.flip(x, tuple(dimensions))


@primitive("concatenate")
def _concatenate(*parts: Tensor, dimension: int, **_: Any) -> Tensor:
    return torch.cat(parts, dimension)


@primitive("split")
def _split(x: Tensor, *, sizes: Sequence[int], axis: int, **_: Any) -> list[Tensor]:
    return list(torch.split(x, list(sizes), axis))


@primitive("slice")
def _slice(x: Tensor, *, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> Tensor:
    steps = strides or [1] * x.ndim
    return x[tuple(slice(*part) for part in zip(start_indices, limit_indices, steps, strict=True))]


def _starts(x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int]) -> list[slice]:
    """Where a part of these sizes begins and ends: JAX moves it inside."""
    begins = [min(max(int(start), 0), whole - size) for start, whole, size in zip(starts, x.shape, sizes, strict=True)]
    return [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


@primitive("dynamic_slice")
def _dynamic_slice(x: Tensor, *starts: Tensor, slice_sizes: Sequence[int], **_: Any) -> Tensor:
    return x[tuple(_starts(x, starts, slice_sizes))]


@primitive("dynamic_update_slice")
def _dynamic_update_slice(x: Tensor, update: Tensor, *starts: Tensor, **_: Any) -> Tensor:
    changed = x.clone()
    changed[tuple(_starts(x, starts, update.shape))] = update
    return changed


@primitive("pad")
def padded(x: Tensor, value: Tensor, *, padding_config: Sequence[tuple[int, int, int]], **_: Any) -> Tensor:
    """Padding of each axis: low, high (negative ones cut), and so many between neighbours."""
    for axis, (low, high, between) in enumerate(tuple(map(int, part)) for part in padding_config):
        size = x.shape[axis]
        if between and size > 1:
            shape = list(x.shape)
            shape[axis] = size + (size - 1) * between
            spread = value.expand(shape).clone()
            spread[(slice(None),) * axis + (slice(None, None, between + 1),)] = x
            x = spread
        for count, front in ((low, True), (high, False)):
            shape = list(x.shape)
            shape[axis] = max(count, 0)
            extra = value.expand(shape)
            x = torch.cat([extra, x] if front else [x, extra], axis) if count > 0 else x
        x = x.narrow(axis, max(-low, 0), x.shape[axis] - max(-low, 0) - max(-high, 0))
    return x


def _over_axes(function: Callable[..., Tensor]) -> Primitive:
    return lambda x, *, axes, **_: function(x, tuple(axes)) if axes else x


PRIMITIVES |= {
    "reduce_sum": _over_axes(lambda x, axes: torch.sum(x, axes, dtype=x.dtype)),
    "reduce_max": _over_axes(torch.amax),
    "reduce_min": _over_axes(torch.amin),
}


@primitive("reduce_prod", "reduce_and", "reduce_or")
def _reduce_each(x: Tensor, *, axes: Sequence[int], primitive: str, **_: Any) -> Tensor:
    function: Any = {"reduce_prod": torch.prod, "reduce_and": torch.all, "reduce_or": torch.any}[primitive]
    for axis in sorted(axes, reverse=True):
        x = function(x, axis)
    return x


@primitive("argmax", "argmin")
def _choose(x: Tensor, *, axes: Sequence[int], index_dtype: Any, primitive: str, **_: Any) -> Tensor:
    function: Any = getattr(torch, primitive)
    x = x.to(torch.int64) if x.dtype == torch.bool else x
    return function(x, axes[0]).to(torch_dtype(index_dtype))


@primitive("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _running(x: Tensor, *, axis: int, reverse: bool, primitive: str, **_: Any) -> Tensor:
    function: Any = {"cumlogsumexp": torch.logcumsumexp}.get(primitive) or getattr(torch, primitive)
    result = function(torch.flip(x, (axis,)) if reverse else x, axis)
    result = result if isinstance(result, Tensor) else result[0]
    return torch.flip(result, (axis,)) if reverse else result


@primitive("sort")
def _sort(*operands: Tensor, dimension: int, num_keys: int, **_: Any) -> list[Tensor]:
    order = torch.argsort(operands[num_keys - 1], dim=dimension, stable=True)
    for key in reversed(operands[: num_keys - 1]):
        again = torch.argsort(torch.gather(key, dimension, order), dim=dimension, stable=True)
        order = torch.gather(order, dimension, again)
    return [torch.gather(operand, dimension, order) for operand in operands]


@primitive("top_k")
def _top_k(x: Tensor, *, k: int, axis: int = -1, **_: Any) -> list[Tensor]:
    values, places = torch.topk(x, k, axis)
    return [values, places.to(torch.int32)]


@primitive("dot_general")
def _product(a: Tensor, b: Tensor, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Tensor:
    (left, right), (batch_left, batch_right) = dimension_numbers
    letters = iter(string.ascii_letters)
    names_a = [next(letters) for _ in range(a.ndim)]
    names_b = [next(letters) for _ in range(b.ndim)]
    for mine, others in ((left, right), (batch_left, batch_right)):
        for i, j in zip(mine, others, strict=True):
            names_b[j] = names_a[i]
    batch = [names_a[i] for i in batch_left]
    free_a = [name for i, name in enumerate(names_a) if i not in (*left, *batch_left)]
    free_b = [name for j, name in enumerate(names_b) if j not in (*right, *batch_right)]
    if preferred_element_type is not None:  # that of the sums
        a, b = (part.to(torch_dtype(preferred_element_type)) for part in (a, b))
    return torch.einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(batch + free_a + free_b)}", a, b)
