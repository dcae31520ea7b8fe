"""Rotation of rows by a block-diagonal Hadamard matrix: spreads an outlier over its block and keeps every product."""

from __future__ import annotations

import math
from functools import cache

import torch

__all__ = ["rotate"]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] with every block of b columns multiplied by the orthogonal, symmetric Sylvester matrix H_b / sqrt(b).

    b is the largest power of two that divides K; the rotation is its own inverse, so weights and inputs that are both
    rotated have the product they had.
    """
    size = x.shape[-1] & -x.shape[-1]
    return (torch.unflatten(x, -1, (-1, size)) @ _matrix(size).to(x)).flatten(-2)


@cache
def _matrix(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
