"""Decode attention: one query token per sequence over a paged cache; the grid prefetches pages by the block table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import FP8, check_array
from assay.kernels.pallas.blocks import dot
from assay.kernels.pallas.calls import call


def _decode_kernel(
    block_table_ref: Any,
    seq_lens_ref: Any,
    scales_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
) -> None:
    """Add one page of all KV heads to the state of their query heads; the state is scratch memory."""
    block, page_size, kv_heads = pl.program_id(1), k_ref.shape[1], k_ref.shape[2]
    remaining = seq_lens_ref[pl.program_id(0)] - block * page_size  # slots beyond it hold anything, NaN too

    @pl.when(block == 0)
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(remaining > 0)
    def _() -> None:
        for h in range(kv_heads):
            q, k, v = q_ref[0, h], k_ref[0, :, h], v_ref[0, :, h].astype(jnp.float32)
            qk = dot(q, k.astype(q.dtype), contract=(1, 1)) * scales_ref[0]
            qk = jnp.where(jax.lax.broadcasted_iota(jnp.int32, qk.shape, 1) < remaining, qk, -jnp.inf)
            m_new = jnp.maximum(m_ref[h], jnp.max(qk, axis=1, keepdims=True))
            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # no key yet: exp(-inf - 0) is zero, not NaN
            p, alpha = jnp.exp(qk - shift), jnp.exp(m_ref[h] - shift)
            m_ref[h] = m_new
            l_ref[h] = l_ref[h] * alpha + jnp.sum(p, axis=1, keepdims=True)

            mask = jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < remaining
            finite = mask & (jnp.abs(v) < jnp.inf)
            nonfinite = jnp.sum(jnp.where(mask & ~finite, v, 0.0), axis=0, keepdims=True)  # times p = 0 it would be NaN
            acc_ref[h] = acc_ref[h] * alpha + dot(p.astype(q.dtype), jnp.where(finite, v, 0.0).astype(q.dtype))
            acc_ref[h] += nonfinite

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
    """scales: float32[2], of scores and of values; an operand and not static, since they differ from layer to layer."""
    (batch, heads, head_dim), (_, page_size, kv_heads, _), max_pages = q.shape, k_cache.shape, block_table.shape[1]
    if not q.size or not k_cache.size or not max_pages:
        return jnp.zeros_like(q)
    group_size = heads // kv_heads

    def page_index(b: Any, j: Any, block_table: Any, seq_lens: Any) -> tuple[Any, ...]:
        return jnp.where(j * page_size < seq_lens[b], block_table[b, j], 0), 0, 0, 0

    page = pl.BlockSpec((1, page_size, kv_heads, head_dim), page_index)
    query = pl.BlockSpec((1, kv_heads, group_size, head_dim), lambda b, j, block_table, seq_lens: (b, 0, 0, 0))
    out = call(
        "attention_decode",
        _decode_kernel,
        *(block_table, jnp.minimum(seq_lens, max_pages * page_size), scales),
        *(q.reshape(batch, kv_heads, group_size, head_dim), k_cache, v_cache),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, max_pages),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), query, page, page],
            out_specs=query,
            scratch_shapes=[pltpu.VMEM((kv_heads, group_size, size), jnp.float32) for size in (1, 1, head_dim)],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group_size, head_dim), q.dtype),
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
    """Return softmax(q k^T scale) v for q[B,H,D] over the first seq_lens[b] positions of sequence b.

    k_cache and v_cache [P,page,Hkv,D], H a multiple of Hkv, have q's dtype (float32, bfloat16 or float16),
    float8_e4m3fn or float8_e5m2; their numbers are multiplied by k_scale and v_scale. Position p of sequence b is slot
    p % page of page block_table[b, p // page]; block_table is int32[B,max_pages], seq_lens int32[B]. Entries and slots
    after the last position are not used. scale: 1 / sqrt(D) by default.

    Returns out[B,H,D] in q's dtype, zero for an empty sequence. Raises TypeError or ValueError, naming the argument,
    for another dtype or shape. Lengths and page numbers are not checked; but a sequence is never read beyond the end of
    its row of the table.
    """
    check_array("q", q, ("B", "H", "D"))
    check_array("k_cache", k_cache, ("P", "page", "Hkv", q.shape[2]), q.dtype, *FP8)
    check_array("v_cache", v_cache, k_cache.shape, k_cache.dtype)
    check_array("block_table", block_table, (q.shape[0], "max_pages"), jnp.int32)
    check_array("seq_lens", seq_lens, q.shape[:1], jnp.int32)
    if k_cache.shape[2] == 0 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"k_cache: expected a number of heads that divides q's {q.shape[1]}, got {k_cache.shape[2]}")
    scale = float(max(q.shape[2], 1) ** -0.5 if scale is None else scale) * k_scale
    return _decode(q, k_cache, v_cache, block_table, seq_lens, jnp.array([scale, v_scale], jnp.float32))
