"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

from assay.golden.registry import define, flag


@define(
    "rope",
    "x[B,S,H,D], cos[S,D/2]=angle, sin[S,D/2]=angle -> y[B,S,H,D]",
    options={"interleaved": flag()},
    rows="B",
    empty=("B", "S"),
)
def rope(xp: Any, x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
    """Rotate the pairs (i, i + D/2), or the neighbours (2i, 2i + 1) where interleaved."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return xp.stack(turned, -1).reshape(*x.shape)
    return xp.concatenate(turned, -1)
