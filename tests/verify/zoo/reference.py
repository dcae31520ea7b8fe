"""The ops in float64, written for plainness and apart from the kernels of the zoo."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import reference_gradients
from .reference_quantized import (
    all_reduce,
    attention_varlen,
    gemm_2to4,
    gemm_mxfp8,
    gemm_nvfp4,
    merge_states,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

__all__ = [  # the second half stands in a file of its own
    "all_reduce",
    "attention_varlen",
    "gemm_2to4",
    "gemm_mxfp8",
    "gemm_nvfp4",
    "merge_states",
    "quantize_fp8",
    "quantize_int4",
    "quantize_int8",
]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Outputs = tuple[Tensor, ...]


def softmax(x: Tensor) -> Outputs:
    """As torch has it."""
    return (torch.softmax(x.double(), 1),)


def log_softmax(x: Tensor) -> Outputs:
    """As torch has it."""
    return (torch.log_softmax(x.double(), 1),)


def logsumexp(x: Tensor) -> Outputs:
    """As torch has it."""
    return (torch.logsumexp(x.double(), 1),)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Outputs:
    """As torch has it."""
    return (torch.nn.functional.layer_norm(x.double(), x.shape[1:], weight.double(), bias.double(), eps),)


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Outputs:
    """Each row over its root mean square."""
    root = ((x.double() ** 2).sum(1) / max(x.shape[1], 1) + eps).sqrt()
    return (x.double() / root[:, None] * (weight.double() + offset),)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Outputs:
    """The sum, normalised and as it is."""
    total = x.double() + residual.double()
    return (*rmsnorm(total, weight, eps), total)


def gelu(x: Tensor, approximate: str = "none") -> Outputs:
    """As torch has it, zero at -inf."""
    y = torch.nn.functional.gelu(x.double(), approximate=approximate)
    return (y.masked_fill(x.isneginf(), 0.0),)


def silu(x: Tensor) -> Outputs:
    """As torch has it, zero at -inf."""
    return (torch.nn.functional.silu(x.double()).masked_fill(x.isneginf(), 0.0),)


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Outputs:
    """silu(gate) * up."""
    bound = math.inf if limit is None else limit
    return (silu(gate.double().clamp(max=bound))[0] * up.double().clamp(-bound, bound),)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Outputs:
    """Each pair as a complex number, turned."""
    d = x.shape[-1]
    first = list(range(0, d, 2)) if interleaved else list(range(d // 2))
    second = [i + (1 if interleaved else d // 2) for i in first]
    turn = torch.complex(cos.double(), sin.double())[None, :, None]
    turned = torch.complex(x.double()[..., first], x.double()[..., second]) * turn
    y = torch.empty(x.shape, dtype=torch.float64)
    y[..., first], y[..., second] = turned.real, turned.imag
    return (y,)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    """As torch has it."""
    return (torch.nn.functional.linear(x.double(), weight.double(), bias.double()),)


def gemm(a: Tensor, b: Tensor) -> Outputs:
    """As torch has it."""
    return (a.double() @ b.double(),)


def gemm_fp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, granularity: str = "tensor") -> Outputs:
    """Dequantised, place by place where scales go by blocks."""
    left, right = a.double(), b.double()
    if granularity != "block":
        return ((left * scale_a.double()) @ (right * scale_b.double()),)
    for k in range(0, a.shape[1], 128):
        left[:, k : k + 128] *= scale_a[:, k // 128, None].double()
        for n in range(0, b.shape[1], 128):
            right[k : k + 128, n : n + 128] *= float(scale_b[k // 128, n // 128])
    return (left @ right,)


def gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Outputs:
    """Dequantised."""
    return ((a.double() * scale_a.double()) @ (b.double() * scale_b.double()),)


def nibble(word: int, place: int) -> int:
    """Four bits of a word."""
    return word >> 4 * place & 15


def gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, packing: str = "plain") -> Outputs:
    """The weights unpacked one by one."""
    k_size, n_size = x.shape[1], scales.shape[1]
    weight = torch.zeros(k_size, n_size, dtype=torch.float64)
    words, zero_words = qweight.tolist(), zeros.tolist()
    for k in range(k_size):
        g = k * scales.shape[0] // k_size
        for n in range(n_size):
            if packing == "plain":
                q, z = nibble(words[k // 2][n], k % 2), zero_words[g][n]
            elif packing == "awq":
                place = AWQ_ORDER.index(n % 8)
                q, z = nibble(words[k][n // 8], place), nibble(zero_words[g][n // 8], place)
            else:
                q, z = nibble(words[k // 8][n], k % 8), nibble(zero_words[g][n // 8], n % 8) + 1
            weight[k, n] = (q - z) * float(scales[g, n])
    return (x.double() @ weight,)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Outputs:
    """Row by row, over the keys that the row sees."""
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    causal, window, softcap = options.get("causal", "none"), options.get("window"), options.get("softcap")
    slopes, sinks = options.get("slopes"), options.get("sinks")
    scale = options.get("scale") or q.shape[3] ** -0.5
    offset = 0 if causal == "top_left" else keys - queries
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(q.shape[0]) for h in range(heads) for i in range(queries)):
        own = i + offset
        low, high = (0, keys - 1) if window is None else (max(0, own - window[0]), min(keys - 1, own + window[1]))
        seen = list(range(low, (high if causal == "none" else min(high, own)) + 1))
        kv_head = h * k.shape[1] // heads
        scores = k[b, kv_head, seen].double() @ q[b, h, i].double() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            distance = torch.tensor([abs(i + keys - queries - j) for j in seen], dtype=torch.float64)
            scores = scores - float(slopes[h]) * distance
        if sinks is not None:
            scores = torch.cat([scores, sinks[h].double().reshape(1)])
        if len(scores):
            lse[b, h, i] = torch.logsumexp(scores, 0)
        if seen:
            out[b, h, i] = torch.softmax(scores, 0)[: len(seen)] @ v[b, kv_head, seen].double()
    return (out, lse) if options.get("return_lse") else (out,)


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Outputs:
    """Each sequence's keys and values put together slot by slot."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    page, shared = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for b, length in enumerate(seq_lens.tolist()):
        slots = [(int(block_table[b, p // page]), p % page) for p in range(length)]
        for h in range(q.shape[1] if slots else 0):
            k, v = (
                torch.stack([cache[place][h // shared].double() for place in slots]) for cache in (k_cache, v_cache)
            )
            scores = k @ q[b, h].double() * k_scale * (scale or q.shape[2] ** -0.5)
            out[b, h] = torch.softmax(scores, 0) @ v * v_scale
    return (out,)


def moe_route(logits: Tensor, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax") -> Outputs:
    """Experts sorted by score."""
    values = logits.double()
    scores = torch.sigmoid(values) if scoring == "sigmoid" else torch.softmax(values, 1)
    weights, ids = (part[:, :top_k] for part in scores.sort(dim=1, descending=True, stable=True))
    return weights / weights.sum(1, keepdim=True) if renormalize else weights, ids.to(torch.int32)


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Outputs:
    """Token by token, expert by expert."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, places in enumerate(ids.tolist()):
        for place, expert in enumerate(places):
            gate, up = (w_gate_up[expert].double() @ x[t].double()).tensor_split(2)
            hidden = torch.nn.functional.silu(gate) * up
            y[t] += float(weights[t, place]) * (w_down[expert].double() @ hidden)
    return (y,)


def __getattr__(name: str) -> Any:
    """Functions, losses and gradients, which have a file of their own."""
    return getattr(reference_gradients, name)
