"""Gradients of what works along rows: softmax, the norms, swiglu.

Each is the derivative of its forward definition, as `tests/golden/test_gradients.py` proves. Where kernels in use
differ in how they write it, the formulas stand side by side: a contract allows the errors of any.
"""

from __future__ import annotations

from typing import Any

from assay.golden.registry import define, number


@define("softmax_backward", "y[R,N], dy[R,N] -> dx[R,N]", rows="R")
def softmax_backward(xp: Any, y: Any, dy: Any) -> Any:
    """y (dy - sum y dy)."""
    total = xp.sum(y * dy)
    return xp.either(lambda: y * (dy - total), lambda: y * dy - y * total)


@define(
    "layernorm_backward",
    "x[R,N], weight[N], dy[R,N] -> dx[R,N], dweight[N], dbias[N]",
    options={"eps": number(1e-5, positive=True)},
    empty=("R",),
)
def layernorm_backward(xp: Any, x: Any, weight: Any, dy: Any, *, eps: float) -> tuple[Any, Any, Any]:
    """With h = (x - mean) r, r = 1 / sqrt(variance + eps) and g = dy weight: dx = r (g - mean g - h mean(g h)).

    dweight and dbias are the sums over rows of dy h and dy. The formulas of dx: as written; times N inside and r / N
    outside (Apex); and r g + b (x - mean) - r mean g with b = r^3 (mean x sum g - sum g x) / N, in which PyTorch's CPU
    kernel multiplies x and the mean apart, at a cost that `standardize` allows the deviations.
    """
    columns = max(x.shape[-1], 1)
    centred, root = xp.standardize(x, eps)
    normalized, grown = centred * root, dy * weight

    def as_written() -> Any:
        return ((grown - xp.mean(grown)) - normalized * xp.mean(grown * normalized)) * root

    def times_columns() -> Any:
        inner = (grown * columns - xp.sum(grown)) - normalized * xp.sum(grown * normalized)
        return inner * (root / columns)

    def from_sums() -> Any:
        total = xp.sum(grown)
        slope = (total * xp.mean(x) - xp.sum(grown * x)) * (root * root * root) / columns
        return (root * grown + slope * centred) - total * root / columns

    dx = xp.either(as_written, times_columns, from_sums)
    return dx, xp.sum(xp.product(dy, centred, root), axis=0)[0], xp.sum(dy, axis=0)[0]


@define(
    "rmsnorm_backward",
    "x[R,N], weight[N], dy[R,N] -> dx[R,N], dweight[N]",
    options={"eps": number(1e-6, positive=True)},
    empty=("R",),
)
def rmsnorm_backward(xp: Any, x: Any, weight: Any, dy: Any, *, eps: float) -> tuple[Any, Any]:
    """With r = 1 / sqrt(mean x^2 + eps), h = x r and g = dy weight: dx = r (g - h mean(g h)), dweight = sum dy h."""
    root = xp.rsqrt(xp.mean(x * x) + eps)
    normalized, grown = x * root, dy * weight
    dx = xp.either(
        lambda: (grown - normalized * xp.mean(grown * normalized)) * root,
        lambda: grown * root - x * (root * root * root * xp.mean(grown * x)),
        lambda: (grown - x * (root * root * xp.mean(grown * x))) * root,
    )
    return dx, xp.sum(xp.product(dy, x, root), axis=0)[0]


@define("swiglu_backward", "gate[R,N], up[R,N], dy[R,N] -> dgate[R,N], dup[R,N]", rows="R")
def swiglu_backward(xp: Any, gate: Any, up: Any, dy: Any) -> tuple[Any, Any]:
    """dy up silu'(gate) and dy silu(gate)."""
    return xp.product(dy, up, xp.silu_slope(gate)), xp.gated_product(gate, xp.sigmoid(gate), dy)
