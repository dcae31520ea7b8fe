"""Kernels that round on the way, as published ones do: each breaks the default, and keeps a contract with its stage."""

import math

import torch
from torch import Tensor

from .honest_attention import kv_head_of, shift_of, visible_keys, weighted_sum
from .honest_backward import slope
from .honest_elementwise import halves, silu_values
from .numerics import load, round_via

LOG2_E = math.log2(math.e)


def swiglu_rounding(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) is stored before it is multiplied (Hugging Face, unsloth, lightllm)."""
    return (load(silu_values(load(gate)).to(gate.dtype)) * load(up)).to(gate.dtype)


def swiglu_backward_rounding(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Its gradient by autograd: silu(gate) was stored, and so is dy up, before the slope of silu is multiplied."""
    keep = round_via(gate.dtype)
    g, u, gradient = load(gate), load(up), load(dy)
    return (keep(gradient * u) * slope(g)).to(gate.dtype), (gradient * keep(silu_values(g))).to(gate.dtype)


def rope_rounding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Products are stored, and then added."""
    keep = round_via(x.dtype)
    (first, second), c, s = halves(load(x)), load(cos)[None, :, None], load(sin)[None, :, None]
    return torch.cat([keep(first * c) - keep(second * s), keep(second * c) + keep(first * s)], -1).to(x.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, *, query: bool, scores: bool) -> Tensor:
    heads, keep = kv_head_of(q.shape[1], k.shape[1]), round_via(q.dtype)
    keys, values, scale = load(k)[:, heads], load(v)[:, heads], 1 / math.sqrt(q.shape[3])
    see = visible_keys(q.shape[2], k.shape[2], "none", None)
    if query:  # in base two: log2 e is among the factors that q is multiplied with
        found = keep(load(q) * (scale * LOG2_E)) @ keys.transpose(-1, -2) / LOG2_E
    else:
        found = load(q) @ keys.transpose(-1, -2)
        found = keep(keep(found) * scale) if scores else found * scale
    shift = shift_of(found.amax(-1, keepdim=True))
    weights = torch.exp(found - shift)
    out = weighted_sum(keep(weights / weights.sum(-1, keepdim=True)), values, see)
    return torch.where(see.any(1, keepdim=True), out, 0.0).to(q.dtype)


def attention_rounding_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q times scale and log2 e is stored before it is multiplied with k (the classic Triton flash attention)."""
    return _attention(q, k, v, query=True, scores=False)


def attention_rounding_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q k^T is stored, and stored again once it is scaled (eager code)."""
    return _attention(q, k, v, query=False, scores=True)
