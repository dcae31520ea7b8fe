"""The checker of goldens: does value +- radius hold the exact result, by two witnesses of their own?"""

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from assay.golden import Golden, evaluate, spec
from assay.golden.arithmetic import Arb, Exact, Multiprecision
from assay.golden.evaluation.call import bind, run
from tests.golden.drawing import Case

_PROOF_DIGITS = 400  # enough to prove what thirty digits claim after cancellation


Witnessed = list[tuple[Any, tuple[Any, ...]]]


def witnessed(case: Case, digits: int = 50) -> Witnessed:
    """The exact results of a case by mpmath, at this many digits, and as Arb's proven enclosures."""
    witnesses = (Multiprecision(digits), Arb(_PROOF_DIGITS))
    return [(witness, run(spec(case.op), witness, case.tensors, case.options)) for witness in witnesses]


def goldens_of(case: Case, digits: int | None = None) -> tuple[Golden, ...]:
    return several(evaluate(case.op, *case.tensors, digits=digits, **case.options))


def double_double_of(case: Case) -> tuple[Golden, ...]:
    return bind(spec(case.op), case.tensors, case.options).under(Exact())


def claimed(goldens: tuple[Golden, ...]) -> tuple[Golden, ...]:
    """Goldens without those infinities and NaN of which they claim nothing: the next arithmetic evaluates them."""

    def finite(golden: Golden) -> Golden:
        if not golden.value.is_floating_point():
            return golden
        nothing = ~torch.isfinite(golden.value) & golden.radius.isinf()
        return replace(golden, value=golden.value.masked_fill(nothing, 0.0))

    return tuple(map(finite, goldens))


def escapes(case: Case, digits: int | None = None, witness_digits: int = 50) -> list[str]:
    """Elements whose exact result the golden does not hold."""
    return beyond(goldens_of(case, digits), witnessed(case, witness_digits))


def beyond(goldens: tuple[Golden, ...], exact: Witnessed) -> list[str]:
    """Elements of goldens that don't hold a witness's result; a radius of infinity, and mpmath's NaN, claim nothing."""
    found: list[str] = []
    for witness, results in exact:
        for number, (golden, result) in enumerate(zip(goldens, results, strict=True)):
            if tuple(result.shape) != tuple(golden.value.shape):
                found.append(f"result {number}: shape {tuple(golden.value.shape)}, witness {result.shape}")
            elif result.dtype == object:
                found += [f"result {number}{list(index)}: {text}" for index, text in outside(golden, result, witness)]
    return found


def several(result: Any) -> tuple[Any, ...]:
    """The results of an op, one or several."""
    return result if isinstance(result, tuple) else (result,)


def outside(golden: Golden, result: Any, witness: Any) -> list[tuple[tuple[int, ...], str]]:
    """Where a witness's result is not within the golden's radius, and what it is."""
    name, is_outside = type(witness).__name__, _is_not_proven if isinstance(witness, Arb) else _lies_outside
    values, lows, radii = (part.numpy() for part in (golden.value, golden.rest, golden.radius))
    found = []
    for index in np.ndindex(values.shape):
        value, low, radius = float(values[index]), float(lows[index]), float(radii[index])
        if radius == math.inf and math.isfinite(value):
            continue
        with witness.precision():
            escaped = is_outside(witness, value, low, radius, result[index])
        if escaped:
            found.append((index, f"{value!r} + {low!r} +- {radius!r}, but {name} has {result[index]!s:.60}"))
    return found


def _lies_outside(witness: Multiprecision, value: float, low: float, radius: float, exact: Any) -> bool:
    number = witness.context.mpf
    if witness.context.isnan(exact):
        return False
    if witness.context.isinf(exact) or not math.isfinite(value):
        return value != float(exact)
    return not abs(number(value) + number(low) - exact) <= number(radius)


def _is_not_proven(witness: Arb, value: float, low: float, radius: float, exact: Any) -> bool:
    """Not whether the enclosure meets the golden's ball but whether all of it lies therein: then it is proven."""
    number = witness.flint.arb
    if not exact.is_finite():
        return False
    if math.isinf(value):  # beyond what float64 has
        return not bool(exact * math.copysign(1.0, value) >= sys.float_info.max)
    return not math.isfinite(value) or not (number(value) + number(low) - exact).abs_upper() <= number(radius)
