"""Weights that differ and mean the same: features of heads in another order, norms folded into the next projection."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.compare.architecture import Architecture
from assay.compare.runs.run import Run, Slot
from assay.compare.structure import Parameter, Structure

_ALIKE = 1e-2
"""Relative root mean square difference of products of weights that are the same but for their roundings to 16 bits."""


def reorder_heads(authority: Run, run: Run) -> None:
    """Read a run's queries and keys in the authority's order of features, where its weights are in another.

    Llama's own checkpoints pair the features (2i, 2i + 1) of a head, transformers' (i, i + D/2): rows of the
    projections of queries and keys are permuted, and so are the rotated queries and keys and the cache.
    """
    heads = Architecture(authority).heads
    for module in [name for name in run.modules if name.endswith(".q_proj")]:
        parent = module.rpartition(".")[0]
        pairs = [
            (f"{parent}.{part}_proj", part, authority.parameter(f"{parent}.{part}_proj", "weight"))
            for part in ("q", "k")
        ]
        own = [run.parameter(name, "weight") for name, _, _ in pairs]
        if not heads or any(mine is None or right is None for mine, (*_, right) in zip(own, pairs, strict=True)):
            continue
        width = int(own[0].shape[0]) // heads  # type: ignore[union-attr]
        orders = [_order_of(mine, right, width) for mine, (*_, right) in zip(own, pairs, strict=True)]  # type: ignore[arg-type]
        if any(order is None for order in orders):
            continue
        for (name, part, _), order in zip(pairs, orders, strict=True):
            assert order is not None
            run.reorder(name, "0", order)
            run.reorder(f"{parent}.rotary", part, order)
            if part == "k":
                run.reorder(f"{parent}.cache", part, order)


def _order_of(own: Tensor, right: Tensor, width: int) -> Tensor | None:
    """Return the order in which a run's rows are the authority's, if it is one of pairs of neighbours; else None."""
    if own.shape != right.shape or width < 2 or own.shape[0] % width or torch.equal(own.double(), right.double()):
        return None
    halves = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    for order in (halves, halves.argsort()):
        full = (torch.arange(0, own.shape[0], width)[:, None] + order).reshape(-1)
        if torch.equal(own[full].double(), right.double()):
            return full
    return None


def folded_weights(structure: Structure, authority: Run, run: Run) -> set[Parameter]:
    """Return the weights of norms and of what takes their outputs whose products are the authority's, norm by norm."""
    found: set[Parameter] = set()
    facts = Architecture(authority)
    for norm in structure.plans:
        if norm.definition not in ("rmsnorm", "layernorm"):
            continue
        scale = norm.inputs[1]
        assert isinstance(scale, Parameter)
        takers = [
            plan.inputs[1]
            for plan in structure.plans
            if plan.definition in ("linear", "router_logits")
            and isinstance(plan.inputs[0], Slot)
            and structure.sources.get(plan.inputs[0]) == norm.outputs[0]
        ]
        offset = facts.norm_offset(str(authority.modules[scale.module]["class"]))
        products = [
            [_product(each.parameter(scale.module, scale.name), each.parameter(taker.module, taker.name), offset)
             for each in (authority, run)]
            for taker in takers
            if isinstance(taker, Parameter)
        ]  # fmt: skip
        if takers and all(_are_alike(*pair) for pair in products):
            found |= {scale, *(taker for taker in takers if isinstance(taker, Parameter))}
    return found


def _product(norm: Tensor | None, weight: Tensor | None, offset: float) -> Tensor | None:
    if norm is None or weight is None or weight.shape[-1] != norm.shape[0]:
        return None
    return weight.double() * (norm.double() + offset)


def _are_alike(right: Tensor | None, own: Tensor | None) -> bool:
    if right is None or own is None or right.shape != own.shape:
        return False
    return float((own - right).norm()) <= _ALIKE * float(right.norm())
