"""What nothing reads: elements that no result depends on hold NaN, and stale indices lead to where all is NaN."""

import math
from collections.abc import Mapping, Sequence

import torch

from assay.golden.signature import TensorSpec

Tensor = torch.Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def spoiled(
    values: Mapping[str, Tensor], masks: Mapping[str, Tensor], tensors: Sequence[TensorSpec]
) -> dict[str, Tensor]:
    """``values`` with every number under its mask NaN.

    An index under its mask points to a place that nothing uses, if there is one, and else stays as it is: it must not
    lead a faulty kernel out of the tensor, where reading takes the process down instead of showing the fault.
    """
    result = dict(values)
    for tensor in tensors:
        name = tensor.name
        if name not in masks:
            continue
        if not tensor.is_integer:
            result[name] = _with_nan(values[name], masks[name])
        elif tensor.role == "index":
            indices = _unused_places(tensor.bound, tensors, masks)
            if len(indices):
                stale = indices[values[name].to(torch.int64) % len(indices)].to(values[name].dtype)
                result[name] = torch.where(masks[name], stale, values[name])
    return result


def _unused_places(symbol: str, tensors: Sequence[TensorSpec], masks: Mapping[str, Tensor]) -> Tensor:
    """The places along ``symbol`` at which no tensor has an element that is used."""
    unused = [
        masks[tensor.name].movedim(tensor.dims.index(symbol), 0).flatten(1).all(1)
        for tensor in tensors
        if symbol in tensor.dims and tensor.name in masks
    ]
    return torch.stack(unused).all(0).nonzero()[:, 0] if unused else torch.zeros(0, dtype=torch.int64)


def _with_nan(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with NaN under ``mask``, chosen bit by bit: torch can do little else with 8-bit floats."""
    bits = _BITS[values.dtype.itemsize]
    nan = torch.full(values.shape, math.nan, dtype=torch.float32).to(values.dtype)
    return torch.where(mask, nan.view(bits), values.view(bits)).view(values.dtype)
