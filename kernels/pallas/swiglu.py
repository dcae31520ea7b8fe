"""SwiGLU, element by element, and its gradients.

Source: N. Shazeer, *GLU Variants Improve Transformer*, arXiv:2002.05202 (2020).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import Rows, call_by_rows


def silu_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return x sigmoid(x) and its derivative in float32, with their limits at infinity."""
    exp = jnp.exp(-jnp.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid, complement = (jnp.where(negative, exp, 1.0) / (1.0 + exp) for negative in (x < 0, x >= 0))
    finite = jnp.where(jnp.abs(x) == jnp.inf, 0.0, x)
    return jnp.where(x == -jnp.inf, 0.0, x * sigmoid), sigmoid * (1.0 + finite * complement)


def _clamp(gate: jax.Array, up: jax.Array, limit: float | None) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return gate and up within the limit, and the masks of elements that it leaves as they are."""
    bound = jnp.inf if limit is None else limit
    return jnp.minimum(gate, bound), jnp.clip(up, -bound, bound), ~(gate > bound), ~(jnp.abs(up) > bound)


def _swiglu_rows(rows: Rows, gate: jax.Array, up: jax.Array, *, limit: float | None) -> tuple[jax.Array]:
    gate, up, *_ = _clamp(gate, up, limit)
    return (silu_and_derivative(gate)[0] * up,)


def _swiglu_backward_rows(
    rows: Rows, gate: jax.Array, up: jax.Array, dy: jax.Array, *, limit: float | None
) -> tuple[jax.Array, jax.Array]:
    gate, up, gate_mask, up_mask = _clamp(gate, up, limit)
    silu, derivative = silu_and_derivative(gate)
    return jnp.where(gate_mask, dy * up * derivative, 0.0), jnp.where(up_mask, dy * silu, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
@functools.partial(jax.jit, static_argnums=2)
def _swiglu(gate: jax.Array, up: jax.Array, limit: float | None) -> jax.Array:
    function = functools.partial(_swiglu_rows, limit=limit)
    return call_by_rows("swiglu", function, [gate, up], results=[gate.dtype])


@functools.partial(jax.jit, static_argnums=3)
def _swiglu_backward(gate: jax.Array, up: jax.Array, dy: jax.Array, limit: float | None) -> Any:
    function = functools.partial(_swiglu_backward_rows, limit=limit)
    return call_by_rows("swiglu_backward", function, [gate, up, dy], results=[gate.dtype, up.dtype])


_swiglu.defvjp(
    lambda gate, up, limit: (_swiglu(gate, up, limit), (gate, up)),
    lambda limit, saved, dy: _swiglu_backward(*saved, dy, limit),
)


def swiglu(gate: jax.Array, up: jax.Array, *, limit: float | None = None) -> jax.Array:
    """Return silu(gate) * up of gate[R,N] and up[R,N], computed in float32.

    ``limit``: gate is clamped to at most limit, up to [-limit, limit]. Both are float32, bfloat16 or float16, not
    necessarily the same; the result has gate's dtype. Raises TypeError or ValueError, naming the argument, for another
    dtype, shape or limit.
    """
    _check(gate, up, limit)
    return _swiglu(gate, up, limit)


def swiglu_backward(
    gate: jax.Array, up: jax.Array, dy: jax.Array, *, limit: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return dgate[R,N] and dup[R,N] of `swiglu`, from the gradient dy[R,N] of its result, computed in float32.

    Each has its input's dtype. Dtypes, limit and errors are as in `swiglu`.
    """
    _check(gate, up, limit)
    check_array("dy", dy, gate.shape)
    return _swiglu_backward(gate, up, dy, limit)


def _check(gate: jax.Array, up: jax.Array, limit: float | None) -> None:
    check_array("gate", gate, ("R", "N"))
    check_array("up", up, gate.shape)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit: expected a positive number or None, got {limit}")
