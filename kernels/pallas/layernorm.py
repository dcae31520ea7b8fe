"""Layer norm over the rows of a matrix, and its gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import Rows, call_by_rows


def _normalize(rows: Rows, x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Return x_hat and rstd; the variance is that of differences from the mean, so that nothing cancels."""
    centered = x - rows.mean(x)
    rstd = jax.lax.rsqrt(rows.mean(centered * centered) + eps)
    return centered * rstd, rstd


def _layernorm_rows(rows: Rows, x: jax.Array, weight: jax.Array, bias: jax.Array, *, eps: float) -> tuple[jax.Array]:
    x_hat, _ = _normalize(rows, x, eps)
    return (x_hat * weight + bias,)


def _layernorm_backward_rows(
    rows: Rows, x: jax.Array, dy: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, ...]:
    """Return dx = (wdy - mean(wdy) - x_hat mean(wdy x_hat)) rstd, with wdy = dy weight; terms of dweight and dbias."""
    x_hat, rstd = _normalize(rows, x, eps)
    wdy = dy * weight
    return (wdy - (rows.mean(wdy) + x_hat * rows.mean(wdy * x_hat))) * rstd, dy * x_hat, dy


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
@functools.partial(jax.jit, static_argnums=3)
def _layernorm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    function = functools.partial(_layernorm_rows, eps=eps)
    return call_by_rows("layernorm", function, [x], [weight, bias], results=[x.dtype])


@functools.partial(jax.jit, static_argnums=(3, 4))
def _layernorm_backward(x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float, bias_dtype: Any) -> Any:
    function = functools.partial(_layernorm_backward_rows, eps=eps)
    sums = [weight.dtype, bias_dtype]
    return call_by_rows("layernorm_backward", function, [x, dy], [weight], results=[x.dtype], sums=sums)


def _layernorm_bwd(eps: float, saved: tuple[jax.Array, ...], dy: jax.Array) -> Any:
    x, weight, bias = saved
    return _layernorm_backward(x, weight, dy, eps, bias.dtype)


_layernorm.defvjp(lambda x, weight, bias, eps: (_layernorm(x, weight, bias, eps), (x, weight, bias)), _layernorm_bwd)


def layernorm(x: jax.Array, weight: jax.Array, bias: jax.Array, *, eps: float = 1e-5) -> jax.Array:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias of each row of x[R,N]; weight[N], bias[N].

    Computed in float32, the variance without correction. Each is float32, bfloat16 or float16, not necessarily the
    same; the result has x's dtype. Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    check_array("bias", bias, x.shape[1:])
    return _layernorm(x, weight, bias, eps)


def layernorm_backward(
    x: jax.Array, weight: jax.Array, dy: jax.Array, *, eps: float = 1e-5
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dx[R,N], dweight[N] and dbias[N] of `layernorm`, from x[R,N], weight[N] and its result's gradient dy[R,N].

    Computed in float32. Each is float32, bfloat16 or float16, not necessarily the same; dx has x's dtype, the others
    weight's. Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    check_array("dy", dy, x.shape)
    return _layernorm_backward(x, weight, dy, eps, weight.dtype)
