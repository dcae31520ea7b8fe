"""Softmax over the rows of a matrix, and its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import Rows, call_by_rows


def _softmax_rows(rows: Rows, x: jax.Array) -> tuple[jax.Array]:
    p = jnp.exp(x - rows.max(x))
    return (p / rows.sum(p),)


def _softmax_backward_rows(rows: Rows, y: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    return (y * (dy - rows.sum(y * dy)),)


@jax.custom_vjp
@jax.jit
def _softmax(x: jax.Array) -> jax.Array:
    return call_by_rows("softmax", _softmax_rows, [x], results=[x.dtype])


@jax.jit
def _softmax_backward(y: jax.Array, dy: jax.Array) -> jax.Array:
    return call_by_rows("softmax_backward", _softmax_backward_rows, [y, dy], results=[y.dtype])


def _softmax_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _softmax(x)
    return y, y


_softmax.defvjp(_softmax_fwd, lambda y, dy: (_softmax_backward(y, dy),))


def softmax(x: jax.Array) -> jax.Array:
    """Return exp(x) / sum(exp(x)) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or another number of dimensions.
    """
    check_array("x", x, ("R", "N"))
    return _softmax(x)


def softmax_backward(y: jax.Array, dy: jax.Array) -> jax.Array:
    """Return dx[R,N] of `softmax`, from its result y[R,N] and the gradient dy[R,N] of it, computed in float32.

    Both are float32, bfloat16 or float16, not necessarily the same; dx has y's dtype. Raises TypeError or ValueError,
    naming the argument, for another dtype or shape.
    """
    check_array("y", y, ("R", "N"))
    check_array("dy", dy, y.shape)
    return _softmax_backward(y, dy)
