"""What each sequence adds to a part of the form, and how far the drawing of cotangents leaves that open.

A sum of squares of one cotangent's products is, for every sequence, its expected value times a factor like a chi-square
over its degrees of freedom. Where few rows make the error, as within attention, that factor spreads by 1 or more, as
does a sum over 48 sequences of which a few count. C + 1 cotangents tell it from the spread between sequences: with
s[c, n] the squares under cotangent c, their mean over c has the variance V_n = var_c(s[c, n]) / (C + 1). So the sum of
sequences is off by sqrt(sum_n V_n), and mean_n V_n of the mean's variance over sequences is no difference between them.
What is left of that variance, its root relative to the whole, is how much of a profile's departure from a flat one is
the text's; the median over rows is used, of one cotangent for the rows that had one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np


class Profiles:
    """Of every row of the form, what its sequences add."""

    def __init__(self, squares: np.ndarray, again: np.ndarray | None = None) -> None:
        """squares: [rows, N], under the first cotangent; again: [rows, C, N], zero for rows that had no other."""
        self._squares = np.where(np.isfinite(squares), squares, 0.0)
        self._several: np.ndarray = np.zeros(len(squares), dtype=bool)
        self._doubt = np.zeros(len(squares))
        self._kept = {False: 1.0, True: 1.0}
        self.measured: dict[int, np.ndarray] = {}
        """Of rows that were measured alone: each sequence's share, [N]."""
        if again is not None:
            self._take(np.where(np.isfinite(again), again, 0.0))

    def _take(self, again: np.ndarray) -> None:
        self._several = np.asarray(again.any((1, 2)))
        if not self._several.any() or again.shape[-1] < 2:
            return
        each = np.concatenate([self._squares[self._several, None], again[self._several]], 1)
        mean, drawn = each.mean(1), each.var(1, ddof=1)
        total, between = mean.sum(1), mean.var(1, ddof=1)
        known = (total > 0) & (between > 0)
        self._squares[self._several] = mean
        noise = np.sqrt(drawn.sum(1) / each.shape[1])
        self._doubt[self._several] = np.divide(noise, total, out=np.zeros_like(total), where=total > 0)
        if known.any():
            of_text = np.maximum(between - drawn.mean(1) / each.shape[1], 0.0)[known]
            several = np.median(of_text / between[known])
            one = np.median(of_text / np.maximum(of_text + drawn.mean(1)[known], 1e-300))
            self._kept = {False: float(np.sqrt(one)), True: float(np.sqrt(several))}

    def doubts(self, rows: Sequence[int]) -> np.ndarray:
        """The relative standard error that cotangents leave in a row's sum; zero where it was measured, or where there
        was one cotangent, which can't tell."""
        found = self._doubt[list(rows)]
        found[[row in self.measured for row in rows]] = 0.0
        return found

    def known(self, rows: Sequence[int], distances: np.ndarray) -> Profiles:
        """The same with rows of which was measured what each sequence adds, [N]."""
        other, total = copy(self), float(distances.sum())
        flat = np.full(len(distances), 1 / len(distances))
        share = distances / total if np.isfinite(total) and total > 0 else flat
        other.measured = {**self.measured, **dict.fromkeys(rows, share)}
        return other

    def of(self, rows: Sequence[int], parts: np.ndarray) -> np.ndarray:
        """What each sequence adds, [N], to rows of which the whole adds these parts."""
        found = np.zeros(self._squares.shape[1])
        for row, part in zip(rows, parts, strict=True):
            if np.isfinite(part):
                found += part * self._share(row)
        return found

    def _share(self, row: int) -> np.ndarray:
        if row in self.measured:
            return self.measured[row]
        squares = self._squares[row]
        total, flat = squares.sum(), 1 / max(len(squares), 1)
        if not total > 0:
            return np.full(len(squares), flat)
        share: np.ndarray = flat + self._kept[bool(self._several[row])] * (squares / total - flat)
        return share


def pooled(first: np.ndarray, again: np.ndarray | None, power: float) -> np.ndarray:
    """Sums (of power 0.5) or squares (1) of several cotangents [rows, N], [rows, C, N] side by side, [rows, (C + 1) N],
    over the number of cotangents of a row to that power, so that squares add up to those of one."""
    if again is None:
        return first
    count = np.where(again.any((1, 2)), again.shape[1] + 1.0, 1.0)[:, None]
    whole = np.concatenate([first, again.reshape(len(first), -1)], 1)
    found: np.ndarray = whole / count**power
    return found
