"""The gradient of routing: of the weights of the top k experts, back to all logits."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.moe import ROUTING, check_choices, routing_scores
from assay.golden.registry import Fault, define


def _without_mean(xp: Any, logits: Any, dweights: Any, *, top_k: int, renormalize: bool, scoring: str) -> Any:
    """What the weights have in common is not subtracted."""
    weights, ids = _chosen(xp, logits, top_k, renormalize, scoring)
    grown = weights * dweights
    return _to_experts(xp, grown * _slope(xp, logits, ids) if scoring == "sigmoid" else grown, ids, logits.shape[-1])


@define(
    "moe_route_backward",
    lambda options: f"logits[T,E], dweights:float32[T,{options['top_k']}] -> dlogits[T,E]",
    options=ROUTING,
    rows="T",
    min_sizes={"E": "top_k"},
    default_sizes={"E": (2, 4, 8, 17, 60, 64)},
    gradient_of="moe_route",
    faults=(
        Fault("route_gradient_without_mean", "what all weights have in common is not subtracted", _without_mean,
              "routing", needs="scores that are normalised"),
        Fault("route_gradient_other_scoring", "the gradient is that of the other scoring",
              lambda xp, *tensors, scoring, **options: moe_route_backward(
               xp, *tensors, scoring="softmax" if scoring == "sigmoid" else "sigmoid", **options), "routing"),
        Fault("route_gradient_renormalised", "weights count as renormalised, or the other way",
              lambda xp, *tensors, renormalize, **options: moe_route_backward(
               xp, *tensors, renormalize=not renormalize, **options), "routing"),
        Fault("route_gradient_order", "the gradients of a token's weights are taken in the reverse order",
              lambda xp, logits, dweights, **options: moe_route_backward(
               xp, logits, dweights[:, list(range(dweights.shape[1]))[::-1]], **options), "routing",
              needs="top_k of two or more"),
    ),
)  # fmt: skip
def moe_route_backward(
    xp: Arithmetic[N, Idx], logits: N, dweights: N, *, top_k: int, renormalize: bool, scoring: str
) -> N:
    """With weights w of the chosen experts, in falling order, and scores s of all: w (dw - sum w dw) where softmax
    scores are renormalised, and s dw - s sum w dw where they aren't; of sigmoids w (dw - sum w dw) (1 - s), or
    w dw (1 - s). An expert that is not chosen counts with dw = 0. Nothing is said of rows in which a number isn't
    finite: zero times it stands at experts that aren't chosen, or nothing at all.
    """
    check_choices("moe_route_backward", logits.shape[-1], top_k)
    weights, ids = _chosen(xp, logits, top_k, renormalize, scoring)
    grown = weights * dweights
    if renormalize:
        grown = weights * (dweights - xp.sum(grown))
    if scoring == "sigmoid":
        grown = grown * _slope(xp, logits, ids)
    dlogits = _to_experts(xp, grown, ids, logits.shape[-1])
    if scoring == "softmax" and not renormalize:
        dlogits = dlogits - xp.softmax(logits) * xp.sum(grown)

    def touched() -> Idx:
        found: Idx = ((~xp.is_finite(logits)).any(-1) | (~xp.is_finite(dweights)).any(-1))[:, None]
        return found

    return xp.unspecified(touched, dlogits)


def _chosen(xp: Arithmetic[N, Idx], logits: N, top_k: int, renormalize: bool, scoring: str) -> tuple[N, Idx]:
    """Weights and ids [T,k], as `moe_route` gives them."""
    ids = xp.topk_index(logits, top_k)
    weights = xp.gather(routing_scores(xp, logits, scoring), ids)
    return (weights / xp.sum(weights) if renormalize else weights), ids


def _slope(xp: Arithmetic[N, Idx], logits: N, ids: Idx) -> N:
    """1 - s of the chosen experts' sigmoids."""
    chosen = xp.gather(logits, ids)
    return xp.any_formula(lambda: xp.sigmoid(-chosen), lambda: 1.0 - xp.sigmoid(chosen))


def _to_experts(xp: Arithmetic[N, Idx], grown: N, ids: Idx, experts: int) -> N:
    """[T,E] of [T,k], zero at experts that are not chosen."""
    named: Any = ids[:, None, :] == xp.integers(range(experts))[None, :, None]
    return xp.sum(xp.where(named, grown[:, None, :], 0.0))[..., 0]
