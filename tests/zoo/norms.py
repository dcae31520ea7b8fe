"""Norms and their gradients: two passes, Welford's merged statistics, folded scale and shift; with one fault each."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .entry import ALL, honest, planter
from .numerics import Stage, in_float32, keep, load, to_bfloat16, to_float16
from .softmax import blocked_sum

Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]


def two_pass(values: Tensor) -> tuple[Tensor, Tensor]:
    """Row mean, then the mean of squared deviations from it."""
    mean = values.mean(dim=1, keepdim=True)
    return mean, (values - mean).square().mean(dim=1, keepdim=True)


def one_pass(values: Tensor) -> tuple[Tensor, Tensor]:
    """E[x^2] - E[x]^2, which cancels when the mean is large."""
    mean = values.mean(dim=1, keepdim=True)
    return mean, values.square().mean(dim=1, keepdim=True) - mean.square()


def padded_to_eight(values: Tensor) -> tuple[Tensor, Tensor]:
    """Columns are padded with zeros to a multiple of eight, and the padding's deviations from the mean are counted."""
    mean, variance = two_pass(values)
    return mean, variance + mean.square() * (-values.shape[1] % 8 / max(values.shape[1], 1))


def welford(values: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """Row mean and variance of blocks of columns, merged as Chan, Golub and LeVeque do."""
    rows = values.shape[0]
    count, mean, squares = 0, torch.zeros(rows, 1), torch.zeros(rows, 1)
    for part in values.split(block, dim=1) if values.shape[1] else ():
        width = part.shape[1]
        part_mean, part_variance = two_pass(part)
        count += width
        delta = part_mean - mean
        mean = mean + delta * (width / count)
        squares = squares + part_variance * width + delta * (delta * (width * (count - width) / count))
    return mean, squares / max(count, 1)


@in_float32
def layernorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    statistics: Statistics = two_pass,
    folded: bool = False,
) -> Tensor:
    """(x - mean) * rstd * weight + bias; folded: x * rstd + (-mean * rstd)."""
    mean, variance = statistics(x)
    rstd = torch.rsqrt(variance + eps)
    return (x * rstd + (-mean * rstd) if folded else (x - mean) * rstd) * weight + bias


@in_float32
def rmsnorm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + offset)."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps) * (weight + offset)


@in_float32
def rmsnorm_divided(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps), the squares summed in blocks of 128 columns."""
    return x / torch.sqrt(blocked_sum(x.square(), 128) / max(x.shape[1], 1) + eps) * (weight + offset)


@in_float32
def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The float32 sum is normalised; its rounded copy is returned for the residual stream."""
    total = x + residual
    return total * torch.rsqrt(total.square().mean(dim=1, keepdim=True) + eps) * weight, total


def rows_summed(terms: Tensor, stage: Stage = keep, block: int = 16) -> Tensor:
    """Column sums [N], partial sums of blocks of rows first, each through ``stage``."""
    total = torch.zeros(terms.shape[1])
    for part in terms.split(block, dim=0) if terms.shape[0] else ():
        total = stage(total + part.sum(dim=0))
    return total


@in_float32
def layernorm_backward(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    *,
    eps: float = 1e-5,
    statistics: Statistics = two_pass,
    correlate: Stage = keep,
    rows: Stage = keep,
) -> tuple[Tensor, ...]:
    """dx row by row, dweight and dbias by blocks of rows."""
    mean, variance = statistics(x)
    root = torch.rsqrt(variance + eps)
    normalised, grown = (x - mean) * root, dy * weight
    first = grown.mean(dim=1, keepdim=True)
    second = correlate((grown * normalised).mean(dim=1, keepdim=True))
    dx = (grown - first - normalised * second) * root
    return dx, rows_summed(dy * normalised, rows), rows_summed(dy, rows)


@in_float32
def layernorm_backward_apex(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """(N g - sum g - h sum g h) (r / N), all rows' sums at once."""
    columns = x.shape[1]
    mean, variance = two_pass(x)
    root = torch.rsqrt(variance + eps)
    normalised, grown = (x - mean) * root, dy * weight
    inner = columns * grown - blocked_sum(grown) - normalised * blocked_sum(grown * normalised)
    return inner * (root / max(columns, 1)), (dy * normalised).sum(dim=0), dy.sum(dim=0)


@in_float32
def layernorm_backward_torch(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """PyTorch's own, in float32."""
    with torch.enable_grad():
        leaves = [part.requires_grad_() for part in (x, weight, torch.zeros(weight.shape))]
        out = torch.nn.functional.layer_norm(leaves[0], x.shape[1:], leaves[1], leaves[2], eps)
        return torch.autograd.grad(out, leaves, dy)


@in_float32
def rmsnorm_backward(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    *,
    eps: float = 1e-6,
    correlate: Stage = keep,
    rows: Stage = keep,
    normalised_stage: Stage = keep,
) -> tuple[Tensor, Tensor]:
    """r (g - h mean(g h))."""
    root = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + eps)
    normalised, grown = normalised_stage(x * root), dy * weight
    dx = (grown - normalised * correlate((grown * normalised).mean(dim=1, keepdim=True))) * root
    return dx, rows_summed(dy * normalised, rows)


@in_float32
def rmsnorm_backward_factored(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """r (g - x (r^2 mean(g x))), with sums over x itself."""
    columns = max(x.shape[1], 1)
    root = 1.0 / torch.sqrt(blocked_sum(x.square()) / columns + eps)
    grown = dy * weight
    dx = (grown - x * (root * root * (blocked_sum(grown * x) / columns))) * root
    return dx, rows_summed(dy * (x * root))


FOLDED, WELFORD = partial(layernorm, folded=True), partial(layernorm, statistics=welford)
EPS, OFFSET = {"eps": [1e-5, 1e-2]}, {"eps": [1e-6, 1e-5], "offset": [0.0, 1.0]}

HONEST = (
    *honest(
        "layernorm",
        ("", layernorm),
        ("_welford", WELFORD, ALL[:2]),
        ("_folded", FOLDED, ALL[:2]),
        options={"eps": [1e-5, 1e-3]},
    ),
    *honest("rmsnorm", ("", rmsnorm), ("_divided", rmsnorm_divided, ALL[:2]), options=OFFSET),
    *honest("add_rmsnorm", ("", add_rmsnorm)),
    *honest(
        "layernorm_backward",
        ("", layernorm_backward),
        ("_apex", layernorm_backward_apex, ALL[:2]),
        ("_torch", layernorm_backward_torch, ALL[:2]),
        options=EPS,
    ),
    *honest("rmsnorm_backward", ("", rmsnorm_backward), ("_factored", rmsnorm_backward_factored, ALL[:2]), options=EPS),
)
plant = planter(HONEST)


def layernorm_default_eps(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """The option `eps` isn't passed on."""
    return layernorm(x, weight, bias)


def weighted_dweight(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """dweight has the weight in it."""
    dx, dweight, dbias = layernorm_backward(x, weight, dy, eps=eps)
    return dx, (load(dweight) * load(weight)).to(x.dtype), dbias


def doubled(term: Tensor) -> Tensor:
    return 2.0 * term


FAULTY = (
    plant("layernorm_padding_counted", "layernorm-bfloat16", statistics=padded_to_eight),
    plant("layernorm_default_eps", "layernorm-float32", layernorm_default_eps),
    plant("layernorm_backward_one_pass", "layernorm_backward-float32", statistics=one_pass),
    plant("layernorm_backward_correlation_twice", "layernorm_backward-float16", correlate=doubled),
    plant("layernorm_backward_dweight_in_bfloat16", "layernorm_backward-bfloat16", rows=to_bfloat16),
    plant("layernorm_backward_dweight_in_float16", "layernorm_backward-float16", rows=to_float16),
    plant("layernorm_backward_weighted_dweight", "layernorm_backward-bfloat16", weighted_dweight),
    plant("rmsnorm_backward_correlation_twice", "rmsnorm_backward-float16", correlate=doubled),
    plant("rmsnorm_backward_normalised_in_bfloat16", "rmsnorm_backward-bfloat16", normalised_stage=to_bfloat16),
    plant("rmsnorm_backward_dweight_in_bfloat16", "rmsnorm_backward-bfloat16", rows=to_bfloat16),
)
