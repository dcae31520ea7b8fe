"""torch.nn.MultiheadAttention opened: its projections are products with parameters, its core is attention's."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from assay.precision.model.attention import attention
from assay.precision.model.tap import Tap

__all__ = ["multihead"]

_SIGNATURE = inspect.signature(torch.nn.functional.multi_head_attention_forward)
_CLOSED = ("bias_k", "bias_v", "use_separate_proj_weight", "add_zero_attn", "static_k", "static_v")
"""Arguments with which it is run as it is, its sites shut."""


def multihead(tap: Tap, func: Any, args: Any, kwargs: Any) -> Any:
    """`multi_head_attention_forward` of one sequence with itself: query [L, B, E] or [L, E]."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    p = given.arguments
    query, heads = p["query"], p["num_heads"]
    inner, outer = tap.named(p["in_proj_weight"]), tap.named(p["out_proj_weight"])
    alone = p["key"] is query and p["value"] is query and query.dim() == 3
    if (
        not alone
        or inner is None
        or outer is None
        or any(p[name] is not None and p[name] is not False for name in _CLOSED)
    ):
        return func(*args, **kwargs)
    x = query.transpose(0, 1)
    projected = tap.product(
        p["in_proj_weight"], x, inner, lambda a, w: torch.nn.functional.linear(a, w, p["in_proj_bias"])
    )
    q, k, v = (torch.unflatten(part, -1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    out, probabilities = attention(tap, q, k, v, _mask(p["attn_mask"], p["key_padding_mask"], heads, x))
    out = tap.product(
        p["out_proj_weight"],
        out.transpose(1, 2).flatten(-2),
        outer,
        lambda a, w: torch.nn.functional.linear(a, w, p["out_proj_bias"]),
    ).transpose(0, 1)
    if not p["need_weights"]:
        return out, None
    return out, probabilities.mean(1) if p["average_attn_weights"] else probabilities


def _mask(mask: torch.Tensor | None, padding: torch.Tensor | None, heads: int, x: torch.Tensor) -> torch.Tensor | None:
    """Both masks as one that is added, [B or 1, H or 1, L, L]: -inf where a boolean one is True."""
    found = None
    for each, shape in ((mask, (-1, heads)), (padding, None)):
        if each is None:
            continue
        if each.dtype == torch.bool:
            each = torch.zeros_like(each, dtype=x.dtype).masked_fill_(each, float("-inf"))
        if shape is None:
            each = each[:, None, None, :]
        elif each.dim() == 3:
            each = torch.unflatten(each, 0, shape)
        found = each if found is None else found + each
    return found
