"""Matrix product of two floating-point matrices, accumulated in float32 over blocks of K.

The blocks of K are programs of a TPU's grid, and steps of a loop on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.blocks import dot, load, store
from assay.kernels.pallas.calls import call, call_on_gpu

_BLOCK_M, _BLOCK_N, _BLOCK_K = 128, 128, 128
_GPU_BLOCK_M, _GPU_BLOCK_N, _GPU_BLOCK_K = 64, 64, 32


def _gemm_kernel(a_ref: Any, b_ref: Any, c_ref: Any, acc_ref: Any, *, k: int) -> None:
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    remaining = k - block * _BLOCK_K  # beyond the end of K a block holds anything, NaN too
    a = jnp.where(jax.lax.broadcasted_iota(jnp.int32, a_ref.shape, 1) < remaining, a_ref[...], 0)
    b = jnp.where(jax.lax.broadcasted_iota(jnp.int32, b_ref.shape, 0) < remaining, b_ref[...], 0)
    acc_ref[...] += dot(a, b)

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        c_ref[...] = acc_ref[...].astype(c_ref.dtype)


def _gpu_kernel(a_ref: Any, b_ref: Any, c_ref: Any) -> None:
    row, column = pl.program_id(0) * _GPU_BLOCK_M, pl.program_id(1) * _GPU_BLOCK_N

    def step(block: Any, acc: jax.Array) -> jax.Array:
        a = load(a_ref, (row, block * _GPU_BLOCK_K), (_GPU_BLOCK_M, _GPU_BLOCK_K))
        b = load(b_ref, (block * _GPU_BLOCK_K, column), (_GPU_BLOCK_K, _GPU_BLOCK_N))
        return acc + dot(a, b)

    num_blocks = pl.cdiv(a_ref.shape[1], _GPU_BLOCK_K)
    acc = jax.lax.fori_loop(0, num_blocks, step, jnp.zeros((_GPU_BLOCK_M, _GPU_BLOCK_N), jnp.float32))
    store(c_ref, (row, column), acc)


def _on_gpu(a: jax.Array, b: jax.Array, *, interpret: bool = False) -> jax.Array:
    m, n = len(a), b.shape[1]
    return call_on_gpu(
        *(_gpu_kernel, a, b),
        warps=4,
        grid=(pl.cdiv(m, _GPU_BLOCK_M), pl.cdiv(n, _GPU_BLOCK_N)),
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        interpret=interpret,
    )


@jax.custom_vjp
@jax.jit
def _gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    (m, k), n = a.shape, b.shape[1]
    if not a.size or not b.size:
        return jnp.zeros((m, n), a.dtype)
    return call(
        "gemm",
        functools.partial(_gemm_kernel, k=k),
        *(a, b),
        gpu=_on_gpu,
        grid=(pl.cdiv(m, _BLOCK_M), pl.cdiv(n, _BLOCK_N), pl.cdiv(k, _BLOCK_K)),
        in_specs=[
            pl.BlockSpec((_BLOCK_M, _BLOCK_K), lambda i, j, k: (i, k)),
            pl.BlockSpec((_BLOCK_K, _BLOCK_N), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((_BLOCK_M, _BLOCK_N), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_shapes=[pltpu.VMEM((_BLOCK_M, _BLOCK_N), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


_gemm.defvjp(
    lambda a, b: (_gemm(a, b), (a, b)),
    lambda saved, dc: (_gemm(dc, saved[1].T), _gemm(saved[0].T, dc)),
)


def gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a b of a[M,K] and b[K,N], both float32, bfloat16 or float16, rounded once from a float32 accumulator.

    Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("a", a, ("M", "K"))
    check_array("b", b, (a.shape[1], "N"), a.dtype)
    return _gemm(a, b)
