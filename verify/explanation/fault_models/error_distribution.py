"""How errors spread over outputs, for whether they look like the roundings that a looser contract allows.

A contract with sums in bfloat16 is kept by nearly any kernel with small errors. Only one whose errors are as common, as
large, as much to one side, and as much alike within rows as such sums make them is said to have those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from assay.formats.rounding import next_up, round_to
from assay.verify.comparison.judge import Tolerance

Tensor = torch.Tensor

_FEW = 16  # elements, of which nothing is said
_TIMES = 2.0  # log2 of how much more common or larger errors may be
_LEAN = 0.3  # of -1 to 1
_WITHIN = 0.4  # of 0 to 1


@dataclass(frozen=True)
class ErrorDistribution:
    """Sums over elements, of errors in units of what the tighter contract allows.

    ``broken`` counts those beyond the tighter contract; ``lean`` sums the errors away from zero less those towards it,
    ``within`` the squares of their differences from their row's mean.
    """

    elements: float = 0.0
    broken: float = 0.0
    squares: float = 0.0
    sizes: float = 0.0
    lean: float = 0.0
    within: float = 0.0

    def plus(self, got: Tensor, tight: Tolerance, loose: Tolerance) -> ErrorDistribution:
        """The same with the elements of one output that the looser contract leaves more freedom."""
        y = got.double()
        right = round_to(tight.golden, tight.out)
        certain = tight.judged & y.isfinite() & right.isfinite() & (~loose.judged | (loose.inner > tight.inner))
        number = torch.where(certain, right, 1.0)
        unit = tight.inner + (next_up(number.abs(), tight.out) - number.abs()) / 2
        error = torch.where(certain, (y - right) * right.sign() / unit, 0.0)
        rows, counted = (x.reshape(-1, x.shape[-1] if x.dim() else 1) for x in (error, certain))
        mean = rows.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
        beyond = certain & ((y < tight.ends.low) | (y > tight.ends.high))
        return ErrorDistribution(
            self.elements + float(certain.sum()),
            self.broken + float(beyond.sum()),
            self.squares + float((error**2).sum()),
            self.sizes + float(error.abs().sum()),
            self.lean + float(error.sum()),
            self.within + float((torch.where(counted, rows - mean, 0.0) ** 2).sum()),
        )

    def distance(self, other: ErrorDistribution) -> float:
        """From another spread over the same elements; up to 1 they look alike, and so do those of too few elements."""
        if self.elements < _FEW:
            return 0.0
        least = 1e-24 * self.elements
        return max(
            abs(math.log2((self.broken + 1) / (other.broken + 1))) / _TIMES,
            abs(math.log2((self.squares + least) / (other.squares + least))) / (2 * _TIMES),
            abs(self.lean / (self.sizes + least) - other.lean / (other.sizes + least)) / _LEAN,
            abs(self.within / (self.squares + least) - other.within / (other.squares + least)) / _WITHIN,
        )
