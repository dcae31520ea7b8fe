"""Checks of a kernel's arguments: each error names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_dtype(name: str, tensor: Tensor, allowed: Iterable[torch.dtype]) -> None:
    """Raise TypeError unless ``tensor`` is a tensor of an allowed dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    allowed = tuple(allowed)
    if tensor.dtype not in allowed:
        raise TypeError(f"{name}: expected {' or '.join(map(_short, allowed))}, got {_short(tensor.dtype)}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | str]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape``; a size given by its letter may be anything."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected shape [{expected}], got {list(tensor.shape)}")


def check_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors lie on the device of the first; None is left out."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(present))
    for name, tensor in present.items():
        if tensor.device != present[first].device:
            raise ValueError(f"{name}: expected device {present[first].device}, as {first}'s, got {tensor.device}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
