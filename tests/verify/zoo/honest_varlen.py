"""Honest attention over sequences of several lengths laid end to end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .honest_attention import kv_head_of
from .honest_softmax import shift_of
from .numerics import keep, load, round_via

Mask = Callable[[Tensor, Tensor], Tensor]


def bounds(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """Where sequence b begins and ends."""
    return int(cu_seqlens[b]), int(cu_seqlens[b + 1])


def ahead(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """How far each key of a sequence lies ahead of each query, both counted from the sequence's end."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)


def largest_of(scores: Tensor) -> Tensor:
    """What scores are shifted by: their largest, and zero where a row sees nothing."""
    return shift_of(scores.amax(dim=-1, keepdim=True))


def nonzero(total: Tensor) -> Tensor:
    """A sum of weights to divide by: one where there are none."""
    return torch.where(total == 0, torch.ones_like(total), total)


@dataclass(frozen=True)
class Steps:
    """What the kernels are made of; a fault replaces one."""

    query_bounds: Callable[[Tensor, int], tuple[int, int]] = bounds
    key_bounds: Callable[[Tensor, int], tuple[int, int]] = bounds
    count: Callable[[Tensor], int] = lambda cu_seqlens: len(cu_seqlens) - 1
    ahead: Callable[[int, int, tuple[int, int]], Tensor] = ahead
    kv_head: Callable[[int, int], Tensor] = kv_head_of
    scale: Callable[[int], float] = lambda width: 1 / math.sqrt(width)
    scores: Callable[[Tensor], Tensor] = keep
    shift: Callable[[Tensor], Tensor] = largest_of
    divisor: Callable[[Tensor], Tensor] = nonzero
    weights: Callable[[Tensor], Tensor] = keep
    block: int = 0


HONEST_STEPS = Steps()


def weighted(weights: Tensor, v: Tensor, see: Tensor) -> Tensor:
    """weights [H,S,L] @ v [H,L,D], to which a key behind the mask adds nothing, NaN included."""
    finite = v.isfinite().all(dim=-1)
    out = weights @ torch.where(finite[..., None], v, 0.0)
    for key in (~finite.all(dim=0)).nonzero()[:, 0].tolist():
        term = weights[..., key, None] * v[:, None, key]
        out = out + torch.where(see[:, key, None] & ~finite[:, key, None, None], term, 0.0)
    return out


def one_sequence(scores: Tensor, v: Tensor, see: Tensor, steps: Steps) -> Tensor:
    """Softmax of whole rows [H,S,L], applied to values [H,L,D]."""
    weights = torch.exp(scores - steps.shift(scores))
    return weighted(steps.weights(weights), v, see) / steps.divisor(weights.sum(dim=-1, keepdim=True))


def online(scores: Tensor, v: Tensor, see: Tensor, steps: Steps) -> Tensor:
    """The same, block by block with a running maximum."""
    maximum = torch.full((*scores.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(maximum), torch.zeros(*scores.shape[:-1], v.shape[-1])
    for first in range(0, scores.shape[-1], steps.block):
        keys = slice(first, first + steps.block)
        part = scores[..., keys]
        new = torch.maximum(maximum, part.amax(dim=-1, keepdim=True))
        weights, decay = torch.exp(part - shift_of(new)), torch.exp(maximum - shift_of(new))
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        out = out * decay + weighted(steps.weights(weights), v[:, keys], see[:, keys])
        maximum = new
    return out / steps.divisor(total)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    steps: Steps = HONEST_STEPS,
) -> Tensor:
    """Sequence by sequence."""
    queries, keys, values = (load(x).transpose(0, 1) for x in (q, k, v))
    heads = steps.kv_head(q.shape[1], k.shape[1])
    factor = steps.scale(q.shape[2]) if scale is None else scale
    out = torch.zeros(queries.shape)
    for b in range(steps.count(cu_seqlens_q)):
        rows, places = slice(*steps.query_bounds(cu_seqlens_q, b)), slice(*steps.key_bounds(cu_seqlens_k, b))
        if rows.start >= rows.stop or places.start >= places.stop:
            continue
        scores = steps.scores(queries[:, rows] @ keys[heads][:, places].transpose(1, 2) * factor)
        see = steps.ahead(scores.shape[1], scores.shape[2], (q.shape[0], k.shape[0])) <= 0
        see = see if causal != "none" else torch.ones_like(see)
        method = online if steps.block else one_sequence
        out[:, rows] = method(scores.masked_fill(~see, -math.inf), values[heads][:, places], see, steps)
    return out.transpose(0, 1).contiguous().to(q.dtype)


def attention_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
) -> Tensor:
    """All queries against all keys, what belongs to another sequence masked."""
    token = [torch.arange(x.shape[0]) for x in (q, k)]
    of, ends = [], []
    for place, cu in zip(token, (cu_seqlens_q, cu_seqlens_k), strict=True):
        of.append((place[:, None] >= cu[None, 1:]).sum(dim=1))
        ends.append(cu[1:][of[-1]].long() if len(place) else place)
    see = of[0][:, None] == of[1][None, :]
    if causal != "none":
        see &= (token[1] - ends[1])[None, :] <= (token[0] - ends[0])[:, None]
    heads = kv_head_of(q.shape[1], k.shape[1])
    queries, keys, values = load(q).transpose(0, 1), load(k).transpose(0, 1)[heads], load(v).transpose(0, 1)[heads]
    out = torch.zeros(queries.shape)
    if k.shape[0]:
        scores = queries @ keys.transpose(1, 2) * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
        scores = scores.masked_fill(~see, -math.inf)
        weights = torch.exp(scores - largest_of(scores))
        total = weights.sum(dim=-1, keepdim=True)
        for b in range(len(cu_seqlens_q) - 1):
            rows, places = slice(*bounds(cu_seqlens_q, b)), slice(*bounds(cu_seqlens_k, b))
            mixed = weighted(weights[:, rows, places], values[:, places], see[rows, places])
            out[:, rows] = mixed / nonzero(total[:, rows])
    return out.transpose(0, 1).contiguous().to(q.dtype)


ALL = ("float32", "bfloat16", "float16")
LISTED = {"options": {"causal": ["none", "bottom_right"], "scale": [None, 0.25]}, "shapes": {"D": [8, 40]}}
in_blocks = partial(attention_varlen, steps=Steps(block=16))
ROUNDED = {
    "bfloat16": partial(attention_varlen, steps=Steps(block=32, weights=round_via(torch.bfloat16))),
    "float16": partial(attention_varlen, steps=Steps(block=32, weights=round_via(torch.float16))),
}

VARLEN: tuple[Entry, ...] = (
    *family("attention_varlen", "attention_varlen", attention_varlen, ALL, **LISTED),
    *family("attention_varlen_in_blocks", "attention_varlen", in_blocks, ALL, **LISTED),
    *family("attention_varlen_masked", "attention_varlen", attention_masked, ALL, **LISTED),
    *(
        entry
        for dtype, kernel in ROUNDED.items()
        for entry in family("attention_varlen_rounded", "attention_varlen", kernel, (dtype,), **LISTED)
    ),
)
