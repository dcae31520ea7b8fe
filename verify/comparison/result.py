"""The result of a trial, with a `Failure` if the contract was provably broken.

What became of an element without a verdict of its own:

- *unjudged*: the contract doesn't restrict it; ``left_out`` counts these by output and reason, ``unjudged`` in total.
- *undecided*: unjudged for one reason, `UNDECIDED`: it hangs on a choice that rounding leaves open, and neither is it
  explained by one of the admissible answers that were tried, nor were all tried (`resolution`).
- *unresolved*: judged and not broken, but so near the limit that the golden's own radius leaves open on which side.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from assay.golden.errors import Undecided
from assay.verify.cases.case import Case
from assay.verify.comparison.judge import Tolerance
from assay.verify.findings import Failure


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of judged elements: in total, those whose golden isn't zero, those that the golden left ``unresolved``, by
    output (``judged_of``) and by ratio (``histogram``, see `error_map.histogram`); ``worst`` is the largest ratio.

    ``left_out`` counts the elements that weren't judged, by output and reason.
    """

    worst: float = 0.0
    judged: int = 0
    nonzero: float = 0
    unresolved: int = 0
    judged_of: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    histogram: tuple[int, ...] = ()

    @property
    def unjudged(self) -> int:
        """The number of elements that weren't judged."""
        return self.left_out.total()

    def counting(self, other: Counts) -> Self:
        """Return the same record with the counts of ``other`` added."""
        names = ("judged", "nonzero", "unresolved", "judged_of", "left_out")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        worst, histogram = max(self.worst, other.worst), summed(self.histogram, other.histogram)
        return replace(self, worst=worst, histogram=histogram, **sums)


def summed(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sum of two histograms; an empty one counts nothing."""
    if not first or not second:
        return first or second
    return tuple(map(sum, zip(first, second, strict=True)))


@dataclass(frozen=True)
class Result(Counts):
    """The result of one trial.

    ``ratio`` has the ratio of each element of the output that a failure names, float64, NaN for unjudged elements.
    ``sampled`` says what was judged of a case that is too large to judge whole. ``own_choices``: where the reference
    leaves a choice open, the kernel made another than the likeliest. ``parts`` are the results of the parts of a case
    that was judged by samples.
    """

    case: Case
    failure: Failure | None = None
    sampled: str = ""
    own_choices: bool = False
    outputs: tuple[torch.Tensor, ...] = ()
    ratio: torch.Tensor | None = field(default=None, repr=False)
    tolerances: tuple[Tolerance, ...] = field(default=(), repr=False)
    parts: tuple[Result, ...] = field(default=(), repr=False)


UNDECIDED = "where rounding decides what the reference computes"
"""A reason why elements aren't judged; the line of the reference that compares is appended."""
UNRESOLVED = "within the golden's own radius of the limit"
"""Why judged elements are neither surely right nor wrong."""


def undecided(case: Case, error: Undecided) -> Result:
    """Return a result without judged elements: the reference branches on a comparison that its numbers leave
    undecided."""
    reason = f"{UNDECIDED} ({error.line})"
    return Result(
        case,
        left_out=Counter({(tensor.name, reason): math.prod(case.shape(tensor)) for tensor in case.signature.returns}),
    )


def by_reason(left_out: Counter[tuple[str, str]]) -> dict[str, int]:
    """Return the number of unjudged elements of all outputs, by reason."""
    reasons: Counter[str] = Counter()
    for (_, reason), count in left_out.items():
        reasons[reason] += count
    return dict(reasons)
