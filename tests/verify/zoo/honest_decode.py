"""Honest attention over a paged cache: page by page with an online maximum, and pages split among workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .honest_attention import kv_head_of
from .honest_softmax import LOG2_E, shift_of
from .numerics import keep, load

State = tuple[Tensor, Tensor]


def pages_of(block_table: Tensor, sequence: int) -> Tensor:
    """The pages of a sequence in order."""
    return block_table[sequence]


def used_pages(length: int, page: int) -> int:
    """How many pages hold a sequence, the last perhaps in part."""
    return -(-length // page)


def seen_slots(length: int, start: int, page: int) -> Tensor:
    """Which slots of the page that begins at a position belong to the sequence."""
    return start + torch.arange(page) < length


def zero_stale(values: Tensor, see: Tensor) -> Tensor:
    """Values with what lies behind the last token zero: a weight of zero would keep NaN."""
    return torch.where(see[:, None], values, torch.zeros_like(values))


def nonzero(total: Tensor) -> Tensor:
    """A sum of weights to divide by: one where there are none."""
    return torch.where(total == 0, torch.ones_like(total), total)


def merge_by_lse(states: list[State]) -> Tensor:
    """The output of all parts of the keys; one without keys, with an lse of -inf, has no share; all such give zero."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    weights = torch.exp(lses - shift_of(lses.amax(dim=0)))
    total = weights.sum(dim=0)
    return (weights * outs).sum(dim=0) / nonzero(total)


def score_factor(scale: float, k_scale: float) -> float:
    """What products of a query and codes of keys are multiplied by."""
    return scale * k_scale


def value_factor(k_scale: float, v_scale: float) -> float:
    """What sums of codes of values are multiplied by."""
    return v_scale


@dataclass(frozen=True)
class Parts:
    """The pieces that both kernels are made of; a fault replaces one."""

    pages: Callable[[Tensor, int], Tensor] = pages_of
    used: Callable[[int, int], int] = used_pages
    seen: Callable[[int, int, int], Tensor] = seen_slots
    kv_head: Callable[[int, int], Tensor] = kv_head_of
    values: Callable[[Tensor, Tensor], Tensor] = zero_stale
    codes: Callable[[Tensor], Tensor] = load
    scores: Callable[[Tensor], Tensor] = keep
    factor: Callable[[float, float], float] = score_factor
    value_factor: Callable[[float, float], float] = value_factor
    running_output: Callable[[Tensor], Tensor] = keep
    partial_lse: Callable[[Tensor], Tensor] = keep
    merge: Callable[[list[State]], Tensor] = merge_by_lse
    divisor: Callable[[Tensor], Tensor] = nonzero


HONEST_PARTS = Parts()


class Problem:
    """What the kernels hold: the cache as it lies, and all that leads to a sequence's keys and values in it."""

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        factors: tuple[float | None, float, float],
        round_probabilities: bool,
        parts: Parts,
    ) -> None:
        scale, k_scale, v_scale = factors
        scale = 1.0 / math.sqrt(q.shape[2]) if scale is None else scale
        self.q, self.k_cache, self.v_cache, self.block_table = q, k_cache, v_cache, block_table
        self.lengths = [int(length) for length in seq_lens.tolist()]
        self.factor, self.value_factor = parts.factor(scale, k_scale), parts.value_factor(k_scale, v_scale)
        self.heads = parts.kv_head(q.shape[1], k_cache.shape[2])
        self.round_probabilities, self.parts = round_probabilities, parts

    def state(self, b: int, first: int, last: int) -> State:
        """The output [H,D] of the pages from `first` to `last` of a sequence, and its lse [H,1]."""
        parts, page = self.parts, self.k_cache.shape[1]
        q = load(self.q[b])[:, None]
        numbers = parts.pages(self.block_table, b)
        maximum = torch.full((q.shape[0], 1, 1), -math.inf)
        total, out = torch.zeros_like(maximum), torch.zeros_like(q)
        for place in range(first, last):
            k, v = (
                parts.codes(cache[int(numbers[place])])[:, self.heads].transpose(0, 1)
                for cache in (self.k_cache, self.v_cache)
            )
            see = parts.seen(self.lengths[b], place * page, page)
            scores = parts.scores(q @ k.transpose(1, 2) * self.factor).masked_fill(~see, -math.inf)
            new = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            shift = shift_of(new)
            weights = torch.exp2((scores - shift) * LOG2_E)
            decay = torch.exp2((maximum - shift) * LOG2_E)
            total = total * decay + weights.sum(dim=-1, keepdim=True)
            if self.round_probabilities:
                weights = weights.to(self.q.dtype).to(torch.float32)
            out = parts.running_output(out * decay + weights @ parts.values(v, see))
            maximum = new
        lse = shift_of(maximum) + torch.log(total)
        return (out / parts.divisor(total))[:, 0], lse[:, 0]

    def outputs(self, splits: int) -> Tensor:
        """All sequences, the pages of each in as many equal parts."""
        outs = []
        for b, length in enumerate(self.lengths):
            pages = self.parts.used(length, self.k_cache.shape[1])
            if splits == 1:
                out = self.state(b, 0, pages)[0]
            else:
                share = -(-pages // splits)
                bounds = [(min(pages, i * share), min(pages, (i + 1) * share)) for i in range(splits)]
                states = [self.state(b, first, last) for first, last in bounds]
                out = self.parts.merge([(part, self.parts.partial_lse(lse)) for part, lse in states])
            outs.append(out * self.value_factor)
        return torch.stack(outs).to(self.q.dtype) if outs else torch.zeros_like(self.q)


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
    factors = (scale, k_scale, v_scale)
    return Problem(q, k_cache, v_cache, block_table, seq_lens, factors, round_probabilities, parts).outputs(splits)


def dequantized_first(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    **options: float | None,
) -> Tensor:
    """The scales are applied to keys and values as they are loaded, in float32."""
    k, v = load(k_cache) * k_scale, load(v_cache) * v_scale
    return decode(q, k, v, block_table, seq_lens, **options)  # type: ignore[arg-type]


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
