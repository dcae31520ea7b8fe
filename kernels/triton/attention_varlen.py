"""Attention of sequences of different lengths, packed end to end without padding."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, INT32, check, check_choice, check_heads, check_sm_scale
from assay.kernels.triton.attention import MAX_HEAD_DIM, launch_attention
from assay.kernels.triton.attention_backward import launch_attention_backward
from assay.kernels.triton.attention_blocks import AttentionOptions
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed


def _options(scale: float, causal: bool) -> AttentionOptions:
    return AttentionOptions(None, None, scale, None, None, 0 if causal else None)


def _heads_first(x: Tensor) -> Tensor:
    """Return x[T,H,D] as [1,H,T,D]."""
    return x.transpose(0, 1)[None]


def _empty_results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@custom_op("assay::attention_varlen", _empty_results)
def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return out[Tq,H,D] and lse[Tq,H]."""
    out, lse = _empty_results(q)
    if out.numel():
        q, k, v = map(_heads_first, (q, k, v))
        launch_attention(q, k, v, out, lse, _options(scale, causal), (cu_seqlens_q, cu_seqlens_k))
    return out, lse


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@custom_op("assay::attention_varlen_backward", _empty_gradients)
def _attention_varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _empty_gradients(q, k, v)
    if lse.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    inputs = *map(_heads_first, (q, k, v, out)), lse.t()[None], _heads_first(dout), dlse.t()[None]
    dq, dk, dv = map(_heads_first, gradients)
    delta = torch.empty((1, *lse.t().shape), dtype=torch.float32, device=lse.device)
    results = dq, dk, dv, delta, None
    launch_attention_backward(inputs, results, _options(scale, causal), (cu_seqlens_q, cu_seqlens_k))
    return gradients


def _gradients(saved: SimpleNamespace, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tensors = saved.q, saved.k, saved.v, saved.cu_seqlens_q, saved.cu_seqlens_k, saved.result, saved.last_result
    gradients: tuple[Tensor, Tensor, Tensor] = _attention_varlen_backward(
        *tensors, dout, dlse, saved.scale, saved.causal
    )
    return gradients


differentiate("assay::attention_varlen", _gradients, saves="q k v cu_seqlens_q cu_seqlens_k result last_result")


@replayed
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q k^T scale) v for each sequence b, out[Tq,H,D] in q's dtype.

    Its queries are q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]] of q[Tq,H,D], its keys and values
    [cu_seqlens_k[b] : cu_seqlens_k[b + 1]] of k and v[Tk,Hkv,D]; H is a multiple of Hkv, D at most 256. All three are
    float32, bfloat16 or float16. Scores, exponentials and the accumulator are float32; probabilities are rounded to the
    inputs' dtype before they are multiplied by v. cu_seqlens_q and cu_seqlens_k are int32[B+1] and rise from 0 to Tq
    and Tk.

    causal: "none", or "bottom_right": the last query of a sequence attends to all its keys, each earlier one to one key
    less. scale: 1 / sqrt(D) by default.

    A row that attends to nothing is zero. Raises TypeError or ValueError, naming the argument, for another dtype,
    shape, device or option. Offsets are on the device and not checked.
    """
    scale = _check(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    out: Tensor = _attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal != "none")[0]
    return out


@replayed
def attention_varlen_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dout: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq[Tq,H,D], dk and dv[Tk,Hkv,D] of `attention_varlen` for the gradient dout[Tq,H,D] of its output.

    The forward pass runs first; autograd through `attention_varlen` has saved its results. Products are accumulated in
    float32; p and ds are rounded to the inputs' dtype before they are multiplied. Options and errors are those of
    `attention_varlen`; dout has q's dtype and shape.
    """
    scale = _check(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    check(q=(q, FLOATING, "Tq H D"), dout=(dout, ("q",), "Tq H D"))
    inputs = q, k, v, cu_seqlens_q, cu_seqlens_k
    out, lse = _attention_varlen(*inputs, scale, causal != "none")
    gradients: tuple[Tensor, Tensor, Tensor] = _attention_varlen_backward(
        *inputs, out, lse, dout, torch.zeros_like(lse), scale, causal != "none"
    )
    return gradients


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: str, scale: float | None
) -> float:
    """Return the scale; raise TypeError or ValueError unless arguments are as in `attention_varlen`."""
    check(
        q=(q, FLOATING, "Tq H D"),
        k=(k, ("q",), "Tk Hkv D"),
        v=(v, ("q",), "Tk Hkv D"),
        cu_seqlens_q=(cu_seqlens_q, INT32, "B+1"),
        cu_seqlens_k=(cu_seqlens_k, INT32, "B+1"),
    )
    check_heads(q.shape[1], "k", k.shape[1], MAX_HEAD_DIM, q=q.shape[2])
    least = 2 if q.shape[0] else 1
    if cu_seqlens_q.shape[0] < least:
        raise ValueError(
            f"cu_seqlens_q: expected at least {least} offsets, as q has {q.shape[0]} rows, got {len(cu_seqlens_q)}"
        )
    check_choice("causal", causal, ("none", "bottom_right"))
    return check_sm_scale(scale, q.shape[2])
