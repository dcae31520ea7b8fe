"""X"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.precision.observation import groups

BLOCK = 128
"""Rows that are looked at together where all are: a multiple of those of every scheme's blocks."""
_TURNS = 4
"""Batches that may share a weight's rows among them, each cotangent of theirs a part of its own."""
_LARGE = 1024
"""Rows from which on they are sampled."""
_SAMPLE = 512
"""Rows that all batches draw together for one cotangent, half as many for several; but each no fewer than _LEAST."""
_LEAST = 16
_EVEN = 0.25
"""Of the draws, the share that any row gets alike."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """Some rows of a weight, and how many each of them stands for."""

    rows: slice | Tensor
    root_weights: Tensor | float
    """Roots of these numbers, [n, 1, 1] or one for all: squares grow with them, sums of independent rows with that."""

    def variance(self, squares: Tensor) -> Tensor:
        """Of the sums [S] over the rows and B of squares [n, S, B], times how many each row stands for: what the draw
        leaves open of them; zero where it leaves none."""
        if isinstance(self.root_weights, float):
            return squares.new_zeros(squares.shape[1])
        each, count = squares.sum(-1), len(squares)
        shares = (1 - self.root_weights[:, 0] ** -2) * (count / max(count - 1, 1))
        mean = (each * shares).sum(0) / shares.sum().clamp(min=1e-30)
        return ((each - mean).square_() * shares).sum(0)


@dataclass(frozen=True, slots=True)
class RowSampler:
    """One batch's part: its number, of how many, with how many cotangents; ``exact``: no weight is sampled."""

    batch: int = 0
    batches: int = 1
    cotangents: int = 1
    seed: int = 0
    exact: bool = False

    def alone(self) -> RowSampler:
        """Of a weight that one cotangent of each batch meets."""
        return replace(self, cotangents=1)

    def drawn(self, rows: int) -> int:
        """How many rows are drawn of so many; 0: none, all are looked at in turns."""
        count = max(-(-_SAMPLE // (self.batches * min(self.cotangents, 2))), _LEAST)
        return 0 if self.exact or rows < max(_LARGE, 2 * count) else count

    def parts(self, weight: Tensor, cotangent: int, most: int) -> tuple[float, Iterator[RowSample]]:
        """How many batches and cotangents look at all rows of a weight [N, K] together, and the rows of this batch and
        a cotangent, in ranges of so many ``most``: whole blocks. As many look at each row."""
        index, count = (each * self.cotangents for each in (self.batch, self.batches))
        blocks = -(-weight.shape[0] // BLOCK)
        count_parts = max(t for t in range(1, min(_TURNS * self.cotangents, blocks) + 1) if count % t == 0)
        size = -(-blocks // count_parts) * BLOCK
        first = (index + cotangent) % count_parts * size
        mine = some_rows(weight[first : first + size], most)
        return float(count_parts), (
            RowSample(slice(first + start, first + stop), count_parts**0.5) for start, stop in mine
        )

    def sample(self, sizes: Tensor, name: str) -> tuple[float, RowSample]:
        """How many rows one that is drawn stands for, and rows drawn in proportion to their ``sizes`` [N], of the
        weight of this name.

        The former is of what all rows have in common, in proportion to the root of their size: (sum of p^(1/2))^2 over
        (sum of p)^2.
        """
        count, device, sizes = self.drawn(len(sizes)), sizes.device, sizes.double().cpu()
        if not bool(sizes.isfinite().all()) or not float(sizes.sum()) > 0:
            sizes = torch.ones_like(sizes)
        chances = _chances(sizes * (1 - _EVEN) + sizes.mean() * _EVEN, count)
        text = f"{self.seed} {self.batch} {name}"
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        order = torch.randperm(len(chances), generator=generator)
        ends = chances[order].cumsum(0)
        points = torch.arange(count, dtype=torch.float64) + torch.rand(1, generator=generator, dtype=torch.float64)
        points = points.clamp(max=float(ends[-1]) * (1 - 1e-12))
        rows = order[torch.unique_consecutive(torch.searchsorted(ends, points, right=True))].sort().values
        weights = chances[rows].rsqrt().float().to(device)[:, None, None]
        return float(chances.sqrt().sum() / count) ** 2, RowSample(rows, weights)


def _chances(sizes: Tensor, count: int) -> Tensor:
    """Chances [N] in proportion to sizes, none above one, that add up to ``count``."""
    chances = sizes * (count / sizes.sum())
    while bool((chances > 1 + 1e-9).any()):
        certain = chances >= 1
        others = torch.where(certain, 0.0, sizes)
        chances = torch.where(certain, 1.0, others * ((count - int(certain.sum())) / others.sum()))
    return chances.clamp(max=1.0)


def some_rows(weight: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a weight [N, K], whole blocks of no more than ``most`` elements, or of one block."""
    count = max(most // max(weight.shape[-1], 1) // BLOCK, 1) * BLOCK
    return ((start, min(start + count, weight.shape[0])) for start in range(0, weight.shape[0], count))


@dataclass(frozen=True, slots=True)
class Rows:
    """Which sequence each row of a flattened tensor is of: ``each`` rows in order, or an index [n]; else unknown.

    Unknown are rows that sequences share and those that came by a way that isn't followed. Their products are given to
    the first sequence as one, whose expected square is that of all, for cotangents of sequences are independent.
    """

    each: int = 0
    index: Tensor | None = None

    def sums(self, products: Tensor, batch: int) -> Tensor:
        """Sums of several [S, n] over the rows of every sequence, [S, B]."""
        if self.each:
            return products.reshape(len(products), batch, -1).sum(2)
        sums = products.new_zeros(len(products), batch)
        if self.index is None:
            sums[:, 0] = products.sum(1)
            return sums
        return sums.index_add_(1, self.index.to(sums.device), products)

    def outer(self, g: Tensor, x: Tensor, of: int, batch: int) -> Tensor:
        """g' x over the rows of every sequence, the gradient of a weight, [B, N, K]: g [..., N], x [..., G * K], of
        which there are ``of`` groups."""
        if self.each:
            return groups.weight_gradient(g.reshape(batch, -1, g.shape[-1]), x.reshape(batch, -1, x.shape[-1]), of)
        x, g = x.flatten(0, -2), g.flatten(0, -2)
        gradients = x.new_zeros(batch, g.shape[-1], x.shape[-1] // of)
        if self.index is None:
            gradients[0] = groups.weight_gradient(g, x, of)
            return gradients
        for sequence in torch.unique(self.index).tolist():
            chosen = self.index == sequence
            gradients[sequence] = groups.weight_gradient(g[chosen], x[chosen], of)
        return gradients

    def subsampled(self, index: Tensor | None) -> Rows:
        """Of some of the rows."""
        if index is None:
            return self
        if self.each:
            return Rows(index=index // self.each)
        return Rows(index=None if self.index is None else self.index[index])


@dataclass(frozen=True, slots=True)
class Subsample:
    """Some of a tensor's rows, or all."""

    step: int = 1
    """How many rows the smaller ones of them stand for."""
    index: Tensor | None = None
    root_weights: Tensor | None = None
    """Of each row the root of how many it stands for: squares grow with them, sums of independent rows with that."""

    def of(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return flat.contiguous() if self.index is None else flat[self.index]
