"""Faulty attention over sequences laid end to end: an honest one with a step replaced."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .faulty_attention import kv_head_modulo, to_bfloat16, to_float16
from .honest_varlen import VARLEN, Steps, attention_varlen, bounds
from .numerics import keep

plant = planter(VARLEN)


def one_key_more(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """The first key of the next sequence takes part."""
    first, last = bounds(cu_seqlens, b)
    return first, min(last + 1, int(cu_seqlens[-1]))


def one_key_less(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """The last key doesn't take part."""
    first, last = bounds(cu_seqlens, b)
    return first, max(last - 1, first)


def all_before(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """The keys of earlier sequences take part."""
    return 0, bounds(cu_seqlens, b)[1]


def all_keys(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """All sequences' keys take part."""
    return 0, int(cu_seqlens[-1])


def next_sequence(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """A sequence reads the keys of the next."""
    return bounds(cu_seqlens, min(b + 1, len(cu_seqlens) - 2))


def per_batch(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """The causal mask is aligned by the totals of the batch."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (totals[1] - totals[0])


def top_left(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """The causal mask is aligned at the sequences' beginnings."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None]


def shifted(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """A query doesn't see its own place."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries) + 1


def without_last(cu_seqlens: Tensor) -> int:
    """The last sequence is left out."""
    return len(cu_seqlens) - 2


def unshifted(scores: Tensor) -> Tensor:
    """The maximum is forgotten."""
    return torch.zeros_like(scores[..., :1])


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one_key_more": ("bfloat16", {"key_bounds": one_key_more}),
    "one_key_less": ("float16", {"key_bounds": one_key_less}),
    "earlier_sequences": ("bfloat16", {"key_bounds": all_before}),
    "all_keys": ("float32", {"key_bounds": all_keys}),
    "next_sequence": ("bfloat16", {"key_bounds": next_sequence}),
    "aligned_per_batch": ("bfloat16", {"ahead": per_batch}),
    "aligned_top_left": ("float16", {"ahead": top_left}),
    "mask_shifted": ("bfloat16", {"ahead": shifted}),
    "last_sequence_dropped": ("bfloat16", {"count": without_last}),
    "kv_head_modulo": ("bfloat16", {"kv_head": kv_head_modulo}),
    "scale_over_d": ("float32", {"scale": lambda width: 1 / width}),
    "maximum_forgotten": ("float32", {"shift": unshifted}),
    "empty_rows_nan": ("bfloat16", {"divisor": keep}),
    "bfloat16_scores": ("bfloat16", {"scores": to_bfloat16}),
    "float16_scores": ("float32", {"scores": to_float16}),
}

FAULTY_VARLEN: tuple[Faulty, ...] = tuple(
    plant(f"attention_varlen_{name}", f"attention_varlen-{dtype}", partial(attention_varlen, steps=Steps(**step)))
    for name, (dtype, step) in FAULTS.items()
)
