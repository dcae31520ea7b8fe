"""Rows of a flattened tensor: which sequence each is of, and which of them are looked at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from assay.precision.observation.operations import groups


@dataclass(frozen=True, slots=True)
class Rows:
    """Which sequence each row of a flattened tensor is of: ``each`` rows in order, or an index [n]; else unknown.

    Unknown are rows that sequences share and those that came by a way that isn't followed. Their products are given to
    the first sequence as one, whose expected square is that of all, for cotangents of sequences are independent.
    """

    each: int = 0
    index: torch.Tensor | None = None

    def sums(self, products: torch.Tensor, batch: int) -> torch.Tensor:
        """Sums of several [S, n] over the rows of every sequence, [S, B]."""
        if self.each:
            return products.reshape(len(products), batch, -1).sum(2)
        found = products.new_zeros(len(products), batch)
        if self.index is None:
            found[:, 0] = products.sum(1)
            return found
        return found.index_add_(1, self.index.to(found.device), products)

    def outer(self, g: torch.Tensor, x: torch.Tensor, of: int, batch: int) -> torch.Tensor:
        """g' x over the rows of every sequence, the gradient of a weight, [B, N, K]: g [..., N], x [..., G * K], of
        which there are ``of`` groups."""
        if self.each:
            return groups.outer(g.reshape(batch, -1, g.shape[-1]), x.reshape(batch, -1, x.shape[-1]), of)
        x, g = x.flatten(0, -2), g.flatten(0, -2)
        found = x.new_zeros(batch, g.shape[-1], x.shape[-1] // of)
        if self.index is None:
            found[0] = groups.outer(g, x, of)
            return found
        for sequence in torch.unique(self.index).tolist():
            chosen = self.index == sequence
            found[sequence] = groups.outer(g[chosen], x[chosen], of)
        return found

    def subsampled(self, index: torch.Tensor | None) -> Rows:
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
    index: torch.Tensor | None = None
    root_weights: torch.Tensor | None = None
    """Of each row the root of how many it stands for: squares grow with them, sums of independent rows with that."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        return flat.contiguous() if self.index is None else flat[self.index]
