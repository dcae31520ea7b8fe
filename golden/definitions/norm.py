"""Normalisation along the last axis."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.options import number
from assay.golden.registry import Reduction, define


@define(
    "layernorm",
    "x[R,N], weight[N], bias[N] -> y[R,N]",
    options={"eps": number(1e-5, positive=True)},
    rows="R",
    reduction=Reduction("N"),
    exempt=("tail_of_sum_dropped",),
)
def layernorm(xp: Arithmetic[N], x: N, weight: N, bias: N, *, eps: float) -> N:
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the biased variance."""
    centred, root = xp.standardize(x, eps)
    return xp.add_bias(xp.product(centred, root, weight), bias)


_RMS = {"eps": number(1e-6, positive=True), "offset": number(0.0, usual=(0.0, 1.0))}


@define(
    "rmsnorm",
    "x[R,N], weight[N] -> y[R,N]",
    options=_RMS,
    stages={"normalized": None},
    rows="R",
    reduction=Reduction("N"),
)
def rmsnorm(xp: Arithmetic[N], x: N, weight: N, *, eps: float, offset: float) -> N:
    """x / sqrt(mean x^2 + eps) * (weight + offset)."""
    return xp.product(x, xp.rsqrt(xp.mean(x * x) + eps), weight + offset, stage="normalized")


@define(
    "add_rmsnorm",
    "x[R,N], residual[R,N], weight[N] -> y[R,N], total[R,N]",
    options={"eps": number(1e-6, positive=True)},
    stages={"sum": None, "normalized": None},
    rows="R",
    reduction=Reduction("N"),
    faults=("saturating_store",),
)
def add_rmsnorm(xp: Arithmetic[N], x: N, residual: N, weight: N, *, eps: float) -> tuple[N, N]:
    """RMS norm of x + residual, and x + residual itself."""
    total = x + residual
    return rmsnorm(xp, xp.round(total, "sum"), weight, eps=eps, offset=0.0), total
