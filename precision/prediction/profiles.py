"""What each sequence adds to a part of the form.

A sum of squares of one cotangent's products is, for every sequence, its expected value times a factor like a chi-square
over its degrees of freedom, which spreads by 1 or more where few rows make the error, as within attention. What is the
text's in a row's departure from a flat profile is what the schemes of its site have in common: the derivatives there
are the same, and the sizes of what is changed go with those of what is stored. So a row's profile is the mean of those
of its site, over cotangents and schemes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from assay.precision.prediction.perturbations import Key


def profiles(keys: Sequence[Key], squares: np.ndarray) -> np.ndarray:
    """Of every row the share of each sequence, [keys, N], from its mean squares over cotangents, [keys, N]: one profile
    for all that a site's schemes do to its weight, and one for its values. A row of nothing has a flat one."""
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
    """How many cotangents a row has, [rows], of what further ones gave, [rows, C, N]: one where they gave nothing."""
    return np.where(again.any((1, 2)), again.shape[1] + 1.0, 1.0)


def pooled(first: np.ndarray, again: np.ndarray | None, power: float) -> np.ndarray:
    """Sums (of power 0.5) or squares (1) of several cotangents [rows, N], [rows, C, N] side by side, [rows, (C + 1) N],
    over the number of cotangents of a row to that power, so that squares add up to those of one."""
    if again is None:
        return first
    count = cotangents_of(again)[:, None]
    whole = np.concatenate([first, again.reshape(len(first), -1)], 1)
    found: np.ndarray = whole / count**power
    return found
