"""Activations, element by element."""

from __future__ import annotations

from typing import Any

from assay.golden.registry import choice, define, number


@define("gelu", "x[R,N] -> y[R,N]", options={"approximate": choice("none", "tanh")}, rows="R", columns="N")
def gelu(xp: Any, x: Any, *, approximate: str) -> Any:
    """x times the normal distribution function, or its tanh approximation (Hendrycks & Gimpel, 2016)."""
    if approximate == "tanh":
        cubed = x * x * x
        gate = xp.tanh((x + cubed * 0.044715) * xp.constant(lambda sqrt, pi: sqrt(2 / pi)), absolute=True)
    else:
        gate = xp.erf(x * xp.constant(lambda sqrt, pi: 1 / sqrt(2)), absolute=True)
    return xp.gated(x * 0.5, gate + 1.0)


@define("silu", "x[R,N] -> y[R,N]", rows="R", columns="N")
def silu(xp: Any, x: Any) -> Any:
    """x / (1 + exp(-x))."""
    return xp.gated(x, xp.sigmoid(x))


@define("swiglu", "gate[R,N], up[R,N] -> y[R,N]", options={"limit": number(None, positive=True)}, rows="R", columns="N")
def swiglu(xp: Any, gate: Any, up: Any, *, limit: float | None) -> Any:
    """silu(gate) * up, with gate <= limit and |up| <= limit where a limit is given."""
    if limit is not None:
        gate, up = xp.minimum(gate, limit), -xp.minimum(-xp.minimum(up, limit), limit)
    return xp.gated_product(gate, xp.sigmoid(gate), up)
