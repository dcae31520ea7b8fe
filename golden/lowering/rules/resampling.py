"""Linear and cubic resampling: along each axis a sum over the few places that PyTorch's weights name."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.lowering.evaluation import Evaluation
from assay.golden.lowering.rules.reductions import transposed
from assay.golden.lowering.table import rule

Tensor = torch.Tensor

_STEEPEST = 8.0  # at least the slope of a weight, linear or cubic, and of its position's four roundings


def _resampled(xp: Any, number: Any, axis: int, weights: Tensor, width: int) -> Any:
    """The numbers along one axis, by weights [n, m] of which each column has at most ``width`` neighbours.

    Positions are computed, (i + 1/2) n / m - 1/2, in the arithmetic's own precision, so each weight near the others is
    off by the steepest slope times n u; at a place's edge the neighbour's weight begins at zero, for it is continuous.
    """
    count, made = weights.shape
    order = [*(a for a in range(len(number.shape)) if a != axis), axis]
    moved = xp.rearranged(lambda a: transposed(a[0], order), [number])
    width = min(width, count)
    first = (weights != 0).to(torch.int64).argmax(0) - 1
    first = first.clamp(min=0, max=count - width)
    places = first[:, None] + torch.arange(width)
    picked = weights[places, torch.arange(made)[:, None]]
    off = torch.full_like(picked, _STEEPEST * count * max(getattr(xp, "u", 2.0**-53), 2.0**-53))
    exact = bool((weights == weights.round()).all())
    share = xp.exact(picked) if exact else xp.interval(picked - off, picked + off)
    index = xp.integers(places)
    terms = xp.rearranged(lambda a: a[0][..., index], [moved]) * share
    total = xp.sum(terms)[..., 0]
    back = [order.index(place) for place in range(len(order))]
    return xp.rearranged(lambda a: transposed(a[0], back), [total])


def _weights(count: int, made: int, corners: bool, scale: float | None, cubic: bool) -> Tensor:
    """PyTorch's own weights [n, m] in float64: what it makes of each single one."""
    if not cubic:
        return torch.ops.aten.upsample_linear1d(torch.eye(count, dtype=torch.float64)[None], [made], corners, scale)[0]
    plane = torch.eye(count, dtype=torch.float64)[None, :, :, None]
    return torch.ops.aten.upsample_bicubic2d(plane, [made, 1], corners, scale, None)[0, :, :, 0]


def _register(name: str, axes: int, cubic: bool) -> None:
    def computed(evaluation: Evaluation, x: Tensor, size: Any, corners: bool, scales: Any) -> Tensor:
        xp, number = evaluation.xp, evaluation.number(x)
        for place in range(axes):
            axis = x.ndim - axes + place
            weights = _weights(x.shape[axis], int(size[place]), corners, scales[place], cubic)
            number = _resampled(xp, number, axis, weights, 6 if cubic else 4)
        return evaluation.made(number, x.dtype)

    @rule(name)
    def by_size(evaluation: Evaluation, x: Tensor, size: Any, corners: bool, *scales: Any, **named: Any) -> Tensor:
        given = [*scales, *named.values()]
        return computed(evaluation, x, size, corners, [*given, *[None] * (axes - len(given))])

    @rule(f"{name}.vec")
    def by_factor(evaluation: Evaluation, x: Tensor, size: Any, corners: bool, factors: Any) -> Tensor:
        sizes = size or [int(n * f) for n, f in zip(x.shape[-axes:], factors, strict=True)]
        return computed(evaluation, x, sizes, corners, list(factors) if factors else [None] * axes)


_register("upsample_linear1d", 1, False)
_register("upsample_bilinear2d", 2, False)
_register("upsample_trilinear3d", 3, False)
_register("upsample_bicubic2d", 2, True)
