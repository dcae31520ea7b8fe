"""Rotary position embedding."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.options import flag
from assay.golden.registry import define


@define(
    "rope",
    "x[B,S,H,D], cos[S,D/2]=angle, sin[S,D/2]=angle -> y[B,S,H,D]",
    options={"interleaved": flag()},
    stages={"products": None},
    rows="B",
    separable=("S", "H"),
    empty=("B", "S"),
    faults=("saturating_store", "store_rounds_ties_away"),
)
def rope(xp: Arithmetic[N], x: N, cos: N, sin: N, *, interleaved: bool) -> N:
    """Rotate the pairs (i, i + D/2), or the neighbours (2i, 2i + 1) where interleaved.

    Stage "products": each product, before two of them are added.
    """
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])

    def product(a: N, b: N) -> N:
        return xp.round(a * b, "products")

    turned = product(first, cos) - product(second, sin), product(second, cos) + product(first, sin)
    if interleaved:
        return xp.stack(turned, -1).reshape(*x.shape)
    return xp.concatenate(turned, -1)
