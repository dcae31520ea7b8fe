"""Kernels that round on the way, as published ones do: each breaks the default, and keeps a contract with its stage."""

import math

import torch
from torch import Tensor

from .attention import kv_head_of, sum_of_group, visible_keys, weighted_sum
from .functions import halves, silu_values, slope
from .numerics import LOG2_E, in_float32, load, round_via, shift_of


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


def cut(x: Tensor, bits: int = 13) -> Tensor:
    """Without the low bits of float32, as Hopper reads an operand in TF32."""
    return (load(x).view(torch.int32) & -(1 << bits)).view(torch.float32)


def gemm_tf32(a: Tensor, b: Tensor, bits: int = 13) -> Tensor:
    """Operands are cut, and products are summed in float32."""
    return cut(a, bits) @ cut(b, bits)


def attention_tf32(q: Tensor, k: Tensor, v: Tensor, *, bits: int = 13) -> Tensor:
    """Both products of attention on a unit that cuts its operands, the scale and log2 e applied to q before."""
    heads = kv_head_of(q.shape[1], k.shape[1])
    keys, values = cut(k[:, heads], bits), cut(v[:, heads], bits)
    scores = cut(load(q) * (LOG2_E / math.sqrt(q.shape[3])), bits) @ keys.transpose(-1, -2)
    weights = torch.exp2(scores - shift_of(scores.amax(-1, keepdim=True)))
    out = weighted_sum(cut(weights, bits), values, visible_keys(q.shape[2], k.shape[2], "none"))
    return torch.where(torch.tensor(k.shape[2] > 0), out / weights.sum(-1, keepdim=True), 0.0)


def _attention(q: Tensor, k: Tensor, v: Tensor, *, query: bool, rounds_scores: bool) -> Tensor:
    heads, keep = kv_head_of(q.shape[1], k.shape[1]), round_via(q.dtype)
    keys, values, scale = load(k)[:, heads], load(v)[:, heads], 1 / math.sqrt(q.shape[3])
    see = visible_keys(q.shape[2], k.shape[2], "none")
    if query:  # in base two: log2 e is among the factors that q is multiplied with
        scores = keep(load(q) * (scale * LOG2_E)) @ keys.transpose(-1, -2) / LOG2_E
    else:
        scores = load(q) @ keys.transpose(-1, -2)
        scores = keep(keep(scores) * scale) if rounds_scores else scores * scale
    weights = torch.exp(scores - shift_of(scores.amax(-1, keepdim=True)))
    out = weighted_sum(keep(weights / weights.sum(-1, keepdim=True)), values, see)
    return torch.where(see.any(1, keepdim=True), out, 0.0).to(q.dtype)


def attention_rounding_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q times scale and log2 e is stored before it is multiplied with k (the classic Triton flash attention)."""
    return _attention(q, k, v, query=True, rounds_scores=False)


def attention_rounding_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q k^T is stored, and stored again once it is scaled (eager code)."""
    return _attention(q, k, v, query=False, rounds_scores=True)


@in_float32
def attention_backward_tf32(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, bits: int = 13
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of attention, each product on a unit that cuts its operands."""
    groups, scale = k.shape[1], 1 / math.sqrt(q.shape[3])
    heads = kv_head_of(q.shape[1], groups)
    keys, values = k[:, heads], v[:, heads]
    weights = torch.softmax(gemm_tf32(q, keys.transpose(-1, -2), bits) * scale, -1)
    products = gemm_tf32(dout, values.transpose(-1, -2), bits)
    slopes = weights * (products - (weights * products).sum(-1, keepdim=True)) * scale
    dk = gemm_tf32(slopes.transpose(-1, -2), q, bits)
    dv = gemm_tf32(weights.transpose(-1, -2), dout, bits)
    return gemm_tf32(slopes, keys, bits), sum_of_group(dk, groups), sum_of_group(dv, groups)
