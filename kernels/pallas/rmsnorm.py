"""RMS norm over the rows of a matrix: a block holds whole rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from assay.kernels.pallas.arguments import check_array, is_interpreted

_ROWS = 8  # of a block: what a tile of a TPU's vector memory has in float32


def _rmsnorm_kernel(x_ref: Any, weight_ref: Any, y_ref: Any, *, eps: float, offset: float) -> None:
    x = x_ref[...].astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    y_ref[...] = (x * root * (weight_ref[...].astype(jnp.float32) + offset)).astype(y_ref.dtype)


@functools.partial(jax.jit, static_argnames=("eps", "offset", "interpret"))
def _rmsnorm(x: jax.Array, weight: jax.Array, *, eps: float, offset: float, interpret: bool) -> jax.Array:
    rows, columns = x.shape
    block = pl.BlockSpec((_ROWS, columns), lambda i: (i, 0))
    return pl.pallas_call(
        functools.partial(_rmsnorm_kernel, eps=eps, offset=offset),
        grid=(pl.cdiv(rows, _ROWS),),
        in_specs=[block, pl.BlockSpec((1, columns), lambda i: (0, 0))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=interpret,
    )(x, weight[None, :])


def rmsnorm(x: jax.Array, weight: jax.Array, *, eps: float = 1e-6, offset: float = 0.0) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) of each row of x[R,N], computed in float32; weight[N].

    Both are float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("weight", weight, x.shape[1:])
    return _rmsnorm(x, weight, eps=eps, offset=offset, interpret=is_interpreted()) if x.size else x
