"""Weights that are in memory only while their module runs: accelerate's hooks read them from files and drop them.

A backward pass or a later query reads such a weight again, for a single expert only that expert.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from assay.precision.errors import BadModel
from assay.runtime.memory import cast


@dataclass(frozen=True, slots=True)
class Source:
    """Where accelerate reads a parameter from. Equal sources are one weight under several names."""

    file: str
    """Path of a safetensors file; another path, or empty, where accelerate holds the tensor itself."""
    tensor: str
    """Its name in the file."""
    held: Mapping[str, Tensor] = field(compare=False, repr=False)
    key: str = field(compare=False)

    def read(self, part: int | None = None) -> Tensor:
        """Return the stored tensor, or one index of its first dimension. Raises `BadModel` if its file is gone."""
        try:
            if not self.file.endswith(".safetensors"):
                return self.held[self.key] if part is None else self.held[self.key][part]
            with safe_open(self.file, framework="pt") as opened:
                return opened.get_tensor(self.tensor) if part is None else opened.get_slice(self.tensor)[part]
        except (OSError, SafetensorError) as error:
            raise BadModel(f"{self.file}, whose weights are read as they are needed, is gone ({error})") from None


@dataclass(frozen=True, slots=True)
class Streamed:
    """A weight that is dropped when its module has run; calling it reads it again from ``source``."""

    source: Source
    part: int | None
    """Index of the first dimension, for a weight of one expert of a parameter [E, N, K]."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset of the weight in the tensor read, in elements."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weight: Tensor, parameter: Tensor, part: int | None, source: Source) -> Streamed:
        """Return it for ``weight``, a view of ``parameter`` or of its ``part``, while that is in memory."""
        start = parameter.storage_offset() + (0 if part is None else part * parameter.stride(0))
        offset = int(weight.storage_offset() - start)
        return cls(source, part, tuple(weight.shape), weight.stride(), offset, weight.dtype, weight.device)

    def __call__(self) -> Tensor:
        read = cast(self.source.read(self.part), self.dtype).to(self.device).contiguous()
        return read.as_strided(self.size, self.stride, read.storage_offset() + self.offset)


class Weights(UserDict[int | None, Any]):
    """The weights of a site by expert; streamed ones are read at each access."""

    def __getitem__(self, expert: int | None) -> Tensor:
        held: Tensor | Streamed = self.data[expert]
        return held() if isinstance(held, Streamed) else held


def _offloads(module: torch.nn.Module) -> list[Any]:
    """Return accelerate's hooks that drop the module's weights after each run."""
    hook: Any = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", (hook,)) if getattr(each, "offload", False)]


def source_of(module: torch.nn.Module, name: str) -> Source | None:
    """Return where a module's own parameter is read from when the module runs; None for one that stays in memory."""
    for each in _offloads(module):
        held = getattr(each, "weights_map", None)
        if held is None or name not in module._parameters:
            continue
        loader, key = getattr(held, "dataset", held), f"{getattr(held, 'prefix', '')}{name}"
        tensors = getattr(loader, "state_dict", loader)
        if key in tensors and isinstance(tensors, dict):
            return Source("", str(tensors[key].data_ptr()), getattr(held, "state_dict", held), name)
        entry = loader.index[key]
        file = entry.get("safetensors_file", loader.save_folder)
        return Source(str(file), entry.get("weight_name", key), held, name)
    return None


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's inputs: that of its first weight, for a streamed one that its module runs on."""
    for module in model.modules():
        for each in _offloads(module):
            if each.execution_device is not None:
                return torch.device(each.execution_device)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                return parameter.device
    return torch.device("cpu")


def streamed_parameters(model: torch.nn.Module) -> dict[str, Source]:
    """Return the parameters that aren't in memory, by name. Raises `BadModel` for one without values."""
    sources: dict[str, Source] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                full = f"{path}.{name}" if path else name
                source = source_of(module, name)
                if source is None:
                    raise BadModel(f"{full} is on the meta device, without values; load its weights first")
                sources[full] = source
    return sources
