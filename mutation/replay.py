"""A comparison that passed, kept until its test is over, and made again with wrong values.

By then the test's reports are made: whatever a replay does can't change them.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from _pytest.outcomes import OutcomeException

from assay.mutation.comparisons import Answer, Call, Slot
from assay.mutation.corruptions import corruptions, counts
from assay.mutation.values import Leaf, numbers_of, restored, with_leaf
from assay.verify.comparison.corruptions import Numbers

_SMALLEST, _LARGEST = -30.0, 4.0  # powers of two between which a gain is looked for
_STEPS = 8


@dataclass(frozen=True)
class Kept:
    """A call, its arguments copied, and what is corrupted: the largest array of the value under test."""

    call: Call
    actual: Slot
    leaf: Leaf


@dataclass(frozen=True)
class Replayed:
    """What one comparison lets through."""

    passed: dict[str, bool] = field(default_factory=dict)
    """By corruption: whether the comparison passed all the same."""
    gain: float | None = None
    """The smallest common relative error that it notices; infinite if none up to 16, None for integers."""


def replay(kept: Kept) -> Replayed | None:
    """All corruptions of one comparison; None where it doesn't pass again as it was, and so can't be judged."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        right = kept.leaf.numbers
        if not _passes(kept, restored(right, kept.leaf.value)):
            return None
        passed = {}
        for name, wrong in corruptions(right, kept.leaf.whole):
            stored = restored(wrong, kept.leaf.value)
            numbers = numbers_of(stored)
            if numbers is not None and counts(name, numbers, right):
                passed[name] = _passes(kept, stored)
        return Replayed(passed, None if kept.leaf.whole else _minimum_detectable_error(kept, right))


def _minimum_detectable_error(kept: Kept, right: Numbers) -> float:
    """By bisection: a check by tolerance that rejects a gain also rejects all larger ones."""

    def passes(power: float) -> bool:
        return _passes(kept, restored(right * (1 + 2.0**power), kept.leaf.value))

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
    """What a comparison that didn't raise has answered; what a function of the user's returns counts if it's a bool."""
    if kind == "elements":
        return bool(answer.all())
    if kind == "either":
        return bool(answer) if isinstance(answer, bool | np.bool_) else True
    return True if kind == "raises" else bool(answer)
