"""Weights held in the 16 bits of their files, and cast to float32 a module at a time: `load(as_stored=True)`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch

from assay.runtime.memory import cast
from assay.runtime.modules import optional

_SMALL = 1 << 16
"""Elements of a module's own parameters up to which they are cast once: a hook would take longer than they do."""


def cast_when_run(model: torch.nn.Module, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Leave each weight as it is held, on its device; its module gets a copy in ``dtype`` whenever it runs, dropped
    after it.

    The parameters themselves are on the meta device from then on, as those are that accelerate reads from files; small
    ones are cast at once. A model whose modules use weights of one another, as torch's MultiheadAttention does, is
    cast whole.
    """
    hooks = optional("accelerate.hooks", purpose=name, extra="audit")
    if any(isinstance(module, torch.nn.MultiheadAttention) for module in model.modules()):
        model.to(dtype)
        return
    # Names of one weight share its tensor, by which ties are known.
    held = {key: each.detach() for key, each in model.named_parameters(remove_duplicate=False)}
    small = {id(module) for module in model.modules() if _own(module) <= _SMALL}
    for path, module in model.named_modules():
        if id(module) in small or getattr(module, "_hf_hook", None) is not None:
            continue
        prefix = f"{path}." if path else ""
        device = next(iter(module.parameters(recurse=False))).device
        some = _Cast({key: held[f"{prefix}{key}"] for key, _ in module.named_parameters(recurse=False)}, dtype)
        hook = hooks.AlignDevicesHook(execution_device=device, offload=True, weights_map=some, place_submodules=False)
        hooks.add_hook_to_module(module, hook)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)  # of one on the meta device: what its module gets is cast to it
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _own(module: torch.nn.Module) -> int:
    return sum(each.numel() for each in module.parameters(recurse=False))


class _Cast(UserDict[str, Any]):
    """Tensors by name, each given as a cast of its own; as accelerate's ``weights_map``."""

    def __init__(self, held: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__(held)
        self.state_dict: Mapping[str, torch.Tensor] = dict(held)
        """As they are held, under the name that accelerate has for what is stored."""
        self._dtype = dtype

    def __getitem__(self, key: str) -> torch.Tensor:
        return cast(self.data[key], self._dtype)
