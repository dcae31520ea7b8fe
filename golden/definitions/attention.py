"""Scaled dot-product attention with grouped heads, masks, softcap, ALiBi and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.golden.errors import ShapeError
from assay.golden.registry import Option, choice, define, flag, number


def _signature(options: Mapping[str, Any]) -> str:
    keywords = (", *slopes:float32[H]=slope" if options["alibi"] else "") + (
        ", *sinks:float32[H]" if options["sinks"] else ""
    )
    lse = ", lse:float32[B,H,Sq]" if options["return_lse"] else ""
    return f"q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]{keywords} -> out[B,H,Sq,Dv]{lse}"


def _is_window(value: Any) -> bool:
    return value is None or (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(type(side) is int and side >= 0 for side in value)
    )


@define(
    "attention",
    _signature,
    options={
        "causal": choice("none", "bottom_right", "top_left"),
        "scale": number(None),
        "window": Option(None, _is_window, "None or (left, right), two whole numbers"),
        "softcap": number(None, positive=True),
        "alibi": flag(),
        "sinks": Option(False, lambda value: isinstance(value, bool), "True, False or a tensor"),
        "return_lse": flag(),
    },
    stages={"probabilities": "input"},
    rows="B",
    columns="Dv",
    empty=("Sq",),
    work="B*H*Sq*Sk*(D+Dv)",
    sizes={
        "B": (1, 2, 3),
        "Hkv": (1, 2, 3),
        "D": (8, 16, 32, 40, 64, 80, 96, 128, 256),
        "Dv": (8, 16, 24, 32, 64, 96, 128),
    },
    multiples={"H": "Hkv"},
)
def attention(
    xp: Any,
    q: Any,
    k: Any,
    v: Any,
    slopes: Any = None,
    sinks: Any = None,
    *,
    causal: str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    return_lse: bool,
    alibi: bool = False,
) -> Any:
    """softmax(q k^T scale, capped, biased, masked) v, and its log-sum-exp."""
    batch, heads, queries, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if groups == 0 or heads % groups:
        raise ShapeError(f"attention: the {heads} query heads are no multiple of the {groups} key/value heads")
    q = q.reshape(batch, groups, heads // groups, queries, width)
    k, v = k[:, :, None], v[:, :, None]
    factor = xp.constant(lambda sqrt, pi: 1 / sqrt(max(width, 1))) if scale is None else scale
    if slopes is not None:
        slopes = slopes.reshape(1, groups, heads // groups, 1, 1)
    if sinks is not None:
        sinks = sinks.reshape(1, groups, heads // groups, 1, 1)
    parts = []
    for first, last in xp.blocks(queries, batch * heads * keys):
        scores = xp.scores(q[:, :, :, first:last], k, factor)
        if softcap is not None:
            scores = xp.softcap(scores, softcap)
        key, query = xp.integers(range(keys))[None, :], xp.integers(range(first, last))[:, None]
        aligned = key - query - (keys - queries)  # how far the key lies behind the query, counted from the last ones
        if slopes is not None:
            scores = scores - slopes * xp.exact(abs(aligned))
        ahead = key - query if causal == "top_left" else aligned
        parts.append(xp.attend(scores, _visible(ahead, causal, window), v, sinks))
    out = xp.concatenate([part[0] for part in parts], axis=3).reshape(batch, heads, queries, v.shape[-1])
    lse = xp.concatenate([part[1] for part in parts], axis=3).reshape(batch, heads, queries)
    return (out, lse) if return_lse else out


def _visible(ahead: Any, causal: str, window: tuple[int, int] | None) -> Any:
    """Which keys a query sees, by how far they lie ahead of it."""
    visible = (ahead <= 0) if causal != "none" else (ahead == ahead)
    if window is not None:
        visible = visible & (ahead >= -window[0]) & (ahead <= window[1])
    return visible
