"""Faulty attention in all its forms: whole, paged, ragged, backward, merged; and faulty sums over ranks."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planted, planter
from .honest import HONEST
from .honest_attention import Parts, Result, attention_flash, visible_keys
from .honest_attention_backward import Gradients, attention_backward
from .honest_attention_backward import Parts as BackwardParts
from .honest_decode import HONEST_PARTS as DECODE_PARTS
from .honest_decode import Parts as DecodeParts
from .honest_decode import State, decode
from .honest_merge import Steps as MergeSteps
from .honest_merge import forward, ring
from .honest_softmax import LOG2_E
from .honest_varlen import Steps, bounds
from .numerics import load, round_via, rounded_to

plant = planter(HONEST)
to_bfloat16, to_float16 = round_via(torch.bfloat16), round_via(torch.float16)


def window_right_wider(queries: int, keys: int, causal: str, window: tuple[int, int] | None) -> Tensor:
    """The window reaches one key further to the right."""
    return visible_keys(queries, keys, causal, None if window is None else (window[0], window[1] + 1))


def alibi_top_left(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """The distance is counted from i instead of i + Sk - Sq."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    return -slopes.float()[:, None, None] * distance.abs()


def to_base_two(lse: Tensor) -> Tensor:
    """The lse in base two."""
    return lse * LOG2_E


def nan_swallowed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """NaN becomes zero in the output."""
    out = attention_flash(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def mean_of_group(gradient: Tensor, groups: int) -> Tensor:
    """The mean over the heads that share a key/value head instead of their sum."""
    batch, heads, keys, width = gradient.shape
    return gradient.reshape(batch, groups, heads // groups, keys, width).mean(dim=2)


def group_in_bfloat16(gradient: Tensor, groups: int) -> Tensor:
    """Each head's gradient is rounded before they are added up."""
    batch, heads, keys, width = gradient.shape
    return to_bfloat16(gradient).reshape(batch, groups, heads // groups, keys, width).sum(dim=2)


def delta_of_first_half(dout: Tensor, out: Tensor) -> Tensor:
    """delta from the first half of the head only."""
    half = (dout.shape[-1] + 1) // 2
    return (dout * out)[..., :half].sum(dim=-1, keepdim=True)


def delta_negated(dout: Tensor, out: Tensor) -> Tensor:
    """delta has the wrong sign."""
    return -(dout * out).sum(dim=-1, keepdim=True)


def not_scaled(gradient: Tensor, scale: float) -> Tensor:
    """The scale is forgotten."""
    return gradient


def dq_and_dk_swapped(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> Gradients:
    """Where shapes allow it, dq and dk change places."""
    dq, dk, dv = attention_backward(q, k, v, dout, **options)
    return (dk, dq, dv) if dq.shape == dk.shape else (dq, dk, dv)


def next_page_early(length: int, page: int) -> int:
    """A full last page is followed by one more."""
    return length // page + 1


def whole_pages(length: int, start: int, page: int) -> Tensor:
    """All slots of the last page take part."""
    return torch.ones(page, dtype=torch.bool)


def stale_kept(values: Tensor, see: Tensor) -> Tensor:
    """Values behind the last token are multiplied by their weight of zero."""
    return values


def scaled_twice(scale: float, k_scale: float) -> float:
    """The scale of the keys is applied to the keys, and to the scores again."""
    return scale * k_scale * k_scale


def as_other_float8(codes: Tensor) -> Tensor:
    """Codes of one 8-bit format are read as if they were of the other."""
    other = torch.float8_e5m2 if codes.dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    return load(codes.view(other))


def merge_evenly(states: list[State]) -> Tensor:
    """Every part that has keys counts the same."""
    outs, lses = (torch.stack(part) for part in zip(*states, strict=True))
    some = lses.isfinite()
    return (outs * some).sum(dim=0) / some.sum(dim=0).clamp(min=1)


def last_state_lost(states: list[State]) -> Tensor:
    """The last part isn't merged."""
    return DECODE_PARTS.merge(states[:-1])


def strides_ignored(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Tensor, **options: Any) -> Tensor:
    """The cache is read as if it were contiguous."""
    caches = [x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) for x in (k_cache, v_cache)]
    return decode(q, *caches, *others, **options)


def one_key_more(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """The first key of the next sequence takes part."""
    first, last = bounds(cu_seqlens, b)
    return first, min(last + 1, int(cu_seqlens[-1]))


def next_sequence(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """A sequence reads the keys of the next."""
    return bounds(cu_seqlens, min(b + 1, len(cu_seqlens) - 2))


def first_512_keys(cu_seqlens: Tensor, b: int) -> tuple[int, int]:
    """Keys beyond a sequence's 512th are never visited."""
    first, last = bounds(cu_seqlens, b)
    return first, min(last, first + 512)


def per_batch(queries: int, keys: int, totals: tuple[int, int]) -> Tensor:
    """The causal mask is aligned by the totals of the batch."""
    return torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (totals[1] - totals[0])


def without_last(cu_seqlens: Tensor) -> int:
    """The last sequence is left out."""
    return len(cu_seqlens) - 2


def as_it_is(o: Tensor, lse: Tensor) -> Tensor:
    """An empty state's output is multiplied by its weight of zero."""
    return o


def only_sum(total: Tensor) -> Tensor:
    """Outputs are added, not averaged."""
    return torch.ones_like(total)


def empty_below(lse: Tensor) -> Tensor:
    """A log-sum-exp below -5e4 is taken for that of an empty state."""
    return torch.where(lse < -5e4, -math.inf, lse)


def negligible_beyond(difference: float) -> MergeSteps:
    """A state whose weight is so much less than the other's counts for nothing."""
    least = torch.exp(torch.tensor(-difference))

    def weights(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(a < least * b, 0.0, a), torch.where(b < least * a, 0.0, b)

    return MergeSteps(weights=weights)


def tail_forgotten(shards: Tensor) -> Tensor:
    """Columns beyond the last whole vector of four are those of the first rank."""
    total = forward(shards)
    whole = shards.shape[1] // 4 * 4
    total[whole:] = load(shards[0, whole:])
    return total


def magnitudes(shards: Tensor) -> Tensor:
    """Signs are lost."""
    return forward(shards.abs())


def power_of_two_ranks(shards: Tensor) -> Tensor:
    """Ranks beyond the largest power of two are left out."""
    return forward(shards[: 1 << (shards.shape[0].bit_length() - 1)])


PARTS: dict[str, tuple[str, Parts]] = {
    "window_right_wider": ("_flash_window-bfloat16", Parts(visible=window_right_wider)),
    "alibi_top_left": ("_flash_alibi-float32", Parts(bias=alibi_top_left)),
    "output_in_float16": ("_flash-bfloat16", Parts(running_output=to_float16)),
    "returns_lse_in_bfloat16": ("_flash_lse-float32", Parts(returned_lse=to_bfloat16)),
    "merges_lse_in_bfloat16": ("_split-float32", Parts(partial_lse=to_bfloat16)),
    "merges_lse_in_base_two": ("_split-bfloat16", Parts(partial_lse=to_base_two)),
}
BACKWARD_PARTS: dict[str, tuple[str, BackwardParts]] = {
    "mean_of_group": ("-float16", BackwardParts(group=mean_of_group)),
    "group_in_bfloat16": ("-float32", BackwardParts(group=group_in_bfloat16)),
    "delta_of_half": ("-bfloat16", BackwardParts(delta=delta_of_first_half)),
    "delta_added": ("-float16", BackwardParts(delta=delta_negated)),
    "dk_unscaled": ("-bfloat16", BackwardParts(scale_k=not_scaled)),
    "dq_in_bfloat16": ("_flash-float32", BackwardParts(accumulator=to_bfloat16)),
}
FP8, E5M2 = "-bfloat16-float8_e4m3fn", "-float32-float8_e5m2"
CACHE_PARTS: dict[str, tuple[str, DecodeParts]] = {
    "whole_pages": ("-bfloat16", DecodeParts(seen=whole_pages)),
    "stale_values": ("-bfloat16", DecodeParts(values=stale_kept)),
    "stale_values_of_fp8": (FP8, DecodeParts(values=stale_kept)),
    "k_scale_twice": (E5M2, DecodeParts(factor=scaled_twice)),
    "other_float8": (FP8, DecodeParts(codes=as_other_float8)),
    "other_float8_e5m2": (E5M2, DecodeParts(codes=as_other_float8)),
    "merges_evenly": ("_split-bfloat16", DecodeParts(merge=merge_evenly)),
    "last_state_lost": ("_split-float16", DecodeParts(merge=last_state_lost)),
    "merges_lse_in_base_two": ("_split-bfloat16", DecodeParts(partial_lse=to_base_two)),
    "merges_lse_in_bfloat16": ("_split-float32", DecodeParts(partial_lse=to_bfloat16)),
    "output_in_float16": ("-float16", DecodeParts(running_output=to_float16)),
}
RAGGED_STEPS: dict[str, tuple[str, Steps]] = {
    "one_key_more": ("-bfloat16", Steps(key_bounds=one_key_more)),
    "next_sequence": ("-bfloat16", Steps(key_bounds=next_sequence)),
    "512_keys": ("-bfloat16", Steps(key_bounds=first_512_keys)),
    "aligned_per_batch": ("-bfloat16", Steps(ahead=per_batch)),
    "last_sequence_dropped": ("-bfloat16", Steps(count=without_last)),
    "float16_scores": ("-float32", Steps(scores=to_float16)),
}
MERGE_STEPS: dict[str, tuple[str, MergeSteps]] = {
    "nan_of_empty": ("-bfloat16", MergeSteps(output=as_it_is)),
    "not_normalised": ("-bfloat16", MergeSteps(divisor=only_sum)),
    "empty_below": ("-bfloat16", MergeSteps(lse=empty_below)),
    "bfloat16_terms": ("-bfloat16", MergeSteps(term=to_bfloat16)),
    "bfloat16_lse": ("-float32", MergeSteps(lse=to_bfloat16)),
    "negligible_beyond_8": ("-bfloat16", negligible_beyond(8)),
    "negligible_beyond_12": ("-float32", negligible_beyond(12)),
}
SUMS: dict[str, tuple[str, Any]] = {
    "tail_forgotten": ("-bfloat16", tail_forgotten),
    "magnitudes": ("-float32", magnitudes),
    "float16_hops": ("-float16", partial(ring, hop=partial(rounded_to, torch.float16))),
    "bfloat16_hops_of_float32": ("-float32", partial(ring, hop=partial(rounded_to, torch.bfloat16))),
    "power_of_two_ranks": ("-bfloat16", power_of_two_ranks),
}
LAYOUT = ("layout", "contract", "exact", "nonfinite")

FAULTY_ATTENTION: tuple[Faulty, ...] = (
    *planted(plant, "attention", "parts", PARTS),
    plant("attention_nan_swallowed", "attention_flash-float32", nan_swallowed),
    *planted(plant, "attention_backward", "parts", BACKWARD_PARTS),
    plant("attention_backward_swapped", "attention_backward-bfloat16", dq_and_dk_swapped),
    *planted(plant, "decode", "parts", CACHE_PARTS),
    plant(
        "decode_next_page_early",
        "decode-bfloat16",
        kinds=("crash", "nonfinite"),
        parts=DecodeParts(used=next_page_early),
    ),
    plant("decode_strides_ignored", "decode-bfloat16", strides_ignored, LAYOUT),
    *planted(plant, "attention_varlen", "steps", RAGGED_STEPS),
    *planted(plant, "merge_states", "steps", MERGE_STEPS),
    *planted(plant, "all_reduce", "total", SUMS),
)
