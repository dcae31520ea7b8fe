"""`Cut`: a part of a call that is a call of its own, along the axes that the op's `Spec` calls independent.

A symbol is cut in blocks: single places, unless a dimension is a quotient of it (``N/8``, ``ceil(N/128)``). Of heads in
groups (``{"H": "Hkv"}``) whole groups are taken, and of each the same heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from assay.golden.registry import Spec, Tile
from assay.golden.signature import Signature, TensorSpec

Tensor = torch.Tensor


@dataclass(frozen=True)
class Axis:
    """A symbol that may be cut into so many blocks, each of ``unit`` places; ``within``: places of each group of it."""

    symbol: str
    blocks: int
    unit: int = 1
    within: str = ""

    def block(self, place: int) -> int:
        """The block that a place of the symbol lies in."""
        return place % self.blocks if self.within else place // self.unit


@dataclass(frozen=True)
class Cut:
    """The places that are kept: ``index``, ascending, by the text of a dimension; what isn't named is kept whole.

    ``needs`` are symbols that a result must have to be apart; others are sums over them. ``tensors`` by name are as
    they are, whatever is cut of the whole's.
    """

    index: Mapping[str, Tensor] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def of(self, tensor: TensorSpec, value: Tensor) -> Tensor:
        """The part of one of the signature's tensors, on any device."""
        for axis, text in enumerate(tensor.dims):
            if text in self.index:
                value = value[(slice(None),) * axis + (self.index[text].to(value.device),)]
        return value

    def inputs(
        self, definition: Spec, signature: Signature, values: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The parts of all tensors, and their sizes: of what indices pick, only what is picked is left."""
        parts = {tensor.name: self.of(tensor, values[tensor.name]) for tensor in signature.tensors}
        parts.update(self.tensors)
        sizes = {text: len(places) for text, places in self.index.items() if text in signature.symbols}
        for symbol in definition.axes.gathered:
            pickers = [tensor.name for tensor in signature.tensors if tensor.bound == symbol]
            used = torch.unique(torch.cat([parts[name].reshape(-1).long() for name in pickers]))
            for name in pickers:
                parts[name] = torch.searchsorted(used, parts[name].long()).to(parts[name].dtype)
            picked = Cut({symbol: used})
            parts = {tensor.name: picked.of(tensor, parts[tensor.name]) for tensor in signature.tensors}
            sizes[symbol] = len(used)
        return parts, sizes

    def is_apart(self, result: TensorSpec) -> bool:
        """Whether the part of a result is a result of the parts."""
        return self.needs <= set(result.dims)

    def whole(self, result: TensorSpec, index: tuple[int, ...]) -> tuple[int, ...]:
        """Where an element of a part stands in the whole."""
        return tuple(
            int(self.index[text][place]) if text in self.index else place
            for text, place in zip(result.dims, index, strict=True)
        )


def axes_of(definition: Spec, signature: Signature, sizes: Mapping[str, int], rows: str | None) -> list[Axis]:
    """The axes that may be cut; ``rows`` is what `Spec.row_axis` says."""
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
    """The cut that keeps these blocks, ascending, and along the symbols of ``tile`` its ranges."""
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
    """How many places of a symbol stay together; 0 where some dimension hangs on it in another way than a quotient."""
    texts = {text for tensor in (*signature.tensors, *signature.returns) for text in tensor.dims}
    hanging = [text for text in texts if re.search(rf"\b{symbol}\b", text) and text != symbol]
    quotients = [divisor for text in hanging for name, divisor in _quotients(text) if name == symbol]
    return math.lcm(*quotients) if len(quotients) == len(hanging) else 0


def _quotients(text: str) -> list[tuple[str, int]]:
    """``N/8`` and ``ceil(N/128)``: the symbol and the divisor."""
    found = re.fullmatch(r"(?:ceil\()?(\w+)/(\d+)\)?", text)
    return [(found[1], int(found[2]))] if found else []
