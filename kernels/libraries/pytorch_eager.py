"""Ops as model code writes them in eager PyTorch, with the signatures of the specs.

None is one kernel. Most round intermediate results that a fused kernel doesn't, and `assay survey` shows the cost. Each
docstring says where it rounds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_in_float32(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """One rounding, at the end."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype)


def rms_norm_cast_before_weight(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Llama's order in Transformers: back in the input's dtype before the weight multiplies, two roundings."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The norm reads the sum as stored, once rounded."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU is rounded before it multiplies."""
    return F.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Transformers' rotation of halves: both products and their sum are rounded."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    cos, sin = (torch.cat((part, part), dim=-1)[None, :, None, :].to(x.dtype) for part in (cos, sin))
    return x * cos + rotated * sin


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: str = "none", scale: float | None = None) -> Tensor:
    """Transformers' eager attention: scores rounded twice, softmax in float32; masked scores get the dtype's minimum.

    `causal` is "none" or "bottom_right".
    """
    groups = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal == "bottom_right":
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        hidden = hidden.triu(k.shape[2] - q.shape[2] + 1)
        scores = scores + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
    probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(probabilities, v)


def int8_gemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """`torch._int_mm`, exact, then the scales: its int32 to float32, two products, one rounding to bfloat16."""
    return (torch._int_mm(a, b).float() * scale_a * scale_b).to(torch.bfloat16)


def moe_route(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Everything in float32."""
    wide = logits.float()
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    weights, ids = torch.topk(scores, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.to(torch.int32)


def moe_expert_loop(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Every product is rounded, and the experts' outputs are added in the output's dtype."""
    y = torch.zeros_like(x)
    for expert in range(w_down.shape[0]):
        token, slot = torch.where(ids == expert)
        gate, up = F.linear(x[token], w_gate_up[expert]).chunk(2, dim=-1)
        output = F.linear(F.silu(gate) * up, w_down[expert]) * weights[token, slot, None]
        y.index_add_(0, token, output.to(x.dtype))
    return y


def moe_grouped_mm(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Tokens sorted by expert: both grouped products are rounded, the experts' outputs added in float32."""
    order = torch.argsort(ids.flatten(), stable=True)
    token = order // max(ids.shape[1], 1)
    ends = torch.bincount(ids.flatten(), minlength=w_down.shape[0]).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(x[token], w_gate_up.contiguous().transpose(1, 2), offs=ends).chunk(2, dim=-1)
    output = F.grouped_mm(F.silu(gate) * up, w_down.contiguous().transpose(1, 2), offs=ends)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return y.index_add_(0, token, output.float() * weights.flatten()[order, None]).to(x.dtype)
