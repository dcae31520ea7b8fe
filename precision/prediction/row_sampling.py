"""The rows of a weight to evaluate: all of a small weight, over several batches; a random sample of a large one.

To store a weight under every scheme takes longer than to multiply with it, so each batch evaluates some rows only. A
weight of fewer than 1,024 rows is cut into parts, and each part is evaluated by equally many batches and cotangents. Of
a larger one each batch draws rows for all of its cotangents; the number of draws of row r has the mean p_r. p_r is
proportional to the expected squares of the row, |w_r|^2 sum_t g_tr^2 |x_t|^2 with the g of the first cotangent
(assuming a change that is independent of everything and proportional to the row, and tokens whose gradients are
independent). A quarter of p_r is the same for all rows, so that no row gets a much larger weight than its share; rows
that would be drawn more than once are certain. With t_r^2 the square of the product of a row, summed over the
cotangents, the sum of t_r^2 / p_r over the drawn rows has the mean sum t_r^2 over all of them (Horvitz and Thompson
1952; drawn systematically in a random order: Madow 1949; Cochran, Sampling Techniques, 1977, sections 9A.7 and 8.1; in
the order of a weight's rows, which heads make periodic, the draws would be alike). Its variance is about sum c_r (y_r -
y)^2, y_r = t_r^2 / p_r, c_r = (1 - p_r) n / (n - 1), y their mean with the weights c_r (Deville 1999; Tillé, Sampling
Algorithms, 2006, section 7.6).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.precision.observation import groups

BLOCK = 128
"""Rows evaluated together where all are: a multiple of every scheme's blocks."""
_MOST_BATCHES = 4  # Batches that may share a weight's rows, with a part for each of their cotangents
_LARGE = 1024  # Rows from which a weight is sampled
_SAMPLE = 512
"""Rows that all batches draw together for one cotangent, half as many for several; but each at least _LEAST."""
_LEAST = 16
_EVEN = 0.25  # Share of the draws that is the same for all rows


@dataclass(frozen=True, slots=True)
class RowSample:
    """Some rows of a weight, and how many rows each represents."""

    rows: slice | Tensor
    root_weights: Tensor | float
    """Roots of these numbers, [n, 1, 1] or one for all: squares grow with them, sums of independent rows with their
    roots."""

    def variance(self, squares: Tensor) -> Tensor:
        """Return the sampling variance of the sums [S] over the rows and B of squares [n, S, B], weighted; zero without
        sampling."""
        if isinstance(self.root_weights, float):
            return squares.new_zeros(squares.shape[1])
        each, count = squares.sum(-1), len(squares)
        shares = (1 - self.root_weights[:, 0] ** -2) * (count / max(count - 1, 1))
        mean = (each * shares).sum(0) / shares.sum().clamp(min=1e-30)
        return ((each - mean).square_() * shares).sum(0)


@dataclass(frozen=True, slots=True)
class RowSampler:
    """The rows for one batch: its index, the number of batches and of cotangents; ``exact``: no weight is sampled."""

    batch: int = 0
    batches: int = 1
    cotangents: int = 1
    seed: int = 0
    exact: bool = False

    def alone(self) -> RowSampler:
        """Return the sampler of a weight with one cotangent in each batch."""
        return replace(self, cotangents=1)

    def drawn(self, rows: int) -> int:
        """Return how many of ``rows`` rows to draw; 0: all are evaluated, in parts."""
        count = max(-(-_SAMPLE // (self.batches * min(self.cotangents, 2))), _LEAST)
        return 0 if self.exact or rows < max(_LARGE, 2 * count) else count

    def parts(self, weight: Tensor, cotangent: int, most: int) -> tuple[float, Iterator[RowSample]]:
        """Return how many batches and cotangents share the rows of a weight [N, K], and the rows of this batch and a
        cotangent, in ranges of at most ``most`` elements: whole blocks. Equally many evaluate each row."""
        index, count = (each * self.cotangents for each in (self.batch, self.batches))
        blocks = -(-weight.shape[0] // BLOCK)
        count_parts = max(t for t in range(1, min(_MOST_BATCHES * self.cotangents, blocks) + 1) if count % t == 0)
        size = -(-blocks // count_parts) * BLOCK
        first = (index + cotangent) % count_parts * size
        end = min(first + size, weight.shape[0])
        step = max(most // max(weight.shape[-1], 1) // BLOCK, 1) * BLOCK
        starts = range(first, end, step)
        return float(count_parts), (
            RowSample(slice(start, min(start + step, end)), count_parts**0.5) for start in starts
        )

    def sample(self, sizes: Tensor, name: str) -> tuple[float, RowSample]:
        """Return how many rows a drawn row represents, and rows drawn in proportion to their ``sizes`` [N], of the
        named weight.

        The former is for what all rows have in common, in proportion to the root of their size: (sum of p^(1/2))^2 over
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
    """Return probabilities [N] in proportion to sizes, none above one, with the sum ``count``."""
    chances = sizes * (count / sizes.sum())
    while bool((chances > 1 + 1e-9).any()):
        certain = chances >= 1
        others = torch.where(certain, 0.0, sizes)
        chances = torch.where(certain, 1.0, others * ((count - int(certain.sum())) / others.sum()))
    return chances.clamp(max=1.0)


@dataclass(frozen=True, slots=True)
class Rows:
    """The sequence of each row of a flattened tensor: ``each`` rows in order, or an index [n]; else unknown.

    Unknown are rows that sequences share and those of untraced operations. Their products are assigned to the first
    sequence as one, whose expected square is that of all, for cotangents of sequences are independent.
    """

    each: int = 0
    index: Tensor | None = None

    def sums(self, products: Tensor, batch: int) -> Tensor:
        """Return the sums of products [S, n] over the rows of every sequence, [S, B]."""
        if self.each:
            return products.reshape(len(products), batch, -1).sum(2)
        sums = products.new_zeros(len(products), batch)
        if self.index is None:
            sums[:, 0] = products.sum(1)
            return sums
        return sums.index_add_(1, self.index.to(sums.device), products)

    def outer(self, g: Tensor, x: Tensor, of: int, batch: int) -> Tensor:
        """Return g' x over the rows of every sequence, the gradient of a weight, [B, N, K]: g [..., N], x [..., G * K]
        in ``of`` groups."""
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
        """Return the same for some of the rows."""
        if index is None:
            return self
        if self.each:
            return Rows(index=index // self.each)
        return Rows(index=None if self.index is None else self.index[index])


@dataclass(frozen=True, slots=True)
class Subsample:
    """Some of a tensor's rows, or all."""

    step: int = 1
    """How many rows each small row represents."""
    index: Tensor | None = None
    root_weights: Tensor | None = None
    """For each row the root of how many it represents: squares grow with that number, sums of independent rows with the
    root."""

    def of(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return flat.contiguous() if self.index is None else flat[self.index]
