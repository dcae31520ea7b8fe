"""Attention: blocks of keys follow one another, and the sums are rescaled whenever the maximum grows.

Dao et al., *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, 2022.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.attention_backward import attention_gradients
from assay.kernels.pallas.attention_blocks import BLOCK_K, BLOCK_Q, Geometry, check_attention
from assay.kernels.pallas.calls import call
from assay.kernels.pallas.products import dot


def _attention_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    m_ref: Any,
    l_ref: Any,
    acc_ref: Any,
    *,
    scale: float,
    geometry: Geometry,
) -> None:
    block = pl.program_id(3)
    first_query, first_key = pl.program_id(2) * BLOCK_Q, block * BLOCK_K

    @pl.when(block == 0)
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(geometry.meet(first_query, first_key))
    def _() -> None:
        met = geometry.seen(first_query, first_key)
        s = jnp.where(met, dot(q_ref[0, 0], k_ref[0, 0], over=(1, 1)) * scale, -jnp.inf)

        m_new = jnp.maximum(m_ref[...], jnp.max(s, axis=1, keepdims=True))
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing yet: exp(-inf - 0) is zero, not NaN
        p = jnp.exp(s - shift)
        rescale = jnp.exp(m_ref[...] - shift)
        m_ref[...] = m_new
        l_ref[...] = l_ref[...] * rescale + jnp.sum(p, axis=1, keepdims=True)

        v = v_ref[0, 0].astype(jnp.float32)
        inside = first_key + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < geometry.keys
        finite = inside & (jnp.abs(v) < jnp.inf)
        usable = jnp.where(finite, v, 0.0).astype(v_ref.dtype)
        acc_ref[...] = acc_ref[...] * rescale + dot(p.astype(usable.dtype), usable)

        @pl.when(jnp.any(inside & ~finite))  # a product makes NaN of 0 * infinity: only for rows that see them
        def _() -> None:
            for infinity in (jnp.inf, -jnp.inf):
                found = inside & ((v == infinity) | (v != v))
                reached = dot(met.astype(jnp.float32), found.astype(jnp.float32)) > 0
                acc_ref[...] = jnp.where(reached, acc_ref[...] + infinity, acc_ref[...])

    @pl.when(block == pl.num_programs(3) - 1)
    def _() -> None:
        l_i = l_ref[...]
        out_ref[0, 0] = jnp.where(l_i == 0, 0.0, acc_ref[...] / l_i).astype(out_ref.dtype)
        if lse_ref is not None:
            lse_ref[0, 0] = m_ref[...] + jnp.log(l_i)


@functools.partial(jax.jit, static_argnames=("causal", "scale", "saving"))
def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: str, scale: float, saving: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The result, and for the gradients the natural log-sum-exp of each row, float32[B,H,Sq,1]."""
    (batch, heads, queries, width), (_, groups, keys, width_v) = q.shape, v.shape
    out = jax.ShapeDtypeStruct((batch, heads, queries, width_v), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries, 1), jnp.float32) if saving else None
    if not q.size or not v.size:
        return jnp.zeros(out.shape, out.dtype), None if lse is None else jnp.full(lse.shape, -jnp.inf)

    def of_queries(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, i, 0

    def of_keys(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, jax.lax.div(h, heads // groups), j, 0

    return call(
        "attention",
        functools.partial(_attention_kernel, scale=scale, geometry=Geometry.of(causal, queries, keys)),
        *(q, k, v),
        grid=(batch, heads, pl.cdiv(queries, BLOCK_Q), pl.cdiv(keys, BLOCK_K)),
        in_specs=[
            pl.BlockSpec((1, 1, BLOCK_Q, width), of_queries),
            pl.BlockSpec((1, 1, BLOCK_K, width), of_keys),
            pl.BlockSpec((1, 1, BLOCK_K, width_v), of_keys),
        ],
        out_specs=(
            pl.BlockSpec((1, 1, BLOCK_Q, width_v), of_queries),
            pl.BlockSpec((1, 1, BLOCK_Q, 1), of_queries) if saving else None,
        ),
        out_shape=(out, lse),
        scratch_shapes=[
            pltpu.VMEM((BLOCK_Q, 1), jnp.float32),
            pltpu.VMEM((BLOCK_Q, 1), jnp.float32),
            pltpu.VMEM((BLOCK_Q, width_v), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: str, scale: float) -> jax.Array:
    return _forward(q, k, v, causal, scale, saving=False)[0]


def _saving(q: jax.Array, k: jax.Array, v: jax.Array, causal: str, scale: float) -> tuple[jax.Array, Any]:
    out, lse = _forward(q, k, v, causal, scale, saving=True)
    return out, (q, k, v, out, lse)


_attention.defvjp(_saving, lambda causal, scale, saved, dout: attention_gradients(*saved, dout, causal, scale))


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: str = "none", scale: float | None = None
) -> jax.Array:
    """softmax(q k^T scale, masked) v of q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]; H is a multiple of Hkv.

    All are float32, bfloat16 or float16 alike. The scores are float32; the probabilities are rounded to that dtype.
    ``scale`` is 1 / sqrt(D) where left out; ``causal`` is "none", "bottom_right" or "top_left". A query that sees no
    key gives zeros. Raises TypeError or ValueError, naming the argument, for another dtype, shape or mask.
    """
    check_attention(q, k, v, causal)
    return _attention(q, k, v, causal, _scale_of(q, scale))


def attention_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *, causal: str = "none", scale: float | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv of `attention` where its result's gradient is dout[B,H,Sq,Dv], in the inputs' dtype.

    The forward pass runs first; `jax.grad` of `attention` has kept its results. Products are summed in float32; weights
    and the gradients of scores are rounded to the inputs' dtype before they are multiplied. Options and errors as in
    `attention`.
    """
    check_attention(q, k, v, causal)
    check_array("dout", dout, (*q.shape[:3], v.shape[3]), q.dtype)
    _, saved = _saving(q, k, v, causal, _scale_of(q, scale))
    return attention_gradients(*saved, dout, causal, _scale_of(q, scale))


def _scale_of(q: jax.Array, scale: float | None) -> float:
    return float(max(q.shape[3], 1) ** -0.5 if scale is None else scale)
