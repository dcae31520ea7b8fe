"""The model as the audit runs it: in float32, without gradients of its own, attention and experts visible to the
tracer."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from assay.precision.errors import BadModel, NoData
from assay.precision.observation.streaming import device_of, streamed_parameters


def in_float32(model: torch.nn.Module | torch.export.ExportedProgram) -> torch.nn.Module:
    """Return the module to audit: itself if its weights are float32, else a float32 copy. Streamed weights are left in
    their files, and checked as they are read.

    Raises BadModel for anything but a module, for TorchScript, a model that can't be copied, lazy, NaN or infinite
    weights (named), or streamed weights of another dtype.
    """
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module(check_guards=False)
    if not isinstance(model, torch.nn.Module):
        raise BadModel(f"expected a torch.nn.Module or an exported program, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise BadModel(
            "expected a module in Python or an exported program, got TorchScript (torch.jit), whose calls can't be "
            "seen: give the module that it was made from"
        )
    streamed = streamed_parameters(model)
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise BadModel(f"expected weights, got {name} of a lazy module that has not run: run the model once before")
        if name in streamed:
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise BadModel(
                    f"expected streamed weights in float32, got {name} in {parameter.dtype}: see docs/scale.md"
                )
        elif parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            count = int((~parameter.isfinite()).sum())
            raise BadModel(f"expected finite weights, got {count} NaN or infinities in {name}: load the model anew")
    if streamed or all(p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point()):
        return model
    try:
        return copy.deepcopy(model).float()
    except (RuntimeError, TypeError) as error:
        line = str(error).partition(". ")[0]
        raise BadModel(
            f"expected a model in float32, or one that can be copied into it, got one that can't be ({line}): give it "
            "with model.float(), or in place of torch.nn.utils.weight_norm use parametrizations.weight_norm"
        ) from error


@contextmanager
def evaluating(model: torch.nn.Module, *, traced: bool = True) -> Iterator[None]:
    """Run in evaluation mode and without gradients of weights; ``traced``: without cache, and with attention and
    experts that the tracer can see into. Eager attention stays: its scaled_dot_product_attention may lack a mask, sinks
    or caps."""
    configs = {id(each): each for each in (getattr(m, "config", None) for m in model.modules())} if traced else {}
    settings = {"use_cache": False, "_attn_implementation": "sdpa", "_experts_implementation": "eager"}
    with ExitStack() as after:

        def put(owner: Any, name: str, value: object) -> None:
            after.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        if not isinstance(model, torch.fx.GraphModule):  # whose mode is fixed, and says so if asked
            for module in model.modules():
                after.callback(setattr, module, "training", module.training)
            model.eval()
        for parameter in model.parameters():
            put(parameter, "requires_grad", False)
        for module in model.modules():
            for name, held in module._parameters.items():
                if held is not None and held.is_meta:  # accelerate leaves new ones, which are no longer tied
                    after.callback(module._parameters.__setitem__, name, held)
        for config in configs.values():
            for key, setting in settings.items():
                if hasattr(config, key) and (key, getattr(config, key)) != ("_attn_implementation", "eager"):
                    put(config, key, setting)
        yield


def call(model: torch.nn.Module, batch: Any) -> Any:
    """Return the model's outputs for a copy of a batch: a dict of keyword arguments, a tuple of positional ones, or the
    only argument, such as a tensor."""
    batch = _mapped(Tensor.clone, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence):
        return model(*batch)
    return model(batch)


def normalised(batches: Iterable[Any], model: torch.nn.Module) -> list[Any]:
    """Return the batches on the model's device, tensors of 16 or 64 bits in float32 as the model is. Raises NoData for
    anything but a list of batches and for batches without sequences."""
    if batches is None or isinstance(batches, Tensor | Mapping | str):
        given = type(batches).__name__
        raise NoData(f"expected a list of batches, got {given}: put one batch into a list")
    device = device_of(model)

    def alike(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float32 if tensor.is_floating_point() else tensor.dtype)

    converted = [_mapped(alike, each) for each in batches]
    if not converted:
        raise NoData("expected calibration batches, got none: give a longer text or fewer tokens a sequence")
    for batch in converted:
        batch_size(batch)
    return converted


def _mapped(of: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to each tensor of a batch, in lists, named tuples and dataclasses too."""
    if isinstance(value, Tensor):
        return of(value)
    if isinstance(value, Mapping):
        return {key: _mapped(of, each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        mapped = [_mapped(of, each) for each in value]
        if hasattr(value, "_fields"):
            return type(value)(*mapped)
        return mapped if isinstance(value, list) else tuple(mapped)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for each in fields(value):
            object.__setattr__(made, each.name, _mapped(of, getattr(value, each.name)))
        return made
    return value


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, at any depth."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _mapped(note, batch)
    return tensors


def mapping(batch: Any) -> Mapping[str, Any]:
    """Return a batch by argument names; empty where it has none."""
    return batch if isinstance(batch, Mapping) else {}


def batch_size(batch: Any) -> int:
    """Return the number of sequences in a batch: the first dimension of its first tensor. Raises NoData where there is
    none."""
    for tensor in tensors_in(batch):
        if tensor.dim() and tensor.size(0):
            return tensor.size(0)
    raise NoData("expected batches of tensors with a sequence or more in the first dimension, got one without")


def rows_kept(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return which rows of values [B, T, ..., K], [B, H, T, K] or [B * T, K] are no padding by a ``mask`` [B, T]; None:
    all."""
    if mask is None or bool(mask.all()):
        return None
    mask, rows = mask.to(x.device), x.shape[:-1]
    if rows == (mask.numel(),):
        return mask.flatten()
    for axis in (1, 2):
        if len(rows) > axis and (rows[0], rows[axis]) == mask.shape:
            shape = [1] * len(rows)
            shape[0], shape[axis] = mask.shape
            return mask.view(shape).expand(rows).flatten()
    return None
