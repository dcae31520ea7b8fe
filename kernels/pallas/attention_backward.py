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

from assay.kernels.pallas.attention_blocks import BLOCK_K, BLOCK_Q, GPU_K, GPU_Q, Geometry, gpu_stages
from assay.kernels.pallas.calls import call, call_on_gpu
from assay.kernels.pallas.products import dot
from assay.kernels.pallas.tiles import load, side, store


def _block(ref: Any, first: Any, length: int) -> jax.Array:
    """A block of rows; those behind the end are zero, as otherwise they may be anything, NaN included."""
    block = ref[0, 0]
    row = first + jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
    return jnp.where(row < length, block, 0)


def _blocks(refs: Sequence[Any], first_query: Any, first_key: Any, geometry: Geometry) -> list[jax.Array]:
    """Those of q, k, v, the result, lse and dout."""
    ends = ((first_query, geometry.queries), (first_key, geometry.keys))
    return [_block(ref, *ends[place in (1, 2)]) for place, ref in enumerate(refs)]


def _gradient_of_scores(blocks: Sequence[jax.Array], met: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Weights and gradients of the scores of those who have met, in the inputs' dtype."""
    q, k, v, out, lse, dout = blocks
    p = jnp.where(met, jnp.exp(dot(q, k, over=(1, 1)) * scale - lse), 0.0)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=1, keepdims=True)
    ds = jnp.where(met, p * (dot(dout, v, over=(1, 1)) - delta), 0.0)
    return p.astype(q.dtype), ds.astype(q.dtype)


def _not_finite(dq: jax.Array, k: jax.Array, met: jax.Array) -> jax.Array:
    """The sums with the keys that aren't finite, of which a product makes NaN for queries that don't see them too."""
    found = ~(jnp.abs(k.astype(jnp.float32)) < jnp.inf)
    return jnp.where(dot(met.astype(k.dtype), found.astype(k.dtype)) > 0, jnp.nan, dq)


def _queries_kernel(*refs: Any, scale: float, geometry: Geometry) -> None:
    *inputs, dq_ref, acc_ref = refs
    block = pl.program_id(3)
    first_query, first_key = pl.program_id(2) * BLOCK_Q, block * BLOCK_K

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(geometry.meet(first_query, first_key))
    def _() -> None:
        blocks, met = _blocks(inputs, first_query, first_key, geometry), geometry.seen(first_query, first_key)
        k = blocks[1]
        finite = jnp.abs(k.astype(jnp.float32)) < jnp.inf
        acc_ref[...] += dot(_gradient_of_scores(blocks, met, scale)[1], jnp.where(finite, k, 0))

        @pl.when(jnp.any(~finite))
        def _() -> None:
            acc_ref[...] = _not_finite(acc_ref[...], k, met)

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
        blocks = _blocks(inputs, first_query, first_key, geometry)
        p, ds = _gradient_of_scores(blocks, geometry.seen(first_query, first_key), scale)
        dk_acc_ref[...] += dot(ds, blocks[0], over=(0, 0))
        dv_acc_ref[...] += dot(p, blocks[5], over=(0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        dk_ref[0, 0] = (dk_acc_ref[...] * scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_acc_ref[...].astype(dv_ref.dtype)


def _gpu_blocks(refs: Sequence[Any], head: Any, first_query: Any, first_key: Any) -> list[jax.Array]:
    """As `_blocks`, of the ``head``-th of the query heads that the program has, and of its one key head."""
    found = []
    for place, ref in enumerate(refs):
        height, width = GPU_K if place in (1, 2) else GPU_Q, 1 if place == 4 else side(ref.shape[2], 16)
        block = load(ref, (0, first_key, 0) if place in (1, 2) else (head, first_query, 0), (1, height, width))
        found.append(block.reshape(height, width))
    return found


def _gpu_queries_kernel(*refs: Any, scale: float, geometry: Geometry) -> None:
    """The blocks of keys are steps of the program that has the queries."""
    *inputs, dq_ref = refs
    first_query = pl.program_id(2) * GPU_Q

    def step(block: Any, dq: jax.Array) -> jax.Array:
        blocks = _gpu_blocks(inputs, 0, first_query, block * GPU_K)
        met, k = geometry.seen(first_query, block * GPU_K, (GPU_Q, GPU_K)), blocks[1]
        finite = jnp.abs(k.astype(jnp.float32)) < jnp.inf
        dq += dot(_gradient_of_scores(blocks, met, scale)[1], jnp.where(finite, k, 0))
        some = jnp.max((~finite).astype(jnp.int32)) > 0
        return jax.lax.cond(some, lambda dq: _not_finite(dq, k, met), lambda dq: dq, dq)

    nothing = jnp.zeros((GPU_Q, side(dq_ref.shape[2], 16)))
    dq = jax.lax.fori_loop(0, geometry.key_blocks(first_query), step, nothing)
    store(dq_ref, (0, first_query, 0), (dq * scale)[None])


def _gpu_keys_kernel(*refs: Any, scale: float, geometry: Geometry) -> None:
    """The heads that share a key head, and the blocks of their queries, are steps of the program that has the keys."""
    *inputs, dk_ref, dv_ref = refs
    first_key = pl.program_id(2) * GPU_K
    unmet, blocks_of_queries = geometry.unmet_query_blocks(first_key), pl.cdiv(geometry.queries, GPU_Q)
    met = blocks_of_queries - unmet

    def step(place: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        head, first_query = div(place, met), (unmet + rem(place, met)) * GPU_Q
        blocks = _gpu_blocks(inputs, head, first_query, first_key)
        p, ds = _gradient_of_scores(blocks, geometry.seen(first_query, first_key, (GPU_Q, GPU_K)), scale)
        return sums[0] + dot(ds, blocks[0], over=(0, 0)), sums[1] + dot(p, blocks[5], over=(0, 0))

    nothing = tuple(jnp.zeros((GPU_K, side(ref.shape[2], 16))) for ref in (dk_ref, dv_ref))
    dk, dv = jax.lax.fori_loop(0, inputs[0].shape[0] * met, step, nothing)
    store(dk_ref, (0, first_key, 0), (dk * scale)[None])
    store(dv_ref, (0, first_key, 0), dv[None])


def _on_gpu(*arrays: jax.Array, kernel: Any, of_keys: bool, results: Any, interpret: bool = False) -> Any:
    """A program for each block of queries or, ``of_keys``, of keys; it has a head of keys, and all that share it."""
    shared = arrays[0].shape[1] // arrays[1].shape[1]
    resulting = results if of_keys else (results,)

    def whole(array: Any, keys: bool) -> pl.BlockSpec:
        count, divisor = shared if of_keys and not keys else 1, shared if keys and not of_keys else 1
        return pl.BlockSpec((None, count, *array.shape[2:]), lambda b, h, i: (b, div(h, divisor), 0, 0))

    found = call_on_gpu(
        *(kernel, *arrays),
        warps=4,
        stages=gpu_stages(arrays[0].dtype),
        grid=(*resulting[0].shape[:2], pl.cdiv(resulting[0].shape[2], GPU_K if of_keys else GPU_Q)),
        in_specs=[whole(array, place in (1, 2)) for place, array in enumerate(arrays)],
        out_specs=tuple(whole(result, of_keys) for result in resulting),
        out_shape=resulting,
        interpret=interpret,
    )
    return found if of_keys else found[0]


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
    results = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays[:3])
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
        gpu=functools.partial(
            _on_gpu,
            kernel=functools.partial(_gpu_queries_kernel, scale=scale, geometry=geometry),
            of_keys=False,
            results=results[0],
        ),
        grid=(batch, heads, query_blocks, key_blocks),
        in_specs=given,
        out_specs=given[0],
        out_shape=results[0],
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
        gpu=functools.partial(
            _on_gpu,
            kernel=functools.partial(_gpu_keys_kernel, scale=scale, geometry=geometry),
            of_keys=True,
            results=results[1:],
        ),
        grid=(batch, groups, key_blocks, shared * query_blocks),
        in_specs=given,
        out_specs=tuple(given[1:3]),
        out_shape=results[1:],
        scratch_shapes=[pltpu.VMEM((BLOCK_K, size), jnp.float32) for size in (width, width_v)],
        compiler_params=parameters,
    )
    return dq, dk, dv
