"""Checks which linears a checkpoint can hold: in any scheme, and as assigned."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from assay.precision.errors import CannotExport
from assay.precision.export.checkpoint.folding import Folded, folded
from assay.precision.export.checkpoint.pieces import Piece, pieces_of
from assay.precision.export.configurations.compressed_tensors import why_not
from assay.precision.export.plan import Plan
from assay.precision.observation.qparams import QParams
from assay.precision.observation.sites import Site
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.schemes import Quantizer, Scheme
from assay.precision.targets import engines, kind_of


def unstorable(model: torch.nn.Module, sites: Mapping[str, Site]) -> dict[str, str]:
    """Return the linears and embedding tables that can't be stored in any scheme, with the reasons.

    Pass their names as ``fixed`` to `Audit.recommend` when the model will be exported.
    """
    pieces, shared, kind = pieces_of(model, sites), _shared(model), kind_of(model)
    vllm, result = engines()["vllm"], {}
    for name, site in sites.items():
        if site.type in ("linear", "embedding"):
            reason = _never(model, name, site, pieces, shared)
            if site.type == "embedding" and kind not in vllm.tables_of:
                reason = f"vLLM {vllm.version} loads no quantised table of {kind or 'such a model'}"
            if reason is not None:
                result[name] = reason
    return result


def storable(
    model: torch.nn.Module,
    plan: Plan,
    weights: Mapping[str, torch.Tensor],
    *,
    sites: Mapping[str, Site],
    pieces: Mapping[str, list[Piece]],
    fits: QParams,
    partial: bool,
) -> tuple[Plan, Folded]:
    """Return the part of a plan that a checkpoint can hold, and the folded column factors.

    Without ``partial``, raises CannotExport unless it is the entire plan: a checkpoint with less would mislead. With
    it, linears that can't be stored keep their format, together with those that engines fuse with them, and are noted.
    """
    if streamed_parameters(model):
        raise CannotExport("a checkpoint is written from weights in memory; load the model without max_memory")
    refused, shared = {}, _shared(model)
    for name, scheme in plan.weights.items():
        reason = why_not(scheme) or _column_factors(name, scheme, plan)
        reason = reason or _never(model, name, sites[name], pieces, shared)
        if reason is not None:
            refused[name] = reason
    if refused and not partial:
        name, reason = next(iter(refused.items()))
        scheme = plan.weights[name]
        more = f" (and {len(refused) - 1} more linears)" if len(refused) > 1 else ""
        raise CannotExport(f"{name} can't be stored in {scheme.name}: {reason}{more}")
    columns, rigid = {}, set()
    for name in plan.linears.keys() - refused.keys():
        stored = fits.weight(name, plan.linears[name], weights[name])
        if stored is not None and stored.columns is not None:
            columns[name] = stored.columns
        if stored is not None and not _divisible(stored.quantizer):
            rigid.add(name)
    columns = {name: columns[name] for name in plan.linears if name in columns}
    into = folded(model, columns, rigid, refused if partial else None)
    if not refused:
        return plan, into
    plan = _without(plan, sites, refused)
    return plan, folded(model, {name: factors for name, factors in columns.items() if name in plan.linears}, rigid)


def _without(plan: Plan, sites: Mapping[str, Site], refused: dict[str, str]) -> Plan:
    """Return a plan without refused linears and those fused with them; note all of them."""
    every = plan.weights
    units = {sites[name].unit: name for name in reversed(refused)}
    left = {name for name in every if name in refused or sites[name].unit in units}
    for name in every:
        if name in left:
            beside = f"it is run as one with {units[sites[name].unit]}, which can't be stored"
            plan.note(name, every[name].name, f"stays as it is in the checkpoint: {refused.get(name, beside)}")
    return replace(
        plan,
        linears={name: scheme for name, scheme in plan.linears.items() if name not in left},
        experts={name: scheme for name, scheme in plan.experts.items() if name not in left},
        left=(*plan.left, *(name for name in every if name in left)),
    )


def _never(
    model: torch.nn.Module,
    name: str,
    site: Site,
    pieces: Mapping[str, Collection[Piece]],
    shared: Mapping[int, list[str]],
) -> str | None:
    """Return why a linear can't be stored in any scheme; None if it can."""
    if len(site.shape) == 2:
        module = dict(model.named_modules()).get(name)
        stored = torch.nn.Linear if site.type == "linear" else torch.nn.Embedding
        if type(module) is not stored:
            kind = "parameter" if module is None else type(module).__name__
            return f"it is a {kind}; compressed-tensors stores torch.nn.{stored.__name__}"
        tied = shared.get(id(module.weight), [])
        if len(tied) > 1:
            return f"it shares its weight with {' and '.join(tied)}"
    return None if pieces.get(name) else "its rows are laid out otherwise in checkpoints of this architecture"


def _column_factors(name: str, scheme: Scheme, plan: Plan) -> str | None:
    rule = scheme.weight.rule if scheme.weight is not None else ""
    if name in plan.experts and (scheme.transform != "none" or rule == "awq"):
        return "experts share one input, which column factors of each can't divide"
    return None


def _divisible(quantizer: Quantizer) -> bool:
    """Return whether rows of a stored weight can be divided by dividing their scales."""
    return quantizer.per in ("row", "group") and quantizer.scale_format in ("float32", "bfloat16")


def _shared(model: torch.nn.Module) -> dict[int, list[str]]:
    """Return names of parameters by the object's identity."""
    shared: dict[int, list[str]] = {}
    for name, values in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(values), []).append(name)
    return shared
