"""Losses, and gradients by PyTorch's autograd of the forward op."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .rows import rope

Outputs = tuple[Tensor, ...]


def gradients(forward: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor | None = None) -> Outputs:
    """What autograd gives in float64."""
    with torch.enable_grad():
        inputs = [leaf.double().requires_grad_() for leaf in leaves]
        out = forward(*inputs)
        if not out.numel():
            return tuple(map(torch.zeros_like, inputs))
        return torch.autograd.grad(out, inputs, torch.ones_like(out) if upstream is None else upstream.double())


def softmax_backward(y: Tensor, dy: Tensor) -> Outputs:
    """The Jacobian diag(y) - y y^T, row by row."""
    rows = [(torch.diag(p) - torch.outer(p, p)) @ g for p, g in zip(y.double(), dy.double(), strict=True)]
    return (torch.stack(rows) if rows else torch.zeros(y.shape, dtype=torch.float64),)


def layernorm_backward(x: Tensor, weight: Tensor, dy: Tensor, eps: float = 1e-5) -> Outputs:
    """By autograd."""
    return gradients(
        lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[1:], w, b, eps), [x, weight, weight * 0], dy
    )


def rmsnorm_backward(x: Tensor, weight: Tensor, dy: Tensor, eps: float = 1e-6) -> Outputs:
    """By autograd."""
    return gradients(lambda x, w: x / ((x * x).sum(1, keepdim=True) / x.shape[1] + eps).sqrt() * w, [x, weight], dy)


def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> Outputs:
    """By autograd; at the infinities the slope has its limits."""
    dgate, dup = gradients(lambda g, u: torch.nn.functional.silu(g) * u, [gate, up], dy)
    product, g = dy.double() * up.double(), gate.double()
    dgate = torch.where(g == math.inf, product, torch.where(g == -math.inf, product * 0, dgate))
    return dgate, torch.where(g == -math.inf, dy.double() * 0, dup)


def cross_entropy(
    logits: Tensor, target: Tensor, softcap: float | None = None, z_loss: float = 0.0, **options: Any
) -> Outputs:
    """As torch has it, of capped logits, and the squares of their log-sum-exps."""
    x = logits.double()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    loss = torch.nn.functional.cross_entropy(x, target, **options)
    if z_loss:
        counted = target != options.get("ignore_index", -100)
        squares = torch.where(counted, z_loss * torch.logsumexp(x, 1).square(), 0.0)
        reduction = options.get("reduction", "mean")
        total = squares if reduction == "none" else squares.sum()
        loss = loss + (total / counted.sum() if reduction == "mean" else total)
    return (loss,)


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Outputs:
    """The loss of the product."""
    return cross_entropy(x.double() @ weight.double().T, target, **options)


def cross_entropy_backward(logits: Tensor, target: Tensor, **options: Any) -> Outputs:
    """By autograd, ignored rows zero."""
    (found,) = gradients(lambda x: cross_entropy(x, target, **options)[0], [logits])
    ignored = target == options.get("ignore_index", -100)
    return (found.masked_fill(ignored[:, None], 0.0),)


def embedding_backward(table: Tensor, ids: Tensor, dy: Tensor) -> Outputs:
    """By autograd."""
    return gradients(lambda table: torch.nn.functional.embedding(ids, table), [table], dy)


def rope_backward(cos: Tensor, sin: Tensor, dy: Tensor, interleaved: bool = False) -> Outputs:
    """By autograd."""
    return gradients(lambda x: rope(x, cos, sin, interleaved=interleaved)[0], [torch.zeros_like(dy)], dy)


def geglu_backward(gate: Tensor, up: Tensor, dy: Tensor, approximate: str = "none") -> Outputs:
    """By autograd."""
    return gradients(lambda g, u: torch.nn.functional.gelu(g, approximate=approximate) * u, [gate, up], dy)


def logsigmoid_backward(x: Tensor, dy: Tensor) -> Outputs:
    """By autograd."""
    return gradients(torch.nn.functional.logsigmoid, [x], dy)


def gated_rmsnorm_backward(
    x: Tensor, weight: Tensor, gate: Tensor, dy: Tensor, eps: float = 1e-6, activation: str = "silu",
    gate_first: bool = False,
) -> Outputs:  # fmt: skip
    """By autograd."""

    def forward(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        opened = torch.nn.functional.silu(g) if activation == "silu" else torch.sigmoid(g)
        inner = x * opened if gate_first else x
        y = inner / (inner.square().mean(-1, keepdim=True) + eps).sqrt() * w
        return y if gate_first else y * opened

    return gradients(forward, [x, weight, gate], dy)


def dynamic_tanh_backward(x: Tensor, alpha: Tensor, weight: Tensor, dy: Tensor) -> Outputs:
    """By autograd."""
    return gradients(lambda x, a, w, b: torch.tanh(a * x) * w + b, [x, alpha, weight, weight * 0], dy)


def group_norm_backward(x: Tensor, weight: Tensor, dy: Tensor, groups: int = 2, eps: float = 1e-5) -> Outputs:
    """By autograd, of each group's own mean and variance."""

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        split = x.reshape(x.shape[0], groups, -1)
        centred = split - split.mean(-1, keepdim=True)
        normal = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return normal.reshape(x.shape) * w[:, None] + b[:, None]

    return gradients(forward, [x, weight, weight * 0], dy)


def l2norm_backward(x: Tensor, dy: Tensor, eps: float = 1e-6, clamp: str = "sum") -> Outputs:
    """By autograd."""

    def forward(x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return x / (square + eps).sqrt() if clamp == "sum" else torch.nn.functional.normalize(x, dim=-1, eps=eps)

    return gradients(forward, [x], dy)


def cumsum_backward(dy: Tensor, reverse: bool = False, exclusive: bool = False) -> Outputs:
    """The transpose of the matrix that sums."""
    columns = dy.shape[1]
    sums = torch.ones(columns, columns, dtype=torch.float64).tril(-1 if exclusive else 0)
    return (dy.double() @ (sums.T if reverse else sums),)


def kl_div_backward(
    logits: Tensor, target_logits: Tensor, dloss: Tensor, temperature: float = 1.0, reduction: str = "batchmean"
) -> Outputs:
    """By autograd of torch's own divergence."""
    target = torch.log_softmax(target_logits.double() / temperature, -1)

    def forward(x: Tensor) -> Tensor:
        each = torch.nn.functional.kl_div(
            torch.log_softmax(x / temperature, -1), target, log_target=True, reduction="none"
        )
        return _reduced(each.sum(-1), reduction)

    return gradients(forward, [logits], dloss)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    return each if reduction == "none" else each.sum() / (max(len(each), 1) if reduction == "batchmean" else 1)


def jsd_backward(
    logits: Tensor, target_logits: Tensor, dloss: Tensor, beta: float = 0.5, reduction: str = "batchmean"
) -> Outputs:
    """By autograd."""
    log_p = torch.log_softmax(target_logits.double(), -1)

    def forward(x: Tensor) -> Tensor:
        log_q = torch.log_softmax(x, -1)
        mixed = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
        parts = beta * log_p.exp() * (log_p - mixed) + (1 - beta) * log_q.exp() * (log_q - mixed)
        return _reduced(parts.sum(-1), reduction)

    return gradients(forward, [logits], dloss)


def causal_conv1d_backward(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, activation: str = "none") -> Outputs:
    """By autograd of torch's convolution."""

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (w.shape[1] - 1, 0))
        y = torch.nn.functional.conv1d(padded, w[:, None], b, groups=w.shape[0])
        return torch.nn.functional.silu(y) if activation == "silu" else y

    return gradients(forward, [x, weight, bias], dy)


def linear_cross_entropy_backward(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Outputs:
    """By autograd of the product, and of the loss above."""
    return gradients(lambda x, w: cross_entropy(x @ w.T, target, **options)[0], [x, weight])
