"""ModelOpt: the ``hf_quant_config.json`` that TensorRT-LLM, vLLM and SGLang read beside a model.

Names of algorithms are those of ModelOpt 0.47; only those are used that vLLM reads as well.
"""

from collections.abc import Mapping
from typing import Any

import torch

from assay.precision.export.plan import plan_of
from assay.precision.export.target import Recipe, json_file, of_linears, register
from assay.precision.observation.sites import Site

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
    known = f"ModelOpt's readers know {', '.join(_ALGORITHMS)} only"
    layers = plan.expressed(lambda scheme: (_ALGORITHMS.get(scheme.name), known))
    caches = plan.fp8_caches("ModelOpt's readers know kv-fp8 only")
    body = _body(layers, sites, "FP8" if caches else None)
    return plan.recipe({"producer": {"name": "modelopt", "version": VERSION}, "quantization": body}, [*layers, *caches])


def _body(layers: dict[str, dict[str, Any]], sites: Mapping[str, Site], cache: str | None) -> dict[str, Any]:
    algorithms = {entry["quant_algo"]: entry for entry in layers.values()}
    if len(algorithms) > 1:
        return {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": cache, "quantized_layers": layers}
    only = next(iter(algorithms.values()), {"quant_algo": None})
    excluded = [name for name, site in sites.items() if site.shape and name not in layers]
    return {**only, "kv_cache_quant_algo": cache, "exclude_modules": excluded}


register(
    "modelopt",
    lambda request: hf_quant_config(request.assignment, request.sites, request.dtype),
    json_file("hf_quant_config.json"),
    of_linears(lambda scheme: "" if scheme.name in _ALGORITHMS else "it has no name for it", ["kv-fp8", "kv-fp8-q"]),
)
