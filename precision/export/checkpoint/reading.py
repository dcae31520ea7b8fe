"""Loads a checkpoint as transformers does, also with experts in one parameter or a quantised embedding table.

transformers 5.23 reads the experts of such a model by a single group, and with ``dequantize=True`` also all other
linears by one, so that only one of several formats is read correctly; it can't load a quantised embedding table at all.
Here compressed-tensors reads each linear and table by its own group, and transformers combines the experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from assay.precision.errors import BadModel
from assay.precision.export.checkpoint.writing import needed
from assay.precision.export.configurations.compressed_tensors import TABLE
from assay.precision.loading.pretrained import json_of
from assay.precision.loading.quiet import quiet
from assay.runtime.modules import optional


def _mixture(folder: Path, kind: Any, quantization: Mapping[str, Any], **options: Any) -> torch.nn.Module:
    """Return the model with dense weights, whose linears (except experts) round their inputs as the checkpoint says.

    kind: the class of transformers; quantization: the checkpoint's ``quantization_config``. Raises BadModel if a linear
    is in no group.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match

    config: Any = QuantizationConfig.model_validate(quantization)
    linear, tensors = torch.nn.Linear(1, 1, device="meta"), _tensors(folder)
    dense: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in _quantised(tensors)}
    for key, values in tensors.items():
        name, _, last = key.rpartition(".")
        if last.startswith("input_"):
            scales[key] = values
        elif name in parts and last != "bias":
            parts[name][last] = values
        elif last not in ("k_scale", "v_scale"):
            dense[key] = values
    for name, local in parts.items():
        groups = config.config_groups.values()
        scheme = next((each for each in groups if is_match(name, linear, each.targets, config.ignore)), None)
        if scheme is None:
            raise BadModel(f"{name} has scales and stands in no group of {folder / 'config.json'}: write it anew")
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        # Codes times scales are rounded to the scales' dtype: float32 holds the products.
        wide = {last: values.float() if values.dtype == torch.bfloat16 else values for last, values in local.items()}
        dense[f"{name}.weight"] = compressor.decompress(wide, scheme)["weight"]
    plain = kind.config_class.from_pretrained(folder)
    del plain.quantization_config
    model: torch.nn.Module = kind.from_pretrained(None, config=plain, state_dict=dense, **options)
    _round_inputs(model, config, scales)
    return model


def _round_inputs(model: torch.nn.Module, config: Any, scales: Mapping[str, torch.Tensor]) -> None:
    """Let linears round their inputs according to their groups, with unchanged weights."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    groups = {
        name: group.model_copy(update={"weights": None, "format": None})
        for name, group in config.config_groups.items()
        if group.input_activations is not None
    }
    if not groups:
        return
    inputs: Any = {"config_groups": groups, "ignore": config.ignore, "quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig(**inputs))
    modules = dict(model.named_modules())
    for key, scale in scales.items():
        name, _, last = key.rpartition(".")
        if (made := getattr(modules.get(name), last, None)) is not None:
            made.data = scale.to(made.dtype).reshape(made.shape)


def _quantised(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {key: values for file in files for key, values in load_file(file).items()}


def load_checkpoint(folder: str | Path, dtype: torch.dtype | str = torch.float32, **options: Any) -> torch.nn.Module:
    """Load a folder written by `write_checkpoint` with transformers, with its weights dequantised to ``dtype``.

    Linears round their inputs as the checkpoint says; experts in one parameter don't. options: of transformers'
    `from_pretrained`; if transformers reads linears of several schemes by one (``dequantize=True``), each is read by
    its own here. float32 holds the values of all schemes; for NVFP4 compressed-tensors rounds to bfloat16. Raises
    BadModel for a folder without a quantised model, NotInstalled.
    """
    needed("compressed_tensors", "transformers")
    config: Any = json_of(Path(folder) / "config.json")
    if "quantization_config" not in config:
        raise BadModel(f"{folder} isn't quantised; expected a folder that write_checkpoint wrote")
    with quiet(), packed_zero_points():
        kind = getattr(optional("transformers", purpose="a checkpoint", extra="audit"), config["architectures"][0])
        written = config["quantization_config"]
        dense = getattr(options.get("quantization_config"), "dequantize", False)
        tables = any(TABLE in group["targets"] for group in written.get("config_groups", {}).values())
        single = tables or any(".experts." in name for name in _quantised(_tensors(Path(folder))))
        if single or (dense and len(written["config_groups"]) > 1):
            options.pop("quantization_config", None)
            return _mixture(Path(folder), kind, written, dtype=dtype, **options).eval()
        model: torch.nn.Module = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
        quantizer: Any = model.hf_quantizer
        if not quantizer.quantization_config.dequantize:
            quantizer.compressor.decompress_model(model)
    for parameter in model.parameters():  # for FP4 and MX formats the library returns bfloat16
        if parameter.is_floating_point() and isinstance(dtype, torch.dtype):
            parameter.data = parameter.data.to(dtype)
    return model.eval()


@contextmanager
def packed_zero_points() -> Iterator[None]:
    """Let transformers load checkpoints with packed zero-points (``-asym``, ``-awq``) inside the block.

    It creates a checkpoint's modules on the meta device first, where compressed-tensors 0.20 gives the zero-points of
    packed weights their shape before packing, [N, groups], which the stored ones, int32 [ceil(N * bits / 32), groups],
    don't fit.
    """
    packed: Any = optional(
        "compressed_tensors.compressors", purpose="a checkpoint", extra="audit"
    ).PackedQuantizationCompressor
    original = packed.__dict__["compress"]

    def compress(cls: Any, state: dict[str, torch.Tensor], scheme: Any) -> dict[str, torch.Tensor]:
        done: dict[str, torch.Tensor] = original.__get__(None, cls)(state, scheme)
        zero = done.get("weight_zero_point")
        if zero is not None and zero.is_meta and zero.dtype != torch.int32:
            rows = math.ceil(zero.shape[0] * scheme.weights.num_bits / 32)
            done["weight_zero_point"] = torch.empty(rows, *zero.shape[1:], dtype=torch.int32, device="meta")
        return done

    packed.compress = classmethod(compress)
    try:
        yield
    finally:
        packed.compress = original
