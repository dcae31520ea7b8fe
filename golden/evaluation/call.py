"""A bound call of an op, evaluated whole, in blocks of rows, or on those places only that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic, Exact
from assay.golden.errors import DefinitionError
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.registry import Spec
from assay.golden.signature import Signature, TensorSpec

Tensor = torch.Tensor
Index = Mapping[str, Tensor | slice]

_BLOCK = 2**17  # numbers of a block of rows: its intermediates stay in a processor's cache
_EXACT_BLOCK = 2**15  # the same where a number is several, and intermediates are many


_KEPT = "xp.sum, xp.mean and xp.max keep their axis, with size one: drop it by [..., 0], and [:, None] isn't needed"


@dataclass(frozen=True)
class Call:
    """An op, its tensors by name in the order of the signature, and its complete options; `bind` makes and checks it.

    ``sizes`` are those of the signature's symbols, in a `part` as in the whole.
    """

    spec: Spec
    signature: Signature
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    sizes: Mapping[str, int]

    @cached_property
    def rows(self) -> str | None:
        """The symbol along which results may be evaluated apart."""
        return self._divisible(self.spec.row_axis(self.options))

    @cached_property
    def columns(self) -> str | None:
        """Another one: that of the last axis where each element stands alone."""
        alone = self.signature.returns[0].dims[-1] if self.spec.axes.elementwise else None
        return self._divisible(self.spec.axes.columns or alone)

    def _divisible(self, symbol: str | None) -> str | None:
        """The symbol, unless some dimension is an expression in it: a part of the rows would not have that size."""
        tensors = (*self.signature.tensors, *self.signature.returns)
        whole = symbol is not None and any(symbol in tensor.dims for tensor in self.signature.returns)
        parts = any(symbol != text and symbol in _names(text) for tensor in tensors for text in tensor.dims)
        return symbol if whole and not parts else None

    @cached_property
    def is_finite(self) -> bool:
        """Whether all numbers of all tensors are finite."""
        values = (value for value in self.tensors.values() if value.is_floating_point())
        return all(bool(torch.isfinite(value.double()).all()) for value in values)

    def size(self, symbol: str) -> int:
        """The size of a symbol that some tensor has for a dimension."""
        holder = next(tensor for tensor in self.signature.tensors if symbol in tensor.dims)
        return self.tensors[holder.name].shape[holder.dims.index(symbol)]

    def part(self, index: Index) -> Call:
        """The call on those places only, along each symbol."""
        cut = {tensor.name: _cut(tensor, self.tensors[tensor.name], index) for tensor in self.signature.tensors}
        return replace(self, tensors=cut)

    def results(self, xp: Arithmetic, chosen: Mapping[str, Tensor] | None = None) -> tuple[Any, ...]:
        """The results in arithmetic ``xp``, in its own numbers.

        ``chosen``: a kernel's own choices by the results' names, for an op whose other results hang on them.
        """
        numbers = {
            tensor.name: xp.integers(value) if tensor.is_integer else xp.exact(value.to(torch.float64))
            for tensor, value in zip(self.signature.tensors, self.tensors.values(), strict=True)
        }
        handed = {tensor.name: numbers.pop(tensor.name) for tensor in self.signature.tensors if tensor.keyword}
        plain = {name: value for name, value in self.options.items() if name not in handed}
        plain |= {name: None for name in plain if self.spec.options[name].tensor}
        for name, value in (chosen or {}).items():
            handed[name] = xp.exact(value.to(torch.float64)) if value.is_floating_point() else xp.integers(value)
        if self.spec.needs_dtypes:
            plain["dtypes"] = [value.dtype for value in self.tensors.values()]
        try:
            with xp.precision():
                results = self.spec.definition(xp, *numbers.values(), **handed, **plain)
        except IndexError as error:
            raise DefinitionError(f"{self.spec.name}: IndexError: {error}; {_KEPT}") from error
        results = results if isinstance(results, tuple) else (results,)
        self._check(results)
        return results

    def _check(self, results: tuple[Any, ...]) -> None:
        """Raise `DefinitionError` unless there is a result for each of the signature, of as many dimensions."""
        expected = self.signature.returns
        if len(results) != len(expected):
            raise DefinitionError(
                f"{self.spec.name}: its definition gives {len(results)} results; expected {len(expected)}"
            )
        for tensor, result in zip(expected, results, strict=True):
            if len(result.shape) != len(tensor.dims):
                shape = list(map(int, result.shape))
                raise DefinitionError(f"{self.spec.name}: {tensor} came with the shape {shape}; {_KEPT}")

    def under(self, arithmetic: Arithmetic) -> tuple[Golden, ...]:
        """The results in an arithmetic, as goldens."""
        return tuple(map(golden_of, self.results(arithmetic)))

    def in_blocks(self, arithmetic: Arithmetic) -> tuple[Golden, ...]:
        """The same, a block of rows at a time where hardly anything is shared between the rows."""
        block = _EXACT_BLOCK if isinstance(arithmetic, Exact) else _BLOCK
        if sum(value.numel() for value in self.tensors.values()) <= block:
            return self.under(arithmetic)
        rows = self.rows
        if rows is None:
            return self.under(arithmetic)
        among = {tensor.name for tensor in self.signature.tensors if rows in tensor.dims}
        own = sum(value.numel() for name, value in self.tensors.items() if name in among)
        shared = sum(value.numel() for name, value in self.tensors.items() if name not in among)
        count = self.size(rows)
        step = max(1, block * count // max(own, 1))
        if step >= count or shared * 8 > min(own, block):
            return self.under(arithmetic)
        whole: tuple[Golden, ...] = ()
        for first in range(0, count, step):
            last = min(first + step, count)
            found = self.part({rows: slice(first, last)}).under(arithmetic)
            if not whole:
                whole = tuple(
                    _widened(golden, tensor, rows, count)
                    for golden, tensor in zip(found, self.signature.returns, strict=True)
                )
            for golden, new, tensor in zip(whole, found, self.signature.returns, strict=True):
                if rows in tensor.dims:
                    axis = tensor.dims.index(rows)
                    for target, source in zip(_words(golden), _words(new), strict=True):
                        target.narrow(axis, first, last - first).copy_(source)
        return whole

    def places(self, wanted: list[Tensor]) -> Iterator[dict[str, Tensor]]:
        """Where to evaluate again: the rows and columns of what is wanted, or row by row if much else lies there."""
        rows, columns = self.rows, self.columns
        if rows is None:
            yield {}
            return
        need = torch.zeros(self.size(rows), self.size(columns) if columns else 1, dtype=torch.bool)
        for mask, tensor in zip(wanted, self.signature.returns, strict=True):
            if rows not in tensor.dims:
                need |= bool(mask.any())
                continue
            kept = [tensor.dims.index(symbol) for symbol in (rows, columns) if symbol in tensor.dims]
            flat = mask.permute(*kept, *(place for place in range(mask.ndim) if place not in kept))
            flat = flat.reshape(*flat.shape[: len(kept)], -1).any(-1)
            need |= flat if flat.ndim == 2 else flat[:, None] & (torch.arange(need.shape[1]) == 0)
        which, across = need.any(1).nonzero()[:, 0], need.any(0).nonzero()[:, 0]
        if columns is None:
            yield {rows: which}
        elif int(need.sum()) * 4 >= len(which) * len(across):
            yield {rows: which, columns: across}
        else:
            for row in which:
                yield {rows: row[None], columns: need[row].nonzero()[:, 0]}


def grid(tensor: TensorSpec, value: Tensor, index: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Indices that pick a result's places along each symbol, and everything along the others."""
    axes = [index.get(text, torch.arange(size)) for text, size in zip(tensor.dims, value.shape, strict=True)]
    return torch.meshgrid(*axes, indexing="ij") if axes else ()


def _names(text: str) -> list[str]:
    return "".join(char if char.isalnum() or char == "_" else " " for char in text).split()


def _cut(tensor: TensorSpec, value: Tensor, index: Index) -> Tensor:
    for axis, text in enumerate(tensor.dims):
        if text in index:
            value = value[(slice(None),) * axis + (index[text],)]
    return value


def _words(golden: Golden) -> list[Tensor]:
    return [word for word in (golden.value, golden.radius, golden.low) if word is not None]


def _widened(golden: Golden, tensor: TensorSpec, rows: str, count: int) -> Golden:
    """Room for all rows."""
    if rows not in tensor.dims:
        return golden
    axis = tensor.dims.index(rows)
    return Golden(*(word.new_empty((*word.shape[:axis], count, *word.shape[axis + 1 :])) for word in _words(golden)))
