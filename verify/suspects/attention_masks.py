"""Faults of which keys a query sees: masks, windows, tails of the keys, and what stands for minus infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.verify.inputs.cases import Case
from assay.verify.suspects.mechanisms import asked, option, whole
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor
Rule = Callable[[Any, Tensor], Tensor]

CAUSAL = ("attention", "attention_varlen", "attention_backward")
FORWARD = ("attention", "attention_varlen", "attention_decode")
ALL = (*FORWARD, "attention_backward")
_CAPTURE = "flash-attention#282, #436, cutlass#2336"


def masked(rule: Rule) -> type:
    """Attention in which ``rule(xp, visible)`` says what is visible."""

    class Masked:
        def blocks(self: Any, rows: int, width: int) -> list[tuple[int, int]]:
            return [(0, rows)]  # a rule sees all rows at once

        def attend(self: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
            return super().attend(scores, rule(self, visible), values, sinks)  # type: ignore[misc]

        def attend_backward(self: Any, scores: Any, visible: Tensor, *rest: Any) -> Any:
            return super().attend_backward(scores, rule(self, visible), *rest)  # type: ignore[misc]

    return Masked


def causal(limit: int = 0, *, like: str = "", window: tuple[int, int] = (0, 0), tile: int = 1) -> Rule:
    """The mask drawn again: keys up to ``limit`` ahead, aligned ``like``, a window larger by so much on each side."""

    def rule(xp: Any, visible: Tensor) -> Tensor:
        options, (rows, keys) = xp.case.options, visible.shape
        queries = xp.case.sizes.get("Sq", rows)
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
    """Where the last key is that a row sees."""
    behind = visible.flip(-1).to(torch.int64).cumsum(-1).flip(-1)
    return visible & (behind == 1)


def _beyond(step: int) -> Rule:
    """Keys beyond the last whole ``step`` are never seen, of more than one step."""
    return lambda xp, visible: visible & (torch.arange(visible.shape[-1]) < whole(visible.shape[-1], step))


def _without(first: int, last: int) -> Rule:
    """Keys from ``first`` to ``last`` are never seen, where there are more."""

    def rule(xp: Any, visible: Tensor) -> Tensor:
        key, keys = torch.arange(visible.shape[-1]), visible.shape[-1]
        return visible & ~((key >= first) & (key < last) & (keys > last - first) & (keys > first))

    return rule


class _CapAfterMask:
    """Masked scores are -inf when they reach the cap, which makes them -cap."""

    def attend(self: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
        scores = self.where(visible, scores, -self.case.options["softcap"])
        return super().attend(scores, torch.ones_like(visible), values, sinks)  # type: ignore[misc]


class _Sentinel:
    """A finite number stands for minus infinity behind the mask."""

    def attend(self: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
        scores = self.where(visible, scores, -5e4)
        return super().attend(scores, torch.ones_like(visible), values, sinks)  # type: ignore[misc]

    def attend_backward(self: Any, scores: Any, visible: Tensor, *rest: Any) -> Any:
        scores = self.where(visible, scores, -5e4)
        return super().attend_backward(scores, torch.ones_like(visible), *rest)  # type: ignore[misc]


class _EmptyRowNan:
    """A row that sees nothing is divided by its sum of weights, zero."""

    def attend(self: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
        out, lse = super().attend(scores, visible, values, sinks)  # type: ignore[misc]
        if sinks is not None:
            return out, lse
        blind = ~visible.any(-1, keepdim=True)
        return self.where(blind.expand(out.shape), self.exact(torch.full(out.shape, math.nan)), out), lse

    def attend_backward(self: Any, scores: Any, visible: Tensor, q: Any, *rest: Any) -> Any:
        dq, dk, dv = super().attend_backward(scores, visible, q, *rest)  # type: ignore[misc]
        blind = ~visible.any(-1, keepdim=True)
        return self.where(blind.expand(dq.shape), self.exact(torch.full(dq.shape, math.nan)), dq), dk, dv


class _StaleValues:
    """What is masked has a weight of zero, and zero times NaN is NaN: for float32 evaluations."""

    def attend(self: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        weights, lse = self.attention_weights(scores, visible, sinks)
        return weights @ values, lse


def _unmasked_padding(values: Tensors, case: Case) -> Tensors:
    """Keys and values padded with zeros to whole tiles of 16, and all of them seen."""

    def longer(x: Tensor) -> Tensor:
        missing = -x.shape[2] % 16
        return torch.cat([x.double(), torch.zeros(*x.shape[:2], missing, x.shape[3], dtype=torch.float64)], 2)

    return values | {name: longer(values[name]) for name in ("k", "v")}


def _sees_all(case: Case) -> bool:
    options = case.options
    return options["causal"] == "none" and options["window"] is None and not options["alibi"]


def _is_causal(case: Case) -> bool:
    return bool(case.options["causal"] != "none")


def _row(name: str, description: str, rule: Rule | type, specs: tuple[str, ...], **more: Any) -> Suspect:
    return Suspect(
        name, "mask", description, specs, arithmetic=rule if isinstance(rule, type) else masked(rule), **more
    )


SUSPECTS = (
    _row("diagonal_one_too_far", "the causal mask lets a query see one key beyond its own", causal(1), CAUSAL,
         applies=_is_causal),
    _row("diagonal_one_short", "the causal mask hides a query's own key", causal(-1), CAUSAL, applies=_is_causal),
    _row("top_left_for_bottom_right", "the causal mask is aligned at the first keys, not at the last: the offset of "
         "keys to queries is ignored", causal(like="top_left"), CAUSAL, origin=_CAPTURE,
         applies=asked("causal", "bottom_right"), needs="q shorter or longer than k"),
    _row("bottom_right_for_top_left", "the causal mask is aligned at the last keys, not at the first",
         causal(like="bottom_right"), ("attention", "attention_backward"), origin=_CAPTURE,
         applies=asked("causal", "top_left"), needs="q shorter or longer than k"),
    _row("causal_mask_by_tiles", "the causal mask is applied to whole tiles of 16 keys only", causal(tile=16), CAUSAL,
         applies=_is_causal),
    Suspect("causal_mask_ignored", "mask", "the causal mask is ignored", CAUSAL, applies=_is_causal,
            options=option(causal="none")),
    _row("window_one_wider", "the window reaches one key too far to the left", causal(window=(1, 0)), ("attention",),
         applies=asked("window")),
    _row("window_one_narrower", "the window ends one key too early on the left", causal(window=(-1, 0)),
         ("attention",), applies=asked("window")),
    _row("window_right_ignored", "the window is open to the right", causal(window=(0, 1 << 30)), ("attention",),
         applies=lambda case: asked("window")(case) and not _is_causal(case)),
    _row("window_offset_ignored", "the window is counted from the query's number, not from its place among the keys",
         causal(like="top_left"), ("attention",), origin=_CAPTURE, needs="q shorter or longer than k",
         applies=lambda case: asked("window")(case) and not _is_causal(case)),
    Suspect("window_ignored", "mask", "the window is ignored", ("attention",), applies=asked("window"),
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
         _CapAfterMask, ("attention",), applies=asked("softcap"), origin="sgl-kernel-xpu#491",
         needs="a mask and a softcap together"),
    _row("finite_sentinel", "-5e4 stands for minus infinity behind the mask", _Sentinel, ALL,
         origin="flashinfer#4401", needs="logits below -5e4, or a row that sees nothing"),
    _row("empty_row_nan", "a row that sees nothing is NaN: zero divided by zero", _EmptyRowNan, ALL,
         origin="flash-attention#443", needs="a row that sees nothing"),
    Suspect("stale_values_reach", "special values", "what is masked has a weight of zero, and zero times NaN is NaN",
            ("attention", "attention_varlen"), "vllm#936, #47305",
            "NaN or infinities in values behind the mask", arithmetic=_StaleValues,
            emulated=True),
    Suspect("padding_not_masked", "mask", "keys are padded with zeros to whole tiles of 16, and the padding is seen",
            ("attention",), needs="a number of keys that is no multiple of 16", applies=_sees_all,
            inputs=_unmasked_padding),
)  # fmt: skip
