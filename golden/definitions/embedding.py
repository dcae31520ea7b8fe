"""Rows of a table by their number, and the gradient of the table."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.registry import Fault, define


@define(
    "embedding",
    "table[V,D], ids:int64[T]=index(V) -> y[T,D]",
    rows="T",
    columns="D",
    gathered=("V",),
    faults=(
        Fault("embedding_row_after", "the row after the one that is asked for is read",
              lambda xp, table, ids: table[(ids + 1) % max(table.shape[0], 1)], "routing"),
        Fault("embedding_of_first_token", "every token gets the row of the first",
              lambda xp, table, ids: table[ids * 0 + ids[:1]], "routing", needs="more than one token"),
        Fault("embedding_of_place", "the token's place stands for its number",
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
    last = {int(token): place for place, token in enumerate(ids)}
    kept = sorted(last.values())
    return embedding_backward(xp, table, ids[xp.integers(kept)], dy[xp.integers(kept)])


def _mean(xp: Any, table: Any, ids: Any, dy: Any) -> Any:
    """Divided by how often the number comes."""
    often = [max(int((ids == row).sum()), 1) for row in range(table.shape[0])]
    return embedding_backward(xp, table, ids, dy) / xp.exact(xp.integers(often))[:, None]


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
        Fault("embedding_gradient_mean", "the gradient is divided by how often the number comes", _mean,
              needs="a number that comes twice"),
        Fault("embedding_gradient_row_after", "the gradient goes to the row after",
              lambda xp, table, ids, dy: embedding_backward(xp, table, (ids + 1) % max(table.shape[0], 1), dy),
              "routing", needs="a table of two rows or more"),
        Fault("embedding_gradient_last_token_left_out", "the last token is left out",
              lambda xp, table, ids, dy: embedding_backward(xp, table, ids[:-1], dy[: max(len(ids) - 1, 0)]), "tail"),
    ),
    exempt=("computed_in_bfloat16", "computed_in_float16"),
)  # fmt: skip
def embedding_backward(xp: Arithmetic[N, Idx], table: N, ids: Idx, dy: N) -> N:
    """dtable[v] is the sum of dy[t] over all t with ids[t] = v, in any order; zero where none has.

    Of the table only the number of rows counts.
    """
    rows, place, sums = [0] * table.shape[0], 1, [xp.exact(xp.native.zeros((1, dy.shape[1])))]
    for row in sorted({int(ids[token]) for token in range(len(ids))}):
        tokens = xp.native.argwhere(ids == row)[:, 0]
        sums.append(xp.sum(dy[tokens], axis=0))
        rows[row], place = place, place + 1
    return xp.concatenate(sums)[xp.integers(rows)]
