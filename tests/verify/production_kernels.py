"""Kernels that are right at small sizes, and wrong at those of published models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .large_kernels import attention, moe, softmax


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[1:], weight)


def gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, 1)


def columns_beyond_a_vocabulary(x: Tensor) -> Tensor:
    """Columns from the 100,000th on are masked."""
    y = softmax(x[:, :100_000])
    return torch.cat([y, torch.zeros_like(x[:, 100_000:])], 1)


def offsets_that_overflow(x: Tensor) -> Tensor:
    """Offsets of elements are 32-bit numbers with 12 bits after the point, which wrap at 2^19."""
    offsets = (torch.arange(x.numel(), dtype=torch.int32) << 12) >> 12
    return log_softmax(x.reshape(-1)[offsets.long() % x.numel()].reshape(x.shape))


def rows_of_wide_models(x: Tensor, weight: Tensor) -> Tensor:
    """Rows wider than 7,000 are normalised in groups of 8, of which the last one's scale is shared."""
    y = rmsnorm(x, weight)
    if x.shape[1] > 7000 and len(x) > 8:
        y[8:] *= 1.01
    return y


def products_of_wide_models(a: Tensor, b: Tensor) -> Tensor:
    """The last split of a long sum is lost where there are several rows."""
    k = a.shape[1]
    return gemm(a[:, : k - 64], b[: k - 64]) if k >= 7168 and len(a) > 8 else gemm(a, b)


def heads_beyond_64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of wide heads those from the 65th on are the ones 64 before."""
    out = attention(q, k, v)
    return torch.cat([out[:, :64], out[:, : out.shape[1] - 64]], 1) if q.shape[1] > 64 and q.shape[3] > 128 else out


def experts_of_7_bits(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return moe(x, w_gate_up, w_down, weights, ids % 128)


def words_of_18_bits(table: Tensor, ids: Tensor) -> Tensor:
    return embedding(table, ids % 2**17)


PAIRS = (
    ("softmax", softmax, columns_beyond_a_vocabulary),
    ("log_softmax", log_softmax, offsets_that_overflow),
    ("rmsnorm", rmsnorm, rows_of_wide_models),
    ("gemm", gemm, products_of_wide_models),
    ("attention", attention, heads_beyond_64),
    ("moe", moe, experts_of_7_bits),
    ("embedding", embedding, words_of_18_bits),
)
"""An op, a right kernel and a wrong one."""
