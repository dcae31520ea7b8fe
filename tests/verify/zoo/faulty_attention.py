"""Faulty attention: each kernel is an honest one with one of its parts replaced."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_attention import (
    HONEST_PARTS,
    Result,
    alibi_bias,
    attention_flash,
    attention_rows,
    attention_split,
    masked_scores,
    visible_keys,
)
from .honest_attention_table import ATTENTION
from .honest_softmax import LOG2_E
from .numerics import round_via, store_truncated

plant = planter(ATTENTION)
Window = tuple[int, int] | None
to_bfloat16 = round_via(torch.bfloat16)
to_float16 = round_via(torch.float16)


def sees_one_more(queries: int, keys: int, causal: str, window: Window) -> Tensor:
    """A causal query sees the key after its own."""
    see = visible_keys(queries, keys, causal, window)
    if causal == "none":
        return see
    return see | torch.nn.functional.pad(see, (1, 0))[:, :keys]


def sees_one_less(queries: int, keys: int, causal: str, window: Window) -> Tensor:
    """A causal query doesn't see its own key."""
    see = visible_keys(queries, keys, causal, window)
    return see if causal == "none" else see & torch.nn.functional.pad(see, (0, 1))[:, 1:]


def always_top_left(queries: int, keys: int, causal: str, window: Window) -> Tensor:
    """The causal mask ignores that queries and keys differ in number."""
    return visible_keys(queries, keys, "none" if causal == "none" else "top_left", window)


def always_bottom_right(queries: int, keys: int, causal: str, window: Window) -> Tensor:
    """The causal mask is aligned at the end where the start was asked for."""
    return visible_keys(queries, keys, "none" if causal == "none" else "bottom_right", window)


def mask_ignored(queries: int, keys: int, causal: str, window: Window) -> Tensor:
    """No causal mask."""
    return visible_keys(queries, keys, "none", window)


def window_moved(left: int, right: int, queries: int, keys: int, causal: str, window: Window) -> Tensor:
    """The window is wider by `left` and `right`."""
    moved = None if window is None else (window[0] + left, window[1] + right)
    return visible_keys(queries, keys, causal, moved)


def kv_head_modulo(heads: int, kv_heads: int) -> Tensor:
    """Query head h takes key head h % Hkv."""
    return torch.arange(heads) % max(1, kv_heads)


def kv_head_first(heads: int, kv_heads: int) -> Tensor:
    """Every query head takes the first key head."""
    return torch.zeros(heads, dtype=torch.int64)


def alibi_growing(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """Distance is rewarded."""
    return -alibi_bias(slopes, queries, keys)


def alibi_top_left(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """The distance is counted from i instead of i + Sk - Sq."""
    distance = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    return -slopes.float()[:, None, None] * distance.abs()


def scores_in_bfloat16(*arguments: Any) -> Tensor:
    """Scores are kept in bfloat16."""
    return to_bfloat16(masked_scores(*arguments))


def softcap_dropped(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None, see: Tensor
) -> Tensor:
    """The scores aren't capped."""
    return masked_scores(q, k, scale, None, bias, see)


def softcap_after_mask(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None, see: Tensor
) -> Tensor:
    """tanh turns the mask's -inf into -softcap."""
    scores = masked_scores(q, k, scale, None, bias, see)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softcap_before_scale(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None, see: Tensor
) -> Tensor:
    """Products are capped first and scaled after."""
    if softcap is None:
        return masked_scores(q, k, scale, None, bias, see)
    return masked_scores(q, k, 1.0, softcap, None, see) * scale + (0.0 if bias is None else bias)


def mask_of_finite_value(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None, see: Tensor
) -> Tensor:
    """Hidden scores are -10000 instead of -inf."""
    everything = torch.ones_like(see)
    return masked_scores(q, k, scale, softcap, bias, everything).masked_fill(~see, -1e4)


def no_decay(old: Tensor, new: Tensor) -> Tensor:
    """Nothing is rescaled when the maximum grows, except from -inf."""
    return torch.where(old == -math.inf, torch.zeros_like(old), torch.ones_like(old))


def no_shift(maximum: Tensor) -> Tensor:
    """The maximum isn't subtracted."""
    return torch.zeros_like(maximum)


def to_base_two(lse: Tensor) -> Tensor:
    """The lse in base two."""
    return lse * LOG2_E


def without_sinks(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any) -> Result:
    """The sinks are ignored."""
    return attention_flash(q, k, v, **options)


def fixed_head_size(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """The scale belongs to a head size of 64."""
    return attention_flash(q, k, v, **{"scale": 0.125, **options})


def tail_unmasked(q: Tensor, k: Tensor, v: Tensor, *, causal: str = "none", **options: Any) -> Result:
    """Keys are padded with zeros to a multiple of 64, and without a causal mask the padding takes part."""
    keys, extra = k.shape[2], -k.shape[2] % 64

    def visible(queries: int, padded: int, causal: str, window: Window) -> Tensor:
        return torch.nn.functional.pad(visible_keys(queries, keys, causal, window), (0, extra), value=causal == "none")

    padded_k, padded_v = (torch.cat([x, x.new_zeros(*x.shape[:2], extra, x.shape[3])], dim=2) for x in (k, v))
    return attention_flash(
        q, padded_k, padded_v, causal=causal, parts=replace(HONEST_PARTS, visible=visible), **options
    )


def hidden_nan_leaks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """A NaN among the values spoils every query, since 0 * NaN is NaN."""
    out = attention_flash(q, k, v, **options)
    assert isinstance(out, Tensor)
    spoiled = v.isnan().any(dim=2, keepdim=True).repeat_interleave(max(1, q.shape[1] // max(1, v.shape[1])), dim=1)
    return torch.where(spoiled, torch.full_like(out, torch.nan), out)


def nan_swallowed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """NaN becomes zero in the output."""
    out = attention_flash(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def output_in(store: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """The kernel runs in float32 and stores with `store`."""
    out = attention_flash(q.float(), k.float(), v.float(), **options)
    assert isinstance(out, Tensor)
    return store(out, q.dtype)  # type: ignore[no-any-return]


def flash_with(**parts: Any) -> partial[Result]:
    """The flash kernel with some parts replaced."""
    return partial(attention_flash, parts=replace(HONEST_PARTS, **parts))


FAULTY_ATTENTION: tuple[Faulty, ...] = (
    *(
        plant("attention_causal_one_more", f"attention_flash_causal-{dtype}", flash_with(visible=sees_one_more))
        for dtype in ("float32", "bfloat16")
    ),
    plant("attention_causal_one_less", "attention_flash_causal-float16", flash_with(visible=sees_one_less)),
    plant("attention_always_top_left", "attention_flash_causal-bfloat16", flash_with(visible=always_top_left)),
    plant("attention_always_bottom_right", "attention_flash_causal-bfloat16", flash_with(visible=always_bottom_right)),
    plant("attention_mask_ignored", "attention_flash_causal-float32", flash_with(visible=mask_ignored)),
    *(
        plant(f"attention_window_{name}", "attention_flash_window-bfloat16", flash_with(visible=moved))
        for name, moved in (
            ("left_wider", partial(window_moved, 1, 0)),
            ("left_narrower", partial(window_moved, -1, 0)),
            ("right_wider", partial(window_moved, 0, 1)),
        )
    ),
    plant("attention_kv_head_modulo", "attention_flash-bfloat16", flash_with(kv_head=kv_head_modulo)),
    plant("attention_kv_head_first", "attention_flash-float32", flash_with(kv_head=kv_head_first)),
    plant("attention_tail_unmasked", "attention_flash-bfloat16", tail_unmasked),
    plant("attention_fixed_head_size", "attention_flash-float16", fixed_head_size),
    *(
        plant(
            "attention_unshifted",
            f"attention_rows-{dtype}",
            partial(attention_rows, parts=replace(HONEST_PARTS, shift=no_shift)),
        )
        for dtype in ("float32", "bfloat16")
    ),
    *(
        plant("attention_sum_not_rescaled", f"attention_flash-{dtype}", flash_with(decay_of_sum=no_decay))
        for dtype in ("float32", "bfloat16")
    ),
    plant("attention_output_not_rescaled", "attention_flash-bfloat16", flash_with(decay_of_output=no_decay)),
    *(
        plant("attention_scores_in_bfloat16", f"attention_flash-{dtype}", flash_with(scores=scores_in_bfloat16))
        for dtype in ("float32", "bfloat16", "float16")
    ),
    *(
        plant("attention_output_in_float16", f"attention_flash-{dtype}", flash_with(running_output=to_float16))
        for dtype in ("bfloat16", "float16")
    ),
    *(
        plant("attention_returns_lse_in_bfloat16", f"attention_flash_lse-{dtype}", flash_with(returned_lse=to_bfloat16))
        for dtype in ("float32", "bfloat16")
    ),
    plant("attention_lse_in_base_two", "attention_flash_lse-bfloat16", flash_with(returned_lse=to_base_two)),
    *(
        plant(
            "attention_merges_lse_in_bfloat16",
            f"attention_split-{dtype}",
            partial(attention_split, parts=replace(HONEST_PARTS, partial_lse=to_bfloat16)),
        )
        for dtype in ("float32", "bfloat16")
    ),
    plant(
        "attention_merges_lse_in_base_two",
        "attention_split-bfloat16",
        partial(attention_split, parts=replace(HONEST_PARTS, partial_lse=to_base_two)),
    ),
    plant("attention_softcap_dropped", "attention_flash_softcap-bfloat16", flash_with(scores=softcap_dropped)),
    plant("attention_softcap_after_mask", "attention_flash_softcap-bfloat16", flash_with(scores=softcap_after_mask)),
    plant("attention_softcap_before_scale", "attention_flash_softcap-float32", flash_with(scores=softcap_before_scale)),
    plant("attention_mask_finite", "attention_flash_causal-float32", flash_with(scores=mask_of_finite_value)),
    plant("attention_alibi_growing", "attention_flash_alibi-bfloat16", flash_with(bias=alibi_growing)),
    plant("attention_alibi_top_left", "attention_flash_alibi-float32", flash_with(bias=alibi_top_left)),
    plant("attention_sinks_ignored", "attention_flash_sinks-bfloat16", without_sinks),
    plant("attention_hidden_nan_leaks", "attention_flash_causal-bfloat16", hidden_nan_leaks),
    plant("attention_nan_swallowed", "attention_flash-float32", nan_swallowed),
    plant("attention_truncating_store", "attention_flash-bfloat16", partial(output_in, store_truncated)),
)
