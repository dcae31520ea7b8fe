"""A quantised linear's tensors as a compressed-tensors checkpoint holds them, with the scales that were fitted."""

from __future__ import annotations

from typing import Any

import torch

from assay.precision.errors import CannotExport
from assay.precision.schemes import Scales, Stored, store

__all__ = ["compressed", "held_scales", "input_tensors"]


def compressed(name: str, weight: torch.Tensor, stored: Stored, group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a weight [N, K] (float32) by their local names: codes, scales, zero-points.

    stored: its scales are those that the codes are taken with. group: the config group that the linear stands in.
    They are read back with the library before they are given out. Raises CannotExport if that gives other values
    than the simulation.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scales = stored.scales
    if scales is None:
        raise CannotExport(f"{name}: expected fitted scales, got none; fit its scheme on calibration data first")
    scheme = QuantizationScheme.model_validate({**group, "targets": [name]})
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    packed = compressor.compress({"weight": weight, **_scales(scales, stored)}, scheme)
    expected = store(weight, stored.quantizer, scales)
    read = compressor.decompress(packed, scheme)["weight"]  # of FP4 and MX formats in bfloat16
    if not torch.equal(read, expected.to(read.dtype)):
        raise CannotExport(
            f"{name}: compressed-tensors reads back {int((read != expected.to(read.dtype)).sum())} of {read.numel()} "
            "values otherwise than simulated; use the version that this one was tested with, or another scheme"
        )
    packed["weight_scale"] = held_scales(packed["weight_scale"], stored)
    return {key: values.detach().clone(memory_format=torch.contiguous_format) for key, values in packed.items()}


def held_scales(scale: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Scales in the dtype that they are stored in, which holds them."""
    return scale.to(torch.bfloat16) if stored.quantizer.scale_format == "bfloat16" else scale


def input_tensors(name: str, stored: Stored | None) -> dict[str, torch.Tensor]:
    """The static scale of a linear's input, or NVFP4's scale of the tensor; empty where all is dynamic."""
    if stored is None:
        return {}
    if stored.quantizer.scale_format == "float8_e4m3fn":
        if stored.divisor is None:
            raise CannotExport(f"{name}: its input's scale needs calibration data, which showed none")
        return {"input_global_scale": stored.divisor.reshape(1)}
    if stored.quantizer.dynamic:
        return {}
    if stored.scales is None:
        raise CannotExport(f"{name}: its input's scale needs calibration data, which showed none")
    return {"input_scale": held_scales(stored.scales.scale, stored).reshape(1)}


def _scales(scales: Scales, stored: Stored) -> dict[str, torch.Tensor]:
    """Scales (float32) and zero-points without the axes that `grouped` keeps."""
    per = stored.quantizer.per

    def laid(x: torch.Tensor) -> torch.Tensor:
        if per == "tensor":
            return x.reshape(1)
        if per == "block":
            return x.squeeze(-1).squeeze(-2)
        return x.squeeze(-1) if per == "group" else x

    tensors = {"weight_scale": laid(scales.scale)}
    if scales.divisor is not None:
        exact = (scales.scale * scales.divisor).to(torch.float8_e4m3fn).to(torch.float32)
        tensors = {"weight_scale": laid(exact), "weight_global_scale": scales.divisor.reshape(1)}
    if scales.zero is not None:
        tensors["weight_zero_point"] = laid(scales.zero).to(torch.int8)
    return tensors
