"""Faults of masks: causal masks, windows, tails of the keys, and finite numbers in place of minus infinity."""

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import has, head_groups, operations, option, whole

Tensor = torch.Tensor
Rule = Callable[[Any, Tensor], Tensor]

CAUSAL = ("attention", "attention_varlen", "attention_backward", "attention_varlen_backward")
FORWARD = ("attention", "attention_varlen", "attention_decode")
ALL = (*FORWARD, "attention_backward", "attention_varlen_backward")
_CAPTURE = "flash-attention#282, #436, cutlass#2336"


def _seen(alter: Callable[[Any, Any, Tensor], tuple[Any, Tensor]]) -> type:
    """Compute attention with ``alter(xp, scores, visible)`` in place of the scores and the mask."""

    def attend(xp: Any, right: Any, scores: Any, visible: Tensor, *rest: Any) -> Any:
        return right(*alter(xp, scores, visible), *rest)

    def blocks(xp: Any, right: Any, rows: int, width: int) -> list[tuple[int, int]]:
        return [(0, rows)]  # a mask is altered for all rows at once

    return operations(blocks=blocks, attend=attend, attend_backward=attend)


def _masked(rule: Rule) -> type:
    """Compute attention with the mask ``rule(xp, visible)``."""
    return _seen(lambda xp, scores, visible: (scores, rule(xp, visible)))


def _for_infinity(number: Callable[[Case], float]) -> type:
    """Mask with a finite number in place of minus infinity."""
    return _seen(lambda xp, scores, visible: (xp.where(visible, scores, number(xp.case)), torch.ones_like(visible)))


def causal(limit: int = 0, *, like: str = "", window: tuple[int, int] = (0, 0), tile: int = 1) -> Rule:
    """Rebuild the mask: keys up to ``limit`` ahead, aligned ``like``, ``window`` added to the sides of a window."""

    def rule(xp: Any, visible: Tensor) -> Tensor:
        options, (rows, keys) = xp.case.options, visible.shape
        # A gradient stacks the query heads that share a key/value head.
        shared = head_groups(xp.case)[1] if xp.case.definition.outputs.gradient_of else 1
        queries = rows // max(shared, 1)
        query, key = torch.arange(rows)[:, None] % max(queries, 1), torch.arange(keys)[None, :]
        aligned = like or options["causal"]
        last = query + (0 if aligned == "top_left" else keys - queries)
        seen = torch.ones_like(visible)
        if options["causal"] != "none":
            seen = key // tile <= (last + limit) // tile
        if options.get("window") is not None:
            left, right = (side + more for side, more in zip(options["window"], window, strict=True))
            seen = seen & (key - last >= -left) & (key - last <= right)
        return seen

    return rule


def _last_seen(visible: Tensor) -> Tensor:
    """Return a mask of each row's last visible key."""
    behind = visible.flip(-1).to(torch.int64).cumsum(-1).flip(-1)
    return visible & (behind == 1)


def _beyond(step: int) -> Rule:
    """Hide the keys beyond the last multiple of ``step``, if there is more than one step."""
    return lambda xp, visible: visible & (torch.arange(visible.shape[-1]) < whole(visible.shape[-1], step))


def _without(first: int, last: int) -> Rule:
    """Hide the keys from ``first`` up to ``last``, if there are others."""

    def rule(xp: Any, visible: Tensor) -> Tensor:
        key, keys = torch.arange(visible.shape[-1]), visible.shape[-1]
        return visible & ~((key >= first) & (key < last) & (keys > last - first) & (keys > first))

    return rule


def nan_of_blind(xp: Any, visible: Tensor, x: Any) -> Any:
    """Return x, but NaN in rows without visible keys: they are divided by a sum of weights of zero."""
    blind = ~visible.any(-1, keepdim=True)
    return xp.where(blind.expand(x.shape), xp.exact(torch.full(x.shape, math.nan)), x)


def _empty_row_nan(xp: Any, right: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
    out, lse = right(scores, visible, values, sinks)
    return (out if sinks is not None else nan_of_blind(xp, visible, out)), lse


def _empty_row_nan_backward(xp: Any, right: Any, scores: Any, visible: Tensor, *rest: Any) -> Any:
    dq, dk, dv = right(scores, visible, *rest)
    return nan_of_blind(xp, visible, dq), dk, dv


def _stale_values(xp: Any, right: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any) -> Any:
    """Multiply masked values by their weight of zero, which gives NaN for NaN: for float32 evaluations."""
    weights, lse = xp.attention_weights(scores, visible, sinks)
    return weights @ values, lse


def _unmasked_padding(values: Tensors, case: Case) -> Tensors:
    def longer(x: Tensor) -> Tensor:
        missing = -x.shape[2] % 16
        return torch.cat([x.double(), torch.zeros(*x.shape[:2], missing, x.shape[3], dtype=torch.float64)], 2)

    return values | {name: longer(values[name]) for name in ("k", "v")}


_is_causal = has("causal")


def _row(name: str, description: str, rule: Rule | type, specs: tuple[str, ...], **more: Any) -> FaultModel:
    arithmetic = rule if isinstance(rule, type) else _masked(rule)
    return FaultModel(name, "mask", description, specs, arithmetic=arithmetic, **more)


FAULT_MODELS = (
    _row("diagonal_one_too_far", "the causal mask lets a query see one key beyond its own", causal(1), CAUSAL,
         applies=_is_causal),
    _row("diagonal_one_short", "the causal mask hides a query's own key", causal(-1), CAUSAL, applies=_is_causal),
    _row("top_left_for_bottom_right", "the causal mask is aligned at the first keys, not at the last: the offset of "
         "keys to queries is ignored", causal(like="top_left"), CAUSAL, origin=_CAPTURE,
         applies=has("causal", "bottom_right"), needs="q shorter or longer than k"),
    _row("bottom_right_for_top_left", "the causal mask is aligned at the last keys, not at the first",
         causal(like="bottom_right"), ("attention", "attention_backward"), origin=_CAPTURE,
         applies=has("causal", "top_left"), needs="q shorter or longer than k"),
    _row("causal_mask_by_tiles", "the causal mask is applied to whole tiles of 16 keys only", causal(tile=16), CAUSAL,
         applies=_is_causal),
    FaultModel("causal_mask_ignored", "mask", "the causal mask is ignored", CAUSAL, applies=_is_causal,
        options=option(causal="none")),
    _row("window_one_wider", "the window reaches one key too far to the left", causal(window=(1, 0)), ("attention",),
         applies=has("window")),
    _row("window_one_narrower", "the window ends one key too early on the left", causal(window=(-1, 0)),
         ("attention",), applies=has("window")),
    _row("window_right_ignored", "the window is open to the right", causal(window=(0, 1 << 30)), ("attention",),
         applies=lambda case: has("window")(case) and not _is_causal(case)),
    _row("window_offset_ignored", "the window is counted from the query's number, not from its place among the keys",
         causal(like="top_left"), ("attention",), origin=_CAPTURE, needs="q shorter or longer than k",
         applies=lambda case: has("window")(case) and not _is_causal(case)),
    FaultModel("window_ignored", "mask", "the window is ignored", ("attention",), applies=has("window"),
        options=option(window=None)),
    _row("first_key_dropped", "the first key is never seen", _without(0, 1), ALL, needs="more than one key"),
    _row("last_key_dropped", "each query misses the last key that it should see",
         lambda xp, visible: visible & ~_last_seen(visible), FORWARD, needs="more than one key"),
    _row("tail_of_keys_dropped", "keys beyond the last whole tile of 16 are never seen", _beyond(16), ALL,
         origin="tilelang#2381", needs="a number of keys that is no multiple of 16"),
    _row("tail_of_keys_dropped_64", "keys beyond the last whole tile of 64 are never seen", _beyond(64), ALL,
         origin="triton#621", needs="more than 64 keys, no multiple of 64"),
    _row("key_tile_dropped", "the second tile of 16 keys is never seen", _without(16, 32), ALL,
         needs="more than 16 keys"),
    _row("softcap_after_mask", "the softcap is applied after the mask, so that masked scores become -cap",
         _for_infinity(lambda case: -case.options["softcap"]), ("attention",), applies=has("softcap"),
         origin="sgl-kernel-xpu#491", needs="a mask and a softcap together"),
    _row("finite_sentinel", "-5e4 stands for minus infinity behind the mask", _for_infinity(lambda case: -5e4), ALL,
         origin="flashinfer#4401", needs="logits below -5e4, or a row that sees nothing"),
    _row("empty_row_nan", "a row that sees nothing is NaN: zero divided by zero",
         operations(attend=_empty_row_nan, attend_backward=_empty_row_nan_backward), ALL,
         origin="flash-attention#443", needs="a row that sees nothing"),
    FaultModel("stale_values_reach", "special values", "what is masked has a weight of zero, and zero times NaN is NaN",
        ("attention", "attention_varlen"), "vllm#936, #47305",
        "NaN or infinities in values behind the mask", emulated=True,
        arithmetic=operations(attend=_stale_values)),
    FaultModel("padding_not_masked", "mask", "keys are padded with zeros to whole tiles of 16, and the padding is seen",
        ("attention",), needs="a number of keys that is no multiple of 16", inputs=_unmasked_padding,
        applies=lambda case: case.options["causal"] == "none" and case.options["window"] is None
         and not case.options["alibi"]),
)  # fmt: skip
