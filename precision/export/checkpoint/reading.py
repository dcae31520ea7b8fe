"""A checkpoint opened again, as transformers loads it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from assay.precision.errors import BadModel
from assay.precision.export.checkpoint.folder import needed
from assay.precision.export.checkpoint.mixtures import is_mixture, load_mixture
from assay.precision.loading.pretrained import json_of
from assay.precision.loading.quiet import quiet
from assay.runtime.modules import optional


def load_checkpoint(folder: str | Path, dtype: torch.dtype | str = torch.float32, **options: Any) -> torch.nn.Module:
    """The model of a folder that `write_checkpoint` wrote, by transformers, its weights read back into ``dtype``.

    Its linears round their inputs as the checkpoint says; experts in one parameter don't. options: of transformers'
    `from_pretrained`; where that reads linears of several schemes by one (``dequantize=True``), each is read by its own
    here. float32 holds the values of all schemes; NVFP4's compressed-tensors rounds to bfloat16. Raises BadModel for a
    folder without a quantised model, NotInstalled.
    """
    needed("compressed_tensors", "transformers")
    config: Any = json_of(Path(folder) / "config.json")
    if "quantization_config" not in config:
        raise BadModel(f"{folder} isn't quantised; expected a folder that write_checkpoint wrote")
    with quiet(), packed_zero_points():
        kind = getattr(optional("transformers", purpose="a checkpoint", extra="audit"), config["architectures"][0])
        written = config["quantization_config"]
        dense = getattr(options.get("quantization_config"), "dequantize", False)
        if is_mixture(Path(folder), written) or (dense and len(written["config_groups"]) > 1):
            options.pop("quantization_config", None)
            return load_mixture(Path(folder), kind, written, dtype=dtype, **options).eval()
        model: torch.nn.Module = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, **options)
        quantizer: Any = model.hf_quantizer
        if not quantizer.quantization_config.dequantize:
            quantizer.compressor.decompress_model(model)
    for parameter in model.parameters():  # of FP4 and MX formats the library gives bfloat16
        if parameter.is_floating_point() and isinstance(dtype, torch.dtype):
            parameter.data = parameter.data.to(dtype)
    return model.eval()


@contextmanager
def packed_zero_points() -> Iterator[None]:
    """Within, transformers loads checkpoints whose zero-points are packed (``-asym``, ``-awq``).

    It makes a checkpoint's modules on the meta device first, and there compressed-tensors 0.20 gives the zero-points of
    packed weights [N, groups] the shape that they have before packing, so that the stored ones, int32 [ceil(N * bits /
    32), groups], don't fit.
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
