"""torchao: the JSON of an ``FqnToConfig``, which `torchao.quantization.quantize_`, transformers and vLLM read.

Written in the format of torchao 0.18's `config_to_dict`, without loading torchao: a config's class, version and fields.
"""

from collections.abc import Mapping
from typing import Any

import torch

from assay.precision.export.plan import Recipe, Target, json_text, of_linears, plan_of
from assay.precision.observation.sites import Site
from assay.precision.schemes import Scheme


def fqn_to_config(
    assignment: Mapping[str, str], sites: Mapping[str, Site], dtype: torch.dtype = torch.bfloat16
) -> Recipe:
    """Return the JSON of an ``FqnToConfig`` for an assignment, also with vLLM's names of fused linears.

    Unquantised linears are None, which torchao skips. Raises CannotExport and UnknownScheme as `plan_of` does.
    """
    plan = plan_of(assignment, sites, dtype)
    configs = plan.expressed(entry_of)
    plan.note_caches("torchao's configurations hold linears only")
    fused = {name: several[0] for name, several in plan.fused(sites, configs, "entry").items() if len(several) == 1}
    # Parameters of a module, such as experts, have no entry: several skipped ones make torchao 0.18 fail.
    entries = {name: configs.get(name) for name, site in sites.items() if len(site.shape) == 2} | fused
    # vLLM reads the second name of the same table.
    content = _object("FqnToConfig", fqn_to_config=entries, module_fqn_to_config=entries)
    return plan.recipe(content, configs)


def entry_of(scheme: Scheme) -> tuple[dict[str, Any] | None, str]:
    """Return the torchao config of a linear's scheme, or None and the reason."""
    weight = scheme.weight
    if scheme.transform != "none" or (weight is not None and weight.rule == "awq"):
        return None, "torchao computes the weights' scales itself, without factors on columns or rotations"
    if weight is not None and weight.rule != "absmax":
        return None, "torchao computes the weights' scales itself, from the largest magnitude"
    if scheme.name in _CONFIGS:
        return _CONFIGS[scheme.name], ""
    if weight is not None and scheme.activation is None and weight.per == "group" and weight.element.kind == "integer":
        config = _object(
            "IntxWeightOnlyConfig",
            version=2,
            weight_dtype=_value("torch.dtype", weight.format),
            granularity=_object("PerGroup", group_size=weight.size),
            mapping_type=_value("MappingType", "SYMMETRIC" if weight.symmetric else "ASYMMETRIC"),
            scale_dtype=_value("torch.dtype", weight.scale_format),
            intx_packing_format=_value("IntxPackingFormat", "UNPACKED_TO_INT8"),
            intx_choose_qparams_algorithm=_value("IntxChooseQParamsAlgorithm", "AFFINE"),
        )
        return config, ""
    return None, "torchao 0.18 has no configuration of these formats and granularities"


def _object(kind: str, *, version: int = 1, **fields: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": fields}


def _value(kind: str, name: str) -> dict[str, str]:
    return {"_type": kind, "_data": name}


def _float8(granularity: list[dict[str, Any]]) -> dict[str, Any]:
    e4m3 = _value("torch.dtype", "float8_e4m3fn")
    return _object(
        "Float8DynamicActivationFloat8WeightConfig",
        version=2,
        activation_dtype=e4m3,
        weight_dtype=e4m3,
        granularity=granularity,
    )


def _mx(dtype: str, scaling: str) -> dict[str, Any]:
    element = _value("torch.dtype", dtype)
    return _object(
        "MXDynamicActivationMXWeightConfig",
        block_size=32,
        activation_dtype=element,
        weight_dtype=element,
        scaling_mode=_value("ScaleCalculationMode", scaling),
    )


_ROW = _object("PerRow", dim=-1)
_CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": _float8([_ROW, _ROW]),
    "fp8-block": _float8([_object("PerBlock", block_size=[1, 128]), _object("PerBlock", block_size=[128, 128])]),
    "w8a8": _object("Int8DynamicActivationInt8WeightConfig", version=2, granularity=_ROW),
    "w8a8-asym": _object(
        "Int8DynamicActivationInt8WeightConfig",
        version=2,
        granularity=_ROW,
        act_mapping_type=_value("MappingType", "ASYMMETRIC"),
    ),
    "w8a16": _object("Int8WeightOnlyConfig", version=2, granularity=_ROW),
    # Modes whose power of two equals the simulated one: for e2m1 always, for e4m3 unless the largest magnitude of a
    # group is 448 times a power of two exactly.
    "mxfp8": _mx("float8_e4m3fn", "RCEIL"),
    "mxfp4": _mx("float4_e2m1fn_x2", "EVEN"),
    "nvfp4": _object("NVFP4DynamicActivationNVFP4WeightConfig", use_dynamic_per_tensor_scale=True),
    "w-nvfp4": _object("NVFP4WeightOnlyConfig", use_dynamic_per_tensor_scale=True),
}


def for_transformers(content: dict[str, Any]) -> dict[str, Any]:
    """Return the same as a ``quantization_config`` for transformers' `TorchAoConfig.from_dict`."""
    return {"quant_method": "torchao", "quant_type": {"default": content}}


TARGET = Target(
    lambda request: fqn_to_config(request.assignment, request.sites, request.dtype),
    lambda request, recipe: {
        "torchao.json": json_text(recipe.content),
        "torchao-transformers.json": json_text(for_transformers(recipe.content)),
    },
    of_linears(lambda scheme: entry_of(scheme)[1]),
)
