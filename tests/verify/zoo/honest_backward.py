"""Honest gradients along rows: in float32 inside, by PyTorch's autograd and in the forms that kernels have them."""

from collections.abc import Callable

import torch
from torch import Tensor

from .entry import Entry, family
from .honest_elementwise import sigmoid, zero_at_minus_infinity
from .honest_norm import two_pass
from .numerics import keep, load

Stage = Callable[[Tensor], Tensor]
DTYPES = ("float32", "bfloat16", "float16")


def blocked_sum(terms: Tensor, block: int = 64) -> Tensor:
    """Row sums [R,1], block by block."""
    total = torch.zeros(terms.shape[0], 1)
    for part in terms.split(block, dim=1) if terms.shape[1] else ():
        total = total + part.sum(dim=1, keepdim=True)
    return total


def softmax_backward(y: Tensor, dy: Tensor, *, total: Callable[[Tensor], Tensor] = blocked_sum) -> Tensor:
    """y (dy - sum)."""
    weights, gradient = load(y), load(dy)
    return (weights * (gradient - total(weights * gradient))).to(y.dtype)


def softmax_backward_multiplied_out(y: Tensor, dy: Tensor) -> Tensor:
    """y dy - y sum."""
    products = load(y) * load(dy)
    return (products - load(y) * products.sum(dim=1, keepdim=True)).to(y.dtype)


def softmax_backward_torch(y: Tensor, dy: Tensor) -> Tensor:
    """PyTorch's own, in float32."""
    return torch._softmax_backward_data(load(dy), load(y), 1, torch.float32).to(y.dtype)


def rows_summed(terms: Tensor, stage: Stage = keep, block: int = 16) -> Tensor:
    """Column sums [N], partial sums of blocks of rows first, each through ``stage``."""
    total = torch.zeros(terms.shape[1])
    for part in terms.split(block, dim=0) if terms.shape[0] else ():
        total = stage(total + part.sum(dim=0))
    return total


def layernorm_backward(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    *,
    eps: float = 1e-5,
    statistics: Callable[[Tensor], tuple[Tensor, Tensor]] = two_pass,
    correlate: Stage = keep,
    rows: Stage = keep,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx row by row, dweight and dbias by blocks of rows."""
    values, gradient = load(x), load(dy)
    mean, variance = statistics(values)
    root = torch.rsqrt(variance + eps)
    normalised, grown = (values - mean) * root, gradient * load(weight)
    first = grown.mean(dim=1, keepdim=True)
    second = correlate((grown * normalised).mean(dim=1, keepdim=True))
    dx = (grown - first - normalised * second) * root
    sums = rows_summed(gradient * normalised, rows), rows_summed(gradient, rows)
    return dx.to(x.dtype), sums[0].to(x.dtype), sums[1].to(x.dtype)


def layernorm_backward_apex(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(N g - sum g - h sum g h) (r / N), all rows' sums at once."""
    values, gradient = load(x), load(dy)
    columns = values.shape[1]
    mean, variance = two_pass(values)
    root = torch.rsqrt(variance + eps)
    normalised, grown = (values - mean) * root, gradient * load(weight)
    inner = columns * grown - blocked_sum(grown) - normalised * blocked_sum(grown * normalised)
    dx = inner * (root / columns)
    return dx.to(x.dtype), (gradient * normalised).sum(dim=0).to(x.dtype), gradient.sum(dim=0).to(x.dtype)


def layernorm_backward_torch(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own, in float32."""
    with torch.enable_grad():
        leaves = [part.requires_grad_() for part in (load(x), load(weight), torch.zeros(weight.shape))]
        out = torch.nn.functional.layer_norm(leaves[0], x.shape[1:], leaves[1], leaves[2], eps)
        dx, dweight, dbias = torch.autograd.grad(out, leaves, load(dy))
    return dx.to(x.dtype), dweight.to(x.dtype), dbias.to(x.dtype)


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
    values, gradient = load(x), load(dy)
    root = torch.rsqrt(values.square().mean(dim=1, keepdim=True) + eps)
    normalised, grown = normalised_stage(values * root), gradient * load(weight)
    dx = (grown - normalised * correlate((grown * normalised).mean(dim=1, keepdim=True))) * root
    return dx.to(x.dtype), rows_summed(gradient * normalised, rows).to(x.dtype)


def rmsnorm_backward_factored(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """r (g - x (r^2 mean(g x))), with sums over x itself."""
    values, gradient = load(x), load(dy)
    root = 1.0 / torch.sqrt(blocked_sum(values.square()) / max(values.shape[1], 1) + eps)
    grown = gradient * load(weight)
    dx = (grown - values * (root * root * (blocked_sum(grown * values) / max(values.shape[1], 1)))) * root
    return dx.to(x.dtype), rows_summed(gradient * (values * root)).to(x.dtype)


def slope(gate: Tensor) -> Tensor:
    """silu' as s (1 + x (1 - s)), and its limits."""
    s = sigmoid(gate)
    return torch.where(gate.isinf(), s, s * (1.0 + gate * (1.0 - s)))


def slope_of_product(gate: Tensor) -> Tensor:
    """silu' as silu (1 - s) + s, and its limits."""
    s = sigmoid(gate)
    return torch.where(gate.isinf(), s, gate * s * (1.0 - s) + s)


def swiglu_backward(
    gate: Tensor,
    up: Tensor,
    dy: Tensor,
    *,
    derivative: Stage = slope,
    activation: Stage = keep,
) -> tuple[Tensor, Tensor]:
    """dy up silu'(gate), dy silu(gate)."""
    g, u, gradient = load(gate), load(up), load(dy)
    silu = activation(zero_at_minus_infinity(g * sigmoid(g), g))
    return (gradient * u * derivative(g)).to(gate.dtype), (gradient * silu).to(gate.dtype)


def swiglu_backward_liger(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dy silu' up, with silu' = silu (1 - s) + s."""
    g, u, gradient = load(gate), load(up), load(dy)
    silu = zero_at_minus_infinity(g * sigmoid(g), g)
    return (gradient * slope_of_product(g) * u).to(gate.dtype), (gradient * silu).to(gate.dtype)


def swiglu_backward_torch(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dy up s) (1 + x (1 - s)), in which a subnormal first product is multiplied up again."""
    g, u, gradient = load(gate), load(up), load(dy)
    s = sigmoid(g)
    first = gradient * u * s
    silu = zero_at_minus_infinity(g * s, g)
    return torch.where(g.isinf(), first, first * (1.0 + g * (1.0 - s))).to(gate.dtype), (gradient * silu).to(gate.dtype)


NORM_OPTIONS = {"eps": [1e-5, 1e-2]}

BACKWARD: tuple[Entry, ...] = (
    *family("softmax_backward", "softmax_backward", softmax_backward, DTYPES),
    *family("softmax_backward_multiplied_out", "softmax_backward", softmax_backward_multiplied_out, DTYPES[:2]),
    *family("softmax_backward_torch", "softmax_backward", softmax_backward_torch, DTYPES[:2]),
    *family("layernorm_backward", "layernorm_backward", layernorm_backward, DTYPES, options=NORM_OPTIONS),
    *family("layernorm_backward_apex", "layernorm_backward", layernorm_backward_apex, DTYPES[:2], options=NORM_OPTIONS),
    *family(
        "layernorm_backward_torch", "layernorm_backward", layernorm_backward_torch, DTYPES[:2], options=NORM_OPTIONS
    ),
    *family("rmsnorm_backward", "rmsnorm_backward", rmsnorm_backward, DTYPES, options=NORM_OPTIONS),
    *family(
        "rmsnorm_backward_factored", "rmsnorm_backward", rmsnorm_backward_factored, DTYPES[:2], options=NORM_OPTIONS
    ),
    *family("swiglu_backward", "swiglu_backward", swiglu_backward, DTYPES),
    *family("swiglu_backward_torch", "swiglu_backward", swiglu_backward_torch, DTYPES[:2]),
    *family("swiglu_backward_liger", "swiglu_backward", swiglu_backward_liger, DTYPES[:2]),
)
