"""A prediction's interval: split-conformal, from assignments that were both predicted and measured.

Reference: Lei et al., Distribution-free predictive inference for regression, JASA 2018.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FLOORS = (0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.35, 0.6)
_SINGLES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_JUMPS = (0.0, 0.3, 0.6, 1.0, 2.0)
"""Widths in logarithms that are tried, in steps that the 20 pairs of a fit tell apart: a standard deviation of n values
is known to 1 / sqrt(2 n). A single site always has one: pairs of many sites can't say that it has none."""
_WORTH = 0.75
"""Jumps are one parameter more, which by chance takes about a twentieth off 20 residuals: a quarter is no chance."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One assignment's error as predicted before calibration and as measured, and how many sites it comes from."""

    predicted: float
    measured: float
    effective: float
    noise: float = 0.0
    """The relative variance of the prediction that is known before anything is measured: that of its cotangents."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured error = scale * (predicted^power + jumps * predicted^(power / 2))^(1 / power), within some widths.

    The second term is that of discontinuities: a router's top-k flips with a probability that grows with the size of
    the perturbation, not with its square, so small errors are larger than the quadratic form says. The width in
    logarithms is the root of floor^2 + single^2 / effective + noise + (jump * share of the second term)^2: an error
    that comes from many sites is known better, and so is one from sites that were measured alone, which ``effective``
    leaves out; one of rare jumps is known worse.
    """

    power: float
    """1 for an error that is a square, as a divergence is; 2 for an amplitude."""
    scale: float
    jumps: float
    floor: float
    single: float
    jump: float
    quantile: float
    level: float = 0.95
    """The share that the interval is to hold for: less than was asked for where too few scores are there."""

    @classmethod
    def fitted(
        cls,
        fit: Sequence[Measured],
        *judged: Sequence[Measured],
        level: float = 0.95,
        power: float = 1.0,
    ) -> Calibration:
        """From pairs of one kind of assignments, drawn independently: a third of them fits the curve and the widths,
        the rest the quantile; and of other kinds, which are only judged. The quantile is the largest of the kinds', so
        that the interval holds for each of them.

        Of n scores the ceil((n + 1) level)-th is taken. Fewer than level / (1 - level), 19 for 95 %, promise no more
        than n / (n + 1), by the largest: that is the interval's level then.
        """
        kinds = (fit, *judged)
        usable = [[pair for pair in kind if 0 < pair.predicted < math.inf and pair.measured != 0] for kind in kinds]
        pairs = [pair for kind in usable for pair in kind]
        third = np.arange(len(pairs)) % 3 == 0
        third[len(usable[0]) :] = False
        # Where the model broke and the prediction did not say so, no interval is wide enough.
        measured = np.log([pair.measured if math.isfinite(pair.measured) else math.inf for pair in pairs])
        known = third & np.isfinite(measured) if pairs else third
        if known.sum() < 2:
            return cls(power, 1.0, 0.0, 0.5, 0.5, 0.0, 2.0, 0.0)
        predicted, sites, noise = np.array([(pair.predicted, pair.effective, pair.noise) for pair in pairs]).T
        scale, jumps = _curve(predicted[known], measured[known], power)
        share = _share(predicted, jumps, power)
        residual = measured - math.log(scale) - np.log(_jumped(predicted, jumps, power))
        floor, single, jump = _widths(residual[known], sites[known], noise[known], share[known])
        scores = np.abs(residual) / np.sqrt(floor**2 + single**2 / sites + noise + np.square(jump * share))
        of = np.repeat(np.arange(len(usable)), [len(kind) for kind in usable])
        held = [scores[(of == kind) & ~third] for kind in range(len(usable))]
        quantile = max(_quantile(each, level) for each in held if len(each))
        promised = min([level, *(len(each) / (len(each) + 1) for each in held if len(each))])
        return cls(power, scale, jumps, floor, single, jump, quantile, promised)

    def interval(
        self, predicted: float, effective: float, noise: float = 0.0, others: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[float, float, float]:
        """The calibrated error and its interval's ends; ``others``: how far below and above it other sequences may lie,
        in logarithms, both of them at least zero. Independent errors, so each end is the root of the sum of squares."""
        if predicted <= 0 or not math.isfinite(predicted):
            return predicted, predicted, predicted
        p = np.array(predicted)
        centre = self.scale * float(_jumped(p, self.jumps, self.power))
        wild = self.jump * float(_share(p, self.jumps, self.power))
        half = self.quantile * math.sqrt(self.floor**2 + self.single**2 / effective + noise + wild**2)
        below, above = (math.hypot(half, other) for other in others)
        return centre, centre * math.exp(-below), centre * (math.exp(above) if above < 700 else math.inf)

    def raw(self, error: float) -> float:
        """The error before calibration that is calibrated to ``error``."""
        squared = (error / self.scale) ** self.power
        root = 2 * squared / (self.jumps + math.sqrt(self.jumps**2 + 4 * squared)) if squared else 0.0
        return float(root ** (2 / self.power))


UNCALIBRATED = Calibration(power=1.0, scale=1.0, jumps=0.0, floor=0.0, single=0.0, jump=0.0, quantile=0.0)
"""Takes an error as it is."""


def _quantile(scores: np.ndarray, level: float) -> float:
    place = min(math.ceil((len(scores) + 1) * level), len(scores))
    return float(np.sort(scores)[place - 1])


def _jumped(predicted: np.ndarray, jumps: float, power: float) -> np.ndarray:
    found: np.ndarray = (predicted**power + jumps * predicted ** (power / 2)) ** (1 / power)
    return found


def _share(predicted: np.ndarray, jumps: float, power: float) -> np.ndarray:
    """Of error^power, what jumps make."""
    found: np.ndarray = jumps / (predicted ** (power / 2) + jumps) if jumps else np.zeros_like(predicted)
    return found


def _curve(predicted: np.ndarray, measured: np.ndarray, power: float) -> tuple[float, float]:
    """Scale and jumps of least absolute residuals; jumps only where they take a quarter off them."""
    middle = float(np.median(predicted ** (power / 2)))
    best = (math.inf, 1.0, 0.0)
    for jumps in (0.0, *(middle * np.geomspace(1e-3, 10, 25))):
        off = measured - np.log(_jumped(predicted, float(jumps), power))
        scale = float(np.median(off))
        cost = float(np.abs(off - scale).sum())
        if cost < best[0] * (_WORTH if best[2] == 0.0 else 1.0):
            best = (cost, math.exp(scale), float(jumps))
    return best[1], best[2]


def _widths(
    residual: np.ndarray, sites: np.ndarray, noise: np.ndarray, share: np.ndarray
) -> tuple[float, float, float]:
    """The widths with the largest normal likelihood on a grid."""

    def unlikelihood(widths: tuple[float, float, float]) -> float:
        floor, single, jump = widths
        variance = floor**2 + single**2 / sites + noise + np.square(jump * share)
        return float((np.log(variance) + np.square(residual) / variance).sum())

    return min(itertools.product(_FLOORS, _SINGLES, _JUMPS if share.any() else (0.0,)), key=unlikelihood)
