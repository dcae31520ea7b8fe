"""Embedding lookup and its gradient, and rotary position embedding (RoPE)."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.options import flag
from assay.golden.registry import Fault, altered, define


@define(
    "embedding",
    "table[V,D], ids:int64[T]=index(V) -> y[T,D]",
    rows="T",
    columns="D",
    gathered=("V",),
    faults=(
        Fault("embedding_row_after", "the next row is read",
              lambda xp, table, ids: table[(ids + 1) % max(table.shape[0], 1)], "routing"),
        Fault("embedding_of_first_token", "every token gets the row of the first",
              lambda xp, table, ids: table[ids * 0 + ids[:1]], "routing", needs="more than one token"),
        Fault("embedding_of_place", "the token's position is used instead of its number",
              lambda xp, table, ids: table[xp.integers(range(len(ids))) % max(table.shape[0], 1)], "routing"),
        Fault("embedding_scaled", "rows are multiplied by sqrt(D), as some models do behind it",
              lambda xp, table, ids: table[ids] * xp.constant(lambda sqrt, pi: sqrt(table.shape[1] or 1))),
    ),
    exempt=("truncating_store", "computed_in_bfloat16", "computed_in_float16"),
)  # fmt: skip
def embedding(xp: Arithmetic[N, Idx], table: N, ids: Idx) -> N:
    """table[ids]."""
    return table[ids]


def _last_only(xp: Any, table: Any, ids: Any, dy: Any) -> Any:
    """Of the tokens with one number the last one alone."""
    last = {int(token): position for position, token in enumerate(ids)}
    kept = sorted(last.values())
    return embedding_backward(xp, table, ids[xp.integers(kept)], dy[xp.integers(kept)])


def _averaged(xp: Any, table: Any, ids: Any, dtable: Any) -> Any:
    often = [max(int((ids == row).sum()), 1) for row in range(table.shape[0])]
    return dtable / xp.exact(xp.integers(often))[:, None]


@define(
    "embedding_backward",
    "table[V,D], ids:int64[T]=index(V), dy[T,D] -> dtable[V,D]",
    independent=("D",),
    may_be_zero=("T",),
    gradient_of="embedding",
    faults=(
        "saturating_store",
        Fault("embedding_gradient_overwritten", "of several tokens with one number only the last one counts",
              _last_only, "state", needs="a number that comes twice"),
        Fault("embedding_gradient_mean", "the gradient is divided by how often the number comes",
              altered("embedding_backward", dtable=_averaged), needs="a number that comes twice"),
        Fault("embedding_gradient_row_after", "the gradient goes to the row after",
              altered("embedding_backward", ids=lambda table, ids: (ids + 1) % max(table.shape[0], 1)), "routing",
              needs="a table of two rows or more"),
        Fault("embedding_gradient_last_token_left_out", "the last token is missing",
              altered("embedding_backward", ids=lambda ids: ids[:-1], dy=lambda dy: dy[:-1]), "tail"),
    ),
    exempt=("computed_in_bfloat16", "computed_in_float16"),
)  # fmt: skip
def embedding_backward(xp: Arithmetic[N, Idx], table: N, ids: Idx, dy: N) -> N:
    """dtable[v] is the sum of dy[t] over all t with ids[t] = v, in any order; zero where none has.

    Of the table only the number of rows counts.
    """
    rows, count, sums = [0] * table.shape[0], 1, [xp.exact(xp.native.zeros((1, dy.shape[1])))]
    for row in sorted({int(ids[token]) for token in range(len(ids))}):
        tokens = xp.native.argwhere(ids == row)[:, 0]
        sums.append(xp.sum(dy[tokens], axis=0))
        rows[row], count = count, count + 1
    return xp.concatenate(sums)[xp.integers(rows)]


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

    rotated = product(first, cos) - product(second, sin), product(second, cos) + product(first, sin)
    if interleaved:
        return xp.stack(rotated, -1).reshape(*x.shape)
    return xp.concatenate(rotated, -1)


def _before(xp: Any, value: Any) -> Any:
    return value[xp.integers([max(position - 1, 0) for position in range(value.shape[0])])]


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
        Fault("rope_gradient_turned_on", "the gradient is rotated by the angle, not by its opposite",
              altered("rope_backward", sin=lambda sin: -sin)),
        Fault("rope_gradient_pairing", "pairs (i, i + D/2) are taken for neighbours, or vice versa",
              altered("rope_backward", interleaved=lambda interleaved: not interleaved), "layout",
              needs="D of at least 4"),
        Fault("rope_gradient_without_sine", "the gradient is multiplied by the cosine alone",
              altered("rope_backward", sin=lambda sin: sin * 0.0)),
        Fault("rope_gradient_position_before", "each position takes the angle of the one before",
              altered("rope_backward", cos=_before, sin=_before), "layout", needs="more than one position"),
    ),
)  # fmt: skip
def rope_backward(xp: Arithmetic[N], cos: N, sin: N, dy: N, *, interleaved: bool) -> N:
    """The pairs of dy rotated by the opposite angle."""
    return rope(xp, dy, cos, -sin, interleaved=interleaved)
