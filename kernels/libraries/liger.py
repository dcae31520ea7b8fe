"""Liger-Kernel's operators under the specs' signatures, as `assay survey` calls them.

Each function calls what Liger's users call, forward only. On a GPU its Triton kernels run as they are, elsewhere in the
faithful interpreter. Where an operator does more than a spec, the rest is made idle (a factor of one) and said so.
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
    """The queries, a copy of `x`, as Transformers has them: heads before the sequence, angles twice side by side."""
    return rope_in_place(x.clone(), cos, sin)


def rope_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rope`, on `x` itself."""
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
    """Self-attention with as many heads for keys as for queries, in a window as far to the left as to the right."""
    return liger.liger_fused_neighborhood_attention(q, k, v, kernel_size=2 * window[0] + 1, scale=scale)
