"""SwiGLU of two matrices, element by element, and its gradients.

N. Shazeer, *GLU Variants Improve Transformer*, 2020.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import Rows, by_rows


def silu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x sigmoid(x) and its derivative in float32, with their limits at infinity."""
    small = jnp.exp(-jnp.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid, other = (jnp.where(side, small, 1.0) / (1.0 + small) for side in (x < 0, x >= 0))
    finite = jnp.where(jnp.abs(x) == jnp.inf, 0.0, x)
    return jnp.where(x == -jnp.inf, 0.0, x * sigmoid), sigmoid * (1.0 + finite * other)


def _clamped(gate: jax.Array, up: jax.Array, limit: float | None) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """gate and up within the limit, and where it doesn't bind them."""
    bound = jnp.inf if limit is None else limit
    return jnp.minimum(gate, bound), jnp.clip(up, -bound, bound), ~(gate > bound), ~(jnp.abs(up) > bound)


def _of_rows(rows: Rows, gate: jax.Array, up: jax.Array, *, limit: float | None) -> tuple[jax.Array]:
    gate, up, *_ = _clamped(gate, up, limit)
    return (silu_and_slope(gate)[0] * up,)


def _gradients_of_rows(
    rows: Rows, gate: jax.Array, up: jax.Array, dy: jax.Array, *, limit: float | None
) -> tuple[jax.Array, jax.Array]:
    gate, up, gate_free, up_free = _clamped(gate, up, limit)
    opened, slope = silu_and_slope(gate)
    return jnp.where(gate_free, dy * up * slope, 0.0), jnp.where(up_free, dy * opened, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
@functools.partial(jax.jit, static_argnums=2)
def _swiglu(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    function = functools.partial(_of_rows, limit=limit)
    return by_rows("swiglu", function, [gate, up], results=[gate.dtype])


@functools.partial(jax.jit, static_argnums=3)
def _swiglu_backward(gate: jax.Array, up: jax.Array, dy: jax.Array, limit: float | None) -> Any:
    function = functools.partial(_gradients_of_rows, limit=limit)
    return by_rows("swiglu_backward", function, [gate, up, dy], results=[gate.dtype, up.dtype])


_swiglu.defvjp(
    lambda gate, up, limit: (_swiglu(gate, up, limit), (gate, up)),
    lambda limit, saved, dy: _swiglu_backward(*saved, dy, limit),
)


def swiglu(gate: jax.Array, up: jax.Array, *, limit: float | None = None) -> jax.Array:
    """silu(gate) * up of gate[R,N] and up[R,N], computed in float32.

    ``limit``: gate is clamped to at most so much, and abs(up) too. Both are float32, bfloat16 or float16, not
    necessarily the same; the result has gate's dtype. Raises TypeError or ValueError, naming the argument, for another
    dtype, shape or limit.
    """
    check_array("gate", gate, ("R", "N"))
    check_array("up", up, gate.shape)
    _check_limit(limit)
    return _swiglu(gate, up, limit)


def swiglu_backward(
    gate: jax.Array, up: jax.Array, dy: jax.Array, *, limit: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """dgate[R,N] and dup[R,N] of `swiglu`, from the gradient dy[R,N] of its result, computed in float32.

    Each has its input's dtype. Dtypes, limit and errors as in `swiglu`.
    """
    check_array("gate", gate, ("R", "N"))
    check_array("up", up, gate.shape)
    check_array("dy", dy, gate.shape)
    _check_limit(limit)
    return _swiglu_backward(gate, up, dy, limit)


def _check_limit(limit: float | None) -> None:
    if limit is not None and not limit > 0:
        raise ValueError(f"limit: expected a positive number or None, got {limit}")
