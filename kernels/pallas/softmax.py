"""Softmax over the rows of a matrix, and its gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import by_rows


def _softmax_kernel(x_ref: Any, y_ref: Any) -> None:
    x = x_ref[...].astype(jnp.float32)
    weights = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    y_ref[...] = (weights / jnp.sum(weights, axis=1, keepdims=True)).astype(y_ref.dtype)


def _softmax_backward_kernel(y_ref: Any, dy_ref: Any, dx_ref: Any) -> None:
    y, dy = y_ref[...].astype(jnp.float32), dy_ref[...].astype(jnp.float32)
    dx_ref[...] = (y * (dy - jnp.sum(y * dy, axis=1, keepdims=True))).astype(dx_ref.dtype)


@jax.custom_vjp
@jax.jit
def _softmax(x: jax.Array) -> jax.Array:
    return by_rows(_softmax_kernel, [x], results=[x.dtype])


@jax.jit
def _softmax_backward(y: jax.Array, dy: jax.Array) -> jax.Array:
    return by_rows(_softmax_backward_kernel, [y, dy], results=[y.dtype])


def _saving(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _softmax(x)
    return y, y


_softmax.defvjp(_saving, lambda y, dy: (_softmax_backward(y, dy),))


def softmax(x: jax.Array) -> jax.Array:
    """exp(x) / sum(exp(x)) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or another number of dimensions.
    """
    check_array("x", x, ("R", "N"))
    return _softmax(x)


def softmax_backward(y: jax.Array, dy: jax.Array) -> jax.Array:
    """dx[R,N] of `softmax`, from its result y[R,N] and the gradient dy[R,N] of that, computed in float32.

    Both are float32, bfloat16 or float16, not necessarily the same; dx has y's dtype. Raises TypeError or ValueError,
    naming the argument, for another dtype or shape.
    """
    check_array("y", y, ("R", "N"))
    check_array("dy", dy, y.shape)
    return _softmax_backward(y, dy)
