"""Honest cross-entropy and its gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Entry, families
from .honest_softmax import decay, online_statistics, shift_of
from .numerics import keep, load

Stage = Callable[[Tensor], Tensor]
DTYPES = ("float32", "bfloat16", "float16")


def reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Summed over the tokens that count; their mean is NaN where none does."""
    losses = torch.where(counted, losses, torch.zeros_like(losses))
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counted.sum() if reduction == "mean" else total


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    reduce: Callable[[Tensor, Tensor, str], Tensor] = reduced,
    lse_stage: Stage = keep,
) -> Tensor:
    """(1 - s) (lse - x_label) + s (lse - mean x), the log-sum-exp in one pass over blocks of the vocabulary."""
    values = load(logits)
    counted = target != ignore_index
    label = torch.where(counted, target, torch.zeros_like(target))
    maximum, total = online_statistics(values, 64, decay)
    lse = lse_stage((shift_of(maximum) + torch.log(total)).squeeze(1))
    losses = lse - values.gather(1, label[:, None]).squeeze(1)
    if label_smoothing:
        losses = (1.0 - label_smoothing) * losses + label_smoothing * (lse - values.mean(dim=1))
    return reduce(losses, counted, reduction)


def cross_entropy_torch(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    """PyTorch's own, in float32."""
    return torch.nn.functional.cross_entropy(load(logits), target, **options)


softmax = partial(torch.softmax, dim=1)


def softmax_from_lse(values: Tensor) -> Tensor:
    """exp(x - lse): beside a logit of +inf zero, where a quotient is NaN."""
    return torch.exp(values - torch.logsumexp(values, dim=1, keepdim=True))


def number_of(counted: Tensor, reduction: str) -> float:
    """What the mean divides by."""
    return float(max(int(counted.sum()), 1)) if reduction == "mean" else 1.0


def cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    shares: Stage = softmax,
    share_stage: Stage = keep,
    blank: bool = True,
) -> Tensor:
    """softmax less the smoothed label, times one over the number of labels; ignored rows are blanked."""
    if logits.numel() == 0:
        return torch.zeros_like(logits)
    counted = target != ignore_index
    label = torch.where(counted, target, torch.zeros_like(target))[:, None]
    gradient = share_stage(shares(load(logits))) - label_smoothing / logits.shape[1]
    gradient.scatter_add_(1, label, torch.full(label.shape, label_smoothing - 1.0))
    gradient = gradient * (1.0 / number_of(counted, reduction))
    if blank:
        gradient = torch.where(counted[:, None], gradient, torch.zeros_like(gradient))
    return gradient.to(logits.dtype)


def cross_entropy_backward_from_logs(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """As autograd does: the gradient of log-softmax, less exp(log p) times its sum."""
    if logits.numel() == 0:
        return torch.zeros_like(logits)
    counted = target != ignore_index
    label = torch.where(counted, target, torch.zeros_like(target))[:, None]
    size = logits.shape[1]
    upstream = 1.0 / number_of(counted, reduction)
    outer = torch.full(logits.shape, -label_smoothing / size * upstream)
    outer.scatter_add_(1, label, torch.full(label.shape, (label_smoothing - 1.0) * upstream))
    logs = torch.log_softmax(load(logits), dim=1)
    gradient = outer - torch.exp(logs) * outer.sum(dim=1, keepdim=True)
    return torch.where(counted[:, None], gradient, torch.zeros_like(gradient)).to(logits.dtype)


LOSS_OPTIONS = {
    "ignore_index": [-100, 0],
    "label_smoothing": [0.0, 0.125],
    "reduction": ["mean", "sum", "none"],
}

FROM_LSE = partial(cross_entropy_backward, shares=softmax_from_lse)

LOSS: tuple[Entry, ...] = (
    *families(
        "cross_entropy", ("", cross_entropy, DTYPES), ("_torch", cross_entropy_torch, DTYPES), options=LOSS_OPTIONS
    ),
    *families(
        "cross_entropy_backward",
        ("", cross_entropy_backward, DTYPES),
        ("_from_lse", FROM_LSE, DTYPES[:2]),
        ("_from_logs", cross_entropy_backward_from_logs, DTYPES),
        options=LOSS_OPTIONS,
    ),
)
