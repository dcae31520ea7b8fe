"""`evaluate`: the exact function of the tensors as stored, with a certified radius.

Users, `assay.golden.store` and, with arithmetics of its own, `assay.verify`'s oracle call it. ``evaluate("softmax",
x)`` takes these steps:

1. `registry.spec` returns the op: its signature, options, and definition over any arithmetic;
2. `call.bind` completes the options and checks the tensors, once: a `Call`;
3. `call.Call.in_blocks` evaluates blocks of independent rows in float64 balls (`BallArithmetic`);
4. `golden.golden_of` reads values and radii off the balls, and the blocks are joined.

With ``digits=`` or ``round_to=`` `tiers` evaluates again, with more digits, the rows that float64 did not resolve.
`admissible` returns which of a kernel's choices are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic
from assay.golden.errors import InputError, OptionError
from assay.golden.evaluation.call import bind
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.evaluation.tiers import correctly_rounded, settled, to_digits
from assay.golden.registry import Spec, spec
from assay.runtime.environment import standard_environment
from assay.runtime.errors import unknown

Tensor = torch.Tensor

__all__ = ["admissible", "choices_of", "evaluate"]


@standard_environment()
def evaluate(
    op: str, *tensors: Any, digits: int | None = None, round_to: str | None = None, **options: Any
) -> Golden | tuple[Golden, ...]:
    """Return the golden of spec ``op`` for ``tensors`` (torch tensors or arrays, shapes as in its signature).

    ``options`` are the op's options, and its keyword tensors (``slopes=``, ``sinks=``). ``digits`` asks for that many
    decimal digits of every element, radius <= 10^-digits |value|, as far as value and low, two float64, hold them
    (about 31). ``round_to`` names a format of floating-point numbers: each value is then the correct rounding of the
    exact result, to nearest, ties to even, and the radius holds the exact result about it. Elements that the float64
    evaluation does not resolve are evaluated again with more digits; where no precision within bounds proves what was
    asked for, ``digits`` leaves the radius that was reached, and ``round_to`` an infinite one. Where the format makes
    an infinity or NaN of a number, a radius of zero says that the overflow is proven. An op with several results gives
    a tuple of goldens.

    Raises `UnknownSpec`, `OptionError`, `ShapeError` or `InputError`.
    """
    definition = spec(op)
    if digits is not None and (isinstance(digits, bool) or not isinstance(digits, int) or digits < 1):
        raise OptionError(f"{op}: digits={digits!r}; expected a positive whole number")
    call = bind(definition, tensors, options)
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
        goldens = settled(call, call.in_blocks(BallArithmetic()))
    return goldens if len(goldens) > 1 else goldens[0]


@standard_environment()
def admissible(op: str, *tensors: Any, chosen: Any, **options: Any) -> Any:
    """Return a mask of the ``chosen`` answers that are right for the exact values of ``tensors``.

    ``chosen`` is a tensor for the first of the op's results that are choices (`choices_of`), or a mapping of results'
    names to tensors; then the masks are a mapping too. Results that depend on a choice are judged by the given one: the
    codes of ``quantize_int4`` by its zero-points. If float64 cannot decide on which side of a midpoint a number is,
    both codes are right.

    Raises `UnknownSpec`, `OptionError`, `ShapeError` or `InputError`.
    """
    definition = spec(op)
    names = choices_of(definition, {name: value for name, value in options.items() if not hasattr(value, "shape")})
    if not names:
        raise OptionError(f"{op}: has no result that is a choice; expected an op such as moe_route or quantize_fp8")
    given = chosen if isinstance(chosen, Mapping) else {names[0]: chosen}
    given = {name: torch.as_tensor(value).detach().cpu() for name, value in given.items()}
    xp, call = BallArithmetic(), bind(definition, tensors, options)
    shapes = {tensor.name: tensor.shape(call.sizes) for tensor in call.signature.returns}
    for name, value in given.items():
        if name not in shapes:
            raise OptionError(f"{op}: {unknown('result', name, shapes)}")
        if name not in (*names, *definition.outputs.chosen):
            raise OptionError(f"{op}: {name} is no choice; expected {' or '.join(names)}")
        if tuple(value.shape) != shapes[name]:
            raise InputError(f"{op}: chosen {name} has shape {tuple(value.shape)}, expected {shapes[name]}")
    if not any(name in given for name in names):
        raise OptionError(f"{op}: expected chosen {' or '.join(names)}, got {', '.join(given) or 'none'}")
    handed = {name: value for name, value in given.items() if name in definition.outputs.chosen}
    results = call.results(xp, {} if definition.outputs.accepts else handed)
    masks = {}
    for tensor, result in zip(call.signature.returns, results, strict=True):
        if tensor.name not in given or tensor.name not in names:
            continue
        golden, value = golden_of(result), given[tensor.name].double()
        if definition.outputs.accepts is not None:
            numbers = [xp.exact(value) for value in call.tensors.values()]
            index = given[tensor.name].to(torch.int64)
            masks[tensor.name] = definition.outputs.accepts(xp, *numbers, index, **call.options)
        else:
            inside = (value - golden.value).abs() <= golden.radius
            masks[tensor.name] = inside | golden.radius.isinf()  # rows that are not finite are unspecified
    return masks if isinstance(chosen, Mapping) else masks[names[0]]


def choices_of(definition: Spec, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the results that are choices: ids, codes and zero-points."""
    returns = definition.signature(definition.complete(options)).returns
    by_rounding = [tensor.name for tensor in returns if tensor.role == "rounded"]
    return definition.outputs.chosen[:1] if definition.outputs.accepts is not None else tuple(by_rounding)
