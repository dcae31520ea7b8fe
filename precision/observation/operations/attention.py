"""Attention opened: queries, keys, values, cache, scores, probabilities and output are sites.

Of torch.nn.MultiheadAttention the projections are products with parameters, and its core is attention's.
"""

import inspect
import math
from typing import Any

import torch

from assay.precision.observation.tracer import Tracer

_SIGNATURE = inspect.signature(torch.nn.functional.multi_head_attention_forward)
_SCORES = 1 << 24
"""Scores that are held at once where no gradient is asked for: 64 MiB of float32, so memory grows with T, not T x T."""
_CLOSED = ("bias_k", "bias_v", "use_separate_proj_weight", "add_zero_attn", "static_k", "static_v")
"""Arguments with which it is run as it is, its sites shut."""


def scaled_dot_product(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention."""
    names = {"query": "q", "key": "k", "value": "v"}
    return _attention(tracer, *args, **{names.get(name, name): value for name, value in kwargs.items()})[0]


def _attention(
    tracer: Tracer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    whole: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and probabilities by the definition, stages open: q [..., H, S, D], k and v [..., Hkv, S, D].

    Without gradients long sequences go in chunks of queries, each of which sees all keys, so every stage rounds as it
    does whole: schemes of scores and probabilities have their scales within rows. The probabilities are then those of
    the last chunk; ``whole``: of all queries, at once.
    """
    values = tracer.visitor.values
    if tracer.caches(lambda: is_causal or not _sees_ahead(q, k, attn_mask)):
        k, v = values(tracer.site("kv_cache"), k, "keys"), values(tracer.site("kv_cache"), v, "values")
        q = values(tracer.site("kv_cache"), q, "queries")
    q, k, v = values(tracer.site("q"), q), values(tracer.site("k"), k), values(tracer.site("v"), v)
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    q = q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    rows = max(q.shape[-2], 1)
    step = rows if whole or torch.is_grad_enabled() else max(_SCORES * rows // max(_scores(q, k), 1), 1)
    outputs, probabilities = [], q.new_empty(0)
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        scores = values(tracer.site("scores"), q[..., some, :] @ k.mT)
        mask = attn_mask if attn_mask is None or attn_mask.shape[-2] == 1 else attn_mask[..., some, :]
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(start)
        probabilities = values(tracer.site("probabilities"), _MaskedSoftmax.apply(scores, mask))  # type: ignore[no-untyped-call]
        outputs.append(probabilities @ v)
    return values(tracer.site("output"), outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)), probabilities


def _sees_ahead(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether most keys that are seen at all are seen by the query before their own, as in encoders, whose keys and
    values nothing is kept of; those of padding aren't seen."""
    if not 1 < q.shape[-2] == k.shape[-2]:
        return False
    if mask is None:
        return True
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if mask.shape[-2] == 1:
        return bool(visible[..., 1:].any())
    return bool(visible.diagonal(1, -2, -1).sum() > 0.5 * visible[..., 1:].any(-2).sum())


def _scores(q: torch.Tensor, k: torch.Tensor) -> int:
    """How many scores there are of queries [..., H, S, D] and keys [..., H, T, D]."""
    return q.numel() // max(q.shape[-1], 1) * k.shape[-2]


def multihead(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> Any:
    """`multi_head_attention_forward` of one sequence with itself: query [L, B, E] or [L, E]."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    p = given.arguments
    query, heads = p["query"], p["num_heads"]
    inner, outer = tracer.named(p["in_proj_weight"]), tracer.named(p["out_proj_weight"])
    alone = p["key"] is query and p["value"] is query and query.dim() == 3
    shut = any(p[name] is not None and p[name] is not False for name in _CLOSED)
    if not alone or inner is None or outer is None or shut:
        return func(*args, **kwargs)
    x = query.transpose(0, 1)
    projected = tracer.product(
        p["in_proj_weight"], x, inner, lambda a, w: torch.nn.functional.linear(a, w, p["in_proj_bias"])
    )
    q, k, v = (torch.unflatten(part, -1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    mask = _mask(p["attn_mask"], p["key_padding_mask"], heads, x)
    out, probabilities = _attention(tracer, q, k, v, mask, whole=p["need_weights"])
    out = tracer.product(
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
        ctx.added = None if mask is None else mask.shape
        return probabilities

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (p,) = ctx.saved_tensors
        found = torch._softmax_backward_data(g, p, -1, p.dtype)
        # What is added to scores may be learnt, as biases of distances are.
        return found, found.sum_to_size(ctx.added) if ctx.needs_input_grad[1] else None
