"""Faults of routing and of experts."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.definitions.activation import swiglu
from assay.golden.definitions.moe import routing_scores
from assay.verify.inputs.cases import Case
from assay.verify.suspects.mechanisms import asked, changed, option, whole
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor
_ROUTE, _MOE = ("moe_route",), ("moe",)


def _ids(pick: Any) -> type:
    class Picked:
        def top(self: Any, x: Any, k: int) -> Any:
            return pick(super().top, x, k)  # type: ignore[misc]

    return Picked


def _last_expert_out(top: Any, x: Any, k: int) -> Any:
    """The last expert is never chosen, where there are others enough."""
    return top(x[..., : x.shape[-1] - 1], k) if x.shape[-1] > k else top(x, k)


def _tail_out(top: Any, x: Any, k: int) -> Any:
    """Experts beyond the last whole block of 8 are never chosen."""
    kept = whole(x.shape[-1], 8)
    return top(x[..., :kept], k) if kept >= k else top(x, k)


def _next_best(top: Any, x: Any, k: int) -> Any:
    """The best is passed over, where there are others enough."""
    return top(x, k + 1)[..., 1:] if x.shape[-1] > k else top(x, k)


def _smallest(top: Any, x: Any, k: int) -> Any:
    return top(-x, k)


def _first_twice(top: Any, x: Any, k: int) -> Any:
    """The best expert is not masked out before the next is sought."""
    return top(x, 1)[..., [0] * k]


def _route(kind: str) -> Any:
    def definition(
        xp: Any, logits: Any, *, top_k: int, renormalize: bool, scoring: str, ids: Any = None
    ) -> tuple[Any, Any]:
        scores = logits if kind == "logits" else routing_scores(xp, logits, scoring)
        ids = xp.top(logits, top_k) if ids is None else ids
        weights = xp.take(scores, ids)
        if kind == "sum of all":
            return (weights / xp.sum(scores) if renormalize else weights), ids
        if kind == "more than one" and top_k == 1:
            return weights, ids
        if kind == "softmax of chosen":
            return xp.softmax(xp.take(logits, ids)), ids
        return (weights / xp.sum(weights) if renormalize else weights), ids

    return definition


def _scoring(options: dict[str, Any], case: Case) -> dict[str, Any]:
    return options | {"scoring": "sigmoid" if options["scoring"] == "softmax" else "softmax"}


def _one_of_each_id(values: Tensors, case: Case) -> Tensors:
    """An expert that a token names twice counts once."""
    ids, weights = values["ids"], values["weights"].clone()
    for later in range(1, ids.shape[1]):
        repeated = (ids[:, :later] == ids[:, later : later + 1]).any(1)
        weights[repeated, later] = 0
    return values | {"weights": weights}


def _capacity(values: Tensors, case: Case) -> Tensors:
    """Only the first 16 tokens of an expert are computed."""
    ids, weights = values["ids"].reshape(-1), values["weights"].clone().reshape(-1)
    for expert in range(case.sizes["E"]):
        weights[(ids == expert).nonzero()[16:, 0]] = 0
    return values | {"weights": weights.reshape(values["weights"].shape)}


def _last_expert_skipped(values: Tensors, case: Case) -> Tensors:
    weights = torch.where(values["ids"] == case.sizes["E"] - 1, 0.0, values["weights"])
    return values | {"weights": weights if case.sizes["E"] > 1 else values["weights"]}


def _first_choice_only(values: Tensors, case: Case) -> Tensors:
    weights = values["weights"].clone()
    weights[:, 1:] = 0
    return values | {"weights": weights}


def _halves_swapped(values: Tensors, case: Case) -> Tensors:
    w = values["w_gate_up"]
    half = w.shape[1] // 2
    return values | {"w_gate_up": torch.cat([w[:, half:], w[:, :half]], 1)}


def _interleaved(values: Tensors, case: Case) -> Tensors:
    w = values["w_gate_up"]
    return values | {"w_gate_up": torch.cat([w[:, 0::2], w[:, 1::2]], 1)}


def _normalised(values: Tensors, case: Case) -> Tensors:
    weights = values["weights"]
    total = weights.sum(1, keepdim=True)
    return values | {"weights": weights / torch.where(total == 0, 1.0, total)}


def _experts(kind: str) -> Any:
    """`moe` with another activation, or the weights applied elsewhere."""

    def definition(xp: Any, x: Any, w_gate_up: Any, w_down: Any, weights: Any, ids: Any) -> Any:
        experts, inner = w_gate_up.shape[0], w_gate_up.shape[1] // 2
        tokens, choices = ids.shape
        flat, order, outputs = ids.reshape(tokens * choices), [], []
        given = weights.reshape(tokens * choices)
        for expert in range(experts):
            pairs = xp.native.argwhere(flat == expert)[:, 0]
            rows = x[pairs // max(choices, 1)]
            if kind == "weights on inputs":
                rows = rows * given[pairs][:, None]
            projected = xp.matmul(rows, xp.swap(w_gate_up[expert]))
            gate, up = projected[:, :inner], projected[:, inner:]
            hidden = gate * up if kind == "no silu" else swiglu(xp, gate, up, limit=None)
            outputs.append(xp.matmul(xp.round(hidden, "hidden"), xp.swap(w_down[expert])))
            order.append(pairs)
        back = xp.native.argsort(xp.native.concatenate(order))
        mixed = xp.concatenate(outputs)[back].reshape(tokens, choices, x.shape[-1])
        mixed = mixed if kind == "weights on inputs" else mixed * weights[:, :, None]
        return xp.sum(mixed, axis=1)[:, 0]

    return definition


SUSPECTS = (
    Suspect("one_expert_not_renormalised", "routing", "with top_k = 1 the weight is not renormalised", _ROUTE,
            origin="minimind#859", definition=_route("more than one"), needs="top_k=1 with renormalize=True",
            applies=lambda case: case.options["top_k"] == 1 and case.options["renormalize"]),
    Suspect("renormalisation_dropped", "routing", "the weights of the chosen experts are not renormalised", _ROUTE,
            origin="flashinfer#2889", applies=asked("renormalize", True), options=option(renormalize=False)),
    Suspect("always_renormalised", "routing", "weights are renormalised although that was not asked for", _ROUTE,
            applies=asked("renormalize", False), options=option(renormalize=True)),
    Suspect("renormalised_by_all", "routing", "weights are divided by the sum over all experts", _ROUTE,
            definition=_route("sum of all"),
            applies=lambda case: case.options["renormalize"] and case.options["scoring"] == "sigmoid"),
    Suspect("logits_for_scores", "routing", "the weights are the logits themselves", _ROUTE,
            definition=_route("logits")),
    Suspect("softmax_of_chosen", "routing", "the softmax is taken over the chosen experts only", _ROUTE,
            definition=_route("softmax of chosen"), applies=lambda case: not (
             case.options["renormalize"] and case.options["scoring"] == "softmax")),
    Suspect("scoring_ignored", "routing", "softmax scores stand for sigmoid scores, or the other way", _ROUTE,
            options=_scoring),
    Suspect("experts_beyond_block_never_chosen", "tail", "experts beyond the last whole block of 8 are never chosen",
            _ROUTE, arithmetic=_ids(_tail_out), needs="a number of experts that is no multiple of 8"),
    Suspect("last_expert_never_chosen", "routing", "the last expert is never chosen", _ROUTE, arithmetic=_ids(
        _last_expert_out), needs="more than top_k experts"),
    Suspect("best_expert_passed_over", "routing", "the choice begins with the second best", _ROUTE,
            arithmetic=_ids(_next_best), needs="more than top_k experts"),
    Suspect("smallest_chosen", "routing", "the smallest scores are chosen", _ROUTE, arithmetic=_ids(_smallest)),
    Suspect("best_expert_repeated", "routing", "the best expert is chosen again, not masked out", _ROUTE,
            arithmetic=_ids(_first_twice), applies=lambda case: case.options["top_k"] > 1),
    Suspect("ids_one_too_large", "routing", "ids count from one", _ROUTE, origin="vllm#42034",
            results=lambda xp, found, case: (found[0], found[1] + 1)),
    Suspect("routing_weights_dropped", "routing", "expert outputs are added without their weights", _MOE,
            inputs=changed("weights", torch.ones_like)),
    Suspect("routing_weights_twice", "routing", "routing weights are applied twice", _MOE,
            inputs=changed("weights", lambda x: x * x)),
    Suspect("routing_weights_on_inputs", "routing", "routing weights multiply the expert's input", _MOE,
            definition=_experts("weights on inputs")),
    Suspect("routing_weights_normalised", "routing", "routing weights are normalised again", _MOE, inputs=_normalised,
            needs="weights that don't add up to one"),
    Suspect("routing_weights_of_first_token", "routing", "every token takes the weights of the first", _MOE,
            inputs=changed("weights", lambda x: x[:1].expand(x.shape)), needs="more than one token"),
    Suspect("repeated_id_counts_once", "routing", "an expert that a token names twice counts once", _MOE,
            inputs=_one_of_each_id, needs="an id that comes twice in a token"),
    Suspect("expert_capacity", "tail", "only the first 16 tokens of an expert are computed", _MOE, inputs=_capacity,
            needs="more than 16 tokens for one expert", origin="common slip"),
    Suspect("last_expert_skipped", "routing", "the last expert's tokens are never computed", _MOE,
            inputs=_last_expert_skipped, needs="more than one expert"),
    Suspect("first_choice_only", "routing", "only the first choice of each token counts", _MOE,
            inputs=_first_choice_only, needs="k of two or more"),
    Suspect("gate_and_up_halves_swapped", "layout", "the rows of w_gate_up are taken with up first", _MOE,
            inputs=_halves_swapped),
    Suspect("gate_and_up_interleaved", "layout", "the rows of w_gate_up are taken as interleaved", _MOE,
            inputs=_interleaved, needs="F of two or more"),
    Suspect("expert_activation_dropped", "formula", "gate up: the silu is left out", _MOE,
            definition=_experts("no silu")),
    Suspect("expert_of_next_id", "routing", "ids are taken to count from one", _MOE, origin="vllm#42034",
            inputs=lambda values, case: values | {"ids": (values["ids"] - 1).clamp(min=0)},
            needs="more than one expert"),
)  # fmt: skip
