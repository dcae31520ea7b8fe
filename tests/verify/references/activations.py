"""Activations with what is fused to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

ROWS = "x[T,D] -> y[T,D]"


def bias_gelu(x: Any, b: Any) -> Any:
    return F.gelu(x + b)


def _by_erf(x: Any, b: Any) -> Any:
    z = x + b
    return z.mul(0.5) * (torch.erf(z * 0.7071067811865476) + 1)


def _in_strips(x: Any, b: Any) -> Any:
    out = torch.empty_like(x)
    for first in range(0, x.shape[1], 16):
        strip = slice(first, first + 16)
        out[:, strip] = F.gelu(x[:, strip] + b[strip])
    return out


def _whole_strips_only(x: Any, b: Any) -> Any:
    z = x.clone()
    whole = x.shape[1] // 4 * 4
    z[:, :whole] += b[:whole]
    return F.gelu(z)


def clamped_swish(x: Any) -> Any:
    return torch.clamp(x * torch.sigmoid(x), -1.0, 1.0) / 2


def _exp_in_bfloat16(x: Any) -> Any:
    e = torch.exp(-x.bfloat16()).float()
    return torch.clamp(x / (1 + e), -1.0, 1.0) / 2


def _nan_as_bound(x: Any) -> Any:
    y = x * torch.sigmoid(x)
    return torch.where(y < 1.0, torch.where(y > -1.0, y, -1.0), 1.0) / 2


def mish(x: Any) -> Any:
    return x * torch.tanh(F.softplus(x))


def _mish_by_algebra(x: Any) -> Any:
    e = torch.exp(x.clamp(max=20.0))
    n = e * (e + 2)
    return torch.where(x > 20, x, x * (n / (n + 2)))


def hardswish_residual(x: Any, r: Any) -> Any:
    return x * F.relu6(x + 3) / 6 + r


def _residual_of_whole_blocks(x: Any, r: Any) -> Any:
    y = F.hardswish(x)
    rows = x.shape[0] // 2 * 2
    y[:rows] += r[:rows]
    return y


def geglu(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _geglu_of(gate: Any, up: Any) -> Any:
    return gate * 0.5 * (1 + torch.erf(gate * 0.5**0.5)) * up


def soft_cap(x: Any) -> Any:
    return 30.0 * torch.tanh(x / 30.0)


def channel_prelu(x: Any, w: Any) -> Any:
    return torch.where(x > 0, x, w * x)


def _prelu_in_place(x: Any, w: Any) -> Any:
    y = x.clone()
    below = ~(x > 0)
    y[below] = (x * w)[below]
    return y


def gelu_gradient(x: Any) -> Any:
    return 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.3989422804014327


CASES = (
    Case(bias_gelu, "x[T,D], b[D] -> y[T,D]", (_by_erf, _in_strips), {
        "the tail has no bias": _whole_strips_only,
        "by tanh": lambda x, b: F.gelu(x + b, approximate="tanh"),
        "by a logistic function": lambda x, b: (x + b) * torch.sigmoid(1.702 * (x + b)),
        "the bias comes last": lambda x, b: F.gelu(x) + b,
    }),
    Case(clamped_swish, ROWS, (
        lambda x: torch.clamp(x / (1 + torch.exp(-x)), -1.0, 1.0) * 0.5,
        lambda x: F.silu(x).clamp(-1, 1).div(2),
    ), {
        "clamped first": lambda x: F.silu(x.clamp(-1, 1)) / 2,
        "exponentials in bfloat16": _exp_in_bfloat16,
        "NaN becomes a bound": _nan_as_bound,
    }, warned=frozenset({"NaN becomes a bound"})),
    Case(mish, ROWS, (_mish_by_algebra, F.mish), {
        "x itself from 4 on": lambda x: torch.where(x > 4, x, F.mish(x)),
        "log of 1 + exp": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
        "softplus without tanh": lambda x: x * F.softplus(x).clamp(max=1),
    }, warned=frozenset({"log of 1 + exp"})),
    Case(hardswish_residual, "x[T,D], r[T,D] -> y[T,D]", (
        lambda x, r: torch.addcmul(r, x, (x + 3).clamp(0, 6) * (1 / 6)),
        lambda x, r: F.hardswish(x) + r,
    ), {
        "the last row has no residual": _residual_of_whole_blocks,
        "steeper": lambda x, r: x * (x + 3).clamp(0, 6) / 5.9 + r,
        "clamped a bit late": lambda x, r: x * (x + 3).clamp(0, 6.05) / 6 + r,
    }),
    Case(geglu, "x[T,2*D] -> y[T,D]", (
        lambda x: _geglu_of(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]),
        lambda x: F.gelu(x.narrow(1, 0, x.shape[1] // 2)) * x.narrow(1, x.shape[1] // 2, x.shape[1] // 2),
    ), {
        "halves swapped": lambda x: _geglu_of(x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]),
        "halves interleaved": lambda x: _geglu_of(x[:, ::2], x[:, 1::2]),
        "the gate in bfloat16": lambda x: F.gelu(x.chunk(2, -1)[0].bfloat16()).float() * x.chunk(2, -1)[1],
    }),
    Case(soft_cap, ROWS, (
        lambda x: torch.tanh(x * (1 / 30)).mul(30),
        lambda x: torch.stack([30.0 * torch.tanh(row / 30.0) for row in x]) if len(x) else x.clone(),
    ), {
        "by exponentials, which cancel": lambda x: 30 * (1 - 2 / (torch.exp(2 * x / 30) + 1)),
        "a hard cap": lambda x: x.clamp(-30, 30),
        "capped at 50": lambda x: 50.0 * torch.tanh(x / 50.0),
    }),
    Case(channel_prelu, "x[T,D], w[D] -> y[T,D]", (_prelu_in_place, lambda x, w: F.prelu(x, w)), {
        "one slope for all": lambda x, w: torch.where(x > 0, x, w[:1] * x),
        "slopes are positive": lambda x, w: torch.where(x > 0, x, w.abs() * x),
        "the slope at large numbers too": lambda x, w: torch.where((x > 0) & (x < 10), x, w * x),
    }),
    Case(gelu_gradient, ROWS, (
        lambda x: torch.special.ndtr(x) + x * torch.exp(x * x * -0.5) * 0.39894228,
    ), {
        "without the second term": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)),
        "the exponent not halved": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-x * x) * 0.39894228,
        "a coarse constant": lambda x: 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * 0.4,
    }),
)  # fmt: skip
