"""Attention with grouped heads, masks, softcap, ALiBi and sinks; the online softmax of FlashAttention-2."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.attention_backward import attention_gradients
from assay.kernels.triton.attention_kernel import launch
from assay.kernels.triton.attention_options import attention_options
from assay.kernels.triton.operators import custom_op, differentiate


def _results(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("assay::attention", _results)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    first_seen: int | None,
    last_seen: int | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Query i sees the keys from i + first_seen to i + last_seen."""
    queries, keys = q.shape[2], k.shape[2]
    out, lse = _results(q, k, v)
    if lse.numel() == 0:
        return out, lse
    first_seen = None if first_seen is None or first_seen + queries <= 1 else first_seen  # or it binds no row
    last_seen = None if last_seen is None or last_seen >= keys - 1 else last_seen
    launch(q, k, v, out, lse, slopes, sinks, scale, softcap, first_seen, last_seen)
    return out, lse


def _gradients(saved: SimpleNamespace, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    given = saved.q, saved.k, saved.v, saved.slopes, saved.sinks, saved.result, saved.last_result, dout, dlse
    options = saved.scale, saved.softcap, saved.first_seen, saved.last_seen
    found: tuple[Tensor, ...] = attention_gradients(*given, *options)
    return found


differentiate("assay::attention", _gradients, saves="q k v slopes sinks result last_result")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v of q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]; H a multiple of Hkv, D and Dv up to 256.

    All three are float32, bfloat16 or float16; scores, exponentials and acc are float32, and the weights are rounded
    to the inputs' dtype before they meet v.

    causal: "none", or query i sees the keys up to i + o, with o = Sk - Sq ("bottom_right") or 0 ("top_left").
    scale: 1 / sqrt(D) where left out. window: (left, right), the keys from i + o - left to i + o + right.
    softcap: c tanh(score / c), after the scale and before bias and mask. alibi: adds -slopes[h] |i + Sk - Sq - j|,
    slopes float32[H]. sinks: float32[H], one more logit a head, without a value.

    Returns out[B,H,Sq,Dv], zero in a row that sees nothing; with return_lse also the natural log-sum-exp,
    float32[B,H,Sq], -inf in such a row without a sink. Raises TypeError or ValueError, naming the argument, for
    another dtype, shape, device or option.
    """
    options = attention_options(q, k, v, causal, scale, window, softcap, alibi, sinks, slopes)
    out, lse = _attention(q, k, v, *options)
    return (out, lse) if return_lse else out


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `attention` where its result's gradient is dout[B,H,Sq,Dv], in the inputs' dtype.

    The forward pass runs first: autograd through `attention`, which gives the gradients of slopes and sinks as well,
    has kept its results. Products are summed in float32; weights and the gradients of scores are rounded to the
    inputs' dtype before they are multiplied. Options and errors as in `attention`.
    """
    options = attention_options(q, k, v, causal, scale, window, softcap, alibi, sinks, slopes)
    check(q=(q, FLOATING, "B H Sq D"), v=(v, ("q",), "B Hkv Sk Dv"), dout=(dout, ("q",), "B H Sq Dv"))
    out, lse = _attention(q, k, v, *options)
    slopes, sinks, *rest = options
    dq, dk, dv, _, _ = attention_gradients(q, k, v, slopes, sinks, out, lse, dout, torch.zeros_like(lse), *rest)
    return dq, dk, dv
