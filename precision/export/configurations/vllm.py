"""vLLM's online quantisation: a recipe for each layer that vLLM applies to an unquantised checkpoint while loading.

Shorthands are those of vLLM 0.33 (`vllm/config/quantization.py`).
"""

import json
import shlex
from collections.abc import Mapping

import torch

from assay.configs.architectures import fused_name
from assay.precision.export.plan import (
    Plan,
    Recipe,
    Request,
    Target,
    json_text,
    of_linears,
    plan_of,
    targets_of,
    units_of,
)
from assay.precision.observation.sites import Site, layer_and_kind

_SHORTHANDS = {
    "fp8": "fp8_per_channel",
    "fp8-block": "fp8_per_block",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
}
_CACHES = {"kv-fp8": "fp8_e4m3", "kv-int8": "int8_per_token_head"}
_ROTATED = "vLLM 0.33 rotates keys and values before it rounds them to int4, which wasn't simulated"


def online_config(
    assignment: Mapping[str, str], sites: Mapping[str, Site], dtype: torch.dtype = torch.bfloat16
) -> Recipe:
    """Return the JSON after ``--quantization-config``: shorthands by (split and fused) target, and ignored layers.

    Raises CannotExport and UnknownScheme as `plan_of` does.
    """
    plan = plan_of(assignment, sites, dtype)
    known = f"vLLM quantises linears online to {', '.join(_SHORTHANDS)} only"
    result = plan.expressed(lambda scheme: (_SHORTHANDS.get(scheme.name), known))
    fused = plan.fused(sites, result, "target")
    linears = {fused_name(unit): names for unit, names in units_of(sites).items()}
    mixed = {linear for name, several in fused.items() if len(several) > 1 for linear in linears[name]}
    cached = bool(cache_options(plan, sites))
    if not cached:
        for name, scheme in plan.caches.items():
            one = "vLLM takes one kind of cache, and layers by number that keep the model's dtype"
            plan.note(name, scheme.name, _ROTATED if scheme.name == "kv-int4" else one)
    left = [name for name, site in sites.items() if site.shape and name not in result]
    members: dict[str, list[str]] = {}
    for name, several in {**{name: (shorthand,) for name, shorthand in result.items()}, **fused}.items():
        if several == (None,):
            left.append(name)
        elif len(several) == 1:
            members.setdefault(str(several[0]), []).append(name)
    targets = {target: shorthand for shorthand, names in members.items() for target in targets_of(names)}
    held = [name for name in (*result, *(plan.caches if cached else ())) if name not in mixed]
    return plan.recipe({"targets": targets, "ignore": targets_of(left)}, held)


def command_line(model: str, assignment: Mapping[str, str], sites: Mapping[str, Site]) -> str:
    """Return the ``vllm serve`` command that gives ``model`` the online recipe and the KV caches of an assignment."""
    words = ["vllm", "serve", model]
    config = online_config(assignment, sites).content
    if config["targets"]:
        words += ["--quantization", "online", "--quantization-config", json.dumps(config)]
    return shlex.join([*words, *cache_options(plan_of(assignment, sites), sites)])


def cache_options(plan: Plan, sites: Mapping[str, Site]) -> list[str]:
    """Return vLLM's options for the KV caches of a plan: their dtype, and the numbers of layers to leave unquantised.

    Empty if there are none, they differ, vLLM lacks the format, or a layer to leave has no number.
    """
    kinds = {scheme.name for scheme in plan.caches.values()}
    left = [
        layer_and_kind(name)[0] for name, site in sites.items() if site.type == "kv_cache" and name not in plan.caches
    ]
    if len(kinds) != 1 or not kinds <= _CACHES.keys() or None in left:
        return []
    skipped = ["--kv-cache-dtype-skip-layers", *map(str, left)] if left else []
    return ["--kv-cache-dtype", _CACHES[kinds.pop()], *skipped]


def _files(request: Request, recipe: Recipe) -> dict[str, str]:
    """Return the command, and the recipe if it concerns linears."""
    config = {"vllm.json": json_text(recipe.content)} if recipe.content["targets"] else {}
    return {**config, "vllm.txt": command_line(request.model, request.assignment, request.sites) + "\n"}


TARGET = Target(
    lambda request: online_config(request.assignment, request.sites, request.dtype),
    _files,
    of_linears(
        lambda scheme: "" if scheme.name in _SHORTHANDS else f"online it has {', '.join(_SHORTHANDS)}",
        [*_CACHES, "kv-fp8-q"],
    ),
)
