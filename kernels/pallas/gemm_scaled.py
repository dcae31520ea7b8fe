"""Products of 8-bit matrices with float32 scales: of a row, of a block of 128, or of the whole."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array, check_choice
from assay.kernels.pallas.calls import call

_BLOCK = 128  # of M, N and K; that of K and N also shares a scale
_GRANULARITIES = ("tensor", "row", "block")
_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_LONGEST = (2**31 - 1) // 2**14  # so many products of int8 never exceed an int32


def _gemm_kernel(
    a_ref: Any, b_ref: Any, scale_a_ref: Any, scale_b_ref: Any, c_ref: Any, acc_ref: Any, *, inner: int, by_block: bool
) -> None:
    """int8 is summed as int32; 8-bit floats are exact in bfloat16, and their products in the float32 of the sum."""
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    left = inner - block * _BLOCK  # what lies behind the end of K is anything, NaN included
    factor = jnp.int32 if acc_ref.dtype == jnp.int32 else jnp.bfloat16
    a = jnp.where(jax.lax.broadcasted_iota(jnp.int32, a_ref.shape, 1) < left, a_ref[...].astype(factor), 0)
    b = jnp.where(jax.lax.broadcasted_iota(jnp.int32, b_ref.shape, 0) < left, b_ref[...].astype(factor), 0)
    if factor == jnp.int32:
        a, b = a.astype(jnp.int8), b.astype(jnp.int8)
    products = jnp.dot(a, b, preferred_element_type=acc_ref.dtype)
    acc_ref[...] += products * (scale_a_ref[0] * scale_b_ref[0]) if by_block else products

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        c = acc_ref[...].astype(jnp.float32)
        c_ref[...] = (c if by_block else c * scale_a_ref[0] * scale_b_ref[0]).astype(c_ref.dtype)


@functools.partial(jax.jit, static_argnames="by_block")
def _gemm(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array, *, by_block: bool = False) -> jax.Array:
    """``scale_a`` is [G,M,1] and ``scale_b`` [G,1,N], with a G for each block of K if ``by_block``, else 1."""
    (rows, inner), columns = a.shape, b.shape[1]
    if not a.size or not b.size:
        return jnp.zeros((rows, columns), jnp.bfloat16)
    return call(
        "gemm_int8" if a.dtype == jnp.int8 else "gemm_fp8",
        functools.partial(_gemm_kernel, inner=inner, by_block=by_block),
        *(a, b, scale_a, scale_b),
        grid=(pl.cdiv(rows, _BLOCK), pl.cdiv(columns, _BLOCK), pl.cdiv(inner, _BLOCK)),
        in_specs=[
            pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k: (i, k)),
            pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, _BLOCK, 1), lambda i, j, k: (k if by_block else 0, i, 0)),
            pl.BlockSpec((1, 1, _BLOCK), lambda i, j, k: (k if by_block else 0, 0, j)),
        ],
        out_specs=pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((_BLOCK, _BLOCK), jnp.int32 if a.dtype == jnp.int8 else jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


def gemm_int8(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> jax.Array:
    """(a b) scale_a scale_b as bfloat16 [M,N], of int8 a[M,K] and b[K,N] and float32 scale_a[M,1] and scale_b[1,N].

    The integer sums are exact; K is at most 131,071, so that they fit. Raises TypeError or ValueError, naming the
    argument, for another dtype or shape.
    """
    check_array("a", a, ("M", "K"), jnp.int8)
    check_array("b", b, (a.shape[1], "N"), jnp.int8)
    check_array("scale_a", scale_a, (a.shape[0], 1), jnp.float32)
    check_array("scale_b", scale_b, (1, b.shape[1]), jnp.float32)
    if a.shape[1] > _LONGEST:
        raise ValueError(f"a: expected at most {_LONGEST} columns, as their sum is an int32, got {a.shape[1]}")
    return _gemm(a, b, scale_a[None], scale_b[None])


def gemm_fp8(
    a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array, *, granularity: str = "tensor"
) -> jax.Array:
    """(a scale_a) (b scale_b) as bfloat16 [M,N], of a[M,K] and b[K,N], each float8_e4m3fn or float8_e5m2.

    Scales are float32: scale_a[] and scale_b[] by "tensor", [M,1] and [1,N] by "row", [M,ceil(K/128)] and
    [ceil(K/128),ceil(N/128)] by "block". Raises TypeError or ValueError, naming the argument, for another granularity,
    dtype or shape.
    """
    check_choice("granularity", granularity, _GRANULARITIES)
    check_array("a", a, ("M", "K"), *_FP8)
    check_array("b", b, (a.shape[1], "N"), *_FP8)
    (rows, inner), columns = a.shape, b.shape[1]
    blocks, blocks_n = pl.cdiv(inner, _BLOCK), pl.cdiv(columns, _BLOCK)
    of_a, of_b = {
        "tensor": ((), ()),
        "row": ((rows, 1), (1, columns)),
        "block": ((rows, blocks), (blocks, blocks_n)),
    }[granularity]
    check_array("scale_a", scale_a, of_a, jnp.float32)
    check_array("scale_b", scale_b, of_b, jnp.float32)
    if granularity == "block":
        scale_b = jnp.repeat(scale_b, _BLOCK, axis=1)[:, None, :columns]
        return _gemm(a, b, scale_a.T[:, :, None], scale_b, by_block=True)
    return _gemm(a, b, jnp.broadcast_to(scale_a, (1, rows, 1)), jnp.broadcast_to(scale_b, (1, 1, columns)))
