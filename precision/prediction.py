"""The error of any assignment from the products of one backward pass, and how far it may be off.

For each (site, scheme) there are two estimates of the same quadratic form. The *direct* one is the mean over
sequences of t^2, t the product summed over all tokens and features: right for any change, but of N sequences it has a
relative standard error of about sqrt(2 / N). The *spread* one squares every term by itself and sums: right for
rounding errors that are independent of one another, which most are, and nearly without noise. So what is used is the
spread one, times a factor for its site and one for its scheme as far as two halves of the data agree on them, and the
direct one where it differs by more than chance allows (saturation, flushed values, anything with a bias). Cross terms
come from the products' correlations where they are larger than chance makes them, as for two sites that change the
same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Key", "Prediction", "Products", "QuadraticForm"]

Key = tuple[str, object]
"""A site and a part of what a scheme does there."""

_DIFFERS = 3.5
"""Standard errors beyond which the direct estimate is believed: one of 2,000 by chance."""
_CORRELATES = 4.0
"""Multiples of 1 / sqrt(N) beyond which a correlation is."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted error with its 95 % interval, in the metric's unit."""

    error: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Products:
    """What the backward passes gave, float64: rows are the keys."""

    keys: tuple[Key, ...]
    sums: np.ndarray
    """[keys, N]: t of every sequence, over the rows that were looked at."""
    squares: np.ndarray
    """[keys, 2]: sums of squares of all terms, of even and of odd batches."""
    halves: np.ndarray
    """[N]: 0 or 1, whether a sequence stood in an even or an odd batch."""
    thinning: np.ndarray
    """[keys]: one row of this many was looked at."""


class QuadraticForm:
    """The expected sum of squares (v . dz)^2 over the calibration data for an assignment."""

    def __init__(self, products: Products) -> None:
        self._row = {key: row for row, key in enumerate(products.keys)}
        self._sums = products.sums
        self.diagonal = _diagonal(products)
        norms = np.sqrt(np.square(products.sums).sum(1))
        with np.errstate(invalid="ignore", divide="ignore"):
            self._directions = np.where(norms[:, None] > 0, products.sums / norms[:, None], 0.0)

    def __contains__(self, key: Key) -> bool:
        return key in self._row

    def of(self, keys: Sequence[Key]) -> float:
        """The form for sites that take these schemes; infinite where one makes infinities or NaN."""
        rows = [self._row[key] for key in keys if key in self._row]
        if not rows:
            return 0.0
        diagonal = self.diagonal[rows]
        if not np.isfinite(diagonal).all():
            return math.inf
        return float(max(diagonal.sum() + self._cross(rows, np.sqrt(diagonal)), 0.0))

    def effective(self, keys: Sequence[Key]) -> float:
        """How many sites the error comes from: (sum of contributions)^2 / sum of their squares, at least 1."""
        parts = self.diagonal[[self._row[key] for key in keys if key in self._row]]
        squares = float(np.square(parts).sum())
        return max(float(parts.sum()) ** 2 / squares, 1.0) if squares > 0 and math.isfinite(squares) else 1.0

    def _cross(self, rows: Sequence[int], roots: np.ndarray) -> float:
        directions = self._directions[rows]
        correlations = directions @ directions.T
        np.fill_diagonal(correlations, 0.0)
        correlations[np.abs(correlations) < min(_CORRELATES / math.sqrt(max(directions.shape[1], 1)), 0.9)] = 0.0
        return float(roots @ correlations @ roots)


def _diagonal(products: Products) -> np.ndarray:
    """The form's diagonal, [keys]: sums over the calibration data of expected squares."""
    squared = np.square(products.sums)
    direct, spread = squared.sum(1), products.squares.sum(1)
    count = max(products.sums.shape[1], 1)
    known = (spread > 0) & (direct > 0) & np.isfinite(direct) & np.isfinite(spread)
    found = np.where(np.isfinite(direct) & np.isfinite(spread), spread, np.inf)
    if not known.any():
        return found
    ratio = np.log(np.where(known, direct, 1.0) / np.where(known, spread, 1.0))
    error = np.where(known, squared.std(1) * math.sqrt(count) / np.where(known, direct, 1.0), np.inf)
    halves = []
    for half in (0, 1):
        part = squared[:, products.halves == half].sum(1)
        both = known & (part > 0) & (products.squares[:, half] > 0)
        halves.append(
            np.where(both, np.log(np.where(both, part, 1.0) / np.where(both, products.squares[:, half], 1.0)), np.nan)
        )
    expected = np.zeros_like(ratio)
    for place in (0, 1):  # a factor for each site, then one for each scheme of what remains
        groups: dict[object, list[int]] = {}
        for row in np.flatnonzero(known):
            groups.setdefault(products.keys[row][place], []).append(int(row))
        factors = _reliable(groups, ratio - expected, [half - expected for half in halves])
        for name, rows in groups.items():
            expected[rows] += factors[name]
    believed = known & (np.abs(ratio - expected) > _DIFFERS * error) & (count >= 8)
    # Independent errors grow with the number of rows, those of a common bias with its square.
    thin = products.thinning
    biased = thin * np.minimum(direct, spread) + np.square(thin) * np.maximum(direct - spread, 0.0)
    return np.where(believed, biased, np.where(known, thin * spread * np.exp(expected), found))


def _reliable(
    groups: Mapping[object, Sequence[int]], whole: np.ndarray, halves: Sequence[np.ndarray]
) -> dict[object, float]:
    """Each group's median log ratio, shrunk by how far those of the two halves of the data vary together."""
    medians = {name: float(np.median(whole[rows])) for name, rows in groups.items()}
    pairs = np.array(
        [
            [np.nanmedian(half[rows]) if np.isfinite(half[rows]).any() else np.nan for half in halves]
            for rows in groups.values()
        ]
    )
    pairs = pairs[np.isfinite(pairs).all(1)]
    if len(pairs) < 3:
        return dict.fromkeys(groups, 0.0)
    # A group's factor is signal + noise; the halves share the signal. About zero, for a ratio of one is expected.
    signal = max(float((pairs[:, 0] * pairs[:, 1]).mean()), 0.0)
    noise = float(np.square(pairs[:, 0] - pairs[:, 1]).mean()) / 4
    share = signal / (signal + noise) if signal + noise > 0 else 0.0
    return {name: share * median for name, median in medians.items()}
