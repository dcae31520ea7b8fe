"""Attention, forward: blocks of keys follow one another, and the sums are rescaled whenever the maximum grows.

Dao et al., *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, 2022.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array, is_interpreted

_BLOCK_Q, _BLOCK_K = 64, 128
_MASKS = ("none", "bottom_right", "top_left")

_dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)


def _attention_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    *,
    scale: float,
    keys: int,
    ahead: int | None,
    blocks: int,
) -> None:
    """``ahead``: how many keys beyond its own place a query sees; None: all of them."""
    block = pl.program_id(3)
    first_query = pl.program_id(2) * _BLOCK_Q

    @pl.when(block == 0)
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(True if ahead is None else block * _BLOCK_K < first_query + _BLOCK_Q + ahead)
    def _() -> None:
        query = first_query + jax.lax.broadcasted_iota(jnp.int32, (_BLOCK_Q, _BLOCK_K), 0)
        key = block * _BLOCK_K + jax.lax.broadcasted_iota(jnp.int32, (_BLOCK_Q, _BLOCK_K), 1)
        seen = key < keys if ahead is None else (key < keys) & (key <= query + ahead)
        s = jnp.where(seen, _dot(q_ref[0, 0], k_ref[0, 0].T) * scale, -jnp.inf)

        m_new = jnp.maximum(m_ref[...], jnp.max(s, axis=1, keepdims=True))
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing yet: exp(-inf - 0) is zero, not NaN
        p = jnp.exp(s - shift)
        rescale = jnp.exp(m_ref[...] - shift)
        m_ref[...] = m_new
        l_ref[...] = l_ref[...] * rescale + jnp.sum(p, axis=1, keepdims=True)

        v = v_ref[0, 0]
        inside = block * _BLOCK_K + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < keys
        finite = jnp.isfinite(v) & inside
        acc_ref[...] = acc_ref[...] * rescale + _dot(p.astype(v.dtype), jnp.where(finite, v, 0))

        @pl.when(jnp.any(inside & ~finite))  # a product makes NaN of 0 * infinity: only for rows that see them
        def _() -> None:
            for infinity in (jnp.inf, -jnp.inf):
                found = inside & ((v == infinity) | jnp.isnan(v))
                met = _dot(seen.astype(jnp.float32), found.astype(jnp.float32)) > 0
                acc_ref[...] = jnp.where(met, acc_ref[...] + infinity, acc_ref[...])

    @pl.when(block == blocks - 1)
    def _() -> None:
        l_i = l_ref[...]
        out_ref[0, 0] = jnp.where(l_i == 0, 0.0, acc_ref[...] / l_i).astype(out_ref.dtype)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "interpret"))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: str, scale: float, interpret: bool) -> jax.Array:
    (batch, heads, queries, width), (groups, keys, width_v) = q.shape, v.shape[1:]
    shared, blocks = heads // groups, pl.cdiv(keys, _BLOCK_K)
    ahead = {"none": None, "bottom_right": keys - queries, "top_left": 0}[causal]

    def of_queries(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, i, 0

    def of_keys(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, jax.lax.div(h, jnp.asarray(shared, h.dtype)), j, 0

    return pl.pallas_call(
        functools.partial(_attention_kernel, scale=scale, keys=keys, ahead=ahead, blocks=blocks),
        grid=(batch, heads, pl.cdiv(queries, _BLOCK_Q), blocks),
        in_specs=[
            pl.BlockSpec((1, 1, _BLOCK_Q, width), of_queries),
            pl.BlockSpec((1, 1, _BLOCK_K, width), of_keys),
            pl.BlockSpec((1, 1, _BLOCK_K, width_v), of_keys),
        ],
        out_specs=pl.BlockSpec((1, 1, _BLOCK_Q, width_v), of_queries),
        out_shape=jax.ShapeDtypeStruct((batch, heads, queries, width_v), q.dtype),
        scratch_shapes=[
            pltpu.VMEM((_BLOCK_Q, 1), jnp.float32),
            pltpu.VMEM((_BLOCK_Q, 1), jnp.float32),
            pltpu.VMEM((_BLOCK_Q, width_v), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(q, k, v)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: str = "none", scale: float | None = None
) -> jax.Array:
    """softmax(q k^T scale, masked) v of q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]; H is a multiple of Hkv.

    All are float32, bfloat16 or float16 alike. The scores are float32; the probabilities are rounded to that dtype.
    ``scale`` is 1 / sqrt(D) where left out; ``causal`` is "none", "bottom_right" or "top_left". A query that sees no
    key gives zeros. Raises TypeError or ValueError, naming the argument, for another dtype, shape or mask.
    """
    check_array("q", q, ("B", "H", "Sq", "D"))
    check_array("k", k, (q.shape[0], "Hkv", "Sk", q.shape[3]), q.dtype)
    check_array("v", v, (*k.shape[:3], "Dv"), q.dtype)
    if causal not in _MASKS:
        raise ValueError(f"causal: expected one of {', '.join(map(repr, _MASKS))}, got {causal!r}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected heads that divide the {q.shape[1]} query heads, got {k.shape[1]}")
    if not q.size or not v.size:
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    return _attention(q, k, v, causal=causal, scale=scale, interpret=is_interpreted())
