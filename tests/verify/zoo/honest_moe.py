"""Honest routing and mixture of experts."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .honest_elementwise import sigmoid, silu_values
from .numerics import load

Stage = Callable[[Tensor, torch.dtype], Tensor]


def moe_route(
    logits: Tensor,
    *,
    top_k: int = 2,
    renormalize: bool = True,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """Scores of all experts, then the largest of them, divided by their sum where asked."""
    values = load(logits)
    if scoring == "sigmoid":
        # Weights that are divided by their sum may share a factor: without it all scores could underflow to zero.
        shift = values.amax(dim=1, keepdim=True).clamp(max=0.0) if renormalize else torch.zeros(len(values), 1)
        scores = torch.exp(values.clamp(max=0.0) - shift) / (1.0 + torch.exp(-values.abs()))
    else:
        scores = torch.softmax(values, dim=1)
    weights, ids = torch.topk(scores, top_k, dim=1)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, ids.to(torch.int32)


def moe_route_by_logits(
    logits: Tensor,
    *,
    top_k: int = 2,
    renormalize: bool = True,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """The largest logits first; renormalised softmax then needs only these."""
    values = load(logits)
    chosen, ids = torch.topk(values, top_k, dim=1)
    if scoring == "softmax" and renormalize:
        weights = torch.softmax(chosen, dim=1)
    elif scoring == "softmax":
        maximum = values.amax(dim=1, keepdim=True)
        weights = torch.exp(chosen - maximum) / torch.exp(values - maximum).sum(dim=1, keepdim=True)
    elif renormalize:
        shift = chosen.amax(dim=1, keepdim=True).clamp(max=0.0)
        weights = torch.exp(chosen.clamp(max=0.0) - shift) / (1.0 + torch.exp(-chosen.abs()))
        weights = weights / weights.sum(dim=1, keepdim=True)
    else:
        weights = sigmoid(chosen)
    return weights, ids.to(torch.int32)


def keep_hidden(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The hidden activation stays in float32."""
    return hidden


def round_hidden(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The hidden activation rounded to the input dtype, which the default contract allows."""
    return hidden.to(dtype).to(torch.float32)


def hidden_of(projected: Tensor, dtype: torch.dtype, stage: Stage) -> Tensor:
    """silu(gate) * up, gate in the first half of the last dimension."""
    middle = projected.shape[-1] // 2
    return stage(silu_values(projected[..., :middle]) * projected[..., middle:], dtype)


def moe_by_expert(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    hidden: Callable[[Tensor, torch.dtype, Stage], Tensor] = hidden_of,
    stage: Stage = keep_hidden,
) -> Tensor:
    """For each expert the tokens routed to it, a token twice where it names the expert twice."""
    total = torch.zeros(x.shape)
    for expert in range(w_gate_up.shape[0]):
        token, place = torch.nonzero(ids == expert, as_tuple=True)
        if len(token) == 0:
            continue
        activation = hidden(load(x[token]) @ load(w_gate_up[expert]).T, x.dtype, stage)
        out = activation @ load(w_down[expert]).T
        total.index_add_(0, token, out * load(weights[token, place])[:, None])
    return total.to(x.dtype)


moe_by_expert_rounded = partial(moe_by_expert, stage=round_hidden)


def moe_by_pair(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Both matrices gathered for each pair of token and expert, a few tokens at a time."""
    total = torch.zeros(x.shape)
    for tokens in torch.arange(x.shape[0]).split(8):
        for place in range(ids.shape[1]):
            expert = ids[tokens, place].long()
            projected = load(w_gate_up[expert]) @ load(x[tokens])[:, :, None]
            activation = hidden_of(projected.squeeze(-1), x.dtype, keep_hidden)
            out = (load(w_down[expert]) @ activation[:, :, None]).squeeze(-1)
            total[tokens] += out * load(weights[tokens, place])[:, None]
    return total.to(x.dtype)


ROUTE_OPTIONS = {"top_k": [1, 2, 4], "renormalize": [True, False], "scoring": ["softmax", "sigmoid"]}
ROUTE_SHAPES = {"E": [4, 8, 13, 60, 128]}
ALL = ("float32", "bfloat16", "float16")

MOE: tuple[Entry, ...] = (
    *family("moe_route", "moe_route", moe_route, ALL, options=ROUTE_OPTIONS, shapes=ROUTE_SHAPES),
    *family("moe_route_by_logits", "moe_route", moe_route_by_logits, ALL, options=ROUTE_OPTIONS, shapes=ROUTE_SHAPES),
    *family("moe_by_expert", "moe", moe_by_expert, ALL),
    *family("moe_by_expert_rounded", "moe", moe_by_expert_rounded, ("bfloat16", "float16")),
    *family("moe_by_pair", "moe", moe_by_pair, ("float32", "bfloat16")),
)
