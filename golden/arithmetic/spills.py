"""Where NaN and infinities of masked keys and queries reach: zero times NaN is NaN, and so is -inf added to infinity.

A kernel that masks by adding -inf to a score, or multiplies a masked value by its weight of zero, gives NaN where
these are not finite; one that selects doesn't. A masked score of -inf stays -inf, and reaches nothing.
"""

from __future__ import annotations

import math

import torch

from assay.golden.arithmetic.ball import Ball

Tensor = torch.Tensor


def rows_reached(scores: Ball, visible: Tensor) -> Tensor:
    """Rows [..., Sq, 1] with a masked score that is NaN or inf, or may overflow before -inf is added to it."""
    return _loose(scores, visible).any(-1, keepdim=True)


def reached(scores: Ball, visible: Tensor, values: Ball) -> Tensor:
    """Results [..., Sq, Dv] of rows that a score reaches, or that a masked value reaches which is no finite number."""
    return rows_reached(scores, visible) | _weighted(~visible, values)


def gradients_reached(
    scores: Ball, visible: Tensor, q: Ball, k: Ball, v: Ball, dout: Ball
) -> tuple[Tensor, Tensor, Tensor]:
    """Where masked pairs of rows [..., R, D] and keys [..., Sk, D] reach dq, dk and dv.

    A weight's slope P (dout v^T - delta) has the row's delta in it: one product of zero and NaN makes a row of them,
    and each row enters all of dk; a score that is none makes the row's weights so, and each enters all of dv.
    """
    of_scores = rows_reached(scores, visible)
    bad = _bad(v).any(-1)[..., None, :] | _bad(dout).any(-1, keepdim=True)
    rows = of_scores | (~visible & bad).any(-1, keepdim=True)
    keys = (~visible).transpose(-1, -2)
    dq = rows | _weighted(~visible, k)
    dk = rows.any(-2, keepdim=True) | _weighted(keys, q)
    dv = of_scores.any(-2, keepdim=True) | _weighted(keys, dout)
    return dq, dk, dv


def _loose(scores: Ball, visible: Tensor) -> Tensor:
    return ~visible & (scores.mid.isnan() | (scores.mid == math.inf) | scores.radius.isinf())


def _bad(x: Ball) -> Tensor:
    return ~x.mid.isfinite() | x.radius.isinf()


def _weighted(masked: Tensor, x: Ball) -> Tensor:
    """Where a sum over the last axis of ``masked`` with weights of zero meets what is no finite number."""
    bad = _bad(x)
    if not bool(bad.any()):
        return torch.zeros((), dtype=torch.bool)
    return masked.double() @ bad.double() > 0
