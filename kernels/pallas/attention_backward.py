"""The gradients of attention: of the queries in one kernel, of keys and values in another, so that nothing is shared.

Weights are computed again from the stored log-sum-exp, and delta, the sum over a row of output times its gradient, from
the stored output, as FlashAttention-2 does (T. Dao, arXiv:2307.08691, 2023, algorithm 2).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from assay.kernels.pallas.attention_blocks import BLOCK_K, BLOCK_Q, Geometry
from assay.kernels.pallas.calls import call
from assay.kernels.pallas.products import dot


def _block(ref: Any, first: Any, length: int) -> jax.Array:
    """A block of rows; those behind the end are zero, as otherwise they may be anything, NaN included."""
    block = ref[0, 0]
    row = first + jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
    return jnp.where(row < length, block, 0)


def _gradient_of_scores(
    refs: Sequence[Any], first_query: Any, first_key: Any, scale: float, geometry: Geometry
) -> tuple[jax.Array, ...]:
    """Weights and gradients of the scores, [BLOCK_Q,BLOCK_K] in the inputs' dtype, and the blocks of q, k and dout."""
    q_ref, k_ref, v_ref, out_ref, lse_ref, dout_ref = refs
    q, out, dout = (_block(ref, first_query, geometry.queries) for ref in (q_ref, out_ref, dout_ref))
    k, v = (_block(ref, first_key, geometry.keys) for ref in (k_ref, v_ref))
    met = geometry.seen(first_query, first_key)
    p = jnp.where(met, jnp.exp(dot(q, k, over=(1, 1)) * scale - lse_ref[0, 0]), 0.0)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=1, keepdims=True)
    ds = jnp.where(met, p * (dot(dout, v, over=(1, 1)) - delta), 0.0)
    return p.astype(q.dtype), ds.astype(q.dtype), q, k, dout


def _queries_kernel(*refs: Any, scale: float, geometry: Geometry) -> None:
    *inputs, dq_ref, acc_ref = refs
    block = pl.program_id(3)
    first_query, first_key = pl.program_id(2) * BLOCK_Q, block * BLOCK_K

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(geometry.meet(first_query, first_key))
    def _() -> None:
        _, ds, _, k, _ = _gradient_of_scores(inputs, first_query, first_key, scale, geometry)
        finite = jnp.abs(k.astype(jnp.float32)) < jnp.inf
        acc_ref[...] += dot(ds, jnp.where(finite, k, 0))

        @pl.when(jnp.any(~finite))  # a product makes NaN of 0 * infinity: only for queries that see the key
        def _not_finite() -> None:
            met = geometry.seen(first_query, first_key).astype(jnp.float32)
            acc_ref[...] = jnp.where(dot(met, (~finite).astype(jnp.float32)) > 0, jnp.nan, acc_ref[...])

    @pl.when(block == pl.num_programs(3) - 1)
    def _() -> None:
        dq_ref[0, 0] = (acc_ref[...] * scale).astype(dq_ref.dtype)


def _keys_kernel(*refs: Any, scale: float, geometry: Geometry, query_blocks: int) -> None:
    """The last dimension of the grid goes through the heads that share a key head, and the blocks of their queries."""
    *inputs, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref = refs
    step = pl.program_id(3)
    first_query, first_key = rem(step, query_blocks) * BLOCK_Q, pl.program_id(2) * BLOCK_K

    @pl.when(step == 0)
    def _() -> None:
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)

    @pl.when(geometry.meet(first_query, first_key))
    def _() -> None:
        p, ds, q, _, dout = _gradient_of_scores(inputs, first_query, first_key, scale, geometry)
        dk_acc_ref[...] += dot(ds, q, over=(0, 0))
        dv_acc_ref[...] += dot(p, dout, over=(0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        dk_ref[0, 0] = (dk_acc_ref[...] * scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_acc_ref[...].astype(dv_ref.dtype)


@functools.partial(jax.jit, static_argnums=(6, 7))
def attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    causal: str,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv in the inputs' dtype, from the results of `attention`, lse as float32[B,H,Sq,1], and dout."""
    (batch, heads, queries, width), (_, groups, keys, width_v) = q.shape, v.shape
    if not q.size or not v.size:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    shared, query_blocks, key_blocks = heads // groups, pl.cdiv(queries, BLOCK_Q), pl.cdiv(keys, BLOCK_K)
    geometry = Geometry.of(causal, queries, keys)
    arrays = q, k, v, out, lse, dout
    parameters = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))

    def specs(of_queries: Any, of_keys: Any) -> list[pl.BlockSpec]:
        heights = BLOCK_Q, BLOCK_K, BLOCK_K, BLOCK_Q, BLOCK_Q, BLOCK_Q
        return [
            pl.BlockSpec((1, 1, height, array.shape[3]), of_keys if array is k or array is v else of_queries)
            for height, array in zip(heights, arrays, strict=True)
        ]

    given = specs(lambda b, h, i, j: (b, h, i, 0), lambda b, h, i, j: (b, div(h, shared), j, 0))
    dq = call(
        "attention_backward",
        functools.partial(_queries_kernel, scale=scale, geometry=geometry),
        *arrays,
        grid=(batch, heads, query_blocks, key_blocks),
        in_specs=given,
        out_specs=given[0],
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((BLOCK_Q, width), jnp.float32)],
        compiler_params=parameters,
    )
    given = specs(
        lambda b, g, j, t: (b, g * shared + div(t, query_blocks), rem(t, query_blocks), 0),
        lambda b, g, j, t: (b, g, j, 0),
    )
    dk, dv = call(
        "attention_backward",
        functools.partial(_keys_kernel, scale=scale, geometry=geometry, query_blocks=query_blocks),
        *arrays,
        grid=(batch, groups, key_blocks, shared * query_blocks),
        in_specs=given,
        out_specs=tuple(given[1:3]),
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (k, v)),
        scratch_shapes=[pltpu.VMEM((BLOCK_K, size), jnp.float32) for size in (width, width_v)],
        compiler_params=parameters,
    )
    return dq, dk, dv
