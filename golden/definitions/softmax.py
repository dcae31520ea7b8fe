"""Softmax, its logarithm, and log-sum-exp, along the last axis."""

from __future__ import annotations

import math

from assay.golden.arithmetic.base import Arithmetic, N
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
