"""Where weights are kept: how many bytes of them in memory or on each GPU, the rest in files until they are needed."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from assay.precision.errors import UnknownOption
from assay.precision.model.heap import map_blocks

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """What transformers and accelerate are asked for, so that at most so many bytes of weights stay."""

    memory: Mapping[int | str, int]
    """Bytes by device, of weights in ``dtype``."""
    dtype: torch.dtype
    """That the weights have in files; float32 where they have several, so that none is rounded."""
    folder: tempfile.TemporaryDirectory[str]
    """Where transformers writes weights that it stores otherwise than it computes with them."""

    @classmethod
    def of(cls, memory: int | Mapping[int | str, int], stored: set[torch.dtype], held: torch.dtype) -> Placement:
        """``memory``: bytes of weights of dtype ``held``; ``stored``: the dtypes in files. Raises `UnknownOption`."""
        devices = memory if isinstance(memory, Mapping) else {"cpu": memory}
        for device, count in devices.items():
            if count < 0:
                raise UnknownOption(f"max_memory of {count} bytes on {device}; expected at least 0")
        (dtype,) = stored if len(stored) == 1 else (torch.float32,)
        scaled = {device: count * dtype.itemsize // held.itemsize for device, count in devices.items()}
        return cls(scaled, dtype, tempfile.TemporaryDirectory(prefix="assay-", ignore_cleanup_errors=True))

    def options(self) -> dict[str, Any]:
        """Arguments of from_pretrained."""
        if not any(self.memory.values()):
            return {"device_map": {"": "disk"}, "offload_folder": self.folder.name}
        return {"device_map": "auto", "max_memory": dict(self.memory), "offload_folder": self.folder.name}

    def settle(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """The model, its weights held in ``dtype`` from now on; the folder goes when it does.

        The process returns freed memory from now on, which a bound on memory is nothing without.
        """
        map_blocks()
        weakref.finalize(model, self.folder.cleanup)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)  # of one on the meta device: what is read is cast to it
        if hasattr(model, "config"):
            model.config.dtype = dtype
        return model
