"""Softmax, its logarithm, and log-sum-exp, along the last axis."""

from __future__ import annotations

from typing import Any

from assay.golden.registry import define


@define("softmax", "x[R,N] -> y[R,N]", rows="R")
def softmax(xp: Any, x: Any) -> Any:
    """exp(x) / sum exp(x)."""
    return xp.softmax(x)


@define("log_softmax", "x[R,N] -> y[R,N]", rows="R")
def log_softmax(xp: Any, x: Any) -> Any:
    """x - log sum exp(x)."""
    return xp.log_softmax(x)


@define("logsumexp", "x[R,N] -> y[R]", rows="R")
def logsumexp(xp: Any, x: Any) -> Any:
    """log sum exp(x)."""
    return xp.logsumexp(x)[..., 0]
