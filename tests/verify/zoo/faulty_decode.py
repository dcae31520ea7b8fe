"""Faulty attention over a paged cache: each kernel is an honest one with one of its parts replaced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .faulty_attention import kv_head_first, kv_head_modulo, to_base_two, to_bfloat16, to_float16
from .honest_decode import DECODE, HONEST_PARTS, State, decode, nonzero, seen_slots
from .numerics import keep, load

plant = planter(DECODE)


def table_ignored(block_table: Tensor, sequence: int) -> Tensor:
    """Pages are taken in the order in which they lie."""
    return torch.arange(block_table.shape[1]) % (int(block_table.max()) + 1)


def first_row_of_table(block_table: Tensor, sequence: int) -> Tensor:
    """Every sequence reads the first one's pages."""
    return block_table[0]


def next_page_early(length: int, page: int) -> int:
    """A full last page is followed by one more."""
    return length // page + 1


def last_page_forgotten(length: int, page: int) -> int:
    """A last page that isn't full is left out."""
    return length // page


def one_more(length: int, start: int, page: int) -> Tensor:
    """The slot behind the last token takes part."""
    return seen_slots(length + 1, start, page)


def one_less(length: int, start: int, page: int) -> Tensor:
    """The last token doesn't take part."""
    return seen_slots(length - 1, start, page)


def whole_pages(length: int, start: int, page: int) -> Tensor:
    """All slots of the last page take part."""
    return torch.ones(page, dtype=torch.bool)


def stale_kept(values: Tensor, see: Tensor) -> Tensor:
    """Values behind the last token are multiplied by their weight of zero."""
    return values


def unscaled(scale: float, k_scale: float) -> float:
    """The scale of the keys is dropped."""
    return scale


def scaled_twice(scale: float, k_scale: float) -> float:
    """The scale of the keys is applied to the keys, and to the scores again."""
    return scale * k_scale * k_scale


def no_factor(k_scale: float, v_scale: float) -> float:
    """The scale of the values is dropped."""
    return 1.0


def factor_of_keys(k_scale: float, v_scale: float) -> float:
    """The values are scaled as the keys are."""
    return k_scale


def as_other_float8(codes: Tensor) -> Tensor:
    """Codes of one 8-bit format are read as if they were of the other."""
    other = torch.float8_e5m2 if codes.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    return load(codes.view(other))


def merge_without_shift(states: list[State]) -> Tensor:
    """The largest lse isn't subtracted."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    total = torch.exp(lses).sum(dim=0)
    return (torch.exp(lses) * outs).sum(dim=0) / nonzero(total)


def merge_empty_to_nan(states: list[State]) -> Tensor:
    """States that are all empty are merged as -inf - -inf."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    weights = torch.exp(lses - lses.amax(dim=0))
    return (weights * outs).sum(dim=0) / weights.sum(dim=0)


def merge_evenly(states: list[State]) -> Tensor:
    """Every part that has keys counts the same."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    some = lses.isfinite()
    return (outs * some).sum(dim=0) / some.sum(dim=0).clamp(min=1)


def last_state_lost(states: list[State]) -> Tensor:
    """The last part isn't merged."""
    return HONEST_PARTS.merge(states[:-1])


def strides_ignored(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Tensor, **options: Any) -> Tensor:
    """The cache is read as if it were contiguous."""
    caches = [x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) for x in (k_cache, v_cache)]
    return decode(q, *caches, *others, **options)


def nan_swallowed(*tensors: Tensor, **options: Any) -> Tensor:
    """NaN becomes zero in the output."""
    return decode(*tensors, **options).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def with_parts(**parts: Any) -> partial[Tensor]:
    """The kernel with some parts replaced."""
    return partial(decode, parts=replace(HONEST_PARTS, **parts))


def split_with(**parts: Any) -> partial[Tensor]:
    """The splitting kernel with some parts replaced."""
    return partial(decode, splits=3, parts=replace(HONEST_PARTS, **parts))


def rounded_with(**parts: Any) -> partial[Tensor]:
    """The kernel that rounds its probabilities with some parts replaced."""
    return partial(decode, round_probabilities=True, parts=replace(HONEST_PARTS, **parts))


FP8 = "decode-bfloat16-float8_e4m3fn"
E5M2 = "decode-float32-float8_e5m2"

FAULTY_DECODE: tuple[Faulty, ...] = (
    *(
        plant("decode_table_ignored", f"decode-{dtype}", with_parts(pages=table_ignored))
        for dtype in ("float32", "bfloat16")
    ),
    plant("decode_first_row_of_table", "decode-bfloat16", with_parts(pages=first_row_of_table)),
    plant("decode_last_page_forgotten", "decode-float16", with_parts(used=last_page_forgotten)),
    plant("decode_next_page_early", "decode-bfloat16", with_parts(used=next_page_early), ("crash", "nonfinite")),
    *(
        plant("decode_one_more", f"decode-{dtype}", with_parts(seen=one_more, values=stale_kept))
        for dtype in ("float32", "bfloat16")
    ),
    plant("decode_one_less", "decode-bfloat16", with_parts(seen=one_less)),
    plant("decode_whole_pages", "decode-bfloat16", with_parts(seen=whole_pages)),
    *(
        plant("decode_stale_values", f"decode-{dtype}", with_parts(values=stale_kept))
        for dtype in ("float32", "bfloat16", "float16")
    ),
    plant("decode_stale_values_of_fp8", FP8, rounded_with(values=stale_kept)),
    plant("decode_kv_head_modulo", "decode-bfloat16", with_parts(kv_head=kv_head_modulo)),
    plant("decode_kv_head_first", "decode-float32", with_parts(kv_head=kv_head_first)),
    plant("decode_k_scale_dropped", FP8, rounded_with(factor=unscaled)),
    plant("decode_v_scale_dropped", FP8, rounded_with(value_factor=no_factor)),
    plant("decode_scales_exchanged", "decode-bfloat16", with_parts(value_factor=factor_of_keys)),
    plant("decode_k_scale_twice", E5M2, with_parts(factor=scaled_twice)),
    plant("decode_other_float8", FP8, rounded_with(codes=as_other_float8)),
    plant("decode_other_float8_e5m2", E5M2, with_parts(codes=as_other_float8)),
    *(plant("decode_empty_is_nan", f"decode-{dtype}", with_parts(divisor=keep)) for dtype in ("float32", "bfloat16")),
    plant("decode_merges_empty_to_nan", "decode_split-bfloat16", split_with(merge=merge_empty_to_nan)),
    plant("decode_merges_unshifted", "decode_split-float32", split_with(merge=merge_without_shift)),
    plant("decode_merges_evenly", "decode_split-bfloat16", split_with(merge=merge_evenly)),
    plant("decode_last_state_lost", "decode_split-float16", split_with(merge=last_state_lost)),
    *(
        plant("decode_merges_lse_in_base_two", f"decode_split-{dtype}", split_with(partial_lse=to_base_two))
        for dtype in ("float32", "bfloat16")
    ),
    plant("decode_merges_lse_in_bfloat16", "decode_split-float32", split_with(partial_lse=to_bfloat16)),
    plant("decode_scores_in_bfloat16", "decode-bfloat16", with_parts(scores=to_bfloat16)),
    plant("decode_output_in_float16", "decode-float16", with_parts(running_output=to_float16)),
    plant("decode_strides_ignored", "decode-bfloat16", strides_ignored, ("layout", "contract", "exact", "nonfinite")),
    plant("decode_nan_swallowed", "decode-float32", nan_swallowed),
)
