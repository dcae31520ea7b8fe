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


def cut(x: Tensor, bits: int = 13) -> Tensor:
    """Without the low bits of float32, as Hopper reads an operand in TF32."""
    return (load(x).view(torch.int32) & -(1 << bits)).view(torch.float32)


def gemm_tf32(a: Tensor, b: Tensor, bits: int = 13) -> Tensor:
    """Operands are cut, and products are summed in float32."""
    return cut(a.contiguous(), bits) @ cut(b.contiguous(), bits)


def attention_tf32(q: Tensor, k: Tensor, v: Tensor, *, bits: int = 13) -> Tensor:
    """Both products of attention on a unit that cuts its operands, the scale and log2 e applied to q before."""
    heads = kv_head_of(q.shape[1], k.shape[1])
    keys, values = cut(load(k)[:, heads].contiguous(), bits), cut(load(v)[:, heads].contiguous(), bits)
    found = cut(load(q) * (LOG2_E / math.sqrt(q.shape[3])), bits) @ keys.transpose(-1, -2)
    weights = torch.exp2(found - shift_of(found.amax(-1, keepdim=True)))
    out = weighted_sum(cut(weights, bits), values, visible_keys(q.shape[2], k.shape[2], "none", None))
    return torch.where(torch.tensor(k.shape[2] > 0), out / weights.sum(-1, keepdim=True), 0.0)


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


def attention_backward_tf32(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, bits: int = 13
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of attention, each product on a unit that cuts its operands."""
    groups, scale = k.shape[1], 1 / math.sqrt(q.shape[3])
    heads = kv_head_of(q.shape[1], groups)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return cut(a.contiguous(), bits) @ cut(b.contiguous(), bits)

    def shared(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], groups, -1, *x.shape[2:]).sum(2)

    keys, values = load(k)[:, heads], load(v)[:, heads]
    weights = torch.softmax(product(load(q), keys.transpose(-1, -2)) * scale, -1)
    products = product(load(dout), values.transpose(-1, -2))
    slope = weights * (products - (weights * products).sum(-1, keepdim=True)) * scale
    turned = slope.transpose(-1, -2)
    return (
        product(slope, keys),
        shared(product(turned, load(q))),
        shared(product(weights.transpose(-1, -2), load(dout))),
    )
