"""Products of int8 and FP8 matrices with float32 scales: per tensor, per row, or per block of 128."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import FP8, check_array, check_choice
from assay.kernels.pallas.calls import call

_BLOCK = 128  # of M, N and K; with scales by block also the elements that share one
_MAX_INT8_K = (2**31 - 1) // 2**14  # 2**14 is the greatest product, and the sum is an int32


def _gemm_kernel(
    a_ref: Any, b_ref: Any, scale_a_ref: Any, scale_b_ref: Any, c_ref: Any, acc_ref: Any, *, k: int, by_block: bool
) -> None:
    """Accumulate int8 in int32, FP8 in float32: FP8 is exact in bfloat16, and its products are exact in float32."""
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    remaining = k - block * _BLOCK  # beyond the end of K a block holds anything, NaN too
    dtype = jnp.int32 if acc_ref.dtype == jnp.int32 else jnp.bfloat16
    a = jnp.where(jax.lax.broadcasted_iota(jnp.int32, a_ref.shape, 1) < remaining, a_ref[...].astype(dtype), 0)
    b = jnp.where(jax.lax.broadcasted_iota(jnp.int32, b_ref.shape, 0) < remaining, b_ref[...].astype(dtype), 0)
    if dtype == jnp.int32:
        a, b = a.astype(jnp.int8), b.astype(jnp.int8)
    products = jnp.dot(a, b, preferred_element_type=acc_ref.dtype)
    acc_ref[...] += products * (scale_a_ref[0] * scale_b_ref[0]) if by_block else products

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        c = acc_ref[...].astype(jnp.float32)
        c_ref[...] = (c if by_block else c * scale_a_ref[0] * scale_b_ref[0]).astype(c_ref.dtype)


@functools.partial(jax.jit, static_argnames="by_block")
def _gemm(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array, *, by_block: bool = False) -> jax.Array:
    """Multiply with scale_a[G,M,1] and scale_b[G,1,N]; G is the number of blocks of K if ``by_block``, else 1."""
    (m, k), n = a.shape, b.shape[1]
    if not a.size or not b.size:
        return jnp.zeros((m, n), jnp.bfloat16)
    return call(
        "gemm_int8" if a.dtype == jnp.int8 else "gemm_fp8",
        functools.partial(_gemm_kernel, k=k, by_block=by_block),
        *(a, b, scale_a, scale_b),
        grid=(pl.cdiv(m, _BLOCK), pl.cdiv(n, _BLOCK), pl.cdiv(k, _BLOCK)),
        in_specs=[
            pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k: (i, k)),
            pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k: (k, j)),
            pl.BlockSpec((1, _BLOCK, 1), lambda i, j, k: (k if by_block else 0, i, 0)),
            pl.BlockSpec((1, 1, _BLOCK), lambda i, j, k: (k if by_block else 0, 0, j)),
        ],
        out_specs=pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((_BLOCK, _BLOCK), jnp.int32 if a.dtype == jnp.int8 else jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


def gemm_int8(a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array) -> jax.Array:
    """Return (a b) scale_a scale_b as bfloat16 [M,N], for int8 a[M,K], b[K,N] and float32 scale_a[M,1], scale_b[1,N].

    The integer sums are exact; K is at most 131,071, so that they fit. Raises TypeError or ValueError, naming the
    argument, for another dtype or shape.
    """
    check_array("a", a, ("M", "K"), jnp.int8)
    check_array("b", b, (a.shape[1], "N"), jnp.int8)
    check_array("scale_a", scale_a, (a.shape[0], 1), jnp.float32)
    check_array("scale_b", scale_b, (1, b.shape[1]), jnp.float32)
    if a.shape[1] > _MAX_INT8_K:
        raise ValueError(f"a: expected at most {_MAX_INT8_K} columns, as their sum is an int32, got {a.shape[1]}")
    return _gemm(a, b, scale_a[None], scale_b[None])


def gemm_fp8(
    a: jax.Array, b: jax.Array, scale_a: jax.Array, scale_b: jax.Array, *, granularity: str = "tensor"
) -> jax.Array:
    """Return (a scale_a) (b scale_b) as bfloat16 [M,N], for a[M,K] and b[K,N], each float8_e4m3fn or float8_e5m2.

    Scales are float32: scale_a[] and scale_b[] by "tensor", [M,1] and [1,N] by "row", [M,ceil(K/128)] and
    [ceil(K/128),ceil(N/128)] by "block". Raises TypeError or ValueError, naming the argument, for another granularity,
    dtype or shape.
    """
    check_choice("granularity", granularity, ("tensor", "row", "block"))
    check_array("a", a, ("M", "K"), *FP8)
    check_array("b", b, (a.shape[1], "N"), *FP8)
    (m, k), n = a.shape, b.shape[1]
    blocks_k, blocks_n = pl.cdiv(k, _BLOCK), pl.cdiv(n, _BLOCK)
    shape_a, shape_b = {
        "tensor": ((), ()),
        "row": ((m, 1), (1, n)),
        "block": ((m, blocks_k), (blocks_k, blocks_n)),
    }[granularity]
    check_array("scale_a", scale_a, shape_a, jnp.float32)
    check_array("scale_b", scale_b, shape_b, jnp.float32)
    if granularity == "block":
        scale_b = jnp.repeat(scale_b, _BLOCK, axis=1)[:, None, :n]
        return _gemm(a, b, scale_a.T[:, :, None], scale_b, by_block=True)
    return _gemm(a, b, jnp.broadcast_to(scale_a, (1, m, 1)), jnp.broadcast_to(scale_b, (1, 1, n)))
