"""Mixture of experts: (token, expert) pairs are sorted by expert, so that a block of rows has the weights of one.

The grid prefetches the expert of each block, as in T. Gale et al., *MegaBlocks*, arXiv:2211.15841 (2022).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.blocks import dot
from assay.kernels.pallas.calls import call
from assay.kernels.pallas.swiglu import silu_and_derivative

_BLOCK = 128  # of rows, columns and K


def _grouped_kernel(expert_ref: Any, num_blocks_ref: Any, x_ref: Any, *refs: Any, k: int, epilogue: Any) -> None:
    """Compute epilogue(x w^T, ...) for the matrices w of the block's expert; refs: those, the result, accumulators."""
    matrices = len(refs) // 2
    weight_refs, out_ref, acc_refs = refs[:matrices], refs[matrices], refs[matrices + 1 :]
    used, block, last = pl.program_id(0) < num_blocks_ref[0], pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(block == 0)
    def _() -> None:
        for acc_ref in acc_refs:
            acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(used)
    def _() -> None:
        remaining = k - block * _BLOCK  # beyond the end of K a block holds anything, NaN too
        mask_k = jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 1) < remaining
        x = jnp.where(mask_k, x_ref[...], 0)
        for acc_ref, weight_ref in zip(acc_refs, weight_refs, strict=True):
            acc_ref[...] += dot(x, jnp.where(mask_k, weight_ref[0, 0], 0), contract=(1, 1))

    @pl.when(used & (block == last))
    def _() -> None:
        out_ref[...] = epilogue(*(acc_ref[...] for acc_ref in acc_refs)).astype(out_ref.dtype)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return silu_and_derivative(gate)[0] * up


def _grouped_gemm(
    expert: jax.Array, num_blocks: jax.Array, rows: jax.Array, weights: jax.Array, epilogue: Any, dtype: Any
) -> jax.Array:
    """Apply `_grouped_kernel` to blocks of rows[R,K] and the P matrices of their expert, weights[E,P,N,K]."""
    _, matrices, n, k = weights.shape

    def weight_spec(p: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, _BLOCK, _BLOCK), lambda i, j, k, expert, num_blocks: (expert[i], p, j, k))

    return call(
        "moe",
        functools.partial(_grouped_kernel, k=k, epilogue=epilogue),
        *(expert, num_blocks, rows, *[weights] * matrices),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(rows) // _BLOCK, pl.cdiv(n, _BLOCK), pl.cdiv(k, _BLOCK)),
            in_specs=[
                pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k, expert, num_blocks: (i, k)),
                *(weight_spec(p) for p in range(matrices)),
            ],
            out_specs=pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k, expert, num_blocks: (i, j)),
            scratch_shapes=[pltpu.VMEM((_BLOCK, _BLOCK), jnp.float32)] * matrices,
        ),
        out_shape=jax.ShapeDtypeStruct((len(rows), n), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


def _sort_by_expert(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the row of each pair, the expert of each block of rows, and the number of blocks in use."""
    pairs = ids.reshape(-1)
    counts = jnp.sum(pairs[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    ends = jnp.cumsum((counts + _BLOCK - 1) // _BLOCK)  # in blocks: every expert starts a new one
    order = jnp.argsort(pairs)  # stable
    rank = jnp.zeros_like(pairs).at[order].set(jnp.arange(pairs.size, dtype=pairs.dtype))
    first_rank = jnp.cumsum(counts) - counts
    first_row = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]]) * _BLOCK
    max_blocks = pairs.size // _BLOCK + min(experts, pairs.size)
    expert = jnp.minimum(jnp.sum(ends <= jnp.arange(max_blocks)[:, None], axis=1), experts - 1)
    return first_row[pairs] + rank - first_rank[pairs], expert.astype(jnp.int32), ends[-1:].astype(jnp.int32)


@jax.jit
def _moe(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    (tokens, d), (experts, _, f) = x.shape, w_down.shape
    if not (x.size and w_down.size and ids.size):
        return jnp.zeros_like(x)
    row, expert, num_blocks = _sort_by_expert(ids, experts)
    pairs = jnp.repeat(x, ids.shape[1], axis=0)
    rows = jnp.zeros((len(expert) * _BLOCK, d), x.dtype).at[row].set(pairs)
    gate_up = w_gate_up.reshape(experts, 2, f, d)
    hidden = _grouped_gemm(expert, num_blocks, rows, gate_up, _swiglu, x.dtype)
    out = _grouped_gemm(expert, num_blocks, hidden, w_down[:, None], lambda acc: acc, jnp.float32)
    weighted = out[row].reshape(tokens, -1, d) * weights[:, :, None]
    return jnp.sum(weighted, axis=1).astype(x.dtype)


def moe(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Return y[T,D]: the sum over a token's experts ids[T,k] of weights[T,k] w_down (silu(w_gate x) * (w_up x)).

    x[T,D], w_gate_up[E,2F,D] (rows of w_gate first) and w_down[E,D,F] share one dtype, float32, bfloat16 or float16;
    weights are float32, ids int32, from 0 to E - 1, which isn't checked. The hidden activation is rounded to that
    dtype, all else is float32. There is no gradient. Raises TypeError or ValueError, naming the argument, for another
    dtype or shape.
    """
    check_array("x", x, ("T", "D"))
    check_array("w_down", w_down, ("E", x.shape[1], "F"), x.dtype)
    check_array("w_gate_up", w_gate_up, (w_down.shape[0], 2 * w_down.shape[2], x.shape[1]), x.dtype)
    check_array("ids", ids, (x.shape[0], "k"), jnp.int32)
    check_array("weights", weights, ids.shape, jnp.float32)
    if w_down.shape[0] == 0:
        raise ValueError("w_down: expected one expert or more, got 0")
    return _moe(x, w_gate_up, w_down, weights, ids)
