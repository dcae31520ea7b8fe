"""Layer norm over the rows of a matrix, and its gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import add_rows, by_rows


def _normalised(x_ref: Any, eps: float) -> tuple[jax.Array, jax.Array]:
    """(x - mean) / root and 1 / root of each row. The variance is that of differences, so that nothing cancels."""
    x = x_ref[...].astype(jnp.float32)
    centred = x - jnp.mean(x, axis=1, keepdims=True)
    root = jax.lax.rsqrt(jnp.mean(centred * centred, axis=1, keepdims=True) + eps)
    return centred * root, root


def _layernorm_kernel(x_ref: Any, weight_ref: Any, bias_ref: Any, y_ref: Any, *, eps: float) -> None:
    h, _ = _normalised(x_ref, eps)
    y = h * weight_ref[...].astype(jnp.float32) + bias_ref[...].astype(jnp.float32)
    y_ref[...] = y.astype(y_ref.dtype)


def _layernorm_backward_kernel(
    x_ref: Any,
    dy_ref: Any,
    weight_ref: Any,
    dx_ref: Any,
    dweight_ref: Any,
    dbias_ref: Any,
    weight_grown_ref: Any,
    bias_grown_ref: Any,
    *,
    eps: float,
    rows: int,
) -> None:
    """With g = dy weight: dx = (g - mean(g) - h mean(g h)) / root; dweight sums dy h, and dbias dy."""
    h, root = _normalised(x_ref, eps)
    dy = dy_ref[...].astype(jnp.float32)
    g = dy * weight_ref[...].astype(jnp.float32)
    shared = jnp.mean(g, axis=1, keepdims=True) + h * jnp.mean(g * h, axis=1, keepdims=True)
    dx_ref[...] = ((g - shared) * root).astype(dx_ref.dtype)
    add_rows(dweight_ref, weight_grown_ref, dy * h, rows)
    add_rows(dbias_ref, bias_grown_ref, dy, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
@functools.partial(jax.jit, static_argnums=3)
def _layernorm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    return by_rows(functools.partial(_layernorm_kernel, eps=eps), [x], [weight, bias], results=[x.dtype])


@functools.partial(jax.jit, static_argnums=(3, 4))
def _layernorm_backward(x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float, bias_dtype: Any) -> Any:
    kernel = functools.partial(_layernorm_backward_kernel, eps=eps, rows=len(x))
    return by_rows(kernel, [x, dy], [weight], results=[x.dtype], sums=[weight.dtype, bias_dtype])


def _saving(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _layernorm(x, weight, bias, eps), (x, weight, bias)


def _gradients(eps: float, saved: tuple[jax.Array, ...], dy: jax.Array) -> Any:
    x, weight, bias = saved
    return _layernorm_backward(x, weight, dy, eps, bias.dtype)


_layernorm.defvjp(_saving, _gradients)


def layernorm(x: jax.Array, weight: jax.Array, bias: jax.Array, *, eps: float = 1e-5) -> jax.Array:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias of each row of x[R,N]; weight[N], bias[N].

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
    """dx[R,N], dweight[N] and dbias[N] of `layernorm`'s x[R,N], weight[N] and bias, from its result's gradient dy[R,N].

    Computed in float32 from x. Each is float32, bfloat16 or float16, not necessarily the same; dx has x's dtype, the
    others have weight's. Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    check_array("dy", dy, x.shape)
    return _layernorm_backward(x, weight, dy, eps, weight.dtype)
