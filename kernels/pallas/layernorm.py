"""Layer norm over the rows of a matrix, and its gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.rows import Rows, by_rows


def _normalised(rows: Rows, x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """(x - mean) / root and 1 / root of each row. The variance is that of differences, so that nothing cancels."""
    centred = x - rows.mean(x)
    root = jax.lax.rsqrt(rows.mean(centred * centred) + eps)
    return centred * root, root


def _of_rows(rows: Rows, x: jax.Array, weight: jax.Array, bias: jax.Array, *, eps: float) -> tuple[jax.Array]:
    h, _ = _normalised(rows, x, eps)
    return (h * weight + bias,)


def _gradients_of_rows(
    rows: Rows, x: jax.Array, dy: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, ...]:
    """With g = dy weight: dx = (g - mean(g) - h mean(g h)) / root; dweight sums dy h, and dbias dy."""
    h, root = _normalised(rows, x, eps)
    g = dy * weight
    return (g - (rows.mean(g) + h * rows.mean(g * h))) * root, dy * h, dy


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
@functools.partial(jax.jit, static_argnums=3)
def _layernorm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    function = functools.partial(_of_rows, eps=eps)
    return by_rows("layernorm", function, [x], [weight, bias], results=[x.dtype])


@functools.partial(jax.jit, static_argnums=(3, 4))
def _layernorm_backward(x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float, bias_dtype: Any) -> Any:
    function = functools.partial(_gradients_of_rows, eps=eps)
    return by_rows(
        "layernorm_backward", function, [x, dy], [weight], results=[x.dtype], sums=[weight.dtype, bias_dtype]
    )


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
