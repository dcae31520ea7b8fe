"""The result of a trial, with a `Failure` if the contract was provably broken."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch

from assay.golden.errors import Undecided
from assay.verify.cases.case import Case
from assay.verify.comparison.judge import Tolerance
from assay.verify.findings import Failure


@dataclass(frozen=True)
class Result:
    """The result of one trial.

    ``histogram`` counts the judged elements by ratio (`error_map.histogram`). ``ratio`` has the ratio of each element
    of the output that a failure names, float64, NaN for unjudged elements. ``sampled`` says what was judged of a case
    that is too large to judge whole. ``judged_of`` counts the judged elements by output, ``left_out`` the others by
    output and reason.
    """

    case: Case
    failure: Failure | None = None
    worst: float = 0.0
    judged: int = 0
    nonzero: int = 0
    unjudged: int = 0
    unresolved: int = 0
    judged_of: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    histogram: tuple[int, ...] = ()
    sampled: str = ""
    outputs: tuple[torch.Tensor, ...] = ()
    ratio: torch.Tensor | None = field(default=None, repr=False)
    tolerances: tuple[Tolerance, ...] = field(default=(), repr=False)


UNDECIDED = "where rounding decides what the reference computes"
"""A reason why elements aren't judged; the line that asks stands behind it."""


def undecided(case: Case, error: Undecided) -> Result:
    """Return a result without judged elements: the reference branches on a comparison that its numbers leave
    undecided."""
    left_out: Counter[tuple[str, str]] = Counter()
    for tensor in case.signature.returns:
        left_out[tensor.name, f"{UNDECIDED} ({error.line})"] = math.prod(case.shape(tensor))
    return Result(case, unjudged=left_out.total(), left_out=left_out)


def by_reason(left_out: Counter[tuple[str, str]]) -> dict[str, int]:
    """Return the number of unjudged elements of all outputs, by reason."""
    reasons: Counter[str] = Counter()
    for (_, reason), count in left_out.items():
        reasons[reason] += count
    return dict(reasons)
