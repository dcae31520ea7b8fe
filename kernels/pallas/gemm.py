"""Matrix product of two floating-point matrices: blocks of K follow one another, and add to a float32 accumulator.

They are a TPU's programs, and on a GPU the steps of one program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.calls import call, call_on_gpu
from assay.kernels.pallas.products import dot
from assay.kernels.pallas.tiles import load, store

_BLOCK_M, _BLOCK_N, _BLOCK_K = 128, 128, 128
_GPU_M, _GPU_N, _GPU_K = 64, 64, 32


def _gemm_kernel(a_ref: Any, b_ref: Any, c_ref: Any, acc_ref: Any, *, inner: int) -> None:
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    left = inner - block * _BLOCK_K  # what lies behind the end of K is anything, NaN included
    a = jnp.where(jax.lax.broadcasted_iota(jnp.int32, a_ref.shape, 1) < left, a_ref[...], 0)
    b = jnp.where(jax.lax.broadcasted_iota(jnp.int32, b_ref.shape, 0) < left, b_ref[...], 0)
    acc_ref[...] += dot(a, b)

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        c_ref[...] = acc_ref[...].astype(c_ref.dtype)


def _gpu_kernel(a_ref: Any, b_ref: Any, c_ref: Any) -> None:
    row, column = pl.program_id(0) * _GPU_M, pl.program_id(1) * _GPU_N

    def step(block: Any, acc: jax.Array) -> jax.Array:
        a = load(a_ref, (row, block * _GPU_K), (_GPU_M, _GPU_K))
        b = load(b_ref, (block * _GPU_K, column), (_GPU_K, _GPU_N))
        return acc + dot(a, b)

    blocks = pl.cdiv(a_ref.shape[1], _GPU_K)
    store(c_ref, (row, column), jax.lax.fori_loop(0, blocks, step, jnp.zeros((_GPU_M, _GPU_N), jnp.float32)))


def _on_gpu(a: jax.Array, b: jax.Array, *, interpret: bool = False) -> jax.Array:
    rows, columns = len(a), b.shape[1]
    return call_on_gpu(
        *(_gpu_kernel, a, b),
        warps=4,
        grid=(pl.cdiv(rows, _GPU_M), pl.cdiv(columns, _GPU_N)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        interpret=interpret,
    )


@jax.custom_vjp
@jax.jit
def _gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    (rows, inner), columns = a.shape, b.shape[1]
    if not a.size or not b.size:
        return jnp.zeros((rows, columns), a.dtype)
    return call(
        "gemm",
        functools.partial(_gemm_kernel, inner=inner),
        *(a, b),
        gpu=_on_gpu,
        grid=(pl.cdiv(rows, _BLOCK_M), pl.cdiv(columns, _BLOCK_N), pl.cdiv(inner, _BLOCK_K)),
        in_specs=[
            pl.BlockSpec((_BLOCK_M, _BLOCK_K), lambda i, j, k: (i, k)),
            pl.BlockSpec((_BLOCK_K, _BLOCK_N), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((_BLOCK_M, _BLOCK_N), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        scratch_shapes=[pltpu.VMEM((_BLOCK_M, _BLOCK_N), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


def _gradients(factors: tuple[jax.Array, jax.Array], dc: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = factors
    return _gemm(dc, b.T), _gemm(a.T, dc)


_gemm.defvjp(lambda a, b: (_gemm(a, b), (a, b)), _gradients)


def gemm(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b of a[M,K] and b[K,N], both float32, bfloat16 or float16, rounded once from a float32 accumulator.

    Raises TypeError or ValueError, naming the argument, for another dtype or shape.
    """
    check_array("a", a, ("M", "K"))
    check_array("b", b, (a.shape[1], "N"), a.dtype)
    return _gemm(a, b)
