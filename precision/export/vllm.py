"""vLLM's online quantisation: a recipe for each layer that vLLM applies to an unquantised checkpoint while loading.

Shorthands are those of vLLM 0.33 (`vllm/config/quantization.py`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

import torch

from assay.precision.export.plan import Plan, Recipe, fused_name, named, plan_of, units_of
from assay.precision.export.targets import targets_of
from assay.precision.model.sites import Site

__all__ = ["command_line", "online_config"]

_SHORTHANDS = {
    "fp8": "fp8_per_channel",
    "fp8-block": "fp8_per_block",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
}
_CACHES = {"kv-fp8": "fp8_e4m3", "kv-int8": "int8_per_token_head", "kv-int4": "int4_per_token_head"}


def online_config(
    assignment: Mapping[str, str], sites: Mapping[str, Site], dtype: torch.dtype = torch.bfloat16
) -> Recipe:
    """The JSON after ``--quantization-config``: shorthands by target, for split and fused names, and what is ignored.

    Raises CannotExport and UnknownScheme as `plan_of` does.
    """
    plan = plan_of(assignment, sites, dtype)
    notes = plan.notes
    members: dict[str, list[str]] = {}
    for name, scheme in plan.linears.items():
        if scheme.name in _SHORTHANDS:
            members.setdefault(_SHORTHANDS[scheme.name], []).append(name)
        else:
            known = ", ".join(_SHORTHANDS)
            notes.add(name, scheme.name, f"vLLM quantises linears online to {known} only")
    found = {name: shorthand for shorthand, names in members.items() for name in names}
    held = named({name: plan.linears[name] for name in found} | (plan.caches if _cache(plan) else {}))
    left = [name for name, site in sites.items() if site.shape and name not in found]
    for unit, names in units_of(sites).items():
        fused = fused_name(unit)
        if fused is None:
            continue
        shorthands = {found.get(name) for name in names}
        only = shorthands.pop()
        if shorthands:
            notes.add(unit, "mixed", f"vLLM runs {len(names)} linears as {fused}, which has no target: they differ")
            held = {name: scheme for name, scheme in held.items() if name not in names}
        elif only is not None:
            members[only].append(fused)
        else:
            left.append(fused)
    for name, scheme in plan.caches.items():
        if _cache(plan) is None:
            notes.add(name, scheme.name, "vLLM takes one kind of cache, and layers that keep the model's dtype")
    targets = {target: shorthand for shorthand, names in members.items() for target in targets_of(names)}
    return Recipe({"targets": targets, "ignore": targets_of(left)}, held, notes.lines())


def command_line(model: str, assignment: Mapping[str, str], sites: Mapping[str, Site]) -> str:
    """The ``vllm serve`` command that gives ``model`` the online recipe and the KV caches of an assignment."""
    words = ["vllm", "serve", model]
    config = online_config(assignment, sites).content
    if config["targets"]:
        words += ["--quantization", "online", "--quantization-config", json.dumps(config)]
    plan = plan_of(assignment, sites)
    cache = _cache(plan)
    if cache is not None:
        words += ["--kv-cache-dtype", cache]
        every = [name for name, site in sites.items() if site.place == "kv_cache"]
        skipped = [str(number) for number, name in enumerate(every) if name not in plan.caches]
        if skipped:
            words += ["--kv-cache-dtype-skip-layers", *skipped]
    return shlex.join(words)


def _cache(plan: Plan) -> str | None:
    """vLLM's word for the caches; None where there are none or they differ."""
    kinds = {scheme.name for scheme in plan.caches.values()}
    return _CACHES.get(next(iter(kinds))) if len(kinds) == 1 else None
