"""Gradients of what works along rows: softmax, the norms, swiglu.

Each is the derivative of its forward definition, as `tests/golden/test_gradients.py` proves. Where kernels in use
differ in how they write it, the formulas stand side by side: a contract allows the errors of any.
"""

from __future__ import annotations

import functools
import operator
import sys

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.options import number
from assay.golden.registry import Reduction, define


def infinite(xp: Arithmetic[N, Idx], *tensors: N) -> Idx:
    """A mask of where one of the tensors is infinite, of the shape to which they broadcast."""
    found = [xp.above(x, sys.float_info.max) | xp.above(-x, sys.float_info.max) for x in tensors]
    return functools.reduce(operator.or_, found)


def _row_is_finite(xp: Arithmetic[N], dx: N, *tensors: N) -> N:
    """``dx``, but in rows with an infinity, where the order of evaluation decides between infinities and NaN."""
    return xp.unspecified(lambda: infinite(xp, *tensors).any(-1)[:, None], dx)


def _column_is_finite(xp: Arithmetic[N], dweight: N, dy: N) -> N:
    """``dweight``, but where an infinite gradient meets an x whose sign or zero is a matter of rounding."""
    return xp.unspecified(lambda: infinite(xp, dy).any(0), dweight)


@define("softmax_backward", "y[R,N], dy[R,N] -> dx[R,N]", rows="R", gradient_of="softmax", reduction=Reduction("N"))
def softmax_backward(xp: Arithmetic[N], y: N, dy: N) -> N:
    """y (dy - sum y dy)."""
    total = xp.sum(y * dy)
    return _row_is_finite(xp, xp.any_formula(lambda: y * (dy - total), lambda: y * dy - y * total), y, dy)


@define(
    "layernorm_backward",
    "x[R,N], weight[N], dy[R,N] -> dx[R,N], dweight[N], dbias[N]",
    options={"eps": number(1e-5, positive=True)},
    reduced=("R",),
    may_be_zero=("R",),
    gradient_of="layernorm",
    reduction=Reduction("N"),
    exempt=("tail_of_sum_dropped",),
)
def layernorm_backward(xp: Arithmetic[N], x: N, weight: N, dy: N, *, eps: float) -> tuple[N, N, N]:
    """With h = (x - mean) r, r = 1 / sqrt(variance + eps) and g = dy weight: dx = r (g - mean g - h mean(g h)).

    dweight and dbias are the sums over rows of dy h and dy. The formulas of dx: as written; times N inside and r / N
    outside (Apex); and r g + b (x - mean) - r mean g with b = r^3 (mean x sum g - sum g x) / N, in which PyTorch's CPU
    kernel multiplies x and the mean apart, at a cost that `standardize` allows the deviations.
    """
    columns = max(x.shape[-1], 1)
    centred, root = xp.standardize(x, eps)
    normalized, grown = centred * root, dy * weight

    def as_written() -> N:
        return ((grown - xp.mean(grown)) - normalized * xp.mean(grown * normalized)) * root

    def times_columns() -> N:
        inner = (grown * columns - xp.sum(grown)) - normalized * xp.sum(grown * normalized)
        return inner * (root / columns)

    def from_sums() -> N:
        total = xp.sum(grown)
        slope = (total * xp.mean(x) - xp.sum(grown * x)) * (root * root * root) / columns
        return (root * grown + slope * centred) - total * root / columns

    dx = xp.any_formula(as_written, times_columns, from_sums)
    dweight = xp.sum(xp.product(dy, centred, root), axis=0)[0]
    return _row_is_finite(xp, dx, x, weight, dy), _column_is_finite(xp, dweight, dy), xp.sum(dy, axis=0)[0]


@define(
    "rmsnorm_backward",
    "x[R,N], weight[N], dy[R,N] -> dx[R,N], dweight[N]",
    options={"eps": number(1e-6, positive=True)},
    reduced=("R",),
    may_be_zero=("R",),
    gradient_of="rmsnorm",
    reduction=Reduction("N"),
)
def rmsnorm_backward(xp: Arithmetic[N], x: N, weight: N, dy: N, *, eps: float) -> tuple[N, N]:
    """With r = 1 / sqrt(mean x^2 + eps), h = x r and g = dy weight: dx = r (g - h mean(g h)), dweight = sum dy h."""
    root = xp.rsqrt(xp.mean(x * x) + eps)
    normalized, grown = x * root, dy * weight
    dx = xp.any_formula(
        lambda: (grown - normalized * xp.mean(grown * normalized)) * root,
        lambda: grown * root - x * (root * root * root * xp.mean(grown * x)),
        lambda: (grown - x * (root * root * xp.mean(grown * x))) * root,
    )
    dweight = xp.sum(xp.product(dy, x, root), axis=0)[0]
    return _row_is_finite(xp, dx, x, weight, dy), _column_is_finite(xp, dweight, dy)


@define(
    "swiglu_backward",
    "gate[R,N], up[R,N], dy[R,N] -> dgate[R,N], dup[R,N]",
    rows="R",
    stages={"activated": None, "activated_gradient": None},
    independent=("N",),
    gradient_of="swiglu",
)
def swiglu_backward(xp: Arithmetic[N], gate: N, up: N, dy: N) -> tuple[N, N]:
    """dy up silu'(gate) and dy silu(gate).

    Stages: "activated", silu(gate) as it is multiplied with dy, and "activated_gradient", dy up.
    """
    return xp.silu_gradient(dy, up, gate), xp.gated_product(gate, xp.sigmoid(gate), dy)
