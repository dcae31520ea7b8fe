"""A call of an op, cut along the symbols whose places are independent of each other: in blocks, or where asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Arithmetic, Exact
from assay.golden.arithmetic.double_double import DoubleDouble
from assay.golden.registry import Spec
from assay.golden.run import Golden, golden_of_ball, golden_of_enclosure, run
from assay.golden.signature import Signature, TensorSpec

Tensor = torch.Tensor
Index = Mapping[str, Tensor | slice]

_BLOCK = 2**17  # numbers of a block of rows: its intermediates stay in a processor's cache
_EXACT_BLOCK = 2**15  # the same where a number is several, and intermediates are many


@dataclass(frozen=True)
class Call:
    """An op's tensors and options, checked, and along which symbols they may be cut."""

    spec: Spec
    tensors: tuple[Tensor, ...]
    options: Mapping[str, Any]
    keywords: Mapping[str, Tensor]

    @property
    def signature(self) -> Signature:
        """The signature under the call's options."""
        return self.spec.signature(self.spec.complete(self.options))

    @property
    def rows(self) -> str | None:
        """The symbol along which results may be evaluated apart."""
        return self._divisible(self.spec.independent(self.spec.complete(self.options)))

    @property
    def columns(self) -> str | None:
        """Another one: that of the last axis where each element stands alone."""
        alone = self.signature.returns[0].dims[-1] if self.spec.elementwise else None
        return self._divisible(self.spec.columns or alone)

    def _divisible(self, symbol: str | None) -> str | None:
        """The symbol, unless some dimension is an expression in it: a part of the rows would not have that size."""
        tensors = (*self.signature.tensors, *self.signature.returns)
        whole = symbol is not None and any(symbol in tensor.dims for tensor in self.signature.returns)
        parts = any(symbol != text and symbol in _names(text) for tensor in tensors for text in tensor.dims)
        return symbol if whole and not parts else None

    @property
    def stored(self) -> list[tuple[TensorSpec, Tensor]]:
        """What the op takes, beside what the signature says of it."""
        named = {tensor.name: tensor for tensor in self.signature.tensors}
        positional = [tensor for tensor in self.signature.tensors if not tensor.keyword]
        keywords = [(named[name], value) for name, value in self.keywords.items()]
        return [*zip(positional, self.tensors, strict=True), *keywords]

    @cached_property
    def is_finite(self) -> bool:
        """Whether all numbers of all tensors are finite."""
        return all(bool(torch.isfinite(value.double()).all()) for _, value in self.stored if value.is_floating_point())

    def size(self, symbol: str) -> int:
        """The size of a symbol that some tensor has for a dimension."""
        return next(value.shape[tensor.dims.index(symbol)] for tensor, value in self.stored if symbol in tensor.dims)

    def part(self, index: Index) -> Call:
        """The call on those places only, along each symbol."""
        cut = {tensor.name: _cut(tensor, value, index) for tensor, value in self.stored}
        positional = tuple(cut[tensor.name] for tensor in self.signature.tensors if not tensor.keyword)
        return replace(self, tensors=positional, keywords={name: cut[name] for name in self.keywords})

    def results(self, arithmetic: Arithmetic) -> tuple[Any, ...]:
        """The results in an arithmetic, in its own numbers."""
        results = run(self.spec, arithmetic, self.tensors, self.options, self.keywords)
        return results if isinstance(results, tuple) else (results,)

    def under(self, arithmetic: Arithmetic) -> tuple[Golden, ...]:
        """The results in an arithmetic, as goldens."""
        return tuple(map(_golden, self.results(arithmetic)))

    def in_blocks(self, arithmetic: Arithmetic) -> tuple[Golden, ...]:
        """The same, a block of rows at a time where hardly anything is shared between the rows."""
        rows = self.rows
        if rows is None:
            return self.under(arithmetic)
        own = sum(value.numel() for tensor, value in self.stored if rows in tensor.dims)
        shared = sum(value.numel() for tensor, value in self.stored if rows not in tensor.dims)
        count, block = self.size(rows), _EXACT_BLOCK if isinstance(arithmetic, Exact) else _BLOCK
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


def _golden(result: Any) -> Golden:
    if isinstance(result, DoubleDouble):
        radius = result.radius * (1 + 2.0**-30)
        if not math.isfinite(radius.sum().item()):
            radius = radius.nan_to_num_(nan=math.inf, posinf=math.inf)
        return Golden(result.high, radius, result.rest)
    return golden_of_enclosure(result) if isinstance(result, np.ndarray) else golden_of_ball(result)


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
