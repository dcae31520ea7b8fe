"""Honest attention over a paged cache: page by page with an online maximum, and pages split among workers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Entry, family
from .honest_attention import Block, kv_head_of, online
from .honest_softmax import shift_of
from .numerics import keep, load, nonzero, round_via

Stage = Callable[[Tensor], Tensor]
State = tuple[Tensor, Tensor]


def used_pages(length: int, page: int) -> int:
    """How many pages hold a sequence, the last perhaps in part."""
    return -(-length // page)


def seen_slots(length: int, start: int, page: int) -> Tensor:
    """Which slots of the page that begins at a position belong to the sequence."""
    return start + torch.arange(page) < length


def zero_stale(values: Tensor, see: Tensor) -> Tensor:
    """Values with what lies behind the last token zero: a weight of zero would keep NaN."""
    return torch.where(see[:, None], values, torch.zeros_like(values))


def merge_by_lse(states: list[State]) -> Tensor:
    """The output of all parts of the keys; one without keys, with an lse of -inf, has no share; all such give zero."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    weights = torch.exp(lses - shift_of(lses.amax(dim=0)))
    total = weights.sum(dim=0)
    return (weights * outs).sum(dim=0) / nonzero(total)


def score_factor(scale: float, k_scale: float) -> float:
    """What products of a query and codes of keys are multiplied by."""
    return scale * k_scale


@dataclass(frozen=True)
class Parts:
    """The pieces that both kernels are made of; a fault replaces one."""

    used: Callable[[int, int], int] = used_pages
    seen: Callable[[int, int, int], Tensor] = seen_slots
    values: Callable[[Tensor, Tensor], Tensor] = zero_stale
    codes: Stage = load
    factor: Callable[[float, float], float] = score_factor
    running_output: Stage = keep
    partial_lse: Stage = keep
    merge: Callable[[list[State]], Tensor] = merge_by_lse


HONEST_PARTS = Parts()


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    round_probabilities: bool = False,
    splits: int = 1,
    parts: Parts = HONEST_PARTS,
) -> Tensor:
    """Paged attention of one query per sequence, in one part or in several that are merged by their lse."""
    factor = parts.factor(1.0 / math.sqrt(q.shape[2]) if scale is None else scale, k_scale)
    heads, page = kv_head_of(q.shape[1], k_cache.shape[2]), k_cache.shape[1]
    stage = round_via(q.dtype) if round_probabilities else keep
    everything = torch.ones(1, page, dtype=torch.bool)

    def block(b: int, place: int, length: int) -> Block:
        """Scores and values of a page, what lies behind the last token taken out of both."""
        number = int(block_table[b, place])
        k, v = (parts.codes(cache[number])[:, heads].transpose(0, 1) for cache in (k_cache, v_cache))
        see = parts.seen(length, place * page, page)
        scores = load(q[b])[:, None] @ k.transpose(1, 2) * factor
        return scores.masked_fill(~see, -math.inf), parts.values(v, see), everything

    outs = []
    for b, length in enumerate(seq_lens.tolist()):
        pages = parts.used(length, page)
        share = max(1, -(-pages // splits))
        states = []
        for part in range(splits):
            blocks = (block(b, place, length) for place in range(pages)[part * share : (part + 1) * share])
            out, total, maximum = online(blocks, torch.zeros(q.shape[1], 1, q.shape[2]), stage, parts.running_output)
            lse = parts.partial_lse(shift_of(maximum) + torch.log(total))
            states.append(((out / nonzero(total))[:, 0], lse[:, 0]))
        outs.append((states[0][0] if splits == 1 else parts.merge(states)) * v_scale)
    return torch.stack(outs).to(q.dtype) if outs else torch.zeros_like(q)


def dequantized_first(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *pages: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    """The scales are applied to keys and values as they are loaded, in float32."""
    return decode(q, load(k_cache) * k_scale, load(v_cache) * v_scale, *pages, **options)


ALL = ("float32", "bfloat16", "float16")
HEADS = {"D": [8, 40, 64]}
SCALES = {"scale": [None, 0.25], "k_scale": [1.0, 0.3], "v_scale": [1.0, 1.7]}
EIGHT_BITS = {"k_scale": [0.05, 0.02], "v_scale": [0.11, 1.0]}
decode_rounded, decode_split = partial(decode, round_probabilities=True), partial(decode, splits=3)


def cache_in(name: str, dtype: str, cache: str, kernel: Callable[..., Tensor]) -> Entry:
    """An entry whose cache is in another dtype than the query."""
    dtypes = {"q": dtype, "k_cache": cache, "v_cache": cache}
    examine = {"dtype": dtypes, "options": EIGHT_BITS, "shapes": HEADS}
    return Entry(f"{name}-{dtype}-{cache}", "attention_decode", kernel, examine)


DECODE: tuple[Entry, ...] = (
    *family("decode", "attention_decode", decode, ALL, options=SCALES, shapes=HEADS),
    *family("decode_rounded", "attention_decode", decode_rounded, ALL[1:], options=SCALES, shapes=HEADS),
    *family("decode_split", "attention_decode", decode_split, ALL, options=SCALES, shapes=HEADS),
    *family("decode_dequantized", "attention_decode", dequantized_first, ALL, options=SCALES, shapes=HEADS),
    cache_in("decode", "bfloat16", "float8_e4m3fn", decode_rounded),
    cache_in("decode", "float32", "float8_e5m2", decode),
    cache_in("decode_split", "float16", "float8_e4m3fn", decode_split),
    cache_in("decode_dequantized", "bfloat16", "float8_e5m2", dequantized_first),
)
