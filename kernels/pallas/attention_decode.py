"""Attention of one new token per sequence over a paged cache: the table says which page is fetched next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.calls import call
from assay.kernels.pallas.products import dot

_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def _decode_kernel(
    table_ref: Any,
    lengths_ref: Any,
    scales_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
) -> None:
    """A page of every key head, and the query heads of each."""
    block, page, groups = pl.program_id(1), k_ref.shape[1], k_ref.shape[2]
    left = lengths_ref[pl.program_id(0)] - block * page  # what lies behind the end may be anything, NaN included

    @pl.when(block == 0)
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(left > 0)
    def _() -> None:
        for g in range(groups):
            q, k, v = q_ref[0, g], k_ref[0, :, g], v_ref[0, :, g].astype(jnp.float32)
            s = dot(q, k.astype(q.dtype), over=(1, 1)) * scales_ref[0]
            s = jnp.where(jax.lax.broadcasted_iota(jnp.int32, s.shape, 1) < left, s, -jnp.inf)
            m_new = jnp.maximum(m_ref[g], jnp.max(s, axis=1, keepdims=True))
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing yet: exp(-inf - 0) is zero, not NaN
            p, rescale = jnp.exp(s - shift), jnp.exp(m_ref[g] - shift)
            m_ref[g] = m_new
            l_ref[g] = l_ref[g] * rescale + jnp.sum(p, axis=1, keepdims=True)

            inside = jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < left
            finite = inside & (jnp.abs(v) < jnp.inf)
            infinities = jnp.sum(jnp.where(inside & ~finite, v, 0.0), axis=0, keepdims=True)  # times zero they'd be NaN
            acc_ref[g] = acc_ref[g] * rescale + dot(p.astype(q.dtype), jnp.where(finite, v, 0.0).astype(q.dtype))
            acc_ref[g] += infinities

    @pl.when(block == pl.num_programs(1) - 1)
    def _() -> None:
        l_i = l_ref[...]
        out_ref[0] = jnp.where(l_i == 0, 0.0, acc_ref[...] / l_i * scales_ref[1]).astype(out_ref.dtype)


@jax.jit
def _decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    scales: jax.Array,
) -> jax.Array:
    """scales: float32[2], of the scores and of the values; an operand, for each layer has its own."""
    (batch, heads, width), (_, page, groups, _), pages = q.shape, k_cache.shape, block_table.shape[1]
    if not q.size or not k_cache.size or not pages:
        return jnp.zeros_like(q)
    group = heads // groups

    def of_sequence(b: Any, j: Any, table: Any, lengths: Any) -> tuple[Any, ...]:
        return b, 0, 0, 0

    def of_page(b: Any, j: Any, table: Any, lengths: Any) -> tuple[Any, ...]:
        return jnp.where(j * page < lengths[b], table[b, j], 0), 0, 0, 0

    cache = pl.BlockSpec((1, page, groups, width), of_page)
    block = pl.BlockSpec((1, groups, group, width), of_sequence)
    out = call(
        "attention_decode",
        _decode_kernel,
        *(block_table, jnp.minimum(seq_lens, pages * page), scales),
        *(q.reshape(batch, groups, group, width), k_cache, v_cache),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, pages),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), block, cache, cache],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((groups, group, size), jnp.float32) for size in (1, 1, width)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, groups, group, width), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )
    return out.reshape(q.shape)


def attention_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> jax.Array:
    """softmax(q k^T scale) v for q[B,H,D] over the first seq_lens[b] positions of sequence b; H a multiple of Hkv.

    k_cache and v_cache [P,page,Hkv,D] are in q's dtype (float32, bfloat16 or float16), or in float8_e4m3fn or
    float8_e5m2; a slot stands for its number times k_scale or v_scale. Position p of sequence b lies in page
    block_table[b, p // page], at p % page; block_table is int32[B,max_pages], seq_lens int32[B], and neither entries
    nor slots behind the last position are used. scale: 1 / sqrt(D) where left out.

    Returns out[B,H,D] in q's dtype, zero for an empty sequence. Raises TypeError or ValueError, naming the argument,
    for another dtype or shape. Lengths and page numbers aren't checked, but that no sequence is read beyond the end of
    its row of the table.
    """
    check_array("q", q, ("B", "H", "D"))
    check_array("k_cache", k_cache, ("P", "page", "Hkv", q.shape[2]), q.dtype, *_FP8)
    check_array("v_cache", v_cache, k_cache.shape, k_cache.dtype)
    check_array("block_table", block_table, (q.shape[0], "max_pages"), jnp.int32)
    check_array("seq_lens", seq_lens, q.shape[:1], jnp.int32)
    if k_cache.shape[2] == 0 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"k_cache: expected a number of heads that divides q's {q.shape[1]}, got {k_cache.shape[2]}")
    scale = float(max(q.shape[2], 1) ** -0.5 if scale is None else scale) * k_scale
    return _decode(q, k_cache, v_cache, block_table, seq_lens, jnp.array([scale, v_scale], jnp.float32))
