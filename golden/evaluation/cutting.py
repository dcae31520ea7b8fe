"""`Cut`: a part of a call that can be evaluated alone, along the axes that the op's `Axes` declare independent.

A symbol is cut into blocks of one index, or more if a dimension is a quotient of it (``N/8``, ``ceil(N/128)``). For
grouped heads (``{"H": "Hkv"}``) a cut selects groups, and the same heads in each of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from assay.golden.registry import Spec, Tile
from assay.golden.signature import Signature, TensorSpec

Tensor = torch.Tensor


def selected(tensor: TensorSpec, value: Tensor, index: Mapping[str, Tensor | slice]) -> Tensor:
    """Return the elements of a tensor at these indices along its dimensions."""
    for axis, text in enumerate(tensor.dims):
        if text in index:
            value = value[(slice(None),) * axis + (index[text],)]
    return value


@dataclass(frozen=True)
class Axis:
    """A symbol that can be cut into ``blocks`` blocks of ``unit`` indices; ``within``: the symbol whose groups it
    indexes."""

    symbol: str
    blocks: int
    unit: int = 1
    within: str = ""

    def block(self, index: int) -> int:
        """Return the block that contains an index of the symbol."""
        return index % self.blocks if self.within else index // self.unit


@dataclass(frozen=True)
class Cut:
    """The selected indices, ascending, by the text of a dimension; dimensions that aren't named are complete.

    ``needs``: the symbols that a result must have to be complete; the other results are sums over them. ``tensors``, by
    name, replace slices of the call's.
    """

    index: Mapping[str, Tensor] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def of(self, tensor: TensorSpec, value: Tensor) -> Tensor:
        """Return the part of one of the signature's tensors, on any device."""
        return selected(tensor, value, {text: index.to(value.device) for text, index in self.index.items()})

    def inputs(
        self, definition: Spec, signature: Signature, values: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the parts of all tensors, and their sizes; gathered symbols keep only the indices that are read."""
        parts = {tensor.name: self.of(tensor, values[tensor.name]) for tensor in signature.tensors}
        parts.update(self.tensors)
        sizes = {text: len(indices) for text, indices in self.index.items() if text in signature.symbols}
        for symbol in definition.axes.gathered:
            index_tensors = [tensor.name for tensor in signature.tensors if tensor.bound == symbol]
            used = torch.unique(torch.cat([parts[name].reshape(-1).long() for name in index_tensors]))
            for name in index_tensors:
                parts[name] = torch.searchsorted(used, parts[name].long()).to(parts[name].dtype)
            gathered = Cut({symbol: used})
            parts = {tensor.name: gathered.of(tensor, parts[tensor.name]) for tensor in signature.tensors}
            sizes[symbol] = len(used)
        return parts, sizes

    def at(self, definition: Spec, sizes: Mapping[str, int], symbol: str, index: int) -> Cut:
        """Return the cut with one index along a symbol: of heads with its group alone, of groups with all its heads."""
        only = {symbol: torch.tensor([index])}
        for heads, groups in definition.axes.groups.items():
            shared = sizes[heads] // max(sizes[groups], 1) if {heads, groups} <= sizes.keys() else 0
            if symbol == heads and shared:
                only[groups] = torch.tensor([index // shared])
            elif symbol == groups and shared:
                only[heads] = torch.arange(index * shared, (index + 1) * shared)
        return replace(self, index={**self.index, **only})

    def is_complete(self, result: TensorSpec) -> bool:
        """Return whether the part of a result is a result of the parts alone."""
        return self.needs <= set(result.dims)

    def whole(self, result: TensorSpec, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the complete result of an element of a part."""
        return tuple(
            int(self.index[text][i]) if text in self.index else i for text, i in zip(result.dims, index, strict=True)
        )


def axes_of(definition: Spec, signature: Signature, sizes: Mapping[str, int], rows: str | None) -> list[Axis]:
    """Return the axes that can be cut; ``rows`` is `Spec.row_axis`."""
    symbols = {rows, definition.axes.columns, *definition.axes.independent, *definition.axes.reduced}
    symbols |= set(signature.returns[0].dims) if definition.axes.elementwise else set()
    axes = [
        Axis(s, -(-sizes[s] // unit), unit) for s in signature.symbols if s in symbols and (unit := _unit(signature, s))
    ]
    for symbol, groups in definition.axes.groups.items():
        if symbol in sizes and groups in sizes and sizes[groups]:
            axes.append(Axis(groups, sizes[groups]))
            if not any(groups in tensor.dims for tensor in signature.returns):  # else a result is a sum over them
                axes.append(Axis(symbol, sizes[symbol] // sizes[groups], within=groups))
    return axes


def cut(
    definition: Spec,
    signature: Signature,
    sizes: Mapping[str, int],
    blocks: Mapping[Axis, Tensor],
    tile: Tile | None = None,
) -> Cut:
    """Return the cut with these blocks, ascending, and with the ranges of ``tile``."""
    index = {}
    for axis, chosen in blocks.items():
        if not axis.within:
            spread = chosen[:, None] * axis.unit + torch.arange(axis.unit)
            index[axis.symbol] = spread.reshape(-1)[spread.reshape(-1) < sizes[axis.symbol]]
    for symbol, groups in definition.axes.groups.items():
        if symbol in sizes and groups in sizes:
            shared = sizes[symbol] // max(sizes[groups], 1)
            heads = next((chosen for axis, chosen in blocks.items() if axis.symbol == symbol), torch.arange(shared))
            of = index.get(groups, torch.arange(sizes[groups]))
            index[symbol] = (of[:, None] * shared + heads).reshape(-1)
    for symbol, (first, count) in (tile.ranges if tile else {}).items():
        index[symbol] = torch.arange(first, first + count)
    texts = {text for tensor in (*signature.tensors, *signature.returns) for text in tensor.dims} - index.keys()
    for text in texts:
        for symbol, divisor in _quotients(text):
            if symbol in index:
                index[text] = torch.unique(index[symbol] // divisor)
    cut_short = {s for s in index if s in sizes and len(index[s]) < sizes[s]}
    needed = {*definition.axes.reduced, *(definition.axes.tiling if tile else ())}
    return Cut(index, frozenset(cut_short & needed), tile.tensors if tile else {})


def _unit(signature: Signature, symbol: str) -> int:
    """Return the indices per block of a symbol; 0 if some dimension depends on it other than by a quotient."""
    texts = {text for tensor in (*signature.tensors, *signature.returns) for text in tensor.dims}
    dependent = [text for text in texts if re.search(rf"\b{symbol}\b", text) and text != symbol]
    quotients = [divisor for text in dependent for name, divisor in _quotients(text) if name == symbol]
    return math.lcm(*quotients) if len(quotients) == len(dependent) else 0


def _quotients(text: str) -> list[tuple[str, int]]:
    """Return the symbol and the divisor of ``N/8`` or ``ceil(N/128)``."""
    match = re.fullmatch(r"(?:ceil\()?(\w+)/(\d+)\)?", text)
    return [(match[1], int(match[2]))] if match else []
