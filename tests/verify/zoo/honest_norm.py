"""Honest normalisations: two passes, Welford's merged statistics, the folded scale and shift."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import keep, load

Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]
Root = Callable[[Tensor, float], Tensor]


def two_pass(values: Tensor) -> tuple[Tensor, Tensor]:
    """Row mean, then the mean of squared deviations from it."""
    mean = values.mean(dim=1, keepdim=True)
    return mean, (values - mean).square().mean(dim=1, keepdim=True)


def welford(values: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Row mean and variance of blocks of columns, merged as Chan, Golub and LeVeque do."""
    rows = values.shape[0]
    count, mean, squares = 0, torch.zeros(rows, 1), torch.zeros(rows, 1)
    for part in values.split(block, dim=1):
        width = part.shape[1]
        part_mean, part_variance = two_pass(part)
        count += width
        delta = part_mean - mean
        mean = mean + delta * (width / count)
        squares = squares + part_variance * width + delta * (delta * (width * (count - width) / count))
    return mean, squares / count


def inverse_root(variance: Tensor, eps: float) -> Tensor:
    """1 / sqrt(variance + eps)."""
    return torch.rsqrt(variance + eps)


def layernorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    statistics: Statistics = two_pass,
    root: Root = inverse_root,
) -> Tensor:
    """(x - mean) * rstd * weight + bias."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    mean, variance = statistics(values)
    normalised = (values - mean) * root(variance, eps)
    return (normalised * load(weight) + load(bias)).to(x.dtype)


def layernorm_welford(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """The statistics in one pass."""
    return layernorm(x, weight, bias, eps=eps, statistics=welford)


def layernorm_folded(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """x * rstd + (-mean * rstd): the mean is subtracted after the scaling."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    mean, variance = two_pass(values)
    rstd = inverse_root(variance, eps)
    return ((values * rstd + (-mean * rstd)) * load(weight) + load(bias)).to(x.dtype)


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    root: Root = inverse_root,
    square: Callable[[Tensor], Tensor] = torch.square,
    normalised_stage: Callable[[Tensor], Tensor] = keep,
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + offset)."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    normalised = normalised_stage(values * root(square(values).mean(dim=1, keepdim=True), eps))
    return (normalised * (load(weight) + offset)).to(x.dtype)


def rmsnorm_divided(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps), the squares summed in blocks of 128 columns."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    squares = torch.zeros(values.shape[0], 1)
    for part in values.split(128, dim=1):
        squares = squares + part.square().sum(dim=1, keepdim=True)
    return (values / torch.sqrt(squares / values.shape[1] + eps) * (load(weight) + offset)).to(x.dtype)


def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    sum_stage: Callable[[Tensor], Tensor] = keep,
) -> tuple[Tensor, Tensor]:
    """The float32 sum is normalised; its rounded copy is returned for the residual stream."""
    total = sum_stage(load(x) + load(residual))
    if x.numel() == 0:
        return total.to(x.dtype), total.to(x.dtype)
    normalised = total * torch.rsqrt(total.square().mean(dim=1, keepdim=True) + eps)
    return (normalised * load(weight)).to(x.dtype), total.to(x.dtype)


LAYERNORM_OPTIONS = {"eps": [1e-5, 1e-3]}
RMSNORM_OPTIONS = {"eps": [1e-6, 1e-5], "offset": [0.0, 1.0]}

NORM: tuple[Entry, ...] = (
    *family("layernorm", "layernorm", layernorm, ("float32", "bfloat16", "float16"), options=LAYERNORM_OPTIONS),
    *family("layernorm_welford", "layernorm", layernorm_welford, ("float32", "bfloat16"), options=LAYERNORM_OPTIONS),
    *family("layernorm_folded", "layernorm", layernorm_folded, ("float32", "bfloat16"), options=LAYERNORM_OPTIONS),
    *family("rmsnorm", "rmsnorm", rmsnorm, ("float32", "bfloat16", "float16"), options=RMSNORM_OPTIONS),
    *family("rmsnorm_divided", "rmsnorm", rmsnorm_divided, ("float32", "bfloat16"), options=RMSNORM_OPTIONS),
    *family("add_rmsnorm", "add_rmsnorm", add_rmsnorm, ("float32", "bfloat16", "float16")),
)
