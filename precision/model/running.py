"""A model as the audit runs it: in float32, without gradients of its own, its attention and experts open to the tap."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from assay.precision.errors import BadModel, NoData
from assay.precision.model.streaming import streamed_parameters

__all__ = ["batch_size", "call", "mapping", "prepared", "settled", "taken"]


def prepared(model: torch.nn.Module | torch.export.ExportedProgram) -> torch.nn.Module:
    """The module to audit: itself if its weights are float32, else a float32 copy of it. Streamed weights stay where
    they are, and are looked at as they pass.

    Raises BadModel for what is no module, has NaN or infinite weights (named), or streams weights of another dtype.
    """
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module(check_guards=False)
    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"expected a torch.nn.Module or an exported program, got {type(model).__name__}")
    streamed = streamed_parameters(model)
    for name, parameter in model.named_parameters():
        if name in streamed:
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise BadModel(
                    f"expected streamed weights in float32, got {name} in {parameter.dtype}: see docs/scale.md"
                )
        elif parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            count = int((~parameter.isfinite()).sum())
            raise BadModel(f"expected finite weights, got {count} NaN or infinities in {name}: load the model anew")
    if not streamed and any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters()):
        return copy.deepcopy(model).float()
    return model


@contextmanager
def settled(model: torch.nn.Module, *, opened: bool = True) -> Iterator[None]:
    """Within: evaluation mode and no gradients of weights; ``opened``: no cache, attention and experts that can be seen
    into. Eager attention stays: where it is, scaled_dot_product_attention may lack a mask, sinks or caps."""
    training = {name: module.training for name, module in model.named_modules()}
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    streamed = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    configs = {
        id(c): c
        for c in (getattr(m, "config", None) for m in model.modules())
        if hasattr(c, "use_cache") or hasattr(c, "_attn_implementation")
    }
    settings = {"use_cache": False, "_attn_implementation": "sdpa", "_experts_implementation": "eager"}
    before = [
        (config, key, getattr(config, key))
        for config in (configs.values() if opened else ())
        for key in settings
        if hasattr(config, key) and (key, getattr(config, key)) != ("_attn_implementation", "eager")
    ]
    try:
        if not _is_exported(model):
            model.eval()
        for parameter in wanted:
            parameter.requires_grad_(False)
        for config, key, _ in before:
            setattr(config, key, settings[key])
        yield
    finally:
        for config, key, value in before:
            setattr(config, key, value)
        for module, attribute, parameter in streamed:  # accelerate leaves new ones, which are no longer tied
            module._parameters[attribute] = parameter
        for parameter in wanted:
            parameter.requires_grad_(True)
        if not _is_exported(model):
            for name, module in model.named_modules():
                module.training = training[name]


def _is_exported(model: torch.nn.Module) -> bool:
    return isinstance(model, torch.fx.GraphModule)  # whose mode is fixed, and says so if asked


def call(model: torch.nn.Module, batch: Any) -> Any:
    """The model's outputs for a copy of a batch: a dict of keyword arguments, a tuple of positional ones, a tensor."""
    batch = _copied(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence):
        return model(*batch)
    return model(batch)


def taken(batches: Iterable[Any]) -> list[Any]:
    """The batches, tensors of 16 or 64 bits in float32 as the model is. Raises NoData for what is no list of batches
    and for batches without sequences."""
    if batches is None or isinstance(batches, torch.Tensor | Mapping | str):
        given = type(batches).__name__
        raise NoData(f"expected a list of batches, got {given}: put one batch into a list")
    found = [_in_float32(batch) for batch in batches]
    if not found:
        raise NoData("expected calibration batches, got none: give a longer text or fewer tokens a sequence")
    for batch in found:
        batch_size(batch)
    return found


def _in_float32(value: Any) -> Any:
    return _mapped(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, value)


def _copied(value: Any) -> Any:
    return _mapped(torch.Tensor.clone, value)


def _mapped(of: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A batch with a function of each of its tensors."""
    if isinstance(value, torch.Tensor):
        return of(value)
    if isinstance(value, Mapping):
        return {key: _mapped(of, each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_mapped(of, each) for each in value)
    return value


def mapping(batch: Any) -> Mapping[str, Any]:
    """A batch by its names; empty where it has none."""
    return batch if isinstance(batch, Mapping) else {}


def batch_size(batch: Any) -> int:
    """Sequences in a batch: the first dimension of its first tensor. Raises NoData where there is none."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, Sequence) else [batch]
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0]:
            return int(value.shape[0])
    raise NoData("expected batches of tensors with a sequence or more in the first dimension, got one without")
