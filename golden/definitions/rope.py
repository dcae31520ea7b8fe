"""Rotary position embedding."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.options import flag
from assay.golden.registry import Fault, define


@define(
    "rope",
    "x[B,S,H,D], cos[S,D/2]=angle, sin[S,D/2]=angle -> y[B,S,H,D]",
    options={"interleaved": flag()},
    stages={"products": None},
    rows="B",
    independent=("S", "H"),
    may_be_zero=("B", "S"),
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


def _turned_on(xp: Arithmetic[N], cos: N, sin: N, dy: N, *, interleaved: bool) -> N:
    return rope(xp, dy, cos, sin, interleaved=interleaved)


@define(
    "rope_backward",
    "cos[S,D/2]=angle, sin[S,D/2]=angle, dy[B,S,H,D] -> dx[B,S,H,D]",
    options={"interleaved": flag()},
    stages={"products": None},
    rows="B",
    independent=("S", "H"),
    may_be_zero=("B", "S"),
    grid=("B", "S"),
    gradient_of="rope",
    faults=(
        "saturating_store",
        "store_rounds_ties_away",
        Fault("rope_gradient_turned_on", "the gradient is turned the way that x was, not back", _turned_on),
        Fault("rope_gradient_pairing", "pairs (i, i + D/2) are taken for neighbours, or the other way",
              lambda xp, cos, sin, dy, *, interleaved: rope_backward(xp, cos, sin, dy, interleaved=not interleaved),
              "layout", needs="D of at least 4"),
        Fault("rope_gradient_without_sine", "the gradient is multiplied by the cosine alone",
              lambda xp, cos, sin, dy, *, interleaved: rope_backward(xp, cos, sin * 0.0, dy, interleaved=interleaved)),
        Fault("rope_gradient_position_before", "each position takes the angle of the one before",
              lambda xp, cos, sin, dy, *, interleaved: rope_backward(
               xp, *(x[xp.integers([max(p - 1, 0) for p in range(x.shape[0])])] for x in (cos, sin)), dy,
               interleaved=interleaved), "layout", needs="more than one position"),
    ),
)  # fmt: skip
def rope_backward(xp: Arithmetic[N], cos: N, sin: N, dy: N, *, interleaved: bool) -> N:
    """The pairs of dy turned back: rope by the opposite angle."""
    return rope(xp, dy, cos, -sin, interleaved=interleaved)
