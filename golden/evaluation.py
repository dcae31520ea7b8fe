"""`evaluate`: the exact function of the tensors as stored, with a certified radius."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic import BallArithmetic
from assay.golden.call import Call
from assay.golden.correct_rounding import correctly_rounded
from assay.golden.errors import OptionError
from assay.golden.precise import to_digits
from assay.golden.registry import spec
from assay.golden.run import Golden, checked, split_keywords
from assay.precision.formats import format_named


def evaluate(
    op: str, *tensors: Any, digits: int | None = None, round_to: str | None = None, **options: Any
) -> Golden | tuple[Golden, ...]:
    """The golden of spec ``op`` for ``tensors`` (torch tensors or arrays, shapes as in its signature).

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
    options, keywords = split_keywords(definition, options)
    stored, _ = checked(definition, tensors, options, keywords)
    positional = tuple(value for name, value in stored.items() if name not in keywords)
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
