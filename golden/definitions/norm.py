"""Normalisation along the last axis."""

from __future__ import annotations

from typing import Any

from assay.golden.registry import define, number


@define("layernorm", "x[R,N], weight[N], bias[N] -> y[R,N]", options={"eps": number(1e-5, positive=True)}, rows="R")
def layernorm(xp: Any, x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias, with the biased variance."""
    centred, root = xp.standardize(x, eps)
    return xp.offset(xp.product(centred, root, weight), bias)


_RMS = {"eps": number(1e-6, positive=True), "offset": number(0.0)}


@define("rmsnorm", "x[R,N], weight[N] -> y[R,N]", options=_RMS, stages={"normalized": None}, rows="R")
def rmsnorm(xp: Any, x: Any, weight: Any, *, eps: float, offset: float) -> Any:
    """x / sqrt(mean x^2 + eps) * (weight + offset)."""
    return xp.product(x, xp.rsqrt(xp.mean(x * x) + eps), weight + offset, stage="normalized")


@define(
    "add_rmsnorm",
    "x[R,N], residual[R,N], weight[N] -> y[R,N], total[R,N]",
    options={"eps": number(1e-6, positive=True)},
    stages={"sum": None, "normalized": None},
    rows="R",
)
def add_rmsnorm(xp: Any, x: Any, residual: Any, weight: Any, *, eps: float) -> Any:
    """RMS norm of x + residual, and x + residual itself."""
    total = x + residual
    return rmsnorm(xp, xp.round(total, "sum"), weight, eps=eps, offset=0.0), total
