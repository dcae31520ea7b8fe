"""vLLM's online quantisation: a recipe for each layer that vLLM applies to an unquantised checkpoint while loading.

Shorthands are those of vLLM 0.33 (`vllm/config/quantization.py`).
"""

import json
import shlex
from collections.abc import Mapping

import torch

from assay.configs.architectures import fused_name
from assay.precision.export.patterns import targets_of
from assay.precision.export.plan import Plan, plan_of, units_of
from assay.precision.export.target import Recipe, Request, json_file, of_linears, register
from assay.precision.observation.sites import Site, place_of

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
    known = f"vLLM quantises linears online to {', '.join(_SHORTHANDS)} only"
    found = plan.expressed(lambda scheme: (_SHORTHANDS.get(scheme.name), known))
    fused = plan.fused(sites, found, "target")
    apart = {fused_name(unit): names for unit, names in units_of(sites).items()}
    mixed = {linear for name, several in fused.items() if len(several) > 1 for linear in apart[name]}
    if (cache := _cache(plan)) is None:
        for name, scheme in plan.caches.items():
            plan.note(name, scheme.name, "vLLM takes one kind of cache, and layers that keep the model's dtype")
    left = [name for name, site in sites.items() if site.shape and name not in found]
    members: dict[str, list[str]] = {}
    for name, several in {**{name: (shorthand,) for name, shorthand in found.items()}, **fused}.items():
        if several == (None,):
            left.append(name)
        elif len(several) == 1:
            members.setdefault(str(several[0]), []).append(name)
    targets = {target: shorthand for shorthand, names in members.items() for target in targets_of(names)}
    held = [name for name in (*found, *(plan.caches if cache else ())) if name not in mixed]
    return plan.recipe({"targets": targets, "ignore": targets_of(left)}, held)


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
        every = [name for name, site in sites.items() if site.place == "kv_cache" and name not in plan.caches]
        skipped = [str(layer) for name in every if (layer := place_of(name)[0]) is not None]
        if skipped:
            words += ["--kv-cache-dtype-skip-layers", *skipped]
    return shlex.join(words)


def _cache(plan: Plan) -> str | None:
    """vLLM's word for the caches; None where there are none or they differ."""
    kinds = {scheme.name for scheme in plan.caches.values()}
    return _CACHES.get(next(iter(kinds))) if len(kinds) == 1 else None


def _texts(request: Request, recipe: Recipe) -> dict[str, str | bytes]:
    """The command, and the recipe where it says anything about linears."""
    command: dict[str, str | bytes] = {
        "vllm.txt": command_line(request.model, request.assignment, request.sites) + "\n"
    }
    return {**json_file("vllm.json")(request, recipe), **command} if recipe.content["targets"] else command


register(
    "vllm",
    lambda request: online_config(request.assignment, request.sites, request.dtype),
    _texts,
    of_linears(
        lambda scheme: "" if scheme.name in _SHORTHANDS else f"online it has {', '.join(_SHORTHANDS)}",
        [*_CACHES, "kv-fp8-q"],
    ),
)
