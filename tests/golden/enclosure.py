"""The checker of goldens: does value +- radius hold the exact result, by two witnesses of their own?"""

import math
import sys
from typing import Any

import numpy as np

from assay.golden import Golden, evaluate, spec
from assay.golden.arithmetic import Arb, Multiprecision
from assay.golden.evaluation.binding import run
from tests.golden.drawing import Case

_PROOF_DIGITS = 400  # enough to prove what thirty digits claim after cancellation


def escapes(case: Case, digits: int | None = None, witness_digits: int = 50) -> list[str]:
    """Elements whose exact result, by mpmath or by Arb's proven enclosure, the golden does not hold.

    A radius of infinity claims nothing; where mpmath has no number (0/0) nothing is compared either.
    """
    return beyond(case, several(evaluate(case.op, *case.tensors, digits=digits, **case.options)), witness_digits)


def beyond(case: Case, goldens: tuple[Golden, ...], witness_digits: int = 50) -> list[str]:
    """The same for goldens that are there already."""
    definition = spec(case.op)
    found: list[str] = []
    for witness in (Multiprecision(witness_digits), Arb(_PROOF_DIGITS)):
        results = run(definition, witness, case.tensors, case.options)
        for place, (golden, result) in enumerate(zip(goldens, results, strict=True)):
            if tuple(result.shape) != tuple(golden.value.shape):
                found.append(f"result {place}: shape {tuple(golden.value.shape)}, witness {result.shape}")
            elif result.dtype == object:
                found += [f"result {place}{list(index)}: {text}" for index, text in outside(golden, result, witness)]
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
