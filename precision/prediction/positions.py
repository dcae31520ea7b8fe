"""The error over the positions of sequences as long as those that are served.

Sequences that formats are chosen on are short; the error of a KV cache or of attention's stages may grow with the
number of keys that are seen. Long sequences run one at a time, attention in chunks of queries; nothing is fitted to
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.precision.errors import NoData
from assay.precision.metrics import Metric
from assay.precision.observation.observing import Observed
from assay.precision.observation.running import mapping
from assay.precision.prediction.simulation import simulated
from assay.precision.sampling import MeasuredError, Ratio, ratio

BASE = 128
"""The position that the last one is compared with, where sequences are longer than twice that."""
_FIRST = 8
"""The last position of the first step of a curve."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Errors over steps of half octaves of positions."""

    ends: tuple[int, ...]
    """The last position of each step, counted from 1; a step begins after the end of the one before."""
    errors: tuple[MeasuredError, ...]
    """Of the positions of each step, in the metric's unit, with what each sequence adds."""

    @property
    def base(self) -> int:
        """The end of the step that the last one is compared with: 128, or a quarter of a shorter length."""
        wanted = BASE if self.ends[-1] >= 2 * BASE else self.ends[-1] / 4
        return min(self.ends, key=lambda end: abs(math.log(end / wanted)))

    @property
    def growth(self) -> Ratio:
        """The error at the last step over that at `base`, with its 95 % interval, paired by sequences."""
        return ratio(self.errors[-1], self.errors[self.ends.index(self.base)])


def measured_over(
    model: torch.nn.Module,
    batches: Sequence[Any],
    metric: Metric,
    observed: Observed,
    assignment: Mapping[str, str],
) -> Curve:
    """The error of an assignment over positions, of batches whose sequences all have the same length.

    Two passes a batch, neither with gradients. Raises NoData where there are none or lengths differ, WrongShape for
    outputs that aren't of positions.
    """
    if not batches:
        raise NoData("expected long sequences for errors over positions, got none: give a longer text")
    distances: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for batch in batches:
        reference = simulated(model, batch, metric, observed, {})
        output = simulated(model, batch, metric, observed, assignment)
        found = metric.by_position(reference, output, mapping(batch))
        del reference, output
        for kept, each in zip((distances, weights), found, strict=True):
            kept.append(each.numpy(force=True))
    lengths = sorted({each.shape[1] for each in distances})
    if len(lengths) != 1:
        raise NoData(f"expected sequences of one length for errors over positions, got lengths {lengths}")
    ends = steps(lengths[0])
    of = np.searchsorted(ends, np.arange(1, ends[-1] + 1))
    summed = [
        np.stack([np.concatenate(kept)[:, of == step].sum(1) for step in range(len(ends))])
        for kept in (distances, weights)
    ]
    errors = (MeasuredError.of(some, by, metric.power) for some, by in zip(*summed, strict=True))
    return Curve(ends, tuple(errors))


def steps(length: int) -> tuple[int, ...]:
    """The last positions of half octaves, through 128, up to a length; none so near it that it would be a sliver."""
    found = [round(BASE * 2 ** (half / 2)) for half in range(-8, 2 * max(length, 2).bit_length())]
    return (*(end for end in found if end >= _FIRST and end * 1.2 <= length), length)
