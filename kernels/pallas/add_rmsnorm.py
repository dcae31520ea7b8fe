"""Residual addition and RMS norm over the rows, in one pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rmsnorm import rmsnorm_backward
from assay.kernels.pallas.rows import Rows, call_by_rows


def _add_rmsnorm_rows(
    rows: Rows, x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    total = x + residual
    return total * jax.lax.rsqrt(rows.mean(total * total) + eps) * weight, total


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
@functools.partial(jax.jit, static_argnums=3)
def _add_rmsnorm(x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    function = functools.partial(_add_rmsnorm_rows, eps=eps)
    return call_by_rows("add_rmsnorm", function, [x, residual], [weight], results=[x.dtype, x.dtype])


def _add_rmsnorm_bwd(eps: float, saved: tuple[jax.Array, ...], upstream: tuple[jax.Array, jax.Array]) -> Any:
    (x, residual, weight), (dy, dtotal) = saved, upstream
    total = x.astype(jnp.float32) + residual.astype(jnp.float32)
    dx, dweight = rmsnorm_backward(total, weight, dy, eps=eps)
    dx += dtotal
    return dx.astype(x.dtype), dx.astype(residual.dtype), dweight


_add_rmsnorm.defvjp(
    lambda x, residual, weight, eps: (_add_rmsnorm(x, residual, weight, eps), (x, residual, weight)), _add_rmsnorm_bwd
)


def add_rmsnorm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """Return the RMS norm of x + residual (both [R,N]) times weight[N], and x + residual; computed in float32.

    The norm is that of the float32 sum, before it is rounded. Each is float32, bfloat16 or float16, not necessarily the
    same; both results have x's dtype. Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("x", x, ("R", "N"))
    check_array("residual", residual, x.shape)
    check_array("weight", weight, x.shape[1:])
    return _add_rmsnorm(x, residual, weight, eps)
