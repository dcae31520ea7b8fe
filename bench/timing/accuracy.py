"""How accurate a kernel's results are, in bits, beside how much of what its contract allows they use."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

import torch

from assay.verify.cases.case import Case
from assay.verify.comparison.oracle import Oracle, Values
from assay.verify.comparison.result import Result


@dataclass(frozen=True)
class Measuring(Oracle):
    """An oracle that adds up what it sees of errors: of all judged elements (got - golden)^2 and golden^2."""

    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def judge(
        self, case: Case, values: Values, outputs: tuple[torch.Tensor, ...], besides: Container[str] = ()
    ) -> Result:
        """As `Oracle` judges."""
        result = super().judge(case, values, outputs, besides)
        pairs = zip(case.signature.returns, outputs, strict=True)
        told = [output for tensor, output in pairs if not tensor.is_integer and tensor.name not in besides]
        for limits, got in zip(result.tolerances, told, strict=False):
            x = got.detach().cpu().double()
            known = limits.judged & limits.golden.isfinite() & x.isfinite()
            self.squares[0] += float((x - limits.golden)[known].square().sum())
            self.squares[1] += float(limits.golden[known].square().sum())
        return result

    @property
    def bits(self) -> float:
        """`bits_of` all that was judged.

        Of results rounded to nearest in a format of p bits it is between p + 0.8 and p + 1.8: errors lie evenly within
        2^-p of the lower end of a number's binade, in either direction, and their root mean square is 2^-p / sqrt(3).
        """
        return bits_of(*self.squares)


def bits_of(error: float, golden: float) -> float:
    """log2 of the root mean square of the goldens over that of the errors, of sums of their squares: infinite where
    there are no errors, and NaN where nothing was judged."""
    if not golden:
        return math.nan
    return 0.5 * math.log2(golden / error) if error else math.inf
