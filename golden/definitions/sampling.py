"""Filters of logits before sampling: top-k and top-p."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.options import Option, number
from assay.golden.registry import Fault, Reduction, altered, define

_NOTHING = float("-inf")


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _running_most(native: Any, x: Idx) -> Idx:
    """Return the running maximum along the last axis."""
    running = native.cummax(x, -1).values if hasattr(native, "cummax") else native.maximum.accumulate(x, -1)
    return cast("Idx", running)


def _differs(xp: Arithmetic[N, Idx], ranked: N) -> Idx:
    """Where one of sorted numbers is above the next."""
    return xp.above(ranked[:, :-1] - ranked[:, 1:], 0.0)


def _ends_of_ties(xp: Arithmetic[N, Idx], ranked: N) -> tuple[Idx, Idx]:
    """Return for each of sorted numbers the indices of the first and the last that are equal to it."""
    rows, columns = ranked.shape
    differs = _differs(xp, ranked)
    position, edge = xp.integers(range(columns))[None, :], xp.integers([[1]] * rows) == 1
    first = _running_most(xp.native, xp.native.where(xp.native.concatenate([edge, differs], 1), position, 0))
    backward = xp.integers(range(columns - 1, -1, -1))
    ends = xp.native.concatenate([differs, edge], 1)[:, backward]
    last = columns - 1 - _running_most(xp.native, xp.native.where(ends, position, 0))[:, backward]
    return first, last


def _filtered(
    xp: Arithmetic[N, Idx],
    x: N,
    top_k: int | None,
    top_p: float | None,
    *,
    ties: str = "first",
    from_least: bool = False,
    of_all: bool = False,
    order: Idx | None = None,
) -> N:
    """Return the logits that pass the filter, -inf elsewhere.

    ``ties``: of equal ones the first come first, or "all" stay, or "none", where not all do. ``from_least``: shares are
    added from the least likely one on, and taken from one. ``of_all``: they are those among all tokens.
    """
    columns = x.shape[1]
    order = xp.topk_index(x, columns) if order is None else order
    ranked, position = xp.gather(x, order), xp.integers(range(columns))[None, :]
    judged = position if ties == "first" else _ends_of_ties(xp, ranked)[0 if ties == "all" else 1]
    if top_k is not None:
        kept = xp.where(judged < top_k, ranked, _NOTHING)
        among = xp.where(position < top_k, ranked, _NOTHING) if ties == "none" else kept
    else:
        kept = among = ranked
    if top_p is not None:
        share = xp.softmax(ranked if of_all else among)
        if from_least:
            backward = xp.integers(range(columns - 1, -1, -1))
            before = 1.0 - xp.cumsum(share[:, backward])[:, backward]
        else:
            nothing = xp.exact(xp.native.zeros((x.shape[0], 1)))
            before = xp.cumsum(xp.concatenate([nothing, share[:, : columns - 1]], -1))
        before = before if ties == "first" else xp.gather(before, judged)
        chosen = xp.where_above(-before, -top_p, kept, _NOTHING)
        kept = chosen if ties == "none" else xp.concatenate([kept[:, :1], chosen[:, 1:]], -1)
    return xp.gather(kept, xp.native.argsort(order, -1))


def _in_any_order(xp: Arithmetic[N, Idx], x: N, top_k: int | None, top_p: float | None, *, of_all: bool = False) -> N:
    """`_filtered` with every freedom of ties, where there are any, and of the order of sums."""
    order = xp.topk_index(x, x.shape[1])
    variants: list[dict[str, Any]] = [{}, {"from_least": True}]
    if x.shape[1] > 1 and bool((~_differs(xp, xp.gather(x, order))).any(-1).any(-1)):
        variants += [{"ties": "all"}, {"ties": "none"}]
    return xp.any_formula(
        *(partial(_filtered, xp, x, top_k, top_p, of_all=of_all, order=order, **variant) for variant in variants)
    )


def _kept(xp: Any, x: Any, *, top_k: int | None, top_p: float | None) -> tuple[Any, Any]:
    """Return how many logits of each row stay, at least and at most; of rows that aren't finite nothing is said."""
    columns, finite = x.shape[1], xp.is_finite(x).all(-1)
    least, most = finite * columns, xp.native.where(finite, 0, columns)
    for from_least in (False, True) if columns else ():
        low, high = xp.enclosure(_filtered(xp, x, top_k, top_p, from_least=from_least))
        least = xp.native.minimum(least, (low > _NOTHING).sum(-1))
        most = xp.native.maximum(most, (high > _NOTHING).sum(-1))
    return least, most


def _crossing_dropped(xp: Any, x: Any, y: Any, top_p: float | None) -> Any:
    """Filter also the token with which the sum of shares reaches p."""
    if top_p is None or x.shape[1] < 2:
        return y
    order = xp.topk_index(x, x.shape[1])
    kept = xp.gather(y, order)
    later = xp.concatenate([kept[:, 1:], kept[:, :1] * 0.0 + _NOTHING], -1)
    some = xp.where(xp.is_finite(later), kept, _NOTHING)
    return xp.gather(xp.concatenate([kept[:, :1], some[:, 1:]], -1), xp.native.argsort(order, -1))


@define(
    "top_filter",
    "x[R,V] -> y[R,V]",
    options={
        "top_k": Option(None, _is_count, "None or a positive whole number", usual=(None, 5)),
        "top_p": number(0.9, positive=True, usual=(0.9, 0.4)),
    },
    rows="R",
    reduction=Reduction("V"),
    fills=_NOTHING,
    keeps=_kept,
    faults=(
        Fault("top_k_one_more", "one token more than k is kept",
              altered("top_filter", top_k=lambda top_k: None if top_k is None else top_k + 1), "mask",
              needs="more than k tokens"),
        Fault("crossing_token_dropped", "the token with which the shares reach p is missing",
              altered("top_filter", y=_crossing_dropped), "mask"),
        Fault("top_p_before_top_k", "p counts shares among all tokens, not among the top k",
              lambda xp, x, *, top_k, top_p: _in_any_order(xp, x, top_k, top_p, of_all=True), "mask",
              needs="both k and p"),
        Fault("filtered_to_zero", "filtered logits become zero, not minus infinity",
              altered("top_filter", y=lambda xp, y: xp.where(xp.is_finite(y), y, 0.0))),
        Fault("top_p_ignored", "p is ignored", altered("top_filter", top_p=None), "mask"),
    ),
    exempt=("nan_read_as_zero", "flushed_subnormals", "computed_in_bfloat16", "computed_in_float16",
            "truncating_store"),
)  # fmt: skip
def top_filter(xp: Arithmetic[N, Idx], x: N, *, top_k: int | None, top_p: float | None) -> N:
    """The logits of the ``top_k`` largest, and of these the fewest whose shares reach ``top_p``; -inf elsewhere.

    A token is kept while the shares (softmax of the top k) of those before it add up to less than p (Holtzman et al.,
    *The curious case of neural text degeneration*, 2020). Of equal logits any may stay, but no more than that; where p
    is within the rounding of a sum, both choices are right.
    """
    if x.shape[1] == 0:
        return x
    return _in_any_order(xp, x, top_k, top_p)
