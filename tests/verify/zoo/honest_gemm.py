"""Honest GEMM kernels: float32 accumulation in several orders."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import Store, keep, load, nearest


def gemm(a: Tensor, b: Tensor, *, store: Store = nearest) -> Tensor:
    """One float32 product."""
    return store(load(a) @ load(b), a.dtype)


def gemm_blocked(
    a: Tensor, b: Tensor, *, block: int = 64, accumulator_stage: Callable[[Tensor], Tensor] = keep
) -> Tensor:
    """A loop over blocks of K that adds to one accumulator."""
    left, right = load(a), load(b)
    accumulator = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], block):
        accumulator = accumulator_stage(accumulator + left[:, start : start + block] @ right[start : start + block])
    return accumulator.to(a.dtype)


def gemm_split_k(a: Tensor, b: Tensor, *, splits: int = 4) -> Tensor:
    """K cut into a few parts, each with an accumulator of its own, added at the end."""
    left, right = load(a), load(b)
    width = max(1, -(-a.shape[1] // splits))
    total = torch.zeros(a.shape[0], b.shape[1])
    for start in range(0, a.shape[1], width):
        total = total + left[:, start : start + width] @ right[start : start + width]
    return total.to(a.dtype)


def gemm_reversed(a: Tensor, b: Tensor) -> Tensor:
    """One outer product after another, from the last place of K to the first."""
    left, right = load(a), load(b)
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in reversed(range(a.shape[1])):
        total.addcmul_(left[:, k : k + 1], right[k : k + 1])
    return total.to(a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The bias is added in float32, before the one rounding."""
    return (load(x) @ load(weight).T + load(bias)).to(x.dtype)


def linear_bias_first(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The accumulator starts with the bias."""
    values, weights = load(x), load(weight)
    total = load(bias).repeat(x.shape[0], 1)
    for start in range(0, x.shape[1], 64):
        total = total + values[:, start : start + 64] @ weights[:, start : start + 64].T
    return total.to(x.dtype)


ALL = ("float32", "bfloat16", "float16")

GEMM: tuple[Entry, ...] = (
    *family("gemm", "gemm", gemm, ALL),
    *family("gemm_blocked", "gemm", gemm_blocked, ALL),
    *family("gemm_blocked_128", "gemm", partial(gemm_blocked, block=128), ALL),
    *family("gemm_split_k", "gemm", gemm_split_k, ALL),
    *family("gemm_reversed", "gemm", gemm_reversed, ALL),
    *family("linear", "linear", linear, ALL),
    *family("linear_bias_first", "linear", linear_bias_first, ALL),
)
