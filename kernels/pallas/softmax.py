"""Softmax over the rows of a matrix, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import Rows, by_rows


def _of_rows(rows: Rows, x: jax.Array) -> tuple[jax.Array]:
    weights = jnp.exp(x - rows.max(x))
    return (weights / rows.sum(weights),)


def _gradient_of_rows(rows: Rows, y: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return (y * (dy - rows.sum(y * dy)),)


@jax.custom_vjp
@jax.jit
def _softmax(x: jax.Array) -> jax.Array:
    return by_rows("softmax", _of_rows, [x], results=[x.dtype])


@jax.jit
def _softmax_backward(y: jax.Array, dy: jax.Array) -> jax.Array:
    return by_rows("softmax_backward", _gradient_of_rows, [y, dy], results=[y.dtype])


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
