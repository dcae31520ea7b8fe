"""What trials show: a `Result` for each, with a `Failure` where the contract was provably broken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from assay.verify.inputs.cases import Case
from assay.verify.judge import Tolerance


@dataclass(frozen=True)
class Failure:
    """A proved violation: what the kernel gave, what is right, and how far off it may be."""

    kind: str
    case: Case
    message: str
    output: str = ""
    index: tuple[int, ...] = ()
    got: float | None = None
    golden: float | None = None
    radius: float | None = None
    ratio: float | None = None
    violations: int = 0
    elements: int = 0


@dataclass(frozen=True)
class Result:
    """What one trial showed.

    ``histogram`` counts the judged elements by ratio (`assay.verify.picture.histogram`). ``ratio`` is that of each
    element of the output that a failure names, float64, NaN where it isn't judged.
    """

    case: Case
    failure: Failure | None = None
    worst: float = 0.0
    judged: int = 0
    nonzero: int = 0
    unjudged: int = 0
    unresolved: int = 0
    histogram: tuple[int, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()
    ratio: torch.Tensor | None = field(default=None, repr=False)
    tolerances: tuple[Tolerance, ...] = field(default=(), repr=False)
