"""Honest attention over sequences of several lengths laid end to end."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, families
from .honest_attention import kv_head_of, online, weighted_sum
from .honest_softmax import shift_of
from .numerics import keep, load, nonzero, round_via


def bounds(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """Where sequence b begins and ends."""
    return int(cu_seqlens[b]), int(cu_seqlens[b + 1])


def ahead(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """How far each key of a sequence lies ahead of each query, both counted from the sequence's end."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)


def largest_of(scores: Tensor) -> Tensor:
    """What scores are shifted by: their largest, and zero where a row sees nothing."""
    return shift_of(scores.amax(dim=-1, keepdim=True))


@dataclass(frozen=True)
class Steps:
    """What the kernels are made of; a fault replaces one."""

    key_bounds: Callable[[Tensor, int], tuple[int, int]] = bounds
    count: Callable[[Tensor], int] = lambda cu_seqlens: len(cu_seqlens) - 1
    ahead: Callable[[int, int, tuple[int, int]], Tensor] = ahead
    scores: Callable[[Tensor], Tensor] = keep
    weights: Callable[[Tensor], Tensor] = keep
    block: int = 0


def one_sequence(scores: Tensor, v: Tensor, see: Tensor, steps: Steps) -> Tensor:
    """Softmax of whole rows [H,S,L], applied to values [H,L,D]."""
    weights = torch.exp(scores - largest_of(scores))
    return weighted_sum(steps.weights(weights), v, see) / nonzero(weights.sum(dim=-1, keepdim=True))


def in_blocks(scores: Tensor, v: Tensor, see: Tensor, steps: Steps) -> Tensor:
    """The same, block by block with a running maximum."""
    starts = range(0, scores.shape[-1], steps.block)
    keys = (slice(start, start + steps.block) for start in starts)
    blocks = ((scores[..., part], v[:, part], see[:, part]) for part in keys)
    out, total, _ = online(blocks, torch.zeros(*scores.shape[:-1], v.shape[-1]), steps.weights)
    return out / nonzero(total)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    steps: Steps = Steps(),
) -> Tensor:
    """Sequence by sequence."""
    queries, keys, values = (load(x).transpose(0, 1) for x in (q, k, v))
    heads = kv_head_of(q.shape[1], k.shape[1])
    factor = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    out = torch.zeros(queries.shape)
    for b in range(steps.count(cu_seqlens_q)):
        rows, places = slice(*bounds(cu_seqlens_q, b)), slice(*steps.key_bounds(cu_seqlens_k, b))
        if rows.start >= rows.stop or places.start >= places.stop:
            continue
        scores = steps.scores(queries[:, rows] @ keys[heads][:, places].transpose(1, 2) * factor)
        see = steps.ahead(scores.shape[1], scores.shape[2], (q.shape[0], k.shape[0])) <= 0
        see = see if causal != "none" else torch.ones_like(see)
        method = in_blocks if steps.block else one_sequence
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
            mixed = weighted_sum(weights[:, rows, places], values[:, places], see[rows, places])
            out[:, rows] = mixed / nonzero(total[:, rows])
    return out.transpose(0, 1).contiguous().to(q.dtype)


ALL = ("float32", "bfloat16", "float16")
ROUNDED = (
    ("_rounded", partial(attention_varlen, steps=Steps(block=32, weights=round_via(getattr(torch, dtype)))), (dtype,))
    for dtype in ALL[1:]
)

VARLEN: tuple[Entry, ...] = families(
    "attention_varlen",
    ("", attention_varlen, ALL),
    ("_in_blocks", partial(attention_varlen, steps=Steps(block=16)), ALL),
    ("_masked", attention_masked, ALL),
    *ROUNDED,
    options={"causal": ["none", "bottom_right"], "scale": [None, 0.25]},
    shapes={"D": [8, 40]},
)
