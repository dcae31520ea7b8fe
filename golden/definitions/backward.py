"""Gradients of what works along rows: softmax, the norms, swiglu.

Each is the derivative of its forward definition, as `tests/golden/test_gradients.py` proves. Where kernels in use
differ in how they write it, the formulas stand side by side: a contract allows the errors of any.
"""

from __future__ import annotations

import functools
import operator
import sys
from typing import Any

from assay.golden.registry import define, number


def _infinite(xp: Any, *tensors: Any) -> Any:
    """A mask of where one of the tensors is infinite, of the shape to which they broadcast."""
    found = [xp.above(x, sys.float_info.max) | xp.above(-x, sys.float_info.max) for x in tensors]
    return functools.reduce(operator.or_, found)


def _row_is_finite(xp: Any, dx: Any, *tensors: Any) -> Any:
    """``dx``, but in rows with an infinity, where the order of evaluation decides between infinities and NaN."""
    return xp.unspecified(lambda: _infinite(xp, *tensors).any(-1)[:, None], dx)


def _column_is_finite(xp: Any, dweight: Any, dy: Any) -> Any:
    """``dweight``, but where an infinite gradient meets an x whose sign or zero is a matter of rounding."""
    return xp.unspecified(lambda: _infinite(xp, dy).any(0), dweight)


@define("softmax_backward", "y[R,N], dy[R,N] -> dx[R,N]", rows="R")
def softmax_backward(xp: Any, y: Any, dy: Any) -> Any:
    """y (dy - sum y dy)."""
    total = xp.sum(y * dy)
    return _row_is_finite(xp, xp.either(lambda: y * (dy - total), lambda: y * dy - y * total), y, dy)


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
    dweight = xp.sum(xp.product(dy, centred, root), axis=0)[0]
    return _row_is_finite(xp, dx, x, weight, dy), _column_is_finite(xp, dweight, dy), xp.sum(dy, axis=0)[0]


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
    dweight = xp.sum(xp.product(dy, x, root), axis=0)[0]
    return _row_is_finite(xp, dx, x, weight, dy), _column_is_finite(xp, dweight, dy)


@define("swiglu_backward", "gate[R,N], up[R,N], dy[R,N] -> dgate[R,N], dup[R,N]", rows="R")
def swiglu_backward(xp: Any, gate: Any, up: Any, dy: Any) -> tuple[Any, Any]:
    """dy up silu'(gate) and dy silu(gate)."""
    return xp.silu_gradient(dy, up, gate), xp.gated_product(gate, xp.sigmoid(gate), dy)
