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
