"""Attention of sequences of several lengths that are laid end to end, without padding."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, INT32, check, check_choice, check_heads, check_sm_scale
from assay.kernels.triton.attention_backward import launch_gradients
from assay.kernels.triton.attention_kernel import launch
from assay.kernels.triton.attention_options import WIDEST
from assay.kernels.triton.operators import custom_op, differentiate


def _results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@custom_op("assay::attention_varlen", _results)
def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp [Tq,H]."""
    out, lse = _results(q)
    if out.numel():
        starts = cu_seqlens_q, cu_seqlens_k
        q, k, v = map(_heads_first, (q, k, v))
        launch(q, k, v, out, lse, None, None, scale, None, None, 0 if causal else None, starts)
    return out, lse


def _gradient_results(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@custom_op("assay::attention_varlen_backward", _gradient_results)
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
    """From the results out and lse of `assay::attention_varlen` and their gradients; options are that operator's."""
    results = _gradient_results(q, k, v)
    if lse.numel() == 0:
        for gradient in results:
            gradient.zero_()
        return results
    given = *map(_heads_first, (q, k, v, out)), lse.t()[None], _heads_first(dout), dlse.t()[None]
    dq, dk, dv = map(_heads_first, results)
    delta = torch.empty((1, *lse.t().shape), dtype=torch.float32, device=lse.device)
    options = scale, None, None, 0 if causal else None
    launch_gradients(given, (dq, dk, dv, delta, None), None, options, (cu_seqlens_q, cu_seqlens_k))
    return results


def _heads_first(x: Tensor) -> Tensor:
    """x[T,H,D] as [1,H,T,D]."""
    return x.transpose(0, 1)[None]


def _gradients(saved: SimpleNamespace, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    given = saved.q, saved.k, saved.v, saved.cu_seqlens_q, saved.cu_seqlens_k, saved.result, saved.last_result
    found: tuple[Tensor, Tensor, Tensor] = _attention_varlen_backward(*given, dout, dlse, saved.scale, saved.causal)
    return found


differentiate("assay::attention_varlen", _gradients, saves="q k v cu_seqlens_q cu_seqlens_k result last_result")


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
    scale = _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    return _attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal != "none")[0]


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
    """dq[Tq,H,D], dk and dv[Tk,Hkv,D] of `attention_varlen` where its result's gradient is dout[Tq,H,D].

    The forward pass runs first: autograd through `attention_varlen` has kept its results. Products are summed in
    float32; weights and the gradients of scores are rounded to the inputs' dtype before they are multiplied. Options
    and errors as in `attention_varlen`, but that dout has q's dtype and shape.
    """
    scale = _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale)
    check(q=(q, FLOATING, "Tq H D"), dout=(dout, ("q",), "Tq H D"))
    given = q, k, v, cu_seqlens_q, cu_seqlens_k
    out, lse = _attention_varlen(*given, scale, causal != "none")
    return _attention_varlen_backward(*given, out, lse, dout, torch.zeros_like(lse), scale, causal != "none")


def _checked(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: str, scale: float | None
) -> float:
    """The scale; raises TypeError or ValueError unless all is as `attention_varlen` says."""
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
    return check_sm_scale(scale, q.shape[2])
