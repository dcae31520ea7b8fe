"""Mixture of experts: routing, and the experts themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.activation import swiglu
from assay.golden.errors import ShapeError
from assay.golden.options import Option, choice, flag
from assay.golden.registry import Reduction, define

ROUTING = {
    "top_k": Option(2, lambda value: type(value) is int and value > 0, "a positive whole number", usual=(2, 1)),
    "renormalize": flag(True),
    "scoring": choice("softmax", "sigmoid"),
}


def _admissible(xp: Arithmetic[N, Idx], logits: N, chosen: Idx, *, top_k: int, renormalize: bool, scoring: str) -> Idx:
    """Which chosen experts no unchosen one, or one after it, certainly beats: a mask [T, k]; repeated ids are wrong."""
    return xp.topk_admissible(routing_scores(xp, logits, scoring), chosen, ordered=True)


def routing_scores(xp: Arithmetic[N], logits: N, scoring: str) -> N:
    """The scores of experts, of logits [T,E]."""
    return xp.sigmoid(logits) if scoring == "sigmoid" else xp.softmax(logits)


def check_choices(op: str, experts: int, top_k: int) -> None:
    """Raise `ShapeError` where more experts are to be chosen than there are."""
    if experts < top_k:
        raise ShapeError(f"{op}: top_k={top_k} of only {experts} experts")


@define(
    "moe_route",
    lambda options: f"logits[T,E] -> weights:float32[T,{options['top_k']}], ids:int32[T,{options['top_k']}]=index(E)",
    options=ROUTING,
    rows="T",
    min_sizes={"E": "top_k"},
    default_sizes={"E": (2, 4, 8, 17, 60, 64)},
    chosen=("ids",),
    accepts=_admissible,
)
def moe_route(
    xp: Arithmetic[N, Idx], logits: N, *, top_k: int, renormalize: bool, scoring: str, ids: Idx | None = None
) -> tuple[N, Idx]:
    """The scores of the top k experts, the largest first, normalised to one where asked; ``ids`` given: of those."""
    check_choices("moe_route", logits.shape[-1], top_k)
    scores = routing_scores(xp, logits, scoring)
    if ids is None:
        ids = xp.topk_index(logits, top_k)  # scores grow with logits, but round to ties
    weights = xp.gather(scores, ids)
    return (weights / xp.sum(weights) if renormalize else weights), ids


@define(
    "moe",
    "x[T,D], w_gate_up[E,2*F,D], w_down[E,D,F], weights:float32[T,k]=weight, ids:int32[T,k]=index(E) -> y[T,D]",
    stages={"gate_up": None, "activated": None, "hidden": "input", "expert": None, "weighted": None},
    rows="T",
    work="T*k*D*F+E*D*F",
    sequential_steps="E+ceil(T*k/16)",
    gathered=("E",),
    sizes={"k": (1, 2, 3, 6, 8), "E": (1, 2, 3, 4, 8, 17, 64)},
    reduction=Reduction("D+F"),
    faults=("inputs_in_tf32",),
)
def moe(xp: Arithmetic[N, Idx], x: N, w_gate_up: N, w_down: N, weights: N, ids: Idx) -> N:
    """sum_k weight_k down_k(silu(gate_k x) * up_k x); an expert may come twice, and counts twice."""
    experts = w_gate_up.shape[0]
    y = mixture(
        *(xp, x, weights, ids, experts),
        lambda expert, rows: xp.matmul(rows, xp.swap(w_gate_up[expert])),
        lambda expert, rows: xp.matmul(rows, xp.swap(w_down[expert])),
    )

    def unchosen() -> Idx:
        """Where the weights of an expert are NaN or infinite that a token didn't choose."""
        others: Any = (ids[..., None] != xp.integers(range(experts))).all(1)
        first: Any = ~xp.is_finite(w_gate_up).all(-1).all(-1)
        last: Any = ~xp.is_finite(w_down).all(-1)
        found: Idx = (others[..., None] & (first[:, None] | last)).any(1)
        return found

    return xp.spilled(unchosen, y)


def mixture(
    xp: Arithmetic[N, Idx],
    x: N,
    weights: N,
    ids: Idx,
    experts: int,
    gate_up: Callable[[int, N], N],
    down: Callable[[int, N], N],
) -> N:
    """The mixture [T,D] of so many experts, whose two products of rows these are."""
    tokens, choices = ids.shape
    flat = ids.reshape(tokens * choices)
    order, outputs = [], []
    for expert in range(experts):
        pairs = xp.native.argwhere(flat == expert)[:, 0]
        projected = xp.round(gate_up(expert, x[pairs // max(choices, 1)]), "gate_up")
        inner = projected.shape[-1] // 2
        hidden = xp.round(swiglu(xp, projected[:, :inner], projected[:, inner:], limit=None), "hidden")
        outputs.append(xp.round(down(expert, hidden), "expert"))
        order.append(pairs)
    back = xp.native.argsort(xp.native.concatenate(order))
    mixed = xp.concatenate(outputs)[back].reshape(tokens, choices, x.shape[-1])
    return xp.sum(xp.round(mixed * weights[:, :, None], "weighted"), axis=1)[:, 0]
