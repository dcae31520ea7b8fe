"""Normalisations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .entry import Case

ROWS = "x[T,D] -> y[T,D]"


def unit_rows(x: Any) -> Any:
    return F.normalize(x, dim=-1)


def _without_guard(x: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True))


def gemma_norm(x: Any, w: Any) -> Any:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + w.float())).to(x.dtype)


def _gemma(x: Any, w: Any, squares: Any) -> Any:
    return (x.float() * torch.rsqrt(squares / x.shape[-1] + 1e-6) * (w.float() + 1)).to(x.dtype)


def _gemma_by_blocks(x: Any, w: Any) -> Any:
    total = torch.zeros(x.shape[0], 1)
    for first in range(0, x.shape[1], 8):
        total += x[:, first : first + 8].float().square().sum(-1, keepdim=True)
    return _gemma(x, w, total)


def _gemma_rounded_early(x: Any, w: Any) -> Any:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * (1 + w)


def plain_layer_norm(x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:])


def _welford(x: Any) -> Any:
    mean, m2 = torch.zeros(x.shape[0]), torch.zeros(x.shape[0])
    for place in range(x.shape[1]):
        delta = x[:, place] - mean
        mean = mean + delta / (place + 1)
        m2 = m2 + delta * (x[:, place] - mean)
    return (x - mean[:, None]) * torch.rsqrt(m2[:, None] / x.shape[1] + 1e-5)


def _two_pass(x: Any) -> Any:
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)


def _one_pass(x: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-5)


def group_norm_silu(x: Any) -> Any:
    return F.silu(F.group_norm(x, 2))


def _by_groups(x: Any, groups: Any, eps: float = 1e-5) -> Any:
    y = torch.empty_like(x)
    for channels in groups:
        part = x[:, channels]
        mean = part.mean((1, 2), keepdim=True)
        square = (part - mean).square().mean((1, 2), keepdim=True)
        y[:, channels] = F.silu((part - mean) * torch.rsqrt(square + eps))
    return y


def _halves(x: Any) -> list[slice]:
    return [slice(0, x.shape[1] // 2), slice(x.shape[1] // 2, None)]


def batch_norm_inference(x: Any, m: Any, v: Any, w: Any, b: Any) -> Any:
    return F.batch_norm(x, m, v.abs(), w, b, eps=1e-3)


def _folded(x: Any, m: Any, v: Any, w: Any, b: Any) -> Any:
    scale = w * torch.rsqrt(v.abs() + 1e-3)
    return x * scale[None, :, None] + (b - m * scale)[None, :, None]


def _channelwise(x: Any, m: Any, v: Any, w: Any, b: Any, eps: float = 1e-3) -> Any:
    parts = [(x[:, c] - m[c]) / torch.sqrt(v[c].abs() + eps) * w[c] + b[c] for c in range(x.shape[1])]
    return torch.stack(parts, 1)


def min_max_scale(x: Any) -> Any:
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - least) / (most - least + 1e-3)


CASES = (
    Case(unit_rows, ROWS, (
        lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True)).clamp(min=1e-12),
        lambda x: torch.stack([row / max(float(torch.linalg.vector_norm(row)), 1e-12) for row in x])
        if len(x) else x.clone(),
    ), {
        "rows of zeros give NaN": _without_guard,
        "the sum of magnitudes": lambda x: F.normalize(x, p=1.0, dim=-1),
        "columns in place of rows": lambda x: F.normalize(x, dim=0),
    }),
    Case(gemma_norm, "x[T,D], w[D] -> y[T,D]", (
        _gemma_by_blocks, lambda x, w: _gemma(x, w, (x.double() ** 2).sum(-1, keepdim=True).float()),
    ), {
        "rounded before the weight": _gemma_rounded_early,
        "the weight without one": lambda x, w: F.rms_norm(x.float(), x.shape[-1:], w.float(), 1e-6).to(x.dtype),
        "squares in bfloat16": lambda x, w: _gemma(x, w, (x * x).sum(-1, keepdim=True).float()),
    }, dtype="bfloat16"),
    Case(plain_layer_norm, ROWS, (_welford, _two_pass), {
        "one pass, which cancels": _one_pass,
        "the unbiased variance": lambda x: (x - x.mean(-1, keepdim=True))
        / torch.sqrt((x - x.mean(-1, keepdim=True)).square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1) + 1e-5),
        "epsilon outside of the root": lambda x: (x - x.mean(-1, keepdim=True))
        / (x.var(-1, unbiased=False, keepdim=True).sqrt() + 1e-5),
    }),
    Case(group_norm_silu, "x[N,2*C,L] -> y[N,2*C,L]", (
        lambda x: _by_groups(x, _halves(x)),
        lambda x: F.silu(F.layer_norm(x.reshape(x.shape[0], 2, -1), (x[0].numel() // 2,)).reshape(x.shape)),
    ), {
        "every other channel": lambda x: _by_groups(x, [slice(0, None, 2), slice(1, None, 2)]),
        "one group": lambda x: _by_groups(x, [slice(None)]),
        "a large epsilon": lambda x: _by_groups(x, _halves(x), 1e-3),
    }),
    Case(batch_norm_inference, "x[N,C,L], m[C], v[C], w[C], b[C] -> y[N,C,L]", (_folded, _channelwise), {
        "a small epsilon": lambda *given: _channelwise(*given, eps=1e-5),
        "the variance as deviation": lambda x, m, v, w, b: (x - m[:, None]) / (v.abs()[:, None] + 1e-3) * w[:, None]
        + b[:, None],
        "statistics of the batch": lambda x, m, v, w, b: F.batch_norm(x, None, None, w, b, training=True, eps=1e-3)
        if x.shape[0] * x.shape[2] > 1 else _folded(x, m, v, w, b),
    }),
    Case(min_max_scale, ROWS, (
        lambda x: (x - x.min(-1, keepdim=True).values) / (x.max(-1, keepdim=True).values
                                                         - x.min(-1, keepdim=True).values + 1e-3),
        lambda x: torch.stack([(row - row.min()) / (row.max() - row.min() + 1e-3) for row in x]),
    ), {
        "no epsilon": lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)),
        "the least of all rows": lambda x: (x - x.amin()) / (x.amax(-1, keepdim=True) - x.amin() + 1e-3),
        "the largest magnitude": lambda x: (x - x.amin(-1, keepdim=True))
        / (x.abs().amax(-1, keepdim=True) - x.amin(-1, keepdim=True) + 1e-3),
    }),
)  # fmt: skip
