"""Mixture of experts: routing, and the experts themselves."""

from __future__ import annotations

from typing import Any

from assay.golden.definitions.activation import swiglu
from assay.golden.errors import ShapeError
from assay.golden.registry import Option, choice, define, flag


def _admissible(xp: Any, logits: Any, chosen: Any, *, top_k: int, renormalize: bool, scoring: str) -> Any:
    """Which chosen experts no unchosen one certainly beats: a mask [T, k]; repeated or foreign ids are wrong."""
    return xp.top_admissible(routing_scores(xp, logits, scoring), chosen)


def routing_scores(xp: Any, logits: Any, scoring: str) -> Any:
    """The scores of experts, of logits [T,E]."""
    return xp.sigmoid(logits) if scoring == "sigmoid" else xp.softmax(logits)


@define(
    "moe_route",
    lambda options: f"logits[T,E] -> weights:float32[T,{options['top_k']}], ids:int32[T,{options['top_k']}]=index(E)",
    options={
        "top_k": Option(2, lambda value: type(value) is int and value > 0, "a positive whole number"),
        "renormalize": flag(True),
        "scoring": choice("softmax", "sigmoid"),
    },
    rows="T",
    least={"E": "top_k"},
    chosen=("ids",),
    admissible=_admissible,
)
def moe_route(xp: Any, logits: Any, *, top_k: int, renormalize: bool, scoring: str, ids: Any = None) -> tuple[Any, Any]:
    """The scores of the top k experts, normalised to one where asked; ``ids`` given: of those experts."""
    if logits.shape[-1] < top_k:
        raise ShapeError(f"moe_route: top_k={top_k} of only {logits.shape[-1]} experts")
    scores = routing_scores(xp, logits, scoring)
    if ids is None:
        ids = xp.top(logits, top_k)  # scores grow with logits, but round to ties
    weights = xp.take(scores, ids)
    return (weights / xp.sum(weights) if renormalize else weights), ids


@define(
    "moe",
    "x[T,D], w_gate_up[E,2*F,D], w_down[E,D,F], weights:float32[T,k]=weight, ids:int32[T,k]=index(E) -> y[T,D]",
    stages={"gate_up": None, "hidden": "input", "expert": None},
    rows="T",
    work="T*k*D*F+E*D*F",
    sizes={"k": (1, 2, 3, 6, 8), "E": (1, 2, 3, 4, 8, 17, 64)},
)
def moe(xp: Any, x: Any, w_gate_up: Any, w_down: Any, weights: Any, ids: Any) -> Any:
    """sum_k weight_k down_k(silu(gate_k x) * up_k x); an expert may come twice, and counts twice."""
    experts, inner = w_gate_up.shape[0], w_gate_up.shape[1] // 2
    tokens, choices = ids.shape
    flat = ids.reshape(tokens * choices)
    order, outputs = [], []
    for expert in range(experts):
        pairs = xp.native.argwhere(flat == expert)[:, 0]
        projected = xp.round(xp.matmul(x[pairs // max(choices, 1)], xp.swap(w_gate_up[expert])), "gate_up")
        hidden = xp.round(swiglu(xp, projected[:, :inner], projected[:, inner:], limit=None), "hidden")
        outputs.append(xp.round(xp.matmul(hidden, xp.swap(w_down[expert])), "expert"))
        order.append(pairs)
    back = xp.native.argsort(xp.native.concatenate(order))
    mixed = xp.concatenate(outputs)[back].reshape(tokens, choices, x.shape[-1]) * weights[:, :, None]
    return xp.sum(mixed, axis=1)[:, 0]
