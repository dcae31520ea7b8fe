"""ModelOpt: the ``hf_quant_config.json`` that TensorRT-LLM, vLLM and SGLang read beside a model.

Names of algorithms are those of ModelOpt 0.47; only those are used that vLLM reads as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from assay.precision.export.plan import Recipe, named, plan_of
from assay.precision.model.sites import Site

__all__ = ["VERSION", "hf_quant_config"]

VERSION = "0.47.0"
"""Of ModelOpt, whose fields these are."""

_ALGORITHMS: dict[str, dict[str, Any]] = {
    "fp8-tensor": {"quant_algo": "FP8"},
    "fp8": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8-block": {"quant_algo": "FP8_PB_WO"},
    "nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
    "w-nvfp4": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "mxfp8": {"quant_algo": "MXFP8", "group_size": 32},
}


def hf_quant_config(
    assignment: Mapping[str, str], sites: Mapping[str, Site], dtype: torch.dtype = torch.bfloat16
) -> Recipe:
    """``hf_quant_config.json`` of an assignment: one algorithm and what is excluded, or an algorithm for each layer.

    Raises CannotExport and UnknownScheme as `plan_of` does.
    """
    plan = plan_of(assignment, sites, dtype)
    notes = plan.notes
    layers: dict[str, dict[str, Any]] = {}
    for name, scheme in plan.linears.items():
        if scheme.name in _ALGORITHMS:
            layers[name] = dict(_ALGORITHMS[scheme.name])
        else:
            notes.add(name, scheme.name, f"ModelOpt's readers know {', '.join(_ALGORITHMS)} only")
    for name, scheme in plan.caches.items():
        if scheme.name != "kv-fp8":
            notes.add(name, scheme.name, "ModelOpt's readers know kv-fp8 only")
        elif not plan.cache:
            notes.add(name, scheme.name, "one scheme holds for the caches of all layers")
    cache = "FP8" if plan.cache == "kv-fp8" else None
    held = named({name: plan.linears[name] for name in layers} | (plan.caches if cache else {}))
    content = {"producer": {"name": "modelopt", "version": VERSION}, "quantization": _body(layers, sites, cache)}
    return Recipe(content, held, notes.lines())


def _body(layers: dict[str, dict[str, Any]], sites: Mapping[str, Site], cache: str | None) -> dict[str, Any]:
    algorithms = {entry["quant_algo"]: entry for entry in layers.values()}
    if len(algorithms) > 1:
        return {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": cache, "quantized_layers": layers}
    only = next(iter(algorithms.values()), {"quant_algo": None})
    excluded = [name for name, site in sites.items() if site.shape and name not in layers]
    return {**only, "kv_cache_quant_algo": cache, "exclude_modules": excluded}
