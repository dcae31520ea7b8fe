"""Honest softmax, log-softmax and logsumexp: shifted, blocked with an online maximum, and folded into base two."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import Store, keep, load, nearest

LOG2_E = math.log2(math.e)


def sum_of_rows(weights: Tensor) -> Tensor:
    """The denominators, [R,1]."""
    return weights.sum(dim=1, keepdim=True)


def softmax_shifted(
    x: Tensor,
    *,
    prepare: Callable[[Tensor], Tensor] = keep,
    sum_rows: Callable[[Tensor], Tensor] = sum_of_rows,
    store: Store = nearest,
) -> Tensor:
    """The textbook form: subtract the row's maximum, exponentiate, divide by the sum."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = prepare(load(x))
    weights = torch.exp(values - values.amax(dim=1, keepdim=True))
    return store(weights / sum_rows(weights), x.dtype)


def softmax_base_two(x: Tensor) -> Tensor:
    """exp folded into exp2; the difference is taken first, since x * log2(e) - m * log2(e) overflows and cancels."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    values = load(x)
    weights = torch.exp2((values - values.amax(dim=1, keepdim=True)) * LOG2_E)
    return (weights * torch.reciprocal(weights.sum(dim=1, keepdim=True))).to(x.dtype)


def shift_of(maximum: Tensor) -> Tensor:
    """The maximum where it can be subtracted: zero for a row of -inf, as -inf - (-inf) is NaN."""
    return torch.where(maximum == -math.inf, torch.zeros_like(maximum), maximum)


def decay(old: Tensor, new: Tensor) -> Tensor:
    """The factor that turns a sum relative to the old maximum into one relative to the new."""
    return torch.exp(old - new)


def online_statistics(values: Tensor, block: int, rescale: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Row maximum and sum of exponentials in one pass over blocks of columns."""
    maximum = torch.full((values.shape[0], 1), -math.inf)
    total = torch.zeros(values.shape[0], 1)
    for part in values.split(block, dim=1) if values.shape[1] else ():
        new = torch.maximum(maximum, part.amax(dim=1, keepdim=True))
        shift = shift_of(new)
        total = total * rescale(maximum, shift) + torch.exp(part - shift).sum(dim=1, keepdim=True)
        maximum = new
    return maximum, total


def softmax_online(
    x: Tensor, *, block: int = 64, rescale: Callable[[Tensor, Tensor], Tensor] = decay, store: Store = nearest
) -> Tensor:
    """Two passes: the statistics online, block by block, then the quotients."""
    values = load(x)
    maximum, total = online_statistics(values, block, rescale)
    return store(torch.exp(values - shift_of(maximum)) / total, x.dtype)


def log_softmax_subtracted(x: Tensor) -> Tensor:
    """x - m - log(sum)."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    shifted = load(x)
    shifted = shifted - shifted.amax(dim=1, keepdim=True)
    return (shifted - torch.log(torch.exp(shifted).sum(dim=1, keepdim=True))).to(x.dtype)


def log_softmax_lse(x: Tensor) -> Tensor:
    """x - lse, where m + log(sum) is rounded once more than in `log_softmax_subtracted`."""
    values = load(x)
    maximum, total = online_statistics(values, 64, decay)
    return (values - (shift_of(maximum) + torch.log(total))).to(x.dtype)


def logsumexp_shifted(x: Tensor) -> Tensor:
    """m + log(sum(exp(x - m))); an infinite maximum is the answer itself, and so is -inf of a row without columns."""
    if x.shape[1] == 0:
        return torch.full(x.shape[:1], -math.inf, dtype=x.dtype)
    values = load(x)
    maximum = values.amax(dim=1)
    total = torch.exp(values - maximum[:, None]).sum(dim=1)
    return torch.where(maximum.isinf(), maximum, maximum + torch.log(total)).to(x.dtype)


def logsumexp_online(x: Tensor) -> Tensor:
    """One pass over blocks of columns."""
    maximum, total = online_statistics(load(x), 64, decay)
    return torch.where(maximum.isinf(), maximum, maximum + torch.log(total)).squeeze(1).to(x.dtype)


SOFTMAX: tuple[Entry, ...] = (
    *family("softmax_shifted", "softmax", softmax_shifted, ("float32", "bfloat16", "float16")),
    *family("softmax_online", "softmax", softmax_online, ("float32", "bfloat16", "float16")),
    *family("softmax_base_two", "softmax", softmax_base_two, ("float32", "bfloat16", "float16")),
    *family("log_softmax_subtracted", "log_softmax", log_softmax_subtracted, ("float32", "bfloat16", "float16")),
    *family("log_softmax_lse", "log_softmax", log_softmax_lse, ("float32", "bfloat16", "float16")),
    *family("logsumexp_shifted", "logsumexp", logsumexp_shifted, ("float32", "bfloat16", "float16")),
    *family("logsumexp_online", "logsumexp", logsumexp_online, ("float32", "bfloat16")),
)
