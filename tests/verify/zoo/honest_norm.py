"""Honest normalisations: two passes, Welford's merged statistics, the folded scale and shift."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import load

Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]


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


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5, statistics: Statistics = two_pass
) -> Tensor:
    """(x - mean) * rstd * weight + bias."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    mean, variance = statistics(values)
    normalised = (values - mean) * torch.rsqrt(variance + eps)
    return (normalised * load(weight) + load(bias)).to(x.dtype)


def layernorm_folded(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """x * rstd + (-mean * rstd): the mean is subtracted after the scaling."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    mean, variance = two_pass(values)
    rstd = torch.rsqrt(variance + eps)
    return ((values * rstd + (-mean * rstd)) * load(weight) + load(bias)).to(x.dtype)


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + offset)."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    normalised = values * torch.rsqrt(values.square().mean(dim=1, keepdim=True) + eps)
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


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The float32 sum is normalised; its rounded copy is returned for the residual stream."""
    total = load(x) + load(residual)
    if x.numel() == 0:
        return total.to(x.dtype), total.to(x.dtype)
    normalised = total * torch.rsqrt(total.square().mean(dim=1, keepdim=True) + eps)
    return (normalised * load(weight)).to(x.dtype), total.to(x.dtype)


ALL = ("float32", "bfloat16", "float16")
LAYERNORM_OPTIONS = {"eps": [1e-5, 1e-3]}
RMSNORM_OPTIONS = {"eps": [1e-6, 1e-5], "offset": [0.0, 1.0]}

NORM: tuple[Entry, ...] = (
    *family("layernorm", "layernorm", layernorm, ALL, options=LAYERNORM_OPTIONS),
    *family(
        "layernorm_welford", "layernorm", partial(layernorm, statistics=welford), ALL[:2], options=LAYERNORM_OPTIONS
    ),
    *family("layernorm_folded", "layernorm", layernorm_folded, ALL[:2], options=LAYERNORM_OPTIONS),
    *family("rmsnorm", "rmsnorm", rmsnorm, ALL, options=RMSNORM_OPTIONS),
    *family("rmsnorm_divided", "rmsnorm", rmsnorm_divided, ALL[:2], options=RMSNORM_OPTIONS),
    *family("add_rmsnorm", "add_rmsnorm", add_rmsnorm, ALL),
)
