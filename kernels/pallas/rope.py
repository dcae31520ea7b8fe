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
from jax.experimental.pallas import triton as plt

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.calls import call, call_on_gpu
from assay.kernels.pallas.rows import rows_of_block
from assay.kernels.pallas.tiles import side, warps

_GPU_BLOCK = 2**11  # elements of a GPU's block


def _rope_kernel(x_ref: Any, cos_ref: Any, sin_ref: Any, y_ref: Any, *, interleaved: bool) -> None:
    """cos and sin of every column; sin is that of the angle by which the column's partner is brought here."""
    x = x_ref[0].astype(jnp.float32)
    if interleaved:
        even = jax.lax.broadcasted_iota(jnp.int32, x.shape, 2) % 2 == 0
        partner = jnp.where(even, jnp.roll(x, -1, axis=2), jnp.roll(x, 1, axis=2))
    else:
        partner = jnp.roll(x, x.shape[2] // 2, axis=2)
    y_ref[0] = (x * cos_ref[...][:, None] + partner * sin_ref[...][:, None]).astype(y_ref.dtype)


def _gpu_kernel(
    x_ref: Any, cos_ref: Any, sin_ref: Any, y_ref: Any, *, interleaved: bool, heads: int, block: tuple[int, int]
) -> None:
    """Each row of [B S H,D] is a head at a place. What a TPU rolls to its partner is loaded from there."""
    (rows, width), places = x_ref.shape, cos_ref.shape[0]
    row, column = pl.program_id(0) * block[0] + jnp.arange(block[0])[:, None], jnp.arange(block[1])[None]
    place = jax.lax.rem(jax.lax.div(row, heads), places)
    partner = column ^ 1 if interleaved else jax.lax.rem(column + width // 2, width)
    inside = (row < rows) & (column < width)

    def taken(ref: Any, row: jax.Array, column: jax.Array) -> jax.Array:
        return plt.load(ref.at[row, column], mask=inside, other=0.0).astype(jnp.float32)

    y = taken(x_ref, row, column) * taken(cos_ref, place, column)
    y += taken(x_ref, row, partner) * taken(sin_ref, place, column)
    plt.store(y_ref.at[row, column], y.astype(y_ref.dtype), mask=inside)


def _on_gpu(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool, interpret: bool = False) -> jax.Array:
    rows = x.reshape(-1, x.shape[3])
    block = max(1, _GPU_BLOCK // side(x.shape[3])), side(x.shape[3])
    y = call_on_gpu(
        functools.partial(_gpu_kernel, interleaved=interleaved, heads=x.shape[2], block=block),
        *(rows, cos, sin),
        warps=warps(block[0] * block[1]),
        grid=(pl.cdiv(len(rows), block[0]),),
        out_shape=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        interpret=interpret,
    )
    return y.reshape(x.shape)


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
        gpu=functools.partial(_on_gpu, interleaved=interleaved),
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
