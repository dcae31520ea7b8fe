"""The error of any assignment from the products of one backward pass, and its uncertainty.

For each (site, scheme) there are two estimates of the same quadratic form. The *direct* one is the mean over sequences
of t^2, t the product summed over all tokens and features: right for any change, but of N sequences it has a relative
standard error of about sqrt(2 / N). The *spread* one squares every term by itself and sums, a term being that of a
whole row, a token's values or a weight's output channel, since errors are correlated within one (where a large value
makes small ones vanish); right where rows are independent, which most are, and of little noise. So the estimate is the
spread one, times a factor for its site and one for its scheme as far as two halves of the data agree on them, and times
the ratio of the direct one to it, the mean of t^2 over the sum of squares of its terms, where that differs by more than
chance allows (saturation, flushed values, anything with a bias). Cross terms come from the products' correlations where
they are larger than chance makes them, as for two sites that change the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from assay.precision.prediction.perturbations import Key


def profiles(keys: Sequence[Key], squares: np.ndarray) -> np.ndarray:
    """Return each row's share of every sequence, [keys, N], from its mean squares over cotangents, [keys, N].

    A sum of squares of one cotangent's products is, for every sequence, its expected value times a factor like a
    chi-square over its degrees of freedom, which spreads by 1 or more where few rows dominate the error, as within
    attention. The text's part of a row's departure from a flat profile is common to the schemes of its site: the
    derivatives are the same, and the sizes of the changes follow those of the stored values. So a row's profile is the
    mean over cotangents and over all schemes of its site's weight, or of its values. A row of zeros has a flat one.
    """
    finite = np.where(np.isfinite(squares), squares, 0.0)
    totals = finite.sum(1, keepdims=True)
    shares = np.divide(finite, totals, out=np.full_like(finite, 1 / max(finite.shape[1], 1)), where=totals > 0)
    alike: dict[tuple[str, str], list[int]] = {}
    for row, (site, perturbation) in enumerate(keys):
        alike.setdefault((site, perturbation[0]), []).append(row)
    for rows in alike.values():
        shares[rows] = shares[rows].mean(0)
    return shares


def cotangents_of(again: np.ndarray) -> np.ndarray:
    """Return the number of cotangents of each row, [rows], from the further ones' values, [rows, C, N]: one where these
    are zero."""
    return np.where(again.any((1, 2)), again.shape[1] + 1.0, 1.0)


def pooled(first: np.ndarray, again: np.ndarray | None, power: float) -> np.ndarray:
    """Concatenate sums (power 0.5) or squares (1) of several cotangents [rows, N], [rows, C, N] to [rows, (C + 1) N],
    over the number of cotangents of a row to that power, so that squares add up to those of one."""
    if again is None:
        return first
    count = cotangents_of(again)[:, None]
    whole = np.concatenate([first, again.reshape(len(first), -1)], 1)
    scaled: np.ndarray = whole / count**power
    return scaled


_DIFFERS = 5.0
"""Standard errors beyond which the direct estimate is believed: of 10^4 pairs of site and scheme none is by chance if
products are normal (6e-7 each); they have heavier tails, so less would not do."""
_FEW = 8
"""Samples below which neither biases nor correlations can be distinguished from chance: the error of their mean square
is half."""
_CORRELATES = 4.0
"""Multiples of a correlation's standard error 1 / sqrt(N) beyond which it is: by chance of 10^4 pairs less than one."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted error with its interval, in the metric's unit."""

    error: float
    low: float
    high: float
    level: float = 0.95
    """The share of assignments that the interval is to hold for: less than 95 % where too few were measured, 0 where
    routers' flips may make most of the error or it is larger than the errors that calibrated the interval."""


@dataclass(frozen=True, slots=True)
class Products:
    """The result of the backward passes, float64: rows are the keys."""

    keys: tuple[Key, ...]
    sums: np.ndarray
    """[keys, N]: t of every sequence; with one row in n sampled, times the root of n."""
    squares: np.ndarray
    """[keys, N]: the sum of squares of the terms of each, times n."""
    sampling: np.ndarray
    """[keys]: the largest n."""
    variance: np.ndarray
    """[keys]: the sampling variance of a form's diagonal."""
    again: tuple[np.ndarray, np.ndarray] | None = None
    """Sums and squares, [keys, C, N], under C further cotangents, zero for keys that had none; None: none had."""


class QuadraticForm:
    """The expected sum of squares (v . dz)^2 over the calibration data for an assignment."""

    def __init__(self, products: Products) -> None:
        self._row = {key: row for row, key in enumerate(products.keys)}
        more = products.again or (None, None)
        units = _units(products.sums, products.squares)
        sums, squares = pooled(products.sums, more[0], 0.5), pooled(products.squares, more[1], 1.0)
        self.diagonal = _diagonal(products, squares, _units(sums, squares))
        with np.errstate(invalid="ignore", over="ignore"):
            totals = squares.sum(1)
            shares = np.divide(squares, totals[:, None], out=np.zeros_like(squares), where=totals[:, None] > 0)
            rows = np.divide(products.variance, totals**2, out=np.zeros_like(totals), where=totals > 0)
            self._standard_error = self.diagonal * np.sqrt(np.square(shares).sum(1) + rows)
        each = squares.reshape(len(squares), -1, products.squares.shape[1]).sum(1)
        self._profiles = profiles(products.keys, each)
        units[(units != 0).sum(1) < _FEW] = 0.0
        lengths = np.sqrt(np.square(units).sum(1, keepdims=True))
        self._directions = np.divide(units, lengths, out=np.zeros_like(units), where=lengths > 0)

    @property
    def keys(self) -> Collection[Key]:
        """Keys of all schemes at sites that a gradient reached."""
        return self._row.keys()

    def of(self, keys: Sequence[Key]) -> float:
        """Return the form for these keys; infinite where one makes infinities or NaN."""
        rows, diagonal = self._parts(keys)
        if not rows:
            return 0.0
        if not np.isfinite(diagonal).all():
            return math.inf
        directions, roots = self._directions[rows], np.sqrt(diagonal)
        correlations = directions @ directions.T
        np.fill_diagonal(correlations, 0.0)
        least = min(_CORRELATES / math.sqrt(max(directions.shape[1], 1)), 0.999)
        correlations[np.abs(correlations) < least] = 0.0
        return float(max(diagonal.sum() + float(roots @ correlations @ roots), 0.0))

    def corrected(self, keys: Sequence[Key], squares: float) -> QuadraticForm:
        """Return the form that gives the measured squares of these keys together; infinite for what is not finite.

        The difference is shared among the uncorrected ones, in proportion to their parts, which keep at least a
        twentieth.
        """
        rows = np.array([self._row[key] for key in keys if key in self._row], dtype=np.intp)
        open_rows = rows[self._standard_error[rows] > 0] if len(rows) else rows
        rows = open_rows if len(open_rows) else rows
        parts = self.diagonal[rows]
        if not len(rows) or not np.isfinite(parts).all() or not parts.sum() > 0:
            return self
        change = squares - self.of(keys) if math.isfinite(squares) else math.inf
        other = copy(self)
        other.diagonal, other._standard_error = self.diagonal.copy(), self._standard_error.copy()
        other.diagonal[rows] = np.maximum(parts * (1 + change / parts.sum()), parts / 20)
        other._standard_error[rows] = 0.0
        return other

    def effective(self, keys: Sequence[Key], spread: Callable[[Key], float] = lambda key: 1.0) -> float:
        """Return the effective number of sites of an error: (sum of contributions)^2 / sum of (spread *
        contribution)^2; ``spread``: the relative uncertainty of a contribution."""
        _, parts = self._parts(keys)
        if not len(parts) or not np.isfinite(parts).all() or not parts.sum() > 0:
            return 1.0
        wide = np.array([spread(key) for key in keys if key in self._row])
        return float(parts.sum() ** 2 / np.square(wide * parts).sum())

    def noise(self, keys: Sequence[Key]) -> float:
        """Return the relative variance of the form by the random cotangents and rows: of n samples s, those of every
        sequence under each cotangent, at most sum s^2 / (sum s)^2 of a part that nothing has corrected, and the rows'
        own."""
        rows, parts = self._parts(keys)
        if not np.isfinite(parts).all() or not parts.sum() > 0:
            return 0.0
        return float(np.square(self._standard_error[rows]).sum() / parts.sum() ** 2)

    def shares(self, keys: Sequence[Key]) -> dict[Key, float]:
        """Return the share of each key in the form, without cross terms; empty where the form is zero or not finite."""
        _, parts = self._parts(keys)
        if not np.isfinite(parts).all() or not parts.sum() > 0:
            return {}
        return dict(zip((key for key in keys if key in self._row), (parts / parts.sum()).tolist(), strict=True))

    def profile(self, keys: Sequence[Key]) -> np.ndarray:
        """Return each sequence's part of the form, [N], without cross terms."""
        rows, parts = self._parts(keys)
        added: np.ndarray = np.where(np.isfinite(parts), parts, 0.0) @ self._profiles[rows]
        return added

    def _parts(self, keys: Sequence[Key]) -> tuple[list[int], np.ndarray]:
        rows = [self._row[key] for key in keys if key in self._row]
        return rows, self.diagonal[rows]


def _units(sums: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return products over the root of the sum of squares of their terms, [keys, N]: of variance one for independent
    terms, so that every sequence has the same weight, however sensitive the output is there."""
    usable = (squares > 0) & np.isfinite(squares) & np.isfinite(sums)
    return np.divide(sums, np.sqrt(squares), out=np.zeros_like(sums), where=usable)


def _diagonal(products: Products, squares: np.ndarray, units: np.ndarray) -> np.ndarray:
    """The form's diagonal, [keys]: sums over the calibration data of expected squares."""
    with np.errstate(invalid="ignore"):
        spread = squares.sum(1)
        finite = np.isfinite(spread) & np.isfinite(products.sums.sum(1))
    subsample = products.sampling
    squared = np.square(units)
    count = np.maximum((units != 0).sum(1), 1)
    mean = squared.sum(1) / count
    deviation = np.sqrt(np.maximum(np.square(squared).sum(1) / count - np.square(mean), 0.0))
    known = finite & (spread > 0) & (mean > 0)
    # The median of log(chi^2 / N) of N samples is about -2 / (3 N).
    ratio = np.log(np.where(known, mean, 1.0)) + 2 / (3 * count)
    error = np.where(known, deviation / np.sqrt(count) / np.where(known, mean, 1.0), np.inf)
    means = [np.where(known, _mean(squared, squared[:, half::2]), 1.0) for half in (0, 1)]
    halves = [np.log(mean.clip(1e-6)) + 4 / (3 * count) for mean in means]
    expected = np.zeros_like(ratio)
    for part in (0, 1):  # a factor for each site, then one for each part of what remains
        groups: dict[object, list[int]] = {}
        for row in np.flatnonzero(known):
            groups.setdefault(products.keys[row][part], []).append(int(row))
        factors = _reliable(groups, ratio - expected, [half - expected for half in halves])
        for name, rows in groups.items():
            expected[rows] += factors[name]
    believed = known & (np.abs(ratio - expected) > _DIFFERS * error) & (count >= _FEW)
    # Independent errors grow with the number of rows, those of a common bias with its square.
    with np.errstate(invalid="ignore"):
        biased = spread * (np.minimum(mean, 1.0) + subsample * np.maximum(mean - 1.0, 0.0))
    diagonal = np.where(believed, biased, np.where(known, spread * np.exp(expected), spread))
    return np.where(finite, diagonal, np.inf)


def _mean(squared: np.ndarray, of: np.ndarray) -> np.ndarray:
    count = (of != 0).sum(1)
    whole = squared.sum(1) / np.maximum((squared != 0).sum(1), 1)
    return np.where(count > 0, of.sum(1) / np.maximum(count, 1), whole)


def _reliable(
    groups: Mapping[object, Sequence[int]], whole: np.ndarray, halves: Sequence[np.ndarray]
) -> dict[object, float]:
    """Return each group's median log ratio, shrunk by how much those of the two halves of the data vary together."""
    medians = {name: float(np.median(whole[rows])) for name, rows in groups.items()}
    pairs = np.array([[np.median(half[rows]) for half in halves] for rows in groups.values()])
    if len(pairs) < 3:
        return dict.fromkeys(groups, 0.0)
    # A group's factor is signal + noise; the halves share the signal. About zero, for a ratio of one is expected.
    signal = max(float((pairs[:, 0] * pairs[:, 1]).mean()), 0.0)
    noise = float(np.square(pairs[:, 0] - pairs[:, 1]).mean()) / 4
    share = signal / (signal + noise) if signal + noise > 0 else 0.0
    return {name: share * median for name, median in medians.items()}
