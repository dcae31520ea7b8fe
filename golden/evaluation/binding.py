"""`bind`: a call's tensors and options, checked once; what is bound is evaluated in any arithmetic without more ado."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Arithmetic
from assay.golden.errors import InputError, OptionError
from assay.golden.evaluation.call import Call
from assay.golden.registry import Spec
from assay.golden.signature import TensorSpec

_MOST_WHOLE = 2**53  # whole numbers up to it are float64 numbers


def run(
    definition: Spec,
    xp: Arithmetic,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    chosen: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Any, ...]:
    """The results of a definition in arithmetic ``xp``, in its own numbers; `bind` and `Call.results` in one."""
    return bind(definition, tensors, options).results(xp, chosen)


def bind(definition: Spec, tensors: Sequence[Any], options: Mapping[str, Any]) -> Call:
    """The call of an op with ``tensors`` by position, and ``options``, its keyword tensors among them.

    Tensors are torch tensors or anything that numpy makes an array of. A tensor that is given for a flag
    (``sinks=tensor``) also sets the flag.

    Raises `OptionError`, `ShapeError` or `InputError`.
    """
    keywords = {name: value for name, value in options.items() if hasattr(value, "shape")}
    plain = {name: value for name, value in options.items() if name not in keywords}
    complete = definition.complete(plain | {name: True for name in keywords if name in definition.options})
    signature = definition.signature(complete)
    named = [tensor.name for tensor in signature.tensors if tensor.keyword]
    for tensor in signature.tensors:
        if tensor.keyword and tensor.name not in keywords:
            raise OptionError(f"{definition.name}: expected the keyword tensor {tensor}, got none")
    for name in sorted(set(keywords) - set(named)):
        raise OptionError(f"{definition.name}: {name}= is a tensor that the given options do not call for")
    values = [*tensors, *(keywords[name] for name in named)]
    if len(values) != len(signature.tensors):
        signature.bind(definition.name, [()] * len(values))  # says what it expects
    stored = {
        tensor.name: _tensor(definition, tensor, value) for tensor, value in zip(signature.tensors, values, strict=True)
    }
    sizes = signature.bind(definition.name, [tuple(value.shape) for value in stored.values()])
    unused = definition.inputs.unused(*stored.values()) if definition.inputs.unused else {}
    for tensor in signature.tensors:
        if tensor.is_integer and tensor.bound:
            _check_integers(definition, tensor, stored[tensor.name], unused.get(tensor.name), tensor.most(sizes))
    return Call(definition, signature, stored, complete, sizes)


def _tensor(definition: Spec, tensor: TensorSpec, value: Any) -> torch.Tensor:
    """``value`` as a tensor on the CPU, of the kind of numbers that the signature asks for; lists keep their digits."""
    try:
        found = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:  # NotImplementedError of a meta tensor among them
        why = str(error).partition("\n")[0]
        raise InputError(f"{definition.name}: {tensor.name} is no tensor of numbers: {why}") from None
    if found.layout != torch.strided:
        raise InputError(f"{definition.name}: {tensor.name} is sparse; give it as .to_dense()")
    is_mask = found.dtype == torch.bool and tensor.dtype == "bool"
    whole = is_mask or not (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool)
    if tensor.is_integer and not whole:
        raise InputError(f"{definition.name}: {tensor.name} must be integers, got {found.dtype}")
    if found.dtype.is_complex or (found.dtype == torch.bool and not is_mask):
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


def _check_integers(
    definition: Spec, tensor: TensorSpec, value: torch.Tensor, unused: torch.Tensor | None, highest: int
) -> None:
    """`InputError` unless the integers that some result depends on lie in 0..highest, and offsets rise."""
    used = value if unused is None else value[~unused]
    used = used if tensor.none is None else used[used != tensor.none]
    if not used.numel():
        return
    least, most = int(used.min()), int(used.max())
    if least < 0 or most > highest:
        raise InputError(f"{definition.name}: {tensor.name} must lie in 0..{highest}, got {least}..{most}")
    if tensor.role == "offsets":
        _check_offsets(definition, tensor, value, highest)


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
