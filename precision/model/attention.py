"""Attention opened: queries, keys, values, cache, scores, probabilities and output are sites."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.precision.model.tap import Tap

__all__ = ["attention", "scaled_dot_product"]


def scaled_dot_product(tap: Tap, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention."""
    names = {"query": "q", "key": "k", "value": "v"}
    return attention(tap, *args, **{names.get(name, name): value for name, value in kwargs.items()})[0]


def attention(
    tap: Tap,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and probabilities by the definition, stages open: q [..., H, S, D], k and v [..., Hkv, S, D]."""
    values = tap.visitor.values
    k, v = values(tap.site("kv_cache"), k, "keys"), values(tap.site("kv_cache"), v, "values")
    q, k, v = values(tap.site("q"), q), values(tap.site("k"), k), values(tap.site("v"), v)
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT
    scores = values(tap.site("scores"), scores)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    probabilities = values(tap.site("probabilities"), _MaskedSoftmax.apply(scores, attn_mask))  # type: ignore[no-untyped-call]
    return values(tap.site("output"), probabilities @ v), probabilities


class _MaskedSoftmax(torch.autograd.Function):
    """Softmax along the last dimension under a boolean mask (True: visible) or one that is added; none where nothing is
    visible. One function, for behind a mask the gradient of a softmax is zero by itself."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        probabilities = scores.softmax(-1)
        if mask is not None and mask.dtype == torch.bool and not bool(mask.any(-1).all()):
            probabilities.masked_fill_(~mask.any(-1, keepdim=True), 0.0)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (p,) = ctx.saved_tensors
        return torch._softmax_backward_data(g, p, -1, p.dtype), None
