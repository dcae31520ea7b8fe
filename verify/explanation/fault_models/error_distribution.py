"""The distribution of errors over outputs, compared with that of the roundings which a looser contract allows.

Almost any kernel with small errors keeps a contract with sums in bfloat16. A kernel is said to have such sums only if
its errors agree with theirs in frequency, size, direction, and variation within rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from assay.formats.rounding import next_up, round_to
from assay.verify.comparison.judge import Tolerance

Tensor = torch.Tensor

_FEW = 16  # elements; fewer are not enough to compare
_TIMES = 2.0  # tolerated log2 of the ratios of frequencies and of sizes
_LEAN = 0.3  # tolerated difference of the mean direction, which is between -1 and 1
_WITHIN = 0.4  # tolerated difference of the variation within rows, which is between 0 and 1


@dataclass(frozen=True)
class ErrorDistribution:
    """Sums over elements of errors, in units of the tighter contract's tolerance.

    ``broken`` counts the errors beyond the tighter contract; ``lean`` sums the errors with their sign, positive away
    from zero; ``within`` sums the squares of their differences from the mean of their row.
    """

    elements: float = 0.0
    broken: float = 0.0
    squares: float = 0.0
    sizes: float = 0.0
    lean: float = 0.0
    within: float = 0.0

    def plus(self, got: Tensor, tight: Tolerance, loose: Tolerance) -> ErrorDistribution:
        """Return the distribution with one more output, without elements whose tolerance is the same for both."""
        y = got.double()
        right = round_to(tight.golden, tight.out)
        certain = (
            tight.judged
            & y.isfinite()
            & right.isfinite()
            & (~loose.judged | (loose.pre_store_radius > tight.pre_store_radius))
        )
        number = torch.where(certain, right, 1.0)
        unit = tight.pre_store_radius + (next_up(number.abs(), tight.out) - number.abs()) / 2
        error = torch.where(certain, (y - right) * right.sign() / unit, 0.0)
        shape = math.prod(error.shape[:-1]), error.shape[-1] if error.dim() else 1
        rows, counted = error.reshape(shape), certain.reshape(shape)
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
        """Return the distance from another distribution over the same elements; 0 if there are too few.

        Up to 1 the distributions are taken to be alike.
        """
        if self.elements < _FEW:
            return 0.0
        least = 1e-24 * self.elements
        return max(
            abs(math.log2((self.broken + 1) / (other.broken + 1))) / _TIMES,
            abs(math.log2((self.squares + least) / (other.squares + least))) / (2 * _TIMES),
            abs(self.lean / (self.sizes + least) - other.lean / (other.sizes + least)) / _LEAN,
            abs(self.within / (self.squares + least) - other.within / (other.squares + least)) / _WITHIN,
        )
