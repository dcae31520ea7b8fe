"""Faulty routing and mixture of experts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_elementwise import silu_values
from .honest_moe import MOE, Stage, hidden_of, moe_by_expert, moe_route, moe_route_by_logits, round_hidden
from .numerics import load, round_via

plant = planter(MOE)


def route_without_renormalising(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The weights aren't divided by their sum."""
    return moe_route(logits, top_k=top_k, renormalize=False, scoring=scoring)


def route_always_renormalising(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The weights are divided by their sum where nobody asked for it."""
    return moe_route(logits, top_k=top_k, renormalize=True, scoring=scoring)


def route_ids_sorted(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """The ids are put in order, the weights aren't."""
    weights, ids = moe_route(logits, top_k=top_k, renormalize=renormalize, scoring=scoring)
    return weights, ids.sort(dim=1).values


def route_in_bfloat16(
    logits: Tensor, *, top_k: int = 2, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Float32 logits are rounded to bfloat16."""
    return moe_route(logits.bfloat16(), top_k=top_k, renormalize=renormalize, scoring=scoring)


def moe_never_written_expert(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Outputs of all experts stand in one buffer whose unrouted rows are never written, and take part with weight 0."""
    experts = w_gate_up.shape[0]
    buffer = torch.empty(experts, *x.shape)
    share = torch.zeros(experts, x.shape[0])
    for expert in range(experts):
        token = torch.nonzero((ids == expert).any(dim=1))[:, 0]
        hidden = hidden_of(load(x[token]) @ load(w_gate_up[expert]).T, x.dtype, round_hidden)
        buffer[expert, token] = hidden @ load(w_down[expert]).T
        share[expert] = (load(weights) * (ids == expert)).sum(dim=1)
    return (buffer * share[:, :, None]).sum(dim=0).to(x.dtype)


def moe_repeated_id_once(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Of an expert that a token names twice only the last weight counts."""
    share = torch.zeros(x.shape[0], w_gate_up.shape[0])
    for place in range(ids.shape[1]):
        share[torch.arange(x.shape[0]), ids[:, place].long()] = weights[:, place].float()
    everyone = torch.arange(w_gate_up.shape[0], dtype=torch.int32).expand(x.shape[0], -1)
    unused = share == 0
    return moe_by_expert(x, w_gate_up, w_down, share, torch.where(unused, -1, everyone))


def moe_unweighted(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The routing weights are ignored."""
    return moe_by_expert(x, w_gate_up, w_down, torch.ones_like(weights), ids)


def moe_last_expert_skipped(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The loop over experts ends one too early."""
    return moe_by_expert(x, w_gate_up[:-1], w_down[:-1], weights, ids)


def hidden_rounded_twice(projected: Tensor, dtype: torch.dtype, stage: Stage) -> Tensor:
    """silu(gate) is rounded, and so is its product with up."""
    middle = projected.shape[-1] // 2
    return stage(stage(silu_values(projected[..., :middle]), dtype) * projected[..., middle:], dtype)


def projection_rounded(projected: Tensor, dtype: torch.dtype, stage: Stage) -> Tensor:
    """gate and up are rounded before the activation."""
    return hidden_of(round_via(dtype)(projected), dtype, stage)


def hidden_swapped(projected: Tensor, dtype: torch.dtype, stage: Stage) -> Tensor:
    """gate and up have changed places."""
    return hidden_of(projected.roll(projected.shape[-1] // 2, dims=-1), dtype, stage)


UNWRITTEN = ("unwritten_output", "contract", "exact", "nonfinite", "nondeterministic")

FAULTY_MOE: tuple[Faulty, ...] = (
    *(
        plant("moe_route_not_renormalised", f"moe_route-{dtype}", route_without_renormalising)
        for dtype in ("float32", "bfloat16")
    ),
    plant("moe_route_always_renormalised", "moe_route-float32", route_always_renormalising),
    plant("moe_route_smallest", "moe_route_by_logits-float32", partial(moe_route_by_logits, largest=False)),
    plant("moe_route_ids_sorted", "moe_route-bfloat16", route_ids_sorted),
    plant("moe_route_in_bfloat16", "moe_route-float32", route_in_bfloat16),
    plant("moe_never_written_expert", "moe_by_expert_rounded-bfloat16", moe_never_written_expert, UNWRITTEN),
    plant("moe_repeated_id_once", "moe_by_expert-bfloat16", moe_repeated_id_once),
    plant("moe_unweighted", "moe_by_expert-bfloat16", moe_unweighted),
    plant("moe_last_expert_skipped", "moe_by_expert-float32", moe_last_expert_skipped),
    plant(
        "moe_hidden_rounded_twice",
        "moe_by_expert_rounded-bfloat16",
        partial(moe_by_expert, hidden=hidden_rounded_twice, stage=round_hidden),
    ),
    plant(
        "moe_projection_rounded",
        "moe_by_expert_rounded-bfloat16",
        partial(moe_by_expert, hidden=projection_rounded, stage=round_hidden),
    ),
    *(
        plant("moe_hidden_swapped", f"moe_by_expert-{dtype}", partial(moe_by_expert, hidden=hidden_swapped))
        for dtype in ("float32", "bfloat16")
    ),
)
