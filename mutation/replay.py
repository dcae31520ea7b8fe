"""Replays comparisons that passed, with corrupted values like those of a faulty kernel, after the test is over.

The test's reports are made by then, so that a replay can't change them. Corruptions are placed where a tolerance sees
them best: the row with the largest numbers, the largest element. A corruption that changes no value isn't counted, nor
is a structural one (row, tile, shift) that moves no element by 10 % of the largest, as when all rows are equal.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from _pytest.outcomes import OutcomeException

from assay.mutation.comparisons import Answer, Call, Slot
from assay.mutation.values import Leaf, numbers_of, rebuilt, with_leaf
from assay.mutation.words import STRUCTURE
from assay.verify.comparison.corruptions import TILE, Numbers, of_structure, of_the_largest, with_element

_NOTABLE = 0.1  # of the largest element: smaller moves are noise


def corruptions(right: Numbers, whole: bool = False) -> Iterator[tuple[str, Numbers]]:
    """Yield (name, corrupted numbers) of a nonempty array; ``whole``: only integers can be rebuilt."""
    loud, rows = of_the_largest(right), right.ndim > 1 and right.shape[-1] > 0
    more_than_a_tile = rows and (right.shape[-1] > TILE or right.size // right.shape[-1] > TILE)
    for name, wrong in of_structure(right):
        if (rows and (name != "one tile zero" or more_than_a_tile)) or name in ("all zeros", "sign changed"):
            yield name, wrong
    if right.ndim and right.shape[-1] > 1:
        last = right.copy()
        last[..., -1] = 0
        yield "last column zero", last
        yield "shifted by one", np.roll(right, 1, -1)
    if whole:
        yield "one element off by 1", with_element(right, loud, right[loud] + 1)
        return
    yield "one NaN", with_element(right, loud, np.nan)
    yield "times 1.05", right * 1.05
    yield "times 1.01", right * 1.01
    if right.size > 1:
        yield "one element off by 10 %", with_element(right, loud, right[loud] * 1.1)
    yield "truncated to bfloat16", _parts(_truncate, right)
    for name, dtype in (("rounded to float16", np.float16), ("rounded to float32", np.float32)):
        narrow = _parts(lambda part, dtype=dtype: part.astype(dtype).astype(np.float64), right)
        if bool((np.isfinite(narrow) == np.isfinite(right)).all()):  # else the numbers overflow the format
            yield name, narrow


def counts(name: str, wrong: Numbers, right: Numbers) -> bool:
    """Return whether a corruption, after rounding to the dtype, changes enough to be counted."""
    changed = (wrong != right) & ~(np.isnan(wrong) & np.isnan(right))
    if not bool(changed.any()) or name not in STRUCTURE or name == "one NaN":
        return bool(changed.any())
    with np.errstate(all="ignore"):
        moved = np.abs(wrong - right)
    return float(np.max(moved, initial=0, where=np.isfinite(moved))) >= _NOTABLE * largest(right)


def largest(numbers: Numbers) -> float:
    """The largest finite magnitude."""
    return float(np.max(np.abs(numbers), initial=0, where=np.isfinite(numbers)))


def _truncate(values: Any) -> Any:
    """Towards zero to the 8 significant bits of bfloat16, within float32's range."""
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def _parts(change: Any, values: Numbers) -> Numbers:
    """A change of real numbers, for complex ones too."""
    with np.errstate(over="ignore"):
        if values.dtype.kind != "c":
            return np.asarray(change(values))
        return np.asarray(change(values.real) + 1j * change(values.imag))


_SMALLEST, _LARGEST = -30.0, 4.0  # powers of two between which the gain is bisected: 1e-9 to 16
_STEPS = 8  # of bisection: the gain to within a factor of 2^(34/256) = 1.1


@dataclass(frozen=True)
class Kept:
    """A call, its arguments copied, and what is corrupted: the largest array of the value under test."""

    call: Call
    actual: Slot
    leaf: Leaf


@dataclass(frozen=True)
class Replayed:
    """The result of replaying one comparison."""

    passed: dict[str, bool] = field(default_factory=dict)
    """By corruption: whether the comparison passed all the same."""
    gain: float | None = None
    """The smallest common relative error that it notices; infinite if none up to 16, None for integers."""


def replay(kept: Kept) -> Replayed | None:
    """Replay a comparison with all corruptions; None if it doesn't pass again unchanged and so can't be judged."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        right = kept.leaf.numbers
        if not _passes(kept, rebuilt(right, kept.leaf.value)):
            return None
        passed = {}
        for name, wrong in corruptions(right, kept.leaf.whole):
            stored = rebuilt(wrong, kept.leaf.value)
            numbers = numbers_of(stored)
            if numbers is not None and counts(name, numbers, right):
                passed[name] = _passes(kept, stored)
        return Replayed(passed, None if kept.leaf.whole else _minimum_detectable_error(kept, right))


def _minimum_detectable_error(kept: Kept, right: Numbers) -> float:
    """Bisect for the smallest rejected gain: a tolerance that rejects a gain also rejects all larger ones."""

    def passes(power: float) -> bool:
        return _passes(kept, rebuilt(right * (1 + 2.0**power), kept.leaf.value))

    low, high = _SMALLEST, _LARGEST
    if passes(high):
        return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return float(2.0**high)


def _passes(kept: Kept, value: Any) -> bool:
    container = with_leaf(kept.call.argument(kept.actual), kept.leaf.path, value)
    call = kept.call.with_argument(kept.actual, container)
    try:
        answer = call.original(*call.args, **call.kwargs)
    except (pytest.skip.Exception, pytest.xfail.Exception):  # neither fails a test
        return True
    except (Exception, OutcomeException, SystemExit):  # of any kind: it fails a test
        return False
    return says_yes(call.comparison.answer, answer)


def says_yes(kind: Answer, answer: Any) -> bool:
    """Return whether a comparison that didn't raise found no difference; of a user's function only a bool counts."""
    if kind == "elements":
        return bool(answer.all())
    if kind == "either":
        return bool(answer) if isinstance(answer, bool | np.bool_) else True
    return True if kind == "raises" else bool(answer)
