"""Significant bits: how many leading bits of each element are right.

s = -log2(|y - exact| / |exact|), at most the precision of the output's format; the definition of relative precision in
D. Sohier, P. de Oliveira Castro, F. Fevotte, B. Lathuiliere, E. Petit, O. Jamond, *Confidence intervals for stochastic
arithmetic*, ACM TOMS 47 (2021), taken against the exact result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from assay.precision.formats import Format


@dataclass(frozen=True)
class Significance:
    """Significant bits of an output's elements: fewest, those that 1 % don't reach, median; of at most ``most``."""

    fewest: float
    percentile: float
    median: float
    most: int

    def __str__(self) -> str:
        return f"{self.median:.1f} of {self.most} in the median, {self.fewest:.1f} at the fewest"


def significant_bits(got: torch.Tensor, exact: torch.Tensor, out: Format) -> torch.Tensor:
    """For each element how many bits are right (float64), NaN where the exact result is zero, NaN or infinite."""
    y, exact = got.detach().cpu().double(), exact.double()
    lost = ((y - exact).abs() / exact.abs()).nan_to_num(nan=torch.inf)
    bits = (-torch.log2(lost)).clamp(0, out.precision)
    return torch.where(torch.isfinite(exact) & (exact != 0), bits, torch.nan)


def summary(bits: torch.Tensor, out: Format) -> Significance | None:
    """The distribution of `significant_bits`; None where no element has any."""
    known = bits[~bits.isnan()]
    if not known.numel():
        return None
    least, percentile, median = torch.quantile(known.flatten(), torch.tensor([0.0, 0.01, 0.5], dtype=torch.float64))
    return Significance(float(least), float(percentile), float(median), out.precision)
