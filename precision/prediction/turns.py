"""Which rows of a weight are looked at: of a small one all, in turns, of a large one those that a sample draws.

To store a weight under every scheme takes longer than to multiply with it, so each batch looks at some rows only. A
weight of fewer than 1,024 rows is cut into parts, and each part is looked at by as many batches and cotangents. Of a
larger one each batch draws rows for all of its cotangents, of row r a number that has the mean p_r: p_r is proportional
to the squares that the row is expected to add, |w_r|^2 sum_t g_tr^2 |x_t|^2 with the g of the cotangent that comes by
first (a change that is independent of everything and in proportion to the row, tokens whose gradients are independent),
a quarter of them the same for all rows, lest one counts for much more than it is looked at; rows that would be drawn
more than once are taken for certain. With t_r^2 the square of the product of a row, summed over the cotangents, the sum
of t_r^2 / p_r over the rows that are drawn has the mean sum t_r^2 over all of them (Horvitz and Thompson 1952; drawn
systematically in a random order: Madow 1949; Cochran, Sampling Techniques, 1977, sections 9A.7 and 8.1; in the order
of a weight's rows, which have a period where heads do, the draws would be alike), and its variance is about
sum c_r (y_r - y)^2, y_r = t_r^2 / p_r, c_r = (1 - p_r) n / (n - 1), y their mean with the weights c_r (Deville 1999;
Tillé, Sampling Algorithms, 2006, section 7.6).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

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
class Looked:
    """Some rows of a weight, and how many each of them stands for."""

    rows: slice | torch.Tensor
    root_weights: torch.Tensor | float
    """Roots of these numbers, [n, 1, 1] or one for all: squares grow with them, sums of independent rows with that."""

    def variance(self, squares: torch.Tensor) -> torch.Tensor:
        """Of the sums [S] over the rows and B of squares [n, S, B], times how many each row stands for: what the draw
        leaves open of them; zero where it leaves none."""
        if isinstance(self.root_weights, float):
            return squares.new_zeros(squares.shape[1])
        each, count = squares.sum(-1), len(squares)
        shares = (1 - self.root_weights[:, 0] ** -2) * (count / max(count - 1, 1))
        mean = (each * shares).sum(0) / shares.sum().clamp(min=1e-30)
        return ((each - mean).square_() * shares).sum(0)


@dataclass(frozen=True, slots=True)
class Turns:
    """One batch's part: its number, of how many, with how many cotangents; ``exact``: no weight is sampled."""

    batch: int = 0
    batches: int = 1
    cotangents: int = 1
    seed: int = 0
    exact: bool = False

    def alone(self) -> Turns:
        """Of a weight that one cotangent of each batch meets."""
        return replace(self, cotangents=1)

    def drawn(self, rows: int) -> int:
        """How many rows are drawn of so many; 0: none, all are looked at in turns."""
        count = max(-(-_SAMPLE // (self.batches * min(self.cotangents, 2))), _LEAST)
        return 0 if self.exact or rows < max(_LARGE, 2 * count) else count

    def parts(self, weight: torch.Tensor, cotangent: int, most: int) -> tuple[float, Iterator[Looked]]:
        """How many batches and cotangents look at all rows of a weight [N, K] together, and the rows of this batch and
        a cotangent, in ranges of so many ``most``: whole blocks. As many look at each row."""
        index, count = (each * self.cotangents for each in (self.batch, self.batches))
        blocks = -(-weight.shape[0] // BLOCK)
        turns = max(t for t in range(1, min(_TURNS * self.cotangents, blocks) + 1) if count % t == 0)
        size = -(-blocks // turns) * BLOCK
        first = (index + cotangent) % turns * size
        mine = some_rows(weight[first : first + size], most)
        return float(turns), (Looked(slice(first + start, first + stop), turns**0.5) for start, stop in mine)

    def sample(self, sizes: torch.Tensor, name: str) -> tuple[float, Looked]:
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
        return float(chances.sqrt().sum() / count) ** 2, Looked(rows, weights)


def _chances(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Chances [N] in proportion to sizes, none above one, that add up to ``count``."""
    chances = sizes * (count / sizes.sum())
    while bool((chances > 1 + 1e-9).any()):
        certain = chances >= 1
        others = torch.where(certain, 0.0, sizes)
        chances = torch.where(certain, 1.0, others * ((count - int(certain.sum())) / others.sum()))
    return chances.clamp(max=1.0)


def some_rows(weight: torch.Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a weight [N, K], whole blocks of no more than ``most`` elements, or of one block."""
    count = max(most // max(weight.shape[-1], 1) // BLOCK, 1) * BLOCK
    return ((start, min(start + count, weight.shape[0])) for start in range(0, weight.shape[0], count))
