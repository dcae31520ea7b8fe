"""Attention of sequences of several lengths that are laid end to end, without padding."""

from __future__ import annotations

import math

from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, INT32, check, check_choice, check_heads
from assay.kernels.triton.attention_kernel import launch
from assay.kernels.triton.attention_options import WIDEST
from assay.kernels.triton.operators import custom_op


@custom_op("assay::attention_varlen", lambda q, *others: q.new_empty(q.shape))
def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, causal: bool
) -> Tensor:
    out = q.new_empty(q.shape)
    if out.numel():
        starts = cu_seqlens_q, cu_seqlens_k
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        launch(q, k, v, out, None, None, None, scale, None, None, 0 if causal else None, starts)
    return out


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
    """softmax(q k^T scale) v of each sequence b: queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q[Tq,H,D], keys
    cu_seqlens_k[b] to cu_seqlens_k[b + 1] - 1 of k and v[Tk,Hkv,D]; H a multiple of Hkv, D up to 256.

    All three are float32, bfloat16 or float16; scores, exponentials and acc are float32, and the weights are rounded
    to the inputs' dtype before they meet v. cu_seqlens_q and cu_seqlens_k are int32[B+1], and rise from 0 to Tq and Tk.

    causal: "none", or the last query of a sequence sees its keys up to the last, each one before it one key less
    ("bottom_right"). scale: 1 / sqrt(D) where left out.

    Returns out[Tq,H,D], zero in a row that sees nothing. Raises TypeError or ValueError, naming the argument, for
    another dtype, shape, device or option. Offsets lie on the device and aren't checked.
    """
    check(
        q=(q, FLOATING, "Tq H D"),
        k=(k, ("q",), "Tk Hkv D"),
        v=(v, ("q",), "Tk Hkv D"),
        cu_seqlens_q=(cu_seqlens_q, INT32, "B+1"),
        cu_seqlens_k=(cu_seqlens_k, INT32, "B+1"),
    )
    check_heads(q.shape[1], "k", k.shape[1], WIDEST, q=q.shape[2])
    least = 2 if q.shape[0] else 1
    if cu_seqlens_q.shape[0] < least:
        raise ValueError(
            f"cu_seqlens_q: expected at least {least} offsets, as q has {q.shape[0]} rows, got {len(cu_seqlens_q)}"
        )
    check_choice("causal", causal, ("none", "bottom_right"))
    scale = 1.0 / math.sqrt(max(q.shape[2], 1)) if scale is None else scale
    return _attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal != "none")
