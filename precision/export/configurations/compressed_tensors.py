"""compressed-tensors: the ``quantization_config`` that vLLM, SGLang and transformers read from config.json.

Fields and rules are those of compressed-tensors 0.20 (`QuantizationConfig`, `QuantizationArgs`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from assay.precision.export.plan import (
    Names,
    Plan,
    Recipe,
    Target,
    json_text,
    lookup_targets,
    of_linears,
    plan_of,
    targets_of,
)
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES, Quantizer, Scheme
from assay.precision.targets import engines, kind_of

VERSION = "0.20.0"
"""Version of compressed-tensors that defines these fields."""

_ELEMENTS = ("int3", "int4", "int8", "float4_e2m1fn", "float6_e2m3fn", "float8_e4m3fn")
"""The element formats that it supports."""
_SCALES = {"float8_e8m0fnu": "torch.uint8", "float8_e4m3fn": "torch.float8_e4m3fn"}
TABLE = "Embedding"
"""The class of embedding tables, as a target."""
_KV = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def quantization_config(
    assignment: Mapping[str, str],
    sites: Mapping[str, Site],
    dtype: torch.dtype = torch.bfloat16,
    names: Names | None = None,
    kind: str = "",
) -> Recipe:
    """Return the ``quantization_config`` of an assignment. Raises CannotExport and UnknownScheme as `plan_of` does.

    names: see `Names`; without them experts held in one parameter have none and are noted. kind: the type of the model,
    which decides whether embedding tables can be quantised.
    """
    plan = plan_of(assignment, sites, dtype, experts=names is not None, tables=tables_of(kind))
    return config_of(plan, names or {})


def tables_of(kind: str) -> Callable[[Scheme, bool], str]:
    """Return the function that says why vLLM can't load an embedding table of a type of model (`plan.no_tables`)."""
    vllm = engines()["vllm"]
    schemes = vllm.schemes_by_kind["tables"]

    def lacks(scheme: Scheme, tied: bool) -> str:
        if kind not in vllm.tables_of:
            return f"vLLM {vllm.version} loads quantised tables of {', '.join(vllm.tables_of)} only"
        if tied:
            return "vLLM forms no product with a quantised table"
        return "" if scheme.name in schemes else f"tables may have {', '.join(schemes)}"

    return lacks


def config_of(plan: Plan, names: Names, *, optional: bool = False) -> Recipe:
    """Return the recipe of a plan: a group per scheme, numbered with leading zeros since groups are sorted by name.

    optional: KV caches that it can't express are given by options when the checkpoint is served.
    """
    groups = groups_of(plan, names)
    left = [named for name in plan.left for named in names.get(name, [name])]
    for name, scheme in plan.weights.items():
        if scheme.name not in groups:
            plan.note(name, scheme.name, str(why_not(scheme)))
            left += names.get(name, [name])
    formats = {group["format"] for group in groups.values()}
    caches: Iterable[str] = plan.caches
    if plan.cache != "kv-fp8" and not optional:
        caches = ()
        for name, scheme in plan.caches.items():
            one = "one scheme holds for the caches of all layers"
            plan.note(name, scheme.name, one if scheme.name == "kv-fp8" else "a cache is e4m3 or as it is")
    content = {
        "quant_method": "compressed-tensors",
        "version": VERSION,
        "format": "mixed-precision" if len(formats) > 1 else next(iter(formats), "dense"),
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": [*targets_of(left), *lookup_targets(left)],
        "kv_cache_scheme": dict(_KV) if plan.cache == "kv-fp8" else None,
        "config_groups": {f"group_{number:03d}": group for number, group in enumerate(groups.values())},
    }
    held = [name for name, scheme in plan.weights.items() if scheme.name in groups]
    return plan.recipe(content, [*held, *caches])


def groups_of(plan: Plan, names: Names) -> dict[str, dict[str, Any]]:
    """Return the config group of each scheme that can be expressed, by the scheme's name."""
    members: dict[str, list[str]] = {}
    for name, scheme in plan.weights.items():
        if why_not(scheme) is None:
            members.setdefault(scheme.name, []).extend(names.get(name, [name]))
    groups = {name: group_of(SCHEMES[name], linears) for name, linears in members.items()}
    for name in {plan.linears[table].name for table in plan.tables & plan.linears.keys()}:
        groups[name]["targets"].append(TABLE)  # some vLLM models don't pass the table's name
    return groups


def why_not(scheme: Scheme) -> str | None:
    """Return why compressed-tensors can't express a linear's scheme; None if it can."""
    if scheme.transform == "hadamard":
        return "a rotated input needs a transform that loaders of compressed-tensors don't apply"
    for quantizer in (scheme.weight, scheme.activation):
        if quantizer is not None and quantizer.format not in _ELEMENTS:
            return f"compressed-tensors has no {quantizer.format}; its 8-bit float is e4m3"
    return None


def format_of(scheme: Scheme) -> str:
    """Return the storage format of a linear's tensors."""
    assert scheme.weight is not None
    bits = scheme.weight.element.bits
    if scheme.weight.element.kind == "integer":
        # Engines read packed narrow weights, also with 8-bit inputs, but 8-bit codes with int8 inputs unpacked.
        inputs = scheme.activation
        return "int-quantized" if bits == 8 and inputs is not None and inputs.format == "int8" else "pack-quantized"
    if scheme.weight.scale_format == "float8_e8m0fnu":
        return {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized", 8: "mxfp8-quantized"}[bits]
    return "nvfp4-pack-quantized" if bits == 4 else "float-quantized"


def group_of(scheme: Scheme, names: list[str]) -> dict[str, Any]:
    """Return the config group of linears; ``names``: checkpoint names, and others that engines look up instead."""
    assert scheme.weight is not None
    group: dict[str, Any] = {
        "format": format_of(scheme),
        "targets": [*targets_of(names), *lookup_targets(names)],
        "weights": _arguments(scheme.weight, "channel", False),
    }
    if scheme.activation is not None:
        local = scheme.activation.scale_format == "float8_e4m3fn"  # the tensor's scale is static
        dynamic = "local" if local else scheme.activation.dynamic
        group["input_activations"] = _arguments(scheme.activation, "token", dynamic)
    return group


def _arguments(quantizer: Quantizer, row: str, dynamic: bool | str) -> dict[str, Any]:
    strategy = row if quantizer.per == "row" else quantizer.per
    if quantizer.scale_format == "float8_e4m3fn":
        strategy = "tensor_group"
    arguments: dict[str, Any] = {
        "num_bits": quantizer.element.bits,
        "type": "int" if quantizer.element.kind == "integer" else "float",
        "symmetric": quantizer.symmetric,
        "strategy": strategy,
        "dynamic": dynamic,
    }
    if quantizer.per == "group":
        arguments["group_size"] = quantizer.size
    if quantizer.per == "block":
        arguments["block_structure"] = [quantizer.size, quantizer.size]
    if quantizer.scale_format in _SCALES:
        arguments["scale_dtype"] = _SCALES[quantizer.scale_format]
    return arguments


TARGET = Target(
    lambda request: quantization_config(
        request.assignment, request.sites, request.dtype, request.names, kind_of(request.module)
    ),
    lambda request, recipe: {"quantization_config.json": json_text(recipe.content)},
    of_linears(why_not, ["kv-fp8", "kv-fp8-q"]),
    tables=True,
)
