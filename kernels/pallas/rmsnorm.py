"""RMS norm over the rows of a matrix, and its gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import add_rows, by_rows


def _rmsnorm_kernel(x_ref: Any, weight_ref: Any, y_ref: Any, *, eps: float, offset: float) -> None:
    x = x_ref[...].astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    y_ref[...] = (x * root * (weight_ref[...].astype(jnp.float32) + offset)).astype(y_ref.dtype)


def _rmsnorm_backward_kernel(
    x_ref: Any,
    dy_ref: Any,
    weight_ref: Any,
    dx_ref: Any,
    dweight_ref: Any,
    grown_ref: Any,
    *,
    eps: float,
    offset: float,
    rows: int,
) -> None:
    """With h = x / root and g = dy (weight + offset): dx = (g - h mean(g h)) / root, and dweight sums dy h."""
    x, dy = x_ref[...].astype(jnp.float32), dy_ref[...].astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    h, g = x * root, dy * (weight_ref[...].astype(jnp.float32) + offset)
    dx_ref[...] = ((g - h * jnp.mean(g * h, axis=1, keepdims=True)) * root).astype(dx_ref.dtype)
    add_rows(dweight_ref, grown_ref, dy * h, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@functools.partial(jax.jit, static_argnums=(2, 3))
def _rmsnorm(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    kernel = functools.partial(_rmsnorm_kernel, eps=eps, offset=offset)
    return by_rows(kernel, [x], [weight], results=[x.dtype])


@functools.partial(jax.jit, static_argnums=(3, 4))
def _rmsnorm_backward(
    x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    kernel = functools.partial(_rmsnorm_backward_kernel, eps=eps, offset=offset, rows=len(x))
    return by_rows(kernel, [x, dy], [weight], results=[x.dtype], sums=[weight.dtype])


def _saving(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _rmsnorm(x, weight, eps, offset), (x, weight)


_rmsnorm.defvjp(_saving, lambda eps, offset, saved, dy: _rmsnorm_backward(*saved, dy, eps, offset))


def rmsnorm(x: jax.Array, weight: jax.Array, *, eps: float = 1e-6, offset: float = 0.0) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) of each row of x[R,N], computed in float32; weight[N].

    Both are float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    return _rmsnorm(x, weight, eps, offset)


def rmsnorm_backward(
    x: jax.Array, weight: jax.Array, dy: jax.Array, *, eps: float = 1e-6, offset: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """dx[R,N] and dweight[N] of `rmsnorm`'s x[R,N] and weight[N], from the gradient dy[R,N] of its result.

    Computed in float32 from x. Each is float32, bfloat16 or float16, not necessarily the same; dx has x's dtype,
    dweight that of weight. Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    check_array("dy", dy, x.shape)
    return _rmsnorm_backward(x, weight, dy, eps, offset)
