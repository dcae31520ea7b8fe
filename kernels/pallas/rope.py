"""Rotary position embedding: pairs of columns are turned by angles that depend on the place.

J. Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.calls import call
from assay.kernels.pallas.rows import rows_of_block


def _rope_kernel(x_ref: Any, cos_ref: Any, sin_ref: Any, y_ref: Any, *, interleaved: bool) -> None:
    """cos and sin of every column; sin is that of the angle by which the column's partner is brought here."""
    x = x_ref[0].astype(jnp.float32)
    if interleaved:
        even = jax.lax.broadcasted_iota(jnp.int32, x.shape, 2) % 2 == 0
        partner = jnp.where(even, jnp.roll(x, -1, axis=2), jnp.roll(x, 1, axis=2))
    else:
        partner = jnp.roll(x, x.shape[2] // 2, axis=2)
    y_ref[0] = (x * cos_ref[...][:, None] + partner * sin_ref[...][:, None]).astype(y_ref.dtype)


@functools.partial(jax.jit, static_argnames=("interleaved", "back"))
def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool, back: bool) -> jax.Array:
    if not x.size:
        return x
    batch, places, heads, width = x.shape
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32) * (-1.0 if back else 1.0)
    if interleaved:
        cos, sin = jnp.repeat(cos, 2, axis=1), jnp.stack([-sin, sin], axis=2).reshape(places, width)
    else:
        cos, sin = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
    height = rows_of_block(heads * width)
    block = pl.BlockSpec((1, height, heads, width), lambda b, i: (b, i, 0, 0))
    angles = pl.BlockSpec((height, width), lambda b, i: (i, 0))
    return call(
        "rope",
        functools.partial(_rope_kernel, interleaved=interleaved),
        *(x, cos, sin),
        grid=(batch, pl.cdiv(places, height)),
        in_specs=[block, angles, angles],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    return _turned(x, cos, sin, interleaved, back=False)


def _turned_back(interleaved: bool, angles: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
    return _turned(dy, *angles, interleaved, back=True), *map(jnp.zeros_like, angles)


_rope.defvjp(lambda x, cos, sin, interleaved: (_rope(x, cos, sin, interleaved), (cos, sin)), _turned_back)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """y[B,S,H,D]: the pairs (i, i + D/2) of x[B,S,H,D], or neighbours (2i, 2i + 1), turned by cos, sin[S,D/2].

    Computed in float32. Each is float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. cos
    and sin count as constants: their gradients are zero. Raises TypeError or ValueError, naming the argument, for
    another dtype or shape.
    """
    _check("x", x, cos, sin)
    return _rope(x, cos, sin, interleaved)


def rope_backward(cos: jax.Array, sin: jax.Array, dy: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """dx[B,S,H,D] of `rope`'s x, from its cos[S,D/2] and sin[S,D/2] and the gradient dy[B,S,H,D] of its result.

    dx has dy's dtype. Dtypes and errors as in `rope`.
    """
    _check("dy", dy, cos, sin)
    return _turned(dy, cos, sin, interleaved, back=True)


def _check(name: str, array: jax.Array, cos: jax.Array, sin: jax.Array) -> None:
    check_array(name, array, ("B", "S", "H", "D"))
    if array.shape[3] % 2:
        raise ValueError(f"{name}: expected an even number of columns, got {array.shape[3]}")
    check_array("cos", cos, (array.shape[1], array.shape[3] // 2))
    check_array("sin", sin, cos.shape)
