"""Losses, and gradients by PyTorch's autograd of the forward op."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import rows

Outputs = tuple[Tensor, ...]


def gradients(forward: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor | None = None) -> Outputs:
    """What autograd gives in float64."""
    with torch.enable_grad():
        inputs = [leaf.double().requires_grad_() for leaf in leaves]
        out = forward(*inputs)
        if not out.numel():
            return tuple(map(torch.zeros_like, inputs))
        return torch.autograd.grad(out, inputs, torch.ones_like(out) if upstream is None else upstream.double())


def by_autograd(forward: Callable[..., Outputs], taken: int, bare: int = 0) -> Callable[..., Outputs]:
    """The gradient with regard to the first ``taken`` tensors of an op, and to zeros for ``bare`` ones like the last.

    The gradient op takes the former, the other tensors of the op, and the upstream gradient.
    """

    def formula(*tensors: Tensor, **options: Any) -> Outputs:
        leaves, fixed = [*tensors[:taken], *[tensors[taken - 1] * 0] * bare], tensors[taken:-1]
        return gradients(lambda *moved: forward(*moved, *fixed, **options)[0], leaves, tensors[-1])

    return formula


def softmax_backward(y: Tensor, dy: Tensor) -> Outputs:
    """The Jacobian diag(y) - y y^T, row by row."""
    rows = [(torch.diag(p) - torch.outer(p, p)) @ g for p, g in zip(y.double(), dy.double(), strict=True)]
    return (torch.stack(rows) if rows else torch.zeros(y.shape, dtype=torch.float64),)


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


def rope_backward(cos: Tensor, sin: Tensor, dy: Tensor, interleaved: bool = False) -> Outputs:
    return gradients(lambda x: rows.rope(x, cos, sin, interleaved=interleaved)[0], [torch.zeros_like(dy)], dy)


def cumsum_backward(dy: Tensor, reverse: bool = False, exclusive: bool = False) -> Outputs:
    """The transpose of the matrix that sums."""
    columns = dy.shape[1]
    sums = torch.ones(columns, columns, dtype=torch.float64).tril(-1 if exclusive else 0)
    return (dy.double() @ (sums.T if reverse else sums),)


def jsd_backward(
    logits: Tensor, target_logits: Tensor, dloss: Tensor, beta: float = 0.5, reduction: str = "batchmean"
) -> Outputs:
    log_p = torch.log_softmax(target_logits.double(), -1)

    def forward(x: Tensor) -> Tensor:
        log_q = torch.log_softmax(x, -1)
        mixed = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
        parts = beta * log_p.exp() * (log_p - mixed) + (1 - beta) * log_q.exp() * (log_q - mixed)
        return rows.reduced(parts.sum(-1), reduction)[0]

    return gradients(forward, [logits], dloss)


def linear_cross_entropy_backward(x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Outputs:
    """By autograd of the product, and of the loss above."""
    return gradients(lambda x, w: cross_entropy(x @ w.T, target, **options)[0], [x, weight])


layernorm_backward = by_autograd(rows.layernorm, 2, bare=1)
rmsnorm_backward = by_autograd(rows.rmsnorm, 2)
gated_rmsnorm_backward = by_autograd(rows.gated_rmsnorm, 3)
group_norm_backward = by_autograd(rows.group_norm, 2, bare=1)
l2norm_backward = by_autograd(rows.l2norm, 1)
dynamic_tanh_backward = by_autograd(rows.dynamic_tanh, 3, bare=1)
geglu_backward = by_autograd(rows.geglu, 2)
logsigmoid_backward = by_autograd(rows.logsigmoid, 1)
embedding_backward = by_autograd(rows.embedding, 1)
kl_div_backward = by_autograd(rows.kl_div, 1)
causal_conv1d_backward = by_autograd(rows.causal_conv1d, 3)
