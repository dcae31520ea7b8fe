"""A prediction's interval: conformal, from assignments that were both predicted and measured, each left out in turn.

References: Lei et al., Distribution-free predictive inference for regression, JASA 2018 (scores over a width that
depends on the prediction); Barber et al., Predictive inference with the jackknife+, Annals of Statistics 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

_FLOOR = 0.05
_SINGLE = 0.1
_JUMP = 0.5
_FEW_FLIPS = 30.0
"""Widths in logarithms of an error that is a square: of any assignment, of a single site beyond what cotangents leave
open, and of an error that jumps make, whose variance grows by so much over the number of flips: what one costs differs
by factors of a hundred. They only say which predictions are known better than others, as residuals of the bundled
models do (docs/evidence.md); how wide intervals are is measured."""
_NORMAL = 1.4826  # Standard deviations of normal values in the median of their magnitudes
_UNLIKELY = 0.05  # Expected flips below which an interval that knows of none holds in 95 % of all cases
_MOST = 0.5
"""Share of an error by flips above which its interval isn't promised: which tokens they happen at decides it."""
_WORTH = 0.75
"""Jumps are one parameter more, which by chance takes about a twentieth off 20 residuals: a quarter is no chance."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One assignment's error before calibration and measured, and the effective number of its sites, one within
    attention counting less than one."""

    predicted: float
    measured: float
    effective: float
    noise: float = 0.0
    """The relative variance of the prediction known beforehand: that of its cotangents."""
    flips: float | None = None
    """Expected number of routers' choices that change over the data; None: no routers are known."""

    def cause(self, power: float) -> float:
        """Return the measure of jumps: flips, where one is not too unlikely; without known routers, the size of the
        change."""
        if self.flips is None:
            return self.predicted ** (power / 2)
        return self.flips if self.flips > _UNLIKELY else 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured error = scale * (predicted^power + jumps * cause)^(1 / power), within some width.

    The second term is that of discontinuities: a router's top-k flips with a probability that grows with the size of
    the perturbation, not with its square, so small errors are larger than the quadratic form says. Its cause is the
    number of flips that the routers' margins lead to expect; of a model without known routers, predicted^(power / 2).
    The width in logarithms is the root of floor^2 + single^2 / effective + noise + (share of the second term)^2 *
    (jump^2 + 30 / flips), times the quantile: an error that comes from many sites is known better, and so is one of
    which cotangents leave little open; one of rare jumps is known worse. They may all stay away, so the interval begins
    below the first term alone, and it ends above what jumps add at most, by the largest factor that what was measured
    admits. Where flips may make most of an error by that factor nothing is promised: the level is 0. Nor is it of
    predictions above ``limit``, for a quadratic form is of small errors: none so large was measured, or was where it
    was predicted.
    """

    power: float
    """1 for an error that is a square, as a divergence is; 2 for an amplitude."""
    scale: float
    jumps: float
    floor: float
    quantile: float
    level: float = 0.95
    """The share that the interval is to hold for: less than was asked for where too few scores are there."""
    usual: float = 1.0
    """The cause of jumps over predicted^(power / 2), in the median of what was measured."""
    most: float = 0.0
    """The largest jumps whose residuals are at most a third larger than the best's: what a flip may cost."""
    unscored: int = 0
    """How many of the pairs hang on flips by what the others fit, so that the interval isn't judged by them."""
    limit: float = math.inf
    """The largest prediction, before calibration, of those measured errors that lie within the normal quantile of their
    widths, as the others fit them: what was measured of larger ones lies elsewhere, or nothing was."""

    @classmethod
    def fit(cls, pairs: Sequence[Measured], level: float = 0.95, power: float = 1.0) -> Calibration:
        """From pairs of assignments that were drawn independently, of whatever kinds there are.

        Each is judged by the curve and the floor that the others fit: its score is the distance from that curve, in
        widths; one that depends on flips by that curve has no score, for nothing is promised of its like. Of n scores
        the ceil((n + 1) level)-th is the quantile. Fewer than level / (1 - level), 19 for 95 %, promise no more than
        n / (n + 1), by the largest: that is the interval's level then. It holds as far as one pair hardly moves the
        fit, as it does a median; of any fit at all leaving out in turn promises 2 level - 1. The quantile is at least
        the normal one of that level: widths hold the standard deviation that the drawing of cotangents is known to
        leave, which no lucky set of pairs makes less.
        """
        usable = [pair for pair in pairs if 0 < pair.predicted < math.inf and pair.measured != 0]
        known = np.array([math.isfinite(pair.measured) for pair in usable], dtype=bool)
        if known.sum() < 3:
            return cls(power, 1.0, 0.0, 0.5, 2.0, 0.0)
        # Where the model broke and the prediction did not say so, no interval is wide enough.
        scores = [math.inf] * int((~known).sum())
        finite = [pair for pair in usable if math.isfinite(pair.measured)]
        usual, limit = float(ndtri((1 + level) / 2)), 0.0
        for index, pair in enumerate(finite):
            others = cls._of([*finite[:index], *finite[index + 1 :]], power)
            if not others.depends_on_flips(pair):
                scores.append(others._score(pair))
                limit = max(limit, pair.predicted if scores[-1] <= usual else 0.0)
        calibration, count = cls._of(finite, power), len(scores)
        kept = min(level, count / (count + 1))
        quantile = sorted(scores)[min(math.ceil((count + 1) * level), count) - 1] if scores else 0.0
        quantile = max(quantile, float(ndtri((1 + (kept or level)) / 2)))
        unscored = len(usable) - count
        return replace(
            calibration, quantile=quantile, level=kept, unscored=unscored, limit=limit if scores else math.inf
        )

    @classmethod
    def _of(cls, pairs: Sequence[Measured], power: float) -> Calibration:
        """Curve and floor; the floor is what the median residual has beyond the other widths."""
        predicted, measured = np.array([(pair.predicted, pair.measured) for pair in pairs]).T
        causes = np.array([pair.cause(power) for pair in pairs])
        flips = any(pair.flips is not None for pair in pairs)
        scale, jumps, most = _curve(predicted, causes, np.log(measured), power, 1.0 if flips else _WORTH)
        usual = float(np.median(causes / predicted ** (power / 2)))
        calibration = cls(power, scale, jumps, 0.0, 1.0, usual=usual, most=most if flips else jumps)
        others = [calibration._width(pair) ** 2 for pair in pairs]
        off = _NORMAL * float(np.median(np.abs(np.log(measured / scale / _jumped(predicted, causes, jumps, power)))))
        return replace(calibration, floor=math.sqrt(max(off**2 - float(np.median(others)), (_FLOOR / power) ** 2)))

    def jump_share(self, pair: Measured) -> float:
        """Return the share of error^power that jumps may make."""
        return self._share(pair, self.most)

    def depends_on_flips(self, pair: Measured) -> bool:
        """Return whether flips may make most of the error."""
        return pair.flips is not None and self.jump_share(pair) > _MOST

    def exceeds_limit(self, pair: Measured) -> bool:
        """Return whether the predicted error is larger than the errors that were predicted well."""
        return pair.predicted > self.limit

    def level_of(self, pair: Measured) -> float:
        """Return the level of a prediction's interval: 0 where it depends on flips or exceeds the limit."""
        return 0.0 if self.depends_on_flips(pair) or self.exceeds_limit(pair) else self.level

    def _share(self, pair: Measured, jumps: float) -> float:
        added = self._added(pair, jumps)
        return 1 / (1 + pair.predicted**self.power / added) if added else 0.0

    def _at(self, pair: Measured, jumps: float) -> float:
        return self.scale * (pair.predicted**self.power + self._added(pair, jumps)) ** (1 / self.power)

    def _added(self, pair: Measured, jumps: float) -> float:
        cause = pair.cause(self.power)
        return jumps * cause if cause else 0.0  # jumps of unknown size, which are infinite, add nothing without one

    def _score(self, pair: Measured) -> float:
        above = math.log(pair.measured / self._at(pair, self.jumps))
        below = math.log(self.scale * pair.predicted / pair.measured)
        return max(above / self._width(pair), below / self._width(pair, jumps=False), 0.0)

    def _width(self, pair: Measured, *, jumps: bool = True) -> float:
        """Return the width in logarithms, before the quantile, with the jumps' part or without."""
        share = self._share(pair, self.jumps) if jumps else 0.0
        wild = share**2 * (_JUMP**2 + (_FEW_FLIPS / pair.flips if pair.flips else 0.0))
        return math.sqrt(self.floor**2 + (_SINGLE**2 / pair.effective + wild) / self.power**2 + pair.noise)

    def interval(self, pair: Measured, others: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float, float]:
        """Return the calibrated error of a prediction, and its interval's ends; ``others``: how far below and above it
        other sequences may be, in logarithms, both at least zero. The errors are independent, so each end is the root
        of the sum of squares."""
        predicted = pair.predicted
        if predicted <= 0 or not math.isfinite(predicted):
            return predicted, predicted, predicted
        widths = (self._width(pair, jumps=False), self._width(pair)) if self.quantile else (0.0, 0.0)
        below, above = (math.hypot(self.quantile * width, other) for width, other in zip(widths, others, strict=True))
        low = self.scale * predicted * math.exp(-below)
        high = self._at(pair, self.most) * (math.exp(above) if above < 700 else math.inf)
        return self._at(pair, self.jumps), low, high

    def raw(self, error: float) -> float:
        """Return the error before calibration that is calibrated to ``error``, of an assignment with the usual
        jumps."""
        squared, jumps = (error / self.scale) ** self.power, self.jumps * self.usual
        root = 2 * squared / (jumps + math.sqrt(jumps**2 + 4 * squared)) if squared else 0.0
        return float(root ** (2 / self.power))


UNCALIBRATED = Calibration(power=1.0, scale=1.0, jumps=0.0, floor=0.0, quantile=0.0)
"""Leaves an error unchanged."""


def _jumped(predicted: np.ndarray, causes: np.ndarray, jumps: float, power: float) -> np.ndarray:
    errors: np.ndarray = (predicted**power + jumps * causes) ** (1 / power)
    return errors


def _curve(
    predicted: np.ndarray, causes: np.ndarray, measured: np.ndarray, power: float, worth: float
) -> tuple[float, float, float]:
    """Scale and jumps of least absolute residuals, jumps only where they leave no more than the share ``worth`` of
    them; and the most that jumps may be."""
    usual = float(np.median(causes)) or float(causes.max())
    if not usual:
        return math.exp(float(np.median(measured - np.log(predicted)))), 0.0, math.inf
    tried = [0.0, *(float(np.median(predicted**power)) / usual * np.geomspace(1e-3, 10, 25)).tolist()]
    offs = [measured - np.log(_jumped(predicted, causes, jumps, power)) for jumps in tried]
    scales = [float(np.median(off)) for off in offs]
    costs = [float(np.abs(off - scale).sum()) for off, scale in zip(offs, scales, strict=True)]
    best = int(np.argmin(costs[1:])) + 1
    best = best if costs[best] < worth * costs[0] else 0
    most = max(jumps for jumps, cost in zip(tried, costs, strict=True) if cost <= costs[best] / _WORTH)
    return math.exp(scales[best]), tried[best], most
