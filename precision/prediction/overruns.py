"""Static scales over sequences that they weren't taken from, whose values may overrun them and are clipped.

A static scale is that of the largest magnitude at hand. Other sequences that exceed it are clipped at one value at
least, which makes an error as large as they exceed it by, beside those that rounding makes at all their values. The
squares of both are compared, as if the output hung on all values alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from assay.precision.observation.observing import Observed
from assay.precision.prediction.perturbations import Key
from assay.precision.sampling import OtherSequences
from assay.precision.schemes import Quantizer
from assay.precision.schemes.fitting import fit_values


def overruns(observed: Observed, others: OtherSequences, shares: Mapping[Key, float]) -> np.ndarray | float:
    """What clipping adds in each draw of ``others``, [D], to an error of which each key has a share, over it."""
    found: np.ndarray | float = 0.0
    for key, share in shares.items():
        if key not in others.overrun:
            others.overrun[key] = _at(observed, others, key)
        found = found + share * others.overrun[key]
    return found


def _at(observed: Observed, others: OtherSequences, key: Key) -> np.ndarray | float:
    """Over the error of one key; of a cache, whose keys and values have a scale each, the larger."""
    site, (kind, stored, transform) = key
    if kind not in ("values", "queries") or not isinstance(stored, Quantizer) or transform != "none":
        return 0.0
    if stored.per == "element" or (stored.dynamic and stored.scale_format != "float8_e4m3fn"):
        return 0.0
    found: np.ndarray | float = 0.0
    for (name, part), seen in observed.statistics.items():
        if name != site or (part == "queries") != (kind == "queries") or not seen.rows or seen.experts:
            continue
        tops, moments = torch.cat(seen.tops), seen.moments()
        if len(tops) != observed.sequences or not bool((tops.isfinite() & (tops > 0)).all()):
            continue
        # The largest of a sequence is in no sample, and of floats it is rounded most.
        rows, largest = moments.rows, tops[:, None].expand(-1, moments.rows.shape[-1])
        change, change_at_top = (fit_values(stored, moments)(x) - x for x in (rows, largest))
        squares = float(change.square().sum(1).mean()) * seen.count / len(tops) + float(change_at_top.square().mean())
        if squares > 0:
            found = np.maximum(found, others.overrunning(tops.double().numpy(force=True)) / squares)
    return found
