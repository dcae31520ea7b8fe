"""`Golden`: a certified result, read off the numbers of an arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Ball
from assay.golden.arithmetic.double_double import DoubleDouble
from assay.golden.arithmetic.exact import parts_of
from assay.golden.arithmetic.model import RADIUS_ROUNDING


@dataclass(frozen=True)
class Golden:
    """A certified result: |value + low - exact| <= radius holds for every element.

    - ``value``: a float64 tensor of the result's shape, on the CPU; of a choice, such as top-k ids, integers;
    - ``radius``: a float64 tensor of that shape, in the units of ``value`` (not relative to it); zero for choices;
    - ``low``: None, or where more digits than float64's were asked for, a float64 tensor: the error of ``value``.

    An infinite radius certifies nothing of a finite value. Where ``value`` is NaN or infinite, its class is the answer,
    and no radius measures a distance: zero says that the class is proven, an infinite one that float64 gave it (which
    may be wrong only where numbers near the end of its own range, beyond about 1e150, made the evaluation overflow).
    """

    value: torch.Tensor
    radius: torch.Tensor
    low: torch.Tensor | None = None

    @property
    def rest(self) -> torch.Tensor:
        """``low`` as a tensor of float64."""
        return torch.zeros_like(self.radius) if self.low is None else self.low


def golden_of(result: Any) -> Golden:
    """Return the golden of a result: a `Ball`, a `DoubleDouble`, an array of Arb balls, or integers (choices)."""
    if isinstance(result, np.ndarray):
        if result.dtype != object:
            return golden_of(torch.as_tensor(result))
        value, low, radius = parts_of(result)
        return Golden(value, radius * RADIUS_ROUNDING, low)
    if isinstance(result, torch.Tensor):
        return Golden(result, torch.zeros(result.shape, dtype=torch.float64))
    value = result.mid if isinstance(result, Ball) else result.high
    radius = torch.broadcast_to(result.radius, value.shape) * RADIUS_ROUNDING
    if isinstance(result, DoubleDouble):
        finite = math.isfinite(radius.sum().item())
        return Golden(value, radius if finite else _without_nan(radius), result.rest)
    if isinstance(result, Ball) and result.own is not None:  # a number within ``own``, or none
        value = torch.where(result.lost & result.own.isinf(), math.nan, value)
        radius = torch.where(result.lost, result.own * RADIUS_ROUNDING, radius)
    return Golden(value, _without_nan(radius))


def _without_nan(radius: torch.Tensor) -> torch.Tensor:
    """Replace NaN by infinity, which certifies nothing either."""
    return radius.nan_to_num_(nan=math.inf, posinf=math.inf)
