"""Liger-Kernel's operators with the signatures of the specs, forward only, for `assay survey`.

Its Triton kernels run on a GPU, or elsewhere in the faithful interpreter. Where an operator does more than a spec, the
function neutralises the rest (a factor of one) and says so.
"""

import torch
from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerFusedMoEFunction
from liger_kernel.transformers import functional as liger
from liger_kernel.transformers import liger_llama4_text_rotary_pos_emb, liger_rotary_pos_emb
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    return liger.liger_softmax(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    return liger.liger_layer_norm(x, weight, bias, eps)


def rms_norm_llama(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    return liger.liger_rms_norm(x, weight, eps, offset, "llama")


def rms_norm_gemma(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    return liger.liger_rms_norm(x, weight, eps, offset, "gemma")


def rms_norm_none(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    return liger.liger_rms_norm(x, weight, eps, offset, "none")


def modulated_rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Without shift, and with a scale of zero, which multiplies by one."""
    return liger.liger_modulated_rms_norm(x, weight, x.new_zeros(1, x.shape[1]), None, eps, offset, "gemma")


def add_rms_norm_llama(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return liger.liger_fused_add_rms_norm(x, residual, weight, eps, 0.0, "llama")


def add_rms_norm_gemma(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    return liger.liger_fused_add_rms_norm(x, residual, weight, eps, 0.0, "gemma")


def gelu(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """GEGLU, gelu(x) times ones."""
    return liger.liger_geglu(x, torch.ones_like(x))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return liger.liger_swiglu(gate, up)


def swiglu_fused_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Both halves in one tensor."""
    return LigerFusedGateUpSiLUMulFunction.apply(torch.cat((gate, up), dim=-1))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries, a copy of `x`, in Transformers' layout: heads before the sequence, angles repeated twice."""
    return rope_inplace(x.clone(), cos, sin)


def rope_inplace(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` on `x` itself."""
    cos, sin = (torch.cat((part, part), dim=-1)[None] for part in (cos, sin))
    q, _ = liger_rotary_pos_emb(x.transpose(1, 2), x.clone().transpose(1, 2), cos, sin)
    return q.transpose(1, 2)


def llama4_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = True) -> Tensor:
    """`interleaved` is always true; on a copy, as `rope`."""
    q, _ = liger_llama4_text_rotary_pos_emb(x.clone(), x.clone(), torch.complex(cos, sin))
    return q


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return LigerFusedMoEFunction.apply(x, w_gate_up, w_down, ids, weights)


def neighborhood_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: tuple[int, int], scale: float | None = None
) -> Tensor:
    """Self-attention with as many key heads as query heads and a symmetric window."""
    return liger.liger_fused_neighborhood_attention(q, k, v, kernel_size=2 * window[0] + 1, scale=scale)
