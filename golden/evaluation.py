"""`evaluate`: the exact function of the tensors as stored, with a certified radius."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Arb, Arithmetic, Ball, BallArithmetic
from assay.golden.errors import InputError, OptionError
from assay.golden.registry import Spec, spec
from assay.golden.signature import TensorSpec

_SLACK = 1 + 2.0**-30  # radii are themselves computed in float64
_FLOAT64_DIGITS = 15


@dataclass(frozen=True)
class Golden:
    """A certified answer: |value + low - exact| <= radius holds for every element.

    ``value`` and ``radius`` are float64 tensors (a choice such as top-k ids: integers, radius zero); ``low``, where
    more than float64's digits were asked for, is what ``value`` lacks. An infinite radius certifies nothing; where
    ``value`` is NaN or infinite the radius is meaningless, and the class of the value is the answer (unless numbers
    near the end of float64's own range, beyond about 1e150, made the evaluation itself overflow).
    """

    value: torch.Tensor
    radius: torch.Tensor
    low: torch.Tensor | None = None


def evaluate(op: str, *tensors: Any, digits: int | None = None, **options: Any) -> Golden | tuple[Golden, ...]:
    """The golden of spec ``op`` for ``tensors`` (torch tensors or arrays, shapes as in its signature).

    ``options`` are the op's options, and its keyword tensors (``slopes=``, ``sinks=``). ``digits`` asks for that many
    decimal digits, by Arb (slow; small tensors). An op with several results gives a tuple of goldens.

    Raises `UnknownSpec`, `OptionError`, `ShapeError` or `InputError`.
    """
    definition = spec(op)
    if digits is not None and (isinstance(digits, bool) or not isinstance(digits, int) or digits < 1):
        raise OptionError(f"{op}: digits={digits!r}; expected a positive whole number")
    options, keywords = split_keywords(definition, options)
    if digits is None or digits <= _FLOAT64_DIGITS:
        return _each(run(definition, BallArithmetic(), tensors, options, keywords), golden_of_ball)
    enclosed = run(definition, Arb(digits + 15), tensors, options, keywords)
    certified = run(definition, BallArithmetic(), tensors, options, keywords)
    if not isinstance(enclosed, tuple):
        return _either(golden_of_enclosure(enclosed), golden_of_ball(certified))
    return tuple(_either(golden_of_enclosure(a), golden_of_ball(b)) for a, b in zip(enclosed, certified, strict=True))


def _either(enclosed: Golden, certified: Golden) -> Golden:
    """The float64 golden where Arb's balls grew too wide to say more than NaN."""
    lost = enclosed.value.isnan() & ~certified.value.isnan()
    if enclosed.low is None or not bool(lost.any()):
        return enclosed
    return Golden(
        torch.where(lost, certified.value, enclosed.value),
        torch.where(lost, certified.radius, enclosed.radius),
        torch.where(lost, 0.0, enclosed.low),
    )


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
    chosen: torch.Tensor | None = None,
) -> Any:
    """The definition in arithmetic ``xp``, after its tensors and options have been checked against its signature.

    ``chosen``: a kernel's own choice, for an op whose result depends on one.
    """
    complete = definition.complete(options)
    signature = definition.signature(complete)
    positional = [tensor for tensor in signature.tensors if not tensor.keyword]
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
    sizes = signature.bind(definition.name, [tuple(getattr(value, "shape", np.shape(value))) for value in values])
    stored = [_tensor(definition, tensor, value) for tensor, value in zip(signature.tensors, values, strict=True)]
    unused = definition.unused(*stored) if definition.unused else {}
    numbers = [
        _numbers(xp, definition, tensor, value, unused.get(tensor.name), sizes)
        for tensor, value in zip(signature.tensors, stored, strict=True)
    ]
    extra = {tensor.name: number for tensor, number in zip(named, numbers[len(positional) :], strict=True)}
    settings = {name: value for name, value in complete.items() if name not in extra}
    if chosen is not None and definition.chosen is not None:
        extra[definition.chosen] = xp.integers(chosen)
    settings = {name: None if name == "sinks" and value is False else value for name, value in settings.items()}
    return definition.definition(xp, *numbers[: len(positional)], **extra, **settings)


def _tensor(definition: Spec, tensor: TensorSpec, value: Any) -> torch.Tensor:
    """``value`` as a tensor on the CPU, of the kind of numbers that the signature asks for; lists keep their digits."""
    try:
        found = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise InputError(f"{definition.name}: {tensor.name} is no tensor of numbers: {error}") from None
    whole = not (found.dtype.is_floating_point or found.dtype.is_complex or found.dtype == torch.bool)
    if tensor.is_integer and not whole:
        raise InputError(f"{definition.name}: {tensor.name} must be integers, got {found.dtype}")
    if found.dtype.is_complex or found.dtype == torch.bool:
        raise InputError(f"{definition.name}: {tensor.name} must be real numbers, got {found.dtype}")
    return found


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
    if tensor.bound and used.numel():
        highest, least, most = tensor.most(sizes), int(used.min()), int(used.max())
        if least < 0 or most > highest:
            raise InputError(f"{definition.name}: {tensor.name} must lie in 0..{highest}, got {least}..{most}")
    return xp.integers(value)


def _each(result: Any, convert: Any) -> Any:
    return tuple(map(convert, result)) if isinstance(result, tuple) else convert(result)


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
    value, low, radius = (torch.zeros(result.shape, dtype=torch.float64) for _ in range(3))
    for index in np.ndindex(result.shape):
        number = result[index]
        high = float(number.mid())
        value[index] = high
        if math.isfinite(high):
            rest = number - high
            low[index] = float(rest.mid())
            left = (rest - low[index].item()).abs_upper()
            radius[index] = math.nextafter(float(left) * _SLACK, math.inf) if left > 0 else 0.0  # never down to zero
    return Golden(value, radius, low)
