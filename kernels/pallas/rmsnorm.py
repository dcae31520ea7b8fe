"""RMS norm over the rows of a matrix, and its gradients."""

from __future__ import annotations

import functools

import jax

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import Rows, call_by_rows


def _rmsnorm_rows(rows: Rows, x: jax.Array, weight: jax.Array, *, eps: float, offset: float) -> tuple[jax.Array]:
    return (x * jax.lax.rsqrt(rows.mean(x * x) + eps) * (weight + offset),)


def _rmsnorm_backward_rows(
    rows: Rows, x: jax.Array, dy: jax.Array, weight: jax.Array, *, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """Return dx = (wdy - x_hat mean(wdy x_hat)) rstd, with wdy = dy (weight + offset), and the terms of dweight."""
    rstd = jax.lax.rsqrt(rows.mean(x * x) + eps)
    x_hat, wdy = x * rstd, dy * (weight + offset)
    return (wdy - x_hat * rows.mean(wdy * x_hat)) * rstd, dy * x_hat


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@functools.partial(jax.jit, static_argnums=(2, 3))
def _rmsnorm(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    function = functools.partial(_rmsnorm_rows, eps=eps, offset=offset)
    return call_by_rows("rmsnorm", function, [x], [weight], results=[x.dtype])


@functools.partial(jax.jit, static_argnums=(3, 4))
def _rmsnorm_backward(
    x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    function = functools.partial(_rmsnorm_backward_rows, eps=eps, offset=offset)
    return call_by_rows("rmsnorm_backward", function, [x, dy], [weight], results=[x.dtype], sums=[weight.dtype])


_rmsnorm.defvjp(
    lambda x, weight, eps, offset: (_rmsnorm(x, weight, eps, offset), (x, weight)),
    lambda eps, offset, saved, dy: _rmsnorm_backward(*saved, dy, eps, offset),
)


def rmsnorm(x: jax.Array, weight: jax.Array, *, eps: float = 1e-6, offset: float = 0.0) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * (weight + offset) of each row of x[R,N], computed in float32; weight[N].

    Both are float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    return _rmsnorm(x, weight, eps, offset)


def rmsnorm_backward(
    x: jax.Array, weight: jax.Array, dy: jax.Array, *, eps: float = 1e-6, offset: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Return dx[R,N] and dweight[N] of `rmsnorm`, from x[R,N], weight[N] and the gradient dy[R,N] of its result.

    Computed in float32. Each is float32, bfloat16 or float16, not necessarily the same; dx has x's dtype, dweight
    weight's. Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    check_array("dy", dy, x.shape)
    return _rmsnorm_backward(x, weight, dy, eps, offset)
