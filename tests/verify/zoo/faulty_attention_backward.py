"""Faulty gradients of attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_attention import visible_keys
from .honest_attention_backward import ATTENTION_BACKWARD, Gradients, Parts, attention_backward
from .numerics import round_via

plant = planter(ATTENTION_BACKWARD)
to_bfloat16 = round_via(torch.bfloat16)


def mask_one_further(queries: int, keys: int, causal: str, window: None) -> Tensor:
    """The diagonal lies one place too far to the right."""
    see = visible_keys(queries, keys, causal, window)
    if causal == "none":
        return see
    offset = 0 if causal == "top_left" else keys - queries
    return torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + offset + 1


def mask_top_left(queries: int, keys: int, causal: str, window: None) -> Tensor:
    """Aligned to the first key, whatever was asked for."""
    return visible_keys(queries, keys, "none" if causal == "none" else "top_left", window)


def mask_ignored(queries: int, keys: int, causal: str, window: None) -> Tensor:
    """No mask at all."""
    return visible_keys(queries, keys, "none", window)


def heads_in_turn(heads: int, groups: int) -> Tensor:
    """Query heads take key/value heads in turn instead of in groups."""
    return torch.arange(heads) % max(groups, 1)


def first_of_group(gradient: Tensor, groups: int) -> Tensor:
    """Of the heads that share a key/value head only the first one's gradient is kept."""
    batch, heads, keys, width = gradient.shape
    return gradient.reshape(batch, groups, heads // groups, keys, width)[:, :, 0]


def mean_of_group(gradient: Tensor, groups: int) -> Tensor:
    """The mean over the heads that share a key/value head instead of their sum."""
    batch, heads, keys, width = gradient.shape
    return gradient.reshape(batch, groups, heads // groups, keys, width).mean(dim=2)


def group_in_bfloat16(gradient: Tensor, groups: int) -> Tensor:
    """Each head's gradient is rounded before they are added up."""
    batch, heads, keys, width = gradient.shape
    return to_bfloat16(gradient).reshape(batch, groups, heads // groups, keys, width).sum(dim=2)


def no_delta(products: Tensor, delta: Tensor) -> Tensor:
    """delta is not subtracted."""
    return products


def delta_added(products: Tensor, delta: Tensor) -> Tensor:
    """delta has the wrong sign."""
    return products + delta


def delta_of_first_half(dout: Tensor, out: Tensor) -> Tensor:
    """delta from the first half of the head only."""
    half = (dout.shape[-1] + 1) // 2
    return (dout * out)[..., :half].sum(dim=-1, keepdim=True)


def delta_in_bfloat16(dout: Tensor, out: Tensor) -> Tensor:
    """delta is kept in bfloat16."""
    return to_bfloat16((dout * out).sum(dim=-1, keepdim=True))


def not_scaled(gradient: Tensor, scale: float) -> Tensor:
    """The scale is forgotten."""
    return gradient


def scaled_twice(gradient: Tensor, scale: float) -> Tensor:
    """The scale is applied twice."""
    return gradient * scale * scale


def default_scale(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: str = "none", scale: float | None = None
) -> Gradients:
    """The option `scale` isn't passed on."""
    return attention_backward(q, k, v, dout, causal=causal)


def dq_and_dk_swapped(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: str = "none", scale: float | None = None
) -> Gradients:
    """Where shapes allow it, dq and dk change places."""
    dq, dk, dv = attention_backward(q, k, v, dout, causal=causal, scale=scale)
    return (dk, dq, dv) if dq.shape == dk.shape else (dq, dk, dv)


FAULTY_ATTENTION_BACKWARD: tuple[Faulty, ...] = (
    *(
        plant(name, f"attention_backward-{dtype}", partial(attention_backward, parts=parts))
        for name, dtype, parts in (
            ("attention_backward_causal_off_by_one", "float32", Parts(visible=mask_one_further)),
            ("attention_backward_causal_off_by_one", "bfloat16", Parts(visible=mask_one_further)),
            ("attention_backward_top_left", "float16", Parts(visible=mask_top_left)),
            ("attention_backward_unmasked", "float32", Parts(visible=mask_ignored)),
            ("attention_backward_heads_in_turn", "bfloat16", Parts(kv_head=heads_in_turn)),
            ("attention_backward_first_of_group", "float32", Parts(group=first_of_group)),
            ("attention_backward_first_of_group", "bfloat16", Parts(group=first_of_group)),
            ("attention_backward_mean_of_group", "float16", Parts(group=mean_of_group)),
            ("attention_backward_group_in_bfloat16", "float32", Parts(group=group_in_bfloat16)),
            ("attention_backward_without_delta", "float32", Parts(difference=no_delta)),
            ("attention_backward_without_delta", "bfloat16", Parts(difference=no_delta)),
            ("attention_backward_delta_added", "float16", Parts(difference=delta_added)),
            ("attention_backward_delta_of_half", "bfloat16", Parts(delta=delta_of_first_half)),
            ("attention_backward_delta_in_bfloat16", "float32", Parts(delta=delta_in_bfloat16)),
            ("attention_backward_dq_unscaled", "float32", Parts(scale_q=not_scaled)),
            ("attention_backward_dk_unscaled", "bfloat16", Parts(scale_k=not_scaled)),
            ("attention_backward_dk_scaled_twice", "float16", Parts(scale_k=scaled_twice)),
            ("attention_backward_scores_in_bfloat16", "float32", Parts(scores=to_bfloat16)),
        )
    ),
    plant("attention_backward_default_scale", "attention_backward_flash-float32", default_scale),
    plant("attention_backward_swapped", "attention_backward-bfloat16", dq_and_dk_swapped),
    plant(
        "attention_backward_dq_in_bfloat16",
        "attention_backward_flash-float32",
        partial(attention_backward, block=16, parts=Parts(accumulator=to_bfloat16)),
    ),
)
