"""Scaled dot-product attention, by its own bound."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.rules.logic import truth
from assay.golden.lowering.rules.products import operand
from assay.golden.lowering.table import rule

Tensor = torch.Tensor


def _repeated(xp: Any, number: Any, times: int) -> Any:
    """Heads of keys and values, each for as many heads of queries."""
    if times == 1:
        return number
    places = torch.arange(int(number.shape[-3])).repeat_interleave(times)
    return number[..., xp.integers(places), :, :]


def attended(
    evaluation: Evaluation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Any, Any]:
    """softmax(q k^T scale + bias, masked) v and its log-sum-exp; a row that sees nothing gives zero, as PyTorch's."""
    xp = evaluation.xp
    q, k, v = operand(evaluation, query), operand(evaluation, key), operand(evaluation, value)
    times = query.shape[-3] // max(key.shape[-3], 1) if query.ndim > 2 and key.ndim > 2 else 1
    k, v = _repeated(xp, k, times), _repeated(xp, v, times)
    by = xp.constant(lambda sqrt, pi: 1 / sqrt(query.shape[-1])) if scale is None else scale
    scores = xp.scores(q, k, by)
    shape = tuple(map(int, scores.shape))
    visible = torch.ones(shape[-2:], dtype=torch.bool)
    if causal:
        visible = visible.tril()
    if bias is not None and bias.dtype == torch.bool:
        certain, possible = truth(evaluation, bias)
        if not torch.equal(certain, possible):
            raise evaluation.undecided("elements of a mask")
        visible = visible & certain
    elif bias is not None:
        added = evaluation.number(bias)
        least, _ = xp.enclosure(added)
        hidden = least == -math.inf
        visible = visible & ~hidden
        added = xp.chosen(hidden, xp.exact(torch.zeros((), dtype=torch.float64)), added)
        scores = scores + added
    seen = xp.integers(visible) if xp.native is torch else xp.integers(visible).astype(bool)
    seen = visible if xp.native is torch else seen
    return xp.attend(scores, xp.native.broadcast_to(seen, shape), v, None)


@rule("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable")
def _flash(
    evaluation: Evaluation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    out, lse = attended(evaluation, query, key, value, attn_mask, is_causal, scale)
    return (
        evaluation.made(out, query.dtype),
        evaluation.made(lse.reshape(tuple(query.shape[:-1])), torch.float32),
    )


@rule("scaled_dot_product_attention")
def _attention(
    evaluation: Evaluation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise evaluation.refusal(torch.ops.aten.scaled_dot_product_attention.default, "draws random numbers")
    out, _ = attended(evaluation, query, key, value, attn_mask, is_causal, scale)
    return evaluation.made(out, query.dtype)


@rule("_scaled_dot_product_attention_math")
def _math(
    evaluation: Evaluation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor | None]:
    return _attention(evaluation, query, key, value, attn_mask, dropout_p, is_causal, scale=scale), None
