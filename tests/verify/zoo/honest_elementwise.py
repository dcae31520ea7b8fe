"""Honest activations and rotary embeddings."""

import math

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import Store, load, nearest

TANH_SCALE = math.sqrt(2.0 / math.pi)


def zero_at_minus_infinity(y: Tensor, x: Tensor) -> Tensor:
    """The limit at -inf, where the formula says -inf * 0."""
    return torch.where(x == -math.inf, torch.zeros_like(y), y)


def gelu_erf(values: Tensor) -> Tensor:
    """x / 2 * (1 + erf(x / sqrt 2)), as most kernels have it."""
    return 0.5 * values * (1.0 + torch.erf(values * math.sqrt(0.5)))


def gelu_erfc(values: Tensor) -> Tensor:
    """x / 2 * erfc(-x / sqrt 2), which doesn't cancel for negative x."""
    return 0.5 * values * torch.erfc(values * -math.sqrt(0.5))


def gelu_tanh(values: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return 0.5 * values * (1.0 + torch.tanh(TANH_SCALE * (values + 0.044715 * values * values * values)))


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Both forms as most kernels have them."""
    values = load(x)
    y = gelu_tanh(values) if approximate == "tanh" else gelu_erf(values)
    return zero_at_minus_infinity(y, values).to(x.dtype)


def gelu_uncancelled(x: Tensor, *, approximate: str = "none") -> Tensor:
    """erfc, and 1 + tanh(z) written as 2 * sigmoid(2 z)."""
    values = load(x)
    if approximate == "tanh":
        y = values * sigmoid(2.0 * TANH_SCALE * (values + 0.044715 * values * values * values))
    else:
        y = gelu_erfc(values)
    return zero_at_minus_infinity(y, values).to(x.dtype)


def sigmoid(values: Tensor) -> Tensor:
    """Sigmoid by exp(-|x|), which can't overflow, so that small results stay subnormal instead of zero."""
    small = torch.exp(-values.abs())
    return torch.where(values >= 0, torch.ones_like(values), small) / (1.0 + small)


def silu_values(values: Tensor) -> Tensor:
    """x * sigmoid(x) in float32, zero at -inf."""
    return zero_at_minus_infinity(values * sigmoid(values), values)


def silu(x: Tensor, *, store: Store = nearest) -> Tensor:
    """x * sigmoid(x)."""
    return store(silu_values(load(x)), x.dtype)


def silu_divided(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)); exp overflows below -88.7, where the result then is zero."""
    values = load(x)
    return zero_at_minus_infinity(values / (1.0 + torch.exp(-values)), values).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """silu(gate) * up, both clamped first where a limit is given."""
    gate_values, up_values = load(gate), load(up)
    if limit is not None:
        gate_values = gate_values.clamp(max=limit)
        up_values = up_values.clamp(-limit, limit)
    return (silu_values(gate_values) * up_values).to(gate.dtype)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of each head."""
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Even and odd places of each head."""
    return x[..., 0::2], x[..., 1::2]


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Each pair of places turned by its angle; the pairs are neighbours where interleaved, else half a head apart."""
    split = pairs if interleaved else halves
    first, second = split(load(x))
    c, s = load(cos)[None, :, None, :], load(sin)[None, :, None, :]
    turned = torch.empty(x.shape, dtype=torch.float32)
    out_first, out_second = split(turned)
    out_first.copy_(first * c - second * s)
    out_second.copy_(second * c + first * s)
    return turned.to(x.dtype)


ALL = ("float32", "bfloat16", "float16")
GELU_OPTIONS = {"approximate": ["none", "tanh"]}
SWIGLU_OPTIONS = {"limit": [None, 7.0]}
ROPE_OPTIONS = {"interleaved": [False, True]}

ELEMENTWISE: tuple[Entry, ...] = (
    *family("gelu", "gelu", gelu, ALL, options=GELU_OPTIONS),
    *family("gelu_uncancelled", "gelu", gelu_uncancelled, ("float32", "bfloat16"), options=GELU_OPTIONS),
    *family("silu", "silu", silu, ALL),
    *family("silu_divided", "silu", silu_divided, ALL),
    *family("swiglu", "swiglu", swiglu, ALL, options=SWIGLU_OPTIONS),
    *family("rope", "rope", rope, ALL, options=ROPE_OPTIONS),
)
