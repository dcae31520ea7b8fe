"""Tensor descriptors, by which a GPU of compute capability 9.0 or higher copies whole tiles into shared memory (TMA).

The sizes of a tile are a configuration's, which an autotuner picks: a hook of each configuration sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes, of the first element and of every stride but the last, which is one element
_FIRST_CAPABILITY = (9, 0)


def describable(*tensors: Tensor) -> bool:
    """Whether every tensor can be copied by a descriptor: its device can, and its elements lie as that asks.

    On a CPU, which only interprets kernels, it is the layout that decides.
    """
    return all(_on_a_device_that_can(tensor) and _lies_well(tensor) for tensor in tensors)


def described(tensor: Tensor) -> TensorDescriptor:
    """A descriptor of a describable tensor; the tile's sizes are still to be set."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1] * (tensor.dim() - 1) + [ALIGNMENT])


def sets_tiles(**tiles: Sequence[int | str]) -> Callable[[Mapping[str, Any]], None]:
    """A configuration's hook that gives those of the named arguments that are descriptors the sizes of their tiles.

    A size is a number or the name of one of the kernel's constants.
    """

    def hook(arguments: Mapping[str, Any]) -> None:
        for name, sizes in tiles.items():
            if isinstance(arguments[name], TensorDescriptor):
                arguments[name].block_shape = [arguments[size] if isinstance(size, str) else size for size in sizes]

    return hook


def _on_a_device_that_can(tensor: Tensor) -> bool:
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= _FIRST_CAPABILITY


def _lies_well(tensor: Tensor) -> bool:
    """No tensor is empty, steps backwards or lies expanded; its rows are whole and begin where a copy may."""
    width = tensor.element_size()
    return (
        tensor.numel() > 0
        and max(tensor.shape) < 2**31
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(stride > 0 and stride * width % ALIGNMENT == 0 for stride in tensor.stride()[:-1])
    )
