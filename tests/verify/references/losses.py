"""Losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

PAIR = "x[T,D], y[T,D] -> l[]"


def token_loss(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, t)


def _loss_by_blocks(x: Any, t: Any) -> Any:
    most = x.amax(-1)
    total = torch.zeros_like(most)
    for part in x.split(8, -1):
        total += torch.exp(part - most[:, None]).sum(-1)
    return (torch.log(total) + most - x.gather(-1, t[:, None])[:, 0]).mean()


def _loss_of(x: Any, t: Any) -> Any:
    return torch.logsumexp(x, -1) - x[torch.arange(len(t)), t]


def binary_loss(x: Any, t: Any) -> Any:
    return F.binary_cross_entropy_with_logits(x, torch.sigmoid(t), reduction="none")


def _stable_binary(x: Any, t: Any) -> Any:
    return x.clamp(min=0) - x * torch.sigmoid(t) + torch.log1p(torch.exp(-x.abs()))


def _naive_binary(x: Any, t: Any) -> Any:
    p, y = torch.sigmoid(x), torch.sigmoid(t)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p))


def batch_divergence(x: Any, y: Any) -> Any:
    return F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean")


def _divergence_by_hand(x: Any, y: Any) -> Any:
    p = torch.softmax(y, -1)
    return (torch.xlogy(p, p) - p * torch.log_softmax(x, -1)).sum() / x.shape[0]


def hinge(x: Any, y: Any) -> Any:
    return torch.relu(1 - x * y).mean()


def focal(x: Any, t: Any) -> Any:
    log_p = F.log_softmax(x, -1).gather(-1, t[:, None])[:, 0]
    return -((1 - log_p.exp()) ** 2) * log_p


def _focal(x: Any, t: Any, power: int = 2) -> Any:
    log_p = x[torch.arange(len(t)), t] - torch.logsumexp(x, -1)
    return (1 - log_p.exp()).pow(power) * -log_p


def contrastive(a: Any, b: Any) -> Any:
    scores = a @ b.T / 0.5
    return F.cross_entropy(scores, torch.arange(a.shape[0]))


def _contrastive(a: Any, b: Any) -> Any:
    scores = (a @ b.T) * 2.0
    return (torch.logsumexp(scores, -1) - scores.diagonal()).sum() / a.shape[0]


CASES = (
    Case(token_loss, "x[T,V], t:int64[T]=index(V) -> l[]", (
        _loss_by_blocks, lambda x, t: _loss_of(x, t).sum() / len(t),
    ), {
        "the label after": lambda x, t: _loss_of(x, (t + 1) % x.shape[1]).mean(),
        "no shift": lambda x, t: (x.exp().sum(-1).log() - x.gather(-1, t[:, None])[:, 0]).mean(),
        "the last row is left out": lambda x, t: _loss_of(x, t)[:-1].sum() / len(t),
    }),
    Case(binary_loss, "x[T,D], t[T,D] -> l[T,D]", (
        _stable_binary, lambda x, t: F.softplus(-x) + (1 - torch.sigmoid(t)) * x,
    ), {
        "logarithms of what vanishes": _naive_binary,
        "targets as they are": lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none"),
        "half of it": lambda x, t: 0.5 * _stable_binary(x, t),
    }),
    Case(batch_divergence, PAIR, (
        _divergence_by_hand,
        lambda x, y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="sum", log_target=True) / x.shape[0],
    ), {
        "the mean of all": lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="none").mean(),
        "the other way round": lambda x, y: batch_divergence(y, x),
        "cross-entropy": lambda x, y: -(torch.softmax(y, -1) * torch.log_softmax(x, -1)).sum() / x.shape[0],
    }),
    Case(hinge, PAIR, (
        lambda x, y: torch.clamp(1 - x * y, min=0).sum() / x.numel(),
        lambda x, y: torch.stack([torch.relu(1 - a * b).sum() for a, b in zip(x, y, strict=True)]).sum() / x.numel(),
    ), {
        "squared": lambda x, y: torch.relu(1 - x * y).square().mean(),
        "a narrower margin": lambda x, y: torch.relu(0.9 - x * y).mean(),
        "means of rows, the last one twice": lambda x, y: torch.cat(
            [torch.relu(1 - x * y), torch.relu(1 - x * y)[-1:]]).mean(),
    }),
    Case(focal, "x[T,V], t:int64[T]=index(V) -> l[T]", (_focal,), {
        "not squared": lambda x, t: _focal(x, t, 1),
        "unweighted": lambda x, t: _focal(x, t, 0),
        "of probabilities in bfloat16": lambda x, t: F.cross_entropy(x, t, reduction="none")
        * (1 - F.softmax(x, -1).bfloat16().float().gather(-1, t[:, None])[:, 0]) ** 2,
    }),
    Case(contrastive, "a[T,D], b[T,D] -> l[]", (_contrastive,), {
        "columns in place of rows": lambda a, b: F.cross_entropy(b @ a.T / 0.5, torch.arange(a.shape[0])),
        "another temperature": lambda a, b: F.cross_entropy(a @ b.T, torch.arange(a.shape[0])),
        "scores in bfloat16": lambda a, b: F.cross_entropy((a @ b.T).bfloat16().float() * 2, torch.arange(len(a))),
    }, asked={"shapes": {"T": [1, 2, 7, 16, 33], "D": [2, 7, 33]}}),
)  # fmt: skip
