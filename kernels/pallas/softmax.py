"""Softmax over the rows of a matrix: a block holds whole rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from assay.kernels.pallas.arguments import check_array, is_interpreted

_ROWS = 8  # of a block: what a tile of a TPU's vector memory has in float32


def _softmax_kernel(x_ref: Any, y_ref: Any) -> None:
    x = x_ref[...].astype(jnp.float32)
    weights = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    y_ref[...] = (weights / jnp.sum(weights, axis=1, keepdims=True)).astype(y_ref.dtype)


@functools.partial(jax.jit, static_argnames="interpret")
def _softmax(x: jax.Array, *, interpret: bool) -> jax.Array:
    rows, columns = x.shape
    block = pl.BlockSpec((_ROWS, columns), lambda i: (i, 0))
    return pl.pallas_call(
        _softmax_kernel,
        grid=(pl.cdiv(rows, _ROWS),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x)


def softmax(x: jax.Array) -> jax.Array:
    """exp(x) / sum(exp(x)) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or another number of dimensions.
    """
    check_array("x", x, ("R", "N"))
    return _softmax(x, interpret=is_interpreted()) if x.size else x
