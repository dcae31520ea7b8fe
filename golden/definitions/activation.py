"""Activations, element by element."""

from __future__ import annotations

from assay.golden.arithmetic.base import Arithmetic, N
from assay.golden.options import choice, number
from assay.golden.registry import Fault, define


@define("gelu", "x[R,N] -> y[R,N]", options={"approximate": choice("none", "tanh")}, rows="R", columns="N")
def gelu(xp: Arithmetic[N], x: N, *, approximate: str) -> N:
    """x times the normal distribution function, or its tanh approximation (Hendrycks & Gimpel, 2016)."""
    gate = gate_of_gelu(xp, x, approximate)  # of 0 to 2
    return xp.any_formula(lambda: xp.gate_mul(x * 0.5, gate), lambda: xp.gate_mul(x, gate) * 0.5)


def gate_of_gelu(xp: Arithmetic[N], x: N, approximate: str) -> N:
    """1 + erf(x / sqrt 2), or with tanh in place of erf."""
    if approximate == "tanh":
        cubed = x * x * x
        gate = xp.tanh((x + cubed * 0.044715) * xp.constant(lambda sqrt, pi: sqrt(2 / pi)), absolute=True)
    else:
        gate = xp.erf(x * xp.constant(lambda sqrt, pi: 1 / sqrt(2)), absolute=True)
    return gate + 1.0


@define(
    "silu",
    "x[R,N] -> y[R,N]",
    rows="R",
    columns="N",
    faults=(
        Fault("silu_with_beta", "x sigmoid(1.702 x) is computed", lambda xp, x: xp.gate_mul(x, xp.sigmoid(x * 1.702))),
        Fault("silu_factor_dropped", "sigmoid is computed: the factor x is left out", lambda xp, x: xp.sigmoid(x)),
        Fault("relu_for_silu", "max(x, 0) is computed", lambda xp, x: xp.maximum(x, x * 0.0)),
    ),
)
def silu(xp: Arithmetic[N], x: N) -> N:
    """x / (1 + exp(-x))."""
    return xp.gate_mul(x, xp.sigmoid(x))


@define(
    "swiglu",
    "gate[R,N], up[R,N] -> y[R,N]",
    options={"limit": number(None, positive=True, usual=(None, 1.5))},
    stages={"activated": None},
    rows="R",
    columns="N",
    faults=("saturating_store",),
)
def swiglu(xp: Arithmetic[N], gate: N, up: N, *, limit: float | None) -> N:
    """silu(gate) * up, with gate <= limit and |up| <= limit where a limit is given. Stage "activated": silu(gate)."""
    if limit is not None:
        gate, up = xp.minimum(gate, limit), -xp.minimum(-xp.minimum(up, limit), limit)
    return xp.gated_product(gate, xp.sigmoid(gate), up)
