"""`evaluate`: the exact function of the tensors as stored, with a certified radius."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Arithmetic, Ball, BallArithmetic
from assay.golden.arithmetic.exact_arb import parts_of
from assay.golden.errors import InputError, OptionError
from assay.golden.registry import Spec, spec
from assay.golden.signature import TensorSpec
from assay.precision.formats import format_named

_SLACK = 1 + 2.0**-30  # radii are themselves computed in float64


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


def evaluate(
    op: str, *tensors: Any, digits: int | None = None, round_to: str | None = None, **options: Any
) -> Golden | tuple[Golden, ...]:
    """The golden of spec ``op`` for ``tensors`` (torch tensors or arrays, shapes as in its signature).

    ``options`` are the op's options, and its keyword tensors (``slopes=``, ``sinks=``). ``digits`` asks for that many
    decimal digits of every element, radius <= 10^-digits |value|, as far as value and low, two float64, hold them
    (about 31). ``round_to`` names a format of floating-point numbers: each value is then the correct rounding of the
    exact result, to nearest, ties to even, and the radius holds the exact result about it. Elements that the float64
    evaluation does not resolve are evaluated again with more digits; where no precision within bounds proves what was
    asked for, ``digits`` leaves the radius that was reached, and ``round_to`` an infinite one. An op with several
    results gives a tuple of goldens.

    Raises `UnknownSpec`, `OptionError`, `ShapeError` or `InputError`.
    """
    definition = spec(op)
    if digits is not None and (isinstance(digits, bool) or not isinstance(digits, int) or digits < 1):
        raise OptionError(f"{op}: digits={digits!r}; expected a positive whole number")
    options, keywords = split_keywords(definition, options)
    stored, _ = checked(definition, tensors, options, keywords)
    positional = tuple(value for name, value in stored.items() if name not in keywords)
    from assay.golden.call import Call  # these build on this module
    from assay.golden.correct_rounding import correctly_rounded
    from assay.golden.precise import to_digits

    call = Call(definition, positional, options, {name: stored[name] for name in keywords})
    if digits is not None and round_to is not None:
        raise OptionError(f"{op}: digits={digits} and round_to={round_to!r}; expected one of them")
    if round_to is not None:
        format = format_named(round_to)
        if format.kind != "float":
            raise OptionError(f"{op}: round_to={round_to!r}; expected a format of floating-point numbers")
        goldens = correctly_rounded(call, format)
    elif digits is not None:
        goldens = to_digits(call, digits)
    else:
        goldens = call.in_blocks(BallArithmetic())
    return goldens if len(goldens) > 1 else goldens[0]


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
    sizes = signature.bind(definition.name, [tuple(getattr(value, "shape", np.shape(value))) for value in values])
    stored = {
        tensor.name: _tensor(definition, tensor, value) for tensor, value in zip(signature.tensors, values, strict=True)
    }
    return stored, sizes


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
    used = used if tensor.none is None else used[used != tensor.none]
    if tensor.bound and used.numel():
        highest, least, most = tensor.most(sizes), int(used.min()), int(used.max())
        if least < 0 or most > highest:
            raise InputError(f"{definition.name}: {tensor.name} must lie in 0..{highest}, got {least}..{most}")
        if tensor.role == "offsets" and (most != highest or value[0] != 0 or bool((value.diff() < 0).any())):
            raise InputError(f"{definition.name}: {tensor.name} must rise from 0 to {highest}, got {least}..{most}")
    return xp.integers(value)


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
