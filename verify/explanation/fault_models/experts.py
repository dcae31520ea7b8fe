"""Faults of routing and of experts."""

from typing import Any

import torch

from assay.golden.definitions.moe import moe
from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import changed, has, operations, option, whole

Tensor = torch.Tensor
_ROUTE, _MOE = ("moe_route",), ("moe",)


def _ids(pick: Any) -> type:
    return operations(topk_index=lambda xp, right, x, k: pick(right, x, k))


def _one_of_each_id(values: Tensors, case: Case) -> Tensors:
    ids, weights = values["ids"], values["weights"].clone()
    for later in range(1, ids.shape[1]):
        repeated = (ids[:, :later] == ids[:, later : later + 1]).any(1)
        weights[repeated, later] = 0
    return values | {"weights": weights}


def _capacity(values: Tensors, case: Case) -> Tensors:
    ids, weights = values["ids"].reshape(-1), values["weights"].clone().reshape(-1)
    for expert in range(case.sizes["E"]):
        weights[(ids == expert).nonzero()[16:, 0]] = 0
    return values | {"weights": weights.reshape(values["weights"].shape)}


def _last_expert_skipped(values: Tensors, case: Case) -> Tensors:
    skipped = (values["ids"] == case.sizes["E"] - 1) & (case.sizes["E"] > 1)
    return values | {"weights": torch.where(skipped, 0.0, values["weights"])}


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


def _weights_on_inputs(xp: Any, x: Any, w_gate_up: Any, w_down: Any, weights: Any, ids: Any) -> Any:
    """Multiply a token by its weight before the expert; each choice becomes a token."""
    (tokens, choices), width = ids.shape, x.shape[-1]
    rows = (x[:, None, :] * weights[:, :, None]).reshape(tokens * choices, width)
    unit = xp.exact(xp.native.full((tokens * choices, 1), 1))
    mixed = moe(xp, rows, w_gate_up, w_down, unit, ids.reshape(tokens * choices, 1))
    return xp.sum(mixed.reshape(tokens, choices, width), axis=1)[:, 0]


FAULT_MODELS = (
    FaultModel("one_expert_not_renormalised", "routing", "with top_k = 1 the weight is not renormalised", _ROUTE,
        origin="minimind#859", options=option(renormalize=False), needs="top_k=1 with renormalize=True",
        applies=lambda case: case.options["top_k"] == 1 and case.options["renormalize"]),
    FaultModel("renormalisation_dropped", "routing", "the weights of the chosen experts are not renormalised", _ROUTE,
        origin="flashinfer#2889", applies=has("renormalize", True), options=option(renormalize=False)),
    FaultModel("always_renormalised", "routing", "weights are renormalised although that was not asked for", _ROUTE,
        applies=has("renormalize", False), options=option(renormalize=True)),
    FaultModel("renormalised_by_all", "routing", "weights are divided by the sum over all experts", _ROUTE,
        options=option(renormalize=False),
        arithmetic=operations(gather=lambda xp, right, scores, ids: right(scores, ids) / xp.sum(scores)),
        applies=lambda case: case.options["renormalize"] and case.options["scoring"] == "sigmoid"),
    FaultModel("logits_for_scores", "routing", "the weights are the logits themselves", _ROUTE,
        arithmetic=operations(softmax=lambda xp, right, x: x, sigmoid=lambda xp, right, x: x)),
    FaultModel("softmax_of_chosen", "routing", "the softmax is taken over the chosen experts only", _ROUTE,
        options=option(scoring="softmax", renormalize=True),  # equal to a softmax over the chosen logits
        applies=lambda case: not (case.options["renormalize"] and case.options["scoring"] == "softmax")),
    FaultModel("scoring_ignored", "routing", "softmax scores stand for sigmoid scores, or the other way", _ROUTE,
        options=lambda options, case: options
        | {"scoring": "sigmoid" if options["scoring"] == "softmax" else "softmax"}),
    FaultModel("experts_beyond_block_never_chosen", "tail", "experts beyond the last whole block of 8 are never chosen",
        _ROUTE, arithmetic=_ids(
         lambda top, x, k: top(x[..., : max(whole(x.shape[-1], 8), k)], k)),
        needs="a number of experts that is no multiple of 8"),
    FaultModel("last_expert_never_chosen", "routing", "the last expert is never chosen", _ROUTE, arithmetic=_ids(
         lambda top, x, k: top(x[..., : max(x.shape[-1] - 1, k)], k)), needs="more than top_k experts"),
    FaultModel("best_expert_passed_over", "routing", "the choice begins with the second best", _ROUTE,
        arithmetic=_ids(lambda top, x, k: top(x, k + 1)[..., 1:] if x.shape[-1] > k else top(x, k)),
        needs="more than top_k experts"),
    FaultModel("smallest_chosen", "routing", "the smallest scores are chosen", _ROUTE,
        arithmetic=_ids(lambda top, x, k: top(-x, k))),
    FaultModel("best_expert_repeated", "routing", "the best expert is chosen again, not masked out", _ROUTE,
        arithmetic=_ids(lambda top, x, k: top(x, 1)[..., [0] * k]), applies=lambda case: case.options["top_k"] > 1),
    FaultModel("ids_one_too_large", "routing", "ids count from one", _ROUTE, origin="vllm#42034",
        results=lambda xp, outputs, case: (outputs[0], outputs[1] + 1)),
    FaultModel("routing_weights_dropped", "routing", "expert outputs are added without their weights", _MOE,
        inputs=changed("weights", torch.ones_like)),
    FaultModel("routing_weights_twice", "routing", "routing weights are applied twice", _MOE,
        inputs=changed("weights", lambda x: x * x)),
    FaultModel("routing_weights_on_inputs", "routing", "routing weights multiply the expert's input", _MOE,
        definition=_weights_on_inputs),
    FaultModel("routing_weights_normalised", "routing", "routing weights are normalised again", _MOE,
        inputs=changed("weights", _normalised), needs="weights that don't add up to one"),
    FaultModel("routing_weights_of_first_token", "routing", "every token takes the weights of the first", _MOE,
        inputs=changed("weights", lambda x: x[:1].expand(x.shape)), needs="more than one token"),
    FaultModel("repeated_id_counts_once", "routing", "an expert that a token names twice counts once", _MOE,
        inputs=_one_of_each_id, needs="an id that comes twice in a token"),
    FaultModel("expert_capacity", "tail", "only the first 16 tokens of an expert are computed", _MOE, inputs=_capacity,
        needs="more than 16 tokens for one expert", origin="common slip"),
    FaultModel("last_expert_skipped", "routing", "the last expert's tokens are never computed", _MOE,
        inputs=_last_expert_skipped, needs="more than one expert"),
    FaultModel("first_choice_only", "routing", "only the first choice of each token counts", _MOE,
        needs="k of two or more",
        inputs=changed("weights", lambda x: torch.where(torch.arange(x.shape[1]) > 0, 0.0, x))),
    FaultModel("gate_and_up_halves_swapped", "layout", "the rows of w_gate_up are taken with up first", _MOE,
        inputs=changed("w_gate_up", lambda w: w.roll(w.shape[1] // 2, 1))),
    FaultModel("gate_and_up_interleaved", "layout", "the rows of w_gate_up are taken as interleaved", _MOE,
        inputs=changed("w_gate_up", lambda w: torch.cat([w[:, 0::2], w[:, 1::2]], 1)), needs="F of two or more"),
    FaultModel("expert_activation_dropped", "formula", "gate up: the silu is left out", _MOE,
        arithmetic=operations(gated_product=lambda xp, right, x, gate, y: x * y)),
    FaultModel("expert_of_next_id", "routing", "ids are taken to count from one", _MOE, origin="vllm#42034",
        inputs=lambda values, case: values | {"ids": (values["ids"] - 1).clamp(min=0)},
        needs="more than one expert"),
)  # fmt: skip
