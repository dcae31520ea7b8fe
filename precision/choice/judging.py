"""A choice judged on data that it wasn't made on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from assay.precision.sampling import MeasuredError

_SURE = 1.645
"""Standard errors that a budget of the error is kept by: 95 % of normal ones lie below."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Measures on held-out data what was chosen on other data."""

    measure: Callable[[Mapping[str, str]], MeasuredError]
    """An assignment to its error over the held-out data."""
    sampling: float
    """Standard error of the logarithm of the one error over the other, by the sequences that either is over."""

    @property
    def margin(self) -> float:
        """What a budget of the error is divided by for the choice, so that the held-out error mostly keeps it too."""
        return math.exp(_SURE * self.sampling)
