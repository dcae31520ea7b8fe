"""Softmax, its logarithm and log-sum-exp along the last axis, and the gradient of softmax.

A gradient is the derivative of its forward definition, which `tests/golden/test_gradients.py` checks. If kernels in use
compute it by different formulas, the definition has all of them, and a contract allows the error of any.
"""

from __future__ import annotations

import functools
import math
import operator
import sys

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.registry import Reduction, define


@define("softmax", "x[R,N] -> y[R,N]", rows="R", reduction=Reduction("N", exponentials=lambda y: 1 / y - 1))
def softmax(xp: Arithmetic[N], x: N) -> N:
    """exp(x) / sum exp(x)."""
    return xp.softmax(x)


@define(
    "log_softmax",
    "x[R,N] -> y[R,N]",
    stages={"normalizer": None},
    rows="R",
    reduction=Reduction("N", exponentials=lambda y: math.expm1(-y)),
    exempt=("flushed_subnormals",),
)
def log_softmax(xp: Arithmetic[N], x: N) -> N:
    """x - log sum exp(x). Stage "normalizer": the sum of exponentials less their maximum, and its logarithm."""
    return xp.log_softmax(x)


@define(
    "logsumexp",
    "x[R,N] -> y[R]",
    stages={"exponentials": None, "normalizer": None},
    rows="R",
    reduction=Reduction("N", exponentials=math.expm1),
    exempt=("flushed_subnormals",),
)
def logsumexp(xp: Arithmetic[N], x: N) -> N:
    """log sum exp(x). Stages: "exponentials", of x - max, and that; "normalizer", their sum and its logarithm."""
    return xp.logsumexp(x)[..., 0]


def infinite(xp: Arithmetic[N, Idx], *tensors: N) -> Idx:
    """A mask of where one of the tensors is infinite, of the shape to which they broadcast."""
    masks = [xp.above(x, sys.float_info.max) | xp.above(-x, sys.float_info.max) for x in tensors]
    return functools.reduce(operator.or_, masks)


def _row_is_finite(xp: Arithmetic[N], dx: N, *tensors: N) -> N:
    """``dx``, but in rows with an infinity, where the order of evaluation decides between infinities and NaN."""
    return xp.unspecified(lambda: infinite(xp, *tensors).any(-1)[:, None], dx)


@define("softmax_backward", "y[R,N], dy[R,N] -> dx[R,N]", rows="R", gradient_of="softmax", reduction=Reduction("N"))
def softmax_backward(xp: Arithmetic[N], y: N, dy: N) -> N:
    """y (dy - sum y dy)."""
    total = xp.sum(y * dy)
    return _row_is_finite(xp, xp.any_formula(lambda: y * (dy - total), lambda: y * dy - y * total), y, dy)


@define(
    "softmax_gradient",
    "x[R,N], dy[R,N] -> dx[R,N]",
    stages={"output": "input"},
    rows="R",
    gradient_of="softmax",
    public=False,
)
def softmax_gradient(xp: Arithmetic[N], x: N, dy: N) -> N:
    """softmax_backward of y = softmax(x) and dy. Stage "output": y, as it is saved between the passes."""
    return softmax_backward(xp, xp.round(xp.softmax(x), "output"), dy)
