"""Rotary position embedding (RoPE): pairs of columns are rotated by angles that depend on the position.

Source: J. Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, arXiv:2104.09864 (2021).
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
from assay.kernels.pallas.blocks import next_power_of_2, num_warps
from assay.kernels.pallas.calls import call, call_on_gpu
from assay.kernels.pallas.rows import rows_per_block

_GPU_BLOCK_ELEMENTS = 2**11


def _rope_kernel(x_ref: Any, cos_ref: Any, sin_ref: Any, y_ref: Any, *, interleaved: bool) -> None:
    """Compute x cos + partner sin for every column, where sin has the sign with which the partner enters."""
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
    """Compute the same for rows of [B S H,D], loading the partners instead of rolling."""
    (rows, width), positions = x_ref.shape, cos_ref.shape[0]
    row, column = pl.program_id(0) * block[0] + jnp.arange(block[0])[:, None], jnp.arange(block[1])[None]
    position = jax.lax.rem(jax.lax.div(row, heads), positions)
    partner = column ^ 1 if interleaved else jax.lax.rem(column + width // 2, width)
    mask = (row < rows) & (column < width)

    def gather(ref: Any, row: jax.Array, column: jax.Array) -> jax.Array:
        return plt.load(ref.at[row, column], mask=mask, other=0.0).astype(jnp.float32)

    y = gather(x_ref, row, column) * gather(cos_ref, position, column)
    y += gather(x_ref, row, partner) * gather(sin_ref, position, column)
    plt.store(y_ref.at[row, column], y.astype(y_ref.dtype), mask=mask)


def _on_gpu(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool, interpret: bool = False) -> jax.Array:
    rows = x.reshape(-1, x.shape[3])
    width = next_power_of_2(x.shape[3])
    block = max(1, _GPU_BLOCK_ELEMENTS // width), width
    y = call_on_gpu(
        functools.partial(_gpu_kernel, interleaved=interleaved, heads=x.shape[2], block=block),
        *(rows, cos, sin),
        warps=num_warps(block[0] * block[1]),
        grid=(pl.cdiv(len(rows), block[0]),),
        out_shape=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        interpret=interpret,
    )
    return y.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("interleaved", "backward"))
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool, backward: bool) -> jax.Array:
    if not x.size:
        return x
    batch, positions, heads, width = x.shape
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32) * (-1.0 if backward else 1.0)
    if interleaved:
        cos, sin = jnp.repeat(cos, 2, axis=1), jnp.stack([-sin, sin], axis=2).reshape(positions, width)
    else:
        cos, sin = jnp.concatenate([cos, cos], axis=1), jnp.concatenate([-sin, sin], axis=1)
    height = rows_per_block(heads * width)
    block = pl.BlockSpec((1, height, heads, width), lambda b, i: (b, i, 0, 0))
    angles = pl.BlockSpec((height, width), lambda b, i: (i, 0))
    return call(
        "rope",
        functools.partial(_rope_kernel, interleaved=interleaved),
        *(x, cos, sin),
        gpu=functools.partial(_on_gpu, interleaved=interleaved),
        grid=(batch, pl.cdiv(positions, height)),
        in_specs=[block, angles, angles],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rope(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool) -> jax.Array:
    return _rotate(x, cos, sin, interleaved, backward=False)


def _rope_bwd(interleaved: bool, angles: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, ...]:
    return _rotate(dy, *angles, interleaved, backward=True), *map(jnp.zeros_like, angles)


_rope.defvjp(lambda x, cos, sin, interleaved: (_rope(x, cos, sin, interleaved), (cos, sin)), _rope_bwd)


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Return y[B,S,H,D]: the pairs (i, i + D/2) of x[B,S,H,D], or (2i, 2i + 1), rotated by cos, sin[S,D/2].

    Computed in float32. Each is float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. cos
    and sin are constants: their gradients are zero. Raises TypeError or ValueError, naming the argument, for another
    dtype or shape.
    """
    _check("x", x, cos, sin)
    return _rope(x, cos, sin, interleaved)


def rope_backward(cos: jax.Array, sin: jax.Array, dy: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Return dx[B,S,H,D] of `rope`, in dy's dtype, from cos, sin[S,D/2] and the gradient dy[B,S,H,D] of its result.

    Dtypes and errors are as in `rope`.
    """
    _check("dy", dy, cos, sin)
    return _rotate(dy, cos, sin, interleaved, backward=True)


def _check(name: str, array: jax.Array, cos: jax.Array, sin: jax.Array) -> None:
    check_array(name, array, ("B", "S", "H", "D"))
    if array.shape[3] % 2:
        raise ValueError(f"{name}: expected an even number of columns, got {array.shape[3]}")
    check_array("cos", cos, (array.shape[1], array.shape[3] // 2))
    check_array("sin", sin, cos.shape)
