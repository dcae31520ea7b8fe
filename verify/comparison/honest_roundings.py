"""The ways in which an honest kernel may round the stages of a contract, and what its results then are.

A stage is rounded to nearest or left as it is. Of a stage value z the error of rounding is a function of z, not of
chance: over values spread evenly within the gaps of the format its mean is zero, over few values (silu of integers),
or over those that lie just beside a number of the format (silu(x) just below x), it is not, and is the same in each
call with fresh data. So it is computed: the definition is evaluated again with z rounded to nearest (`NearestBalls`).

A kernel's z' = z + e, |e| <= w, w being the radius of z under the whole contract (`ends`: sums with their worst case,
for a sum that errs by chance alone crosses a midpoint beside which z lies in one direction only). It is rounded to a
number between round(z - w) and round(z + w): where these are the same, as for nearly all z, no freedom is left; else
what lies between them is free, and goes through the rest of the definition as a radius.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from assay.formats.format import Format
from assay.formats.rounding import round_to
from assay.golden.arithmetic import BallArithmetic, Real, RoundingModel
from assay.golden.arithmetic.ball import Ball

Tensor = torch.Tensor
Ends = tuple[Tensor, Tensor]

WEIGHTS = ("rounded", "rounded and added up", "normalised")
"""How the stage "probabilities" of attention may be rounded: before the division, and the sum of the weights taken of
what was rounded or of what was not; or after it."""
_MOST_STAGES = 3  # of which every combination is tried
_WEIGHTS_STAGE = "probabilities"


@dataclass(frozen=True)
class Way:
    """Which stages a kernel rounds, each to its format; ``weights`` is how, of attention's."""

    stages: Mapping[str, Format]
    weights: str = WEIGHTS[0]


def ways(model: RoundingModel) -> Iterator[Way]:
    """What kernels that keep a contract of this model may do with its stages, the one that rounds none left out.

    Stages at least as fine as the arithmetic round nothing beyond it. Of many stages: all of them, and each alone.
    """
    coarse = {name: format for name, format in model.stages.items() if format.precision < model.compute.precision}
    sizes = range(1, len(coarse) + 1) if len(coarse) <= _MOST_STAGES else (1, len(coarse))
    for size in sizes:
        for names in itertools.combinations(coarse, size):
            for weights in WEIGHTS if _WEIGHTS_STAGE in names else WEIGHTS[:1]:
                yield Way({name: coarse[name] for name in names}, weights)


class NearestBalls(BallArithmetic):
    """Balls under a ``model`` without stages, whose stages are rounded to nearest in a ``way``.

    ``ends`` are those of each stage value in turn, found before by another evaluation; where left out, they are those
    of the balls themselves, and ``found``. ``rounds`` tells afterwards whether anything was rounded.
    """

    def __init__(self, model: RoundingModel, way: Way, ends: Sequence[Ends] | None = None) -> None:
        super().__init__(model)
        self.way, self.found, self.rounds = way, list[Ends](), False
        self._ends = None if ends is None else iter(ends)

    def stores(self, stage: str) -> bool:
        return stage in self.way.stages

    def round(self, x: Ball, stage: str) -> Ball:
        format = self.way.stages.get(stage)
        return x if format is None else self._nearest(x, format)

    def _nearest(self, x: Ball, format: Format) -> Ball:
        if self._ends is None:
            self.found.append((round_to(x.mid - x.radius, format), round_to(x.mid + x.radius, format)))
            low, high = self.found[-1]
        else:
            low, high = next(self._ends)
        self.rounds = True
        mid = round_to(x.mid, format)
        rad = torch.maximum(high - mid, mid - low)
        if self.model.flush:
            rad = rad + torch.where(mid.abs() < format.smallest_normal, mid.abs(), 0.0)
        open_ = ~(mid.isfinite() & rad.isfinite())
        return Ball(torch.where(open_, x.mid, mid), torch.where(open_, math.inf, rad), self.model)

    def attend(self, scores: Ball, visible: Tensor, values: Ball, sinks: Ball | None) -> tuple[Ball, Ball]:
        """As the right definition has it, moved by what rounding its weights in this way does to the output.

        Weights are rounded as their exact values are: which side of a midpoint a kernel's falls on is left to chance.
        """
        out, lse = super().attend(scores, visible, values, sinks)
        format = self.way.stages.get(_WEIGHTS_STAGE)
        if format is None or not values.is_finite:
            return out, lse
        self.rounds = True
        weights, total = Real().attention_weights(scores.mid, visible, None if sinks is None else sinks.mid)
        hidden = torch.where(visible, scores.mid, -math.inf).amax(-1, keepdim=True) if scores.shape[-1] else total
        scale = torch.exp(total - hidden)  # what the division is by
        known = scale.isfinite() & (scale > 0)
        scale = torch.where(known, scale, 1.0)
        if self.way.weights == "normalised":
            moved = round_to(weights, format)
        else:
            moved = round_to(weights * scale, format) / scale
            if self.way.weights == "rounded and added up":
                other = 1 - weights.sum(-1, keepdim=True)  # a sink's share
                moved = moved / (moved.sum(-1, keepdim=True) + other).clamp(min=1e-30)
        shift = torch.where(known, (moved - weights) @ values.mid, 0.0)
        return Ball(out.mid + shift, out.rad, self.model), lse
