"""A spec's definition, run in an arithmetic on checked tensors, and what it gives: `Golden`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Arithmetic, Ball
from assay.golden.arithmetic.exact_arb import parts_of
from assay.golden.errors import InputError, OptionError
from assay.golden.registry import Spec
from assay.golden.signature import TensorSpec

_SLACK = 1 + 2.0**-30  # radii are themselves computed in float64
_MOST_WHOLE = 2**53  # whole numbers up to it are float64 numbers


@dataclass(frozen=True)
class Golden:
    """A certified answer: |value + low - exact| <= radius holds for every element.

    ``value`` and ``radius`` are float64 tensors (a choice such as top-k ids: integers, radius zero); ``low``, where
    more than float64's digits were asked for, is what ``value`` lacks. An infinite radius certifies nothing of
    a finite value. Where ``value`` is NaN or infinite, its class is the answer, and no radius measures a distance: zero
    says that the class is proven, an infinite one that float64 gave it (which may be wrong only where numbers near the
    end of its own range, beyond about 1e150, made the evaluation itself overflow).
    """

    value: torch.Tensor
    radius: torch.Tensor
    low: torch.Tensor | None = None


def split_keywords(definition: Spec, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options proper, and keyword tensors; a tensor given for a flag (``sinks=tensor``) also sets the flag."""
    keywords = {name: value for name, value in options.items() if hasattr(value, "shape")}
    plain = {name: value for name, value in options.items() if name not in keywords}
    plain.update({name: True for name in keywords if name in definition.options})
    return plain, keywords


def run(
    definition: Spec,
    xp: Arithmetic,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    keywords: Mapping[str, Any],
    chosen: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """The definition in arithmetic ``xp``, after its tensors and options have been checked against its signature.

    ``chosen``: a kernel's own choices by the results' names, for an op whose other results hang on them.
    """
    complete = definition.complete(options)
    stored, sizes = checked(definition, tensors, complete, keywords)
    signature = definition.signature(complete)
    unused = definition.unused(*stored.values()) if definition.unused else {}
    numbers = {
        tensor.name: _numbers(xp, definition, tensor, stored[tensor.name], unused.get(tensor.name), sizes)
        for tensor in signature.tensors
    }
    extra = {name: numbers.pop(name) for name in keywords}
    settings = {name: value for name, value in complete.items() if name not in extra}
    for name, value in (chosen or {}).items():
        extra[name] = xp.exact(value.to(torch.float64)) if value.is_floating_point() else xp.integers(value)
    settings = {name: None if name == "sinks" and value is False else value for name, value in settings.items()}
    return definition.definition(xp, *numbers.values(), **extra, **settings)


def checked(
    definition: Spec, tensors: Sequence[Any], options: Mapping[str, Any], keywords: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors by name, in the order of the signature, and the sizes of its symbols; raises as `evaluate` does."""
    signature = definition.signature(options)
    named = [tensor for tensor in signature.tensors if tensor.keyword]
    for tensor in named:
        if tensor.name not in keywords:
            raise OptionError(f"{definition.name}: expected the keyword tensor {tensor}, got none")
    foreign = set(keywords) - {tensor.name for tensor in named}
    if foreign:
        raise OptionError(
            f"{definition.name}: {sorted(foreign)[0]}= is a tensor that the given options do not call for"
        )
    values = [*tensors, *(keywords[tensor.name] for tensor in named)]
    if len(values) != len(signature.tensors):
        signature.bind(definition.name, [()] * len(values))  # says what it expects
    stored = {
        tensor.name: _tensor(definition, tensor, value) for tensor, value in zip(signature.tensors, values, strict=True)
    }
    return stored, signature.bind(definition.name, [tuple(value.shape) for value in stored.values()])


def _tensor(definition: Spec, tensor: TensorSpec, value: Any) -> torch.Tensor:
    """``value`` as a tensor on the CPU, of the kind of numbers that the signature asks for; lists keep their digits."""
    try:
        found = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:  # NotImplementedError of a meta tensor among them
        why = str(error).partition("\n")[0]
        raise InputError(f"{definition.name}: {tensor.name} is no tensor of numbers: {why}") from None
    if found.layout != torch.strided:
        raise InputError(f"{definition.name}: {tensor.name} is sparse; give it as .to_dense()")
    whole = not (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool)
    if tensor.is_integer and not whole:
        raise InputError(f"{definition.name}: {tensor.name} must be integers, got {found.dtype}")
    if found.dtype.is_complex or found.dtype == torch.bool:
        raise InputError(f"{definition.name}: {tensor.name} must be real numbers, got {found.dtype}")
    if found.dtype == torch.uint8 and (tensor.dtype or "").startswith(("fp8", "float8")):
        view = "float8_e4m3fn" if tensor.dtype == "fp8" else tensor.dtype
        raise InputError(
            f"{definition.name}: {tensor.name} must be numbers, got bytes; give codes as .view(torch.{view})"
        )
    if whole and not tensor.is_integer and found.element_size() == 8 and _is_beyond(found.numpy()):
        raise InputError(
            f"{definition.name}: {tensor.name} holds whole numbers beyond 2^53, which float64 would round; "
            "give it as floating-point numbers"
        )
    return found


def _is_beyond(numbers: Any) -> bool:
    """Whether some whole number may not be a float64."""
    return bool(((numbers > _MOST_WHOLE) | (numbers < -_MOST_WHOLE)).any())


def _numbers(
    xp: Arithmetic,
    definition: Spec,
    tensor: TensorSpec,
    value: torch.Tensor,
    unused: torch.Tensor | None,
    sizes: Mapping[str, int],
) -> Any:
    if not tensor.is_integer:
        return xp.exact(value.to(torch.float64))
    used = value if unused is None else value[~unused]
    used = used if tensor.none is None else used[used != tensor.none]
    if tensor.bound and used.numel():
        highest, least, most = tensor.most(sizes), int(used.min()), int(used.max())
        if least < 0 or most > highest:
            raise InputError(f"{definition.name}: {tensor.name} must lie in 0..{highest}, got {least}..{most}")
        if tensor.role == "offsets":
            _check_offsets(definition, tensor, value, highest)
    return xp.integers(value)


def _check_offsets(definition: Spec, tensor: TensorSpec, value: torch.Tensor, highest: int) -> None:
    """`InputError` unless the offsets rise from zero to the highest, and never fall."""
    found = value.tolist()
    falls = [place for place in range(1, len(found)) if found[place] < found[place - 1]]
    if falls:
        got = f"{found[falls[0]]} after {found[falls[0] - 1]} at place {falls[0]}"
    elif found[0] != 0 or found[-1] != highest:
        got = f"{found[0]}..{found[-1]}"
    else:
        return
    raise InputError(f"{definition.name}: {tensor.name} must rise from 0 to {highest}, got {got}")


def golden_of_ball(result: Ball | torch.Tensor) -> Golden:
    """The golden of a ball, or of integers that were chosen."""
    if isinstance(result, torch.Tensor):
        return Golden(result, torch.zeros(result.shape, dtype=torch.float64))
    radius = torch.broadcast_to(result.radius, result.mid.shape) * _SLACK
    return Golden(result.mid, radius.nan_to_num_(nan=math.inf, posinf=math.inf))


def golden_of_enclosure(result: Any) -> Golden:
    """The golden of an array of Arb balls: its float64 value, what that lacks, and what is left."""
    if result.dtype != object:
        return golden_of_ball(torch.as_tensor(result))
    value, low, radius = parts_of(result)
    return Golden(value, radius * _SLACK, low)
