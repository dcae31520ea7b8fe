"""A prediction's interval: split-conformal, from assignments that were both predicted and measured.

Reference: Lei et al., Distribution-free predictive inference for regression, JASA 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Calibration", "Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One assignment's error as predicted before calibration and as measured, and how many sites it comes from."""

    predicted: float
    measured: float
    effective: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """log measured = log predicted + shift + bend * (log predicted - middle), within ``quantile`` widths.

    The width is sqrt(floor^2 + single^2 / effective): an error that comes from many sites is known better.
    """

    shift: float
    bend: float
    middle: float
    floor: float
    single: float
    quantile: float
    range: tuple[float, float]
    """Least and largest predicted error that was measured: outside, nothing is known of the interval."""

    @classmethod
    def fitted(cls, pairs: Sequence[Measured], level: float = 0.95) -> Calibration:
        """From pairs in random order: a third fits the line and the width, the rest the quantile.

        With n scores the ceil((n + 1) level)-th is taken, the largest where there are fewer than that takes.
        """
        usable = [pair for pair in pairs if pair.predicted > 0 and pair.measured > 0 and math.isfinite(pair.measured)]
        if len(usable) < 6:
            return cls(0.0, 0.0, 0.0, 0.5, 0.5, 2.0, (0.0, math.inf))
        x = np.log([pair.predicted for pair in usable])
        residual = np.log([pair.measured for pair in usable]) - x
        sites = np.array([pair.effective for pair in usable])
        fit = np.arange(len(usable)) % 3 == 0
        middle = float(np.median(x[fit]))
        bend = _slope(x[fit] - middle, residual[fit])
        shift = float(np.median(residual[fit] - bend * (x[fit] - middle)))
        floor, single = _width(residual[fit] - shift - bend * (x[fit] - middle), sites[fit])
        scores = np.abs(residual - shift - bend * (x - middle)) / np.sqrt(floor**2 + single**2 / sites)
        held = np.sort(scores[~fit])
        place = min(math.ceil((len(held) + 1) * level), len(held))
        return cls(
            shift, bend, middle, floor, single, float(held[place - 1]), (float(np.exp(x.min())), float(np.exp(x.max())))
        )

    def interval(self, predicted: float, effective: float) -> tuple[float, float, float]:
        """The calibrated error and its interval's ends."""
        if predicted <= 0 or not math.isfinite(predicted):
            return predicted, predicted, predicted
        x = math.log(predicted)
        # The line is not drawn out beyond what was measured.
        held = min(max(x, math.log(self.range[0])), math.log(self.range[1])) if self.range[0] > 0 else x
        centre = x + self.shift + self.bend * (held - self.middle)
        half = self.quantile * math.sqrt(self.floor**2 + self.single**2 / effective)
        return math.exp(centre), math.exp(centre - half), math.exp(centre + half)

    def raw(self, error: float) -> float:
        """The error before calibration that is calibrated to ``error``: bisection, for the line may be held."""
        low, high = error / 100, error * 100
        for _ in range(60):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.interval(middle, 1.0)[0] < error else (low, middle)
        return low


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Theil and Sen's slope, drawn to zero: as if one more decade-wide pair had none."""
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[second] - x[first]) > 0.5
    if apart.sum() < 3:
        return 0.0
    slopes = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    weight = float(np.square(x).sum())
    return float(np.median(slopes)) * weight / (weight + 5.0)


def _width(residual: np.ndarray, sites: np.ndarray) -> tuple[float, float]:
    """Floor and single-site width with the largest normal likelihood on a grid."""
    best = (math.inf, 0.05, 0.2)
    for floor in (0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.35, 0.6):
        for single in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
            variance = floor**2 + single**2 / sites
            cost = float((np.log(variance) + np.square(residual) / variance).sum())
            if cost < best[0]:
                best = (cost, floor, single)
    return best[1], best[2]
