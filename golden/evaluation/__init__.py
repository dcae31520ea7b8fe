"""`evaluate`: the exact function of the tensors as stored, with a certified radius.

In: an op's name, tensors, options. Out: a `Golden` for each result. Called by users, by `assay.golden.store` and, with
arithmetics of its own, by `assay.verify`'s oracle. The way of ``evaluate("softmax", x)``:

1. `registry.spec` finds the op: its signature, options, and definition over any arithmetic;
2. `binding.bind` completes the options and checks the tensors, once: a `Call`;
3. `call.Call.in_blocks` hands blocks of independent rows to the definition, in float64 balls (`BallArithmetic`);
4. `golden.golden_of` reads value and radius off the balls, and the blocks are put together.

With ``digits=`` or ``round_to=`` `tiers` (`correct_rounding`) evaluates again, with more digits, the rows that float64
did not resolve. `choices.admissible` tells which of a kernel's choices are right.
"""

from __future__ import annotations

from typing import Any

from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic
from assay.golden.errors import OptionError
from assay.golden.evaluation.binding import bind
from assay.golden.evaluation.correct_rounding import correctly_rounded
from assay.golden.evaluation.golden import Golden
from assay.golden.evaluation.tiers import to_digits
from assay.golden.registry import spec
from assay.runtime.environment import standard_environment

__all__ = ["evaluate"]


@standard_environment()
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
        goldens = call.in_blocks(BallArithmetic())
    return goldens if len(goldens) > 1 else goldens[0]
