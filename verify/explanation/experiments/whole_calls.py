"""The changes of a call that need no operation: another option, another input in an input's stead, other indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from assay.golden.signature import TensorSpec
from assay.verify.cases.case import Case

Tensor = torch.Tensor
Inputs = Callable[..., dict[str, Tensor]]
Options = Callable[..., dict[str, Any]]
_TILES = (8, 16, 32, 64, 128)


def changes_of_inputs(case: Case) -> Iterator[tuple[str, str, Inputs, int]]:
    """Yield a name, the words after "the definition gives if", the change of the tensors and its cost."""
    tensors = case.signature.tensors
    for tensor in tensors:
        for other in tensors:
            if other.name != tensor.name and other.dims == tensor.dims and other.is_integer == tensor.is_integer:
                yield (f"{other.name}_for_{tensor.name}", f"{other.name} is taken for {tensor.name}",
                       _with(tensor.name, lambda v, c, other=other.name: v[other]), 0)  # fmt: skip
            if other.name > tensor.name and other.is_integer == tensor.is_integer and tensor.dims:
                yield (f"{tensor.name}_{other.name}_swapped", f"{tensor.name} and {other.name} are exchanged",
                       lambda v, c, a=tensor.name, b=other.name: _exchanged(v, a, b), 0)  # fmt: skip
        if not tensor.is_integer:
            yield from _of_numbers(tensor)
        for axis, dim in enumerate(tensor.dims):
            yield from _along(tensor, axis, dim)
        if len(tensor.dims) > 1:
            yield (f"{tensor.name}_transposed", f"{tensor.name} is read with its last two dimensions exchanged",
                   _with(tensor.name, lambda v, c, n=tensor.name: _turned(v[n])), 1)  # fmt: skip


def _of_numbers(tensor: TensorSpec) -> Iterator[tuple[str, str, Inputs, int]]:
    name = tensor.name
    for title, words, change in (
        ("zero", "is taken to be zero", torch.zeros_like),
        ("one", "is taken to be one", torch.ones_like),
        ("negated", "has the other sign", lambda x: -x.double()),
        ("plus_one", "is taken as itself plus one", lambda x: x.double() + 1),
        ("magnitude", "enters by its magnitude", lambda x: x.double().abs()),
        ("reciprocal", "is taken as its reciprocal", lambda x: 1 / x.double()),
        ("squared", "is squared", lambda x: x.double() ** 2),
    ):
        yield f"{name}_{title}", f"{name} {words}", _with(name, lambda v, c, change=change: change(v[name])), 1


def _along(tensor: TensorSpec, axis: int, dim: str) -> Iterator[tuple[str, str, Inputs, int]]:
    name = tensor.name
    for title, words, source in (
        ("earlier", "is read one index earlier along {}", lambda i, n: (i - 1).clamp(min=0)),
        ("later", "is read one index later along {}", lambda i, n: (i + 1).clamp(max=n - 1)),
        ("earlier_around", "is read one index earlier along {}, the last before the first", lambda i, n: (i - 1) % n),
        ("later_around", "is read one index later along {}, the first after the last", lambda i, n: (i + 1) % n),
        ("first", "is read at the first {} everywhere", lambda i, n: i * 0),
        ("last", "is read at the last {} everywhere", lambda i, n: i * 0 + n - 1),
        ("reversed", "is read in reverse order along {}", lambda i, n: n - 1 - i),
        ("neighbours", "is read with neighbours along {} exchanged", lambda i, n: (i ^ 1).clamp(max=n - 1)),
        ("halves", "is read with even and odd {} in the order of two halves",
         lambda i, n: torch.cat([i[::2], i[1::2]])),
        ("interleaved", "is read with two halves of {} interleaved",
         lambda i, n: torch.argsort(torch.cat([i[::2], i[1::2]]))),
        *((f"once_per_{step}", f"is read at one {{}} for each {step}", lambda i, n, step=step: i // step * step)
          for step in (2, 4, 8, 16, 32, 64, 128)),
        *((f"of_first_{step}", f"is read along {{}} as if it began again after each {step}",
           lambda i, n, step=step: i % step)
          for step in (8, 16, 32, 64, 128, 256)),
        *((f"up_to_{end}", f"is read at {{}} {end} beyond {end}", lambda i, n, end=end: i.clamp(max=end))
          for end in (1, 3, 7, 15, 31, 63, 127, 255, 511, 1023, 2047, 4095)),
        *((f"quotient_{step}", f"is read at {{}} // {step}", lambda i, n, step=step: i // step) for step in (2, 4, 8)),
    ):  # fmt: skip
        yield (f"{name}_{title}_{axis}", f"{name} {words.format(dim)}",
               _with(name, lambda v, c, source=source: _taken(v[name], axis, source)), 1)  # fmt: skip
    if tensor.is_integer:
        return
    for title, words, kept in (
        ("without_last", f"leaves out the last {dim}", lambda i, n: i < n - 1),
        ("without_first", f"leaves out the first {dim}", lambda i, n: i > 0),
        *((f"without_tail_{tile}", f"leaves out {dim} beyond the last whole block of {tile}",
           lambda i, n, tile=tile: i < n // tile * tile) for tile in _TILES),
        *((f"without_tail_{tile}_of_more", f"leaves out {dim} beyond the last whole block of {tile}, if there is one",
           lambda i, n, tile=tile: i < (n // tile * tile or n)) for tile in _TILES),
        *((f"first_block_{tile}", f"leaves out {dim} from {tile} on", lambda i, n, tile=tile: i < tile)
          for tile in (1, 2, 3, 4, *_TILES, 256, 512, 1024)),
        *((f"last_block_{tile}", f"leaves out {dim} before the last {tile}", lambda i, n, tile=tile: i >= n - tile)
          for tile in (1, 2, 3, 4, 8)),
    ):  # fmt: skip
        yield (f"{name}_{title}_{axis}", f"{name} {words}",
               _with(name, lambda v, c, kept=kept: _zeroed(v[name], axis, kept)), 2)  # fmt: skip


def _with(name: str, change: Callable[..., Tensor]) -> Inputs:
    return lambda values, case: values | {name: change(values, case)}


def _exchanged(values: dict[str, Tensor], a: str, b: str) -> dict[str, Tensor]:
    """Exchange two tensors of as many elements, each read in the other's shape."""
    first, second = values[a], values[b]
    if first.numel() != second.numel():
        return values
    return values | {a: second.reshape(first.shape), b: first.reshape(second.shape)}


def _turned(x: Tensor) -> Tensor:
    """Return a matrix whose memory is read in the other order; a square one is transposed."""
    return x.transpose(-1, -2).contiguous().reshape(x.shape)


def _taken(x: Tensor, axis: int, source: Callable[..., Tensor]) -> Tensor:
    size = x.shape[axis]
    index = source(torch.arange(size), size) if size else torch.arange(0)
    if x.dtype.itemsize == 1:  # index_select lacks some formats of eight bits
        return x.view(torch.uint8).index_select(axis, index).view(x.dtype)
    return x.index_select(axis, index)


def _zeroed(x: Tensor, axis: int, kept: Callable[..., Tensor]) -> Tensor:
    size = x.shape[axis]
    mask = kept(torch.arange(size), size).reshape(-1, *(1,) * (x.ndim - 1 - axis))
    return torch.where(mask, x.double(), 0.0)


def changes_of_options(case: Case) -> Iterator[tuple[str, str, Options, int]]:
    """Yield a name, the words, the change of the options and its cost."""
    definition = case.definition
    complete = definition.complete(case.options)
    for name, option in definition.options.items():
        value = complete[name]
        if option.tensor:
            continue
        others: list[Any] = [option.default, *option.usual]
        if isinstance(value, bool):
            others.append(not value)
        elif isinstance(value, float):
            others += [0.0, 1.0, 1e-5, 1e-6, 1e-8, 1e-12]
            for words, number in _NUMBERS:
                yield (f"{name}: {words}", words.format(name),
                       lambda options, case, name=name, number=number: _replaced(options, name, number), 0)  # fmt: skip
        elif isinstance(value, int):
            others += [value + 1, value - 1, 1, 2 * value, value // 2]
        tried: list[Any] = [value]
        for other in others:
            if other in tried:
                continue
            tried.append(other)
            yield (f"{name}_is_{other}", f"{name} is {other!r} whatever the caller passes",
                   lambda options, case, name=name, other=other: options | {name: other}, 0)  # fmt: skip


_NUMBERS: tuple[tuple[str, Callable[[float], float]], ...] = (
    ("{} is squared", lambda x: x * x),
    ("the square root of {} is taken for it", lambda x: x**0.5 if x > 0 else x),
    ("{} is ten times as large", lambda x: 10 * x),
    ("{} is a tenth of itself", lambda x: x / 10),
    ("{} is doubled", lambda x: 2 * x),
    ("{} is halved", lambda x: x / 2),
    ("{} has the other sign", lambda x: -x),
    ("the reciprocal of {} is taken for it", lambda x: 1 / x if x else x),
    ("1 - {0} is taken for {0}", lambda x: 1 - x),
)


def _replaced(options: dict[str, Any], name: str, number: Callable[[float], float]) -> dict[str, Any]:
    """Return options with another number in place of one; unchanged without one."""
    return options | {name: number(options[name])} if isinstance(options.get(name), float) else options
