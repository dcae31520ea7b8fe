"""Attention, whose scores are held as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.kernels.cpu.compiling import compiled, composed
from assay.kernels.triton.attention import check_attention


@composed
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v of q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]; H a multiple of Hkv, D and Dv up to 256.

    All three are float32, bfloat16 or float16; inside all is float32, and products are torch's. causal: "none", or
    query i sees the keys up to i + o, with o = Sk - Sq ("bottom_right") or 0 ("top_left"). scale: 1 / sqrt(D) where
    left out. window: (left, right), the keys from i + o - left to i + o + right. softcap: c tanh(score / c), after the
    scale and before the mask. A key that isn't seen has a weight of zero, which multiplies its value nevertheless.

    Returns out[B,H,Sq,Dv], zero in a row that sees nothing; with return_lse also the natural log-sum-exp,
    float32[B,H,Sq], -inf in such a row. Raises TypeError or ValueError, naming the argument, for another dtype, shape
    or option.
    """
    _, _, factor, cap, first, last = check_attention(q, k, v, causal, scale, window, softcap, False, None, None)
    batch, heads, queries, keys, shared = *q.shape[:3], *k.shape[2:0:-1]
    grouped = q.float().reshape(batch, shared, heads // shared * queries, q.shape[3])
    scores = (grouped @ k.float().mT).mul_(factor)
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if first is not None or last is not None:
        ahead = torch.arange(keys) - torch.arange(queries)[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if first is not None:
            hidden |= ahead < first
        if last is not None:
            hidden |= ahead > last
        scores.view(batch, heads, queries, keys).masked_fill_(hidden, -torch.inf)
    weights, largest, total = exponentials(scores)
    out = (weights @ v.float()).div_(torch.where(total == 0, 1.0, total)).to(q.dtype)
    out = out.view(batch, heads, queries, v.shape[3])
    return (out, (largest + torch.log(total)).view(batch, heads, queries)) if return_lse else out


def exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - m) of scores[...,N], and [...,1]: m, the largest of a row, and the exponentials' sum.

    Where all of a row are -inf, m is zero, as are weights and sum.
    """
    if not scores.numel():
        none = scores.new_zeros(*scores.shape[:-1], 1)
        return scores, none, none
    weights, largest, total = _exponentials(scores.view(-1, scores.shape[-1]))
    return weights.view(scores.shape), *(x.view(*scores.shape[:-1], 1) for x in (largest, total))


@compiled
def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest = scores.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(scores - largest)
    return weights, largest, weights.sum(-1, keepdim=True)
