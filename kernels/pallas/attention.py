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
from assay.kernels.pallas.attention_blocks import BLOCK_K, BLOCK_Q, GPU_K, GPU_Q, Geometry, check_attention, gpu_stages
from assay.kernels.pallas.calls import call, call_on_gpu
from assay.kernels.pallas.products import dot
from assay.kernels.pallas.tiles import load, side, store


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
        p, rescale, m_ref[...], l_ref[...] = _grown(q_ref[0, 0], k_ref[0, 0], met, scale, m_ref[...], l_ref[...])
        v = v_ref[0, 0]
        v = jnp.where(first_key + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < geometry.keys, v, 0)
        finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
        acc_ref[...] = acc_ref[...] * rescale + dot(p.astype(v.dtype), jnp.where(finite, v, 0))

        @pl.when(jnp.any(~finite))
        def _() -> None:
            acc_ref[...] = _with_infinities(acc_ref[...], v, met)

    @pl.when(block == pl.num_programs(3) - 1)
    def _() -> None:
        l_i = l_ref[...]
        out_ref[0, 0] = jnp.where(l_i == 0, 0.0, acc_ref[...] / l_i).astype(out_ref.dtype)
        if lse_ref is not None:
            lse_ref[0, 0] = m_ref[...] + jnp.log(l_i)


def _grown(
    q: jax.Array, k: jax.Array, met: jax.Array, scale: float, m: jax.Array, l_i: jax.Array
) -> tuple[jax.Array, ...]:
    """The weights of a block, what the sums so far are multiplied by, and the new maxima and sums of weights."""
    s = jnp.where(met, dot(q, k, over=(1, 1)) * scale, -jnp.inf)
    m_new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # nothing yet: exp(-inf - 0) is zero, not NaN
    p, rescale = jnp.exp(s - shift), jnp.exp(m - shift)
    return p, rescale, m_new, l_i * rescale + jnp.sum(p, axis=1, keepdims=True)


def _with_infinities(acc: jax.Array, v: jax.Array, met: jax.Array) -> jax.Array:
    """The sums with the values that aren't finite, of which a product makes NaN for rows that don't see them too."""
    for infinity in (jnp.inf, -jnp.inf):
        found = (v == infinity) | (v != v)
        acc = jnp.where(dot(met.astype(v.dtype), found.astype(v.dtype)) > 0, acc + infinity, acc)
    return acc


def _gpu_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, lse_ref: Any, *, scale: float, geometry: Geometry
) -> None:
    """The blocks of keys are steps of the program that has the queries."""
    first_query, width, width_v = pl.program_id(2) * GPU_Q, side(q_ref.shape[1], 16), side(v_ref.shape[1], 16)
    q = load(q_ref, (first_query, 0), (GPU_Q, width))

    def step(block: Any, so_far: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (m, l_i, acc), first_key = so_far, block * GPU_K
        k, v = (load(ref, (first_key, 0), (GPU_K, size)) for ref, size in ((k_ref, width), (v_ref, width_v)))
        met = geometry.seen(first_query, first_key, (GPU_Q, GPU_K))
        p, rescale, m, l_i = _grown(q, k, met, scale, m, l_i)
        finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
        acc = acc * rescale + dot(p.astype(v.dtype), jnp.where(finite, v, 0))
        some = jnp.max((~finite).astype(jnp.int32)) > 0
        return m, l_i, jax.lax.cond(some, lambda acc: _with_infinities(acc, v, met), lambda acc: acc, acc)

    nothing = jnp.full((GPU_Q, 1), -jnp.inf), jnp.zeros((GPU_Q, 1)), jnp.zeros((GPU_Q, width_v))
    m, l_i, acc = jax.lax.fori_loop(0, geometry.key_blocks(first_query), step, nothing)
    store(out_ref, (first_query, 0), jnp.where(l_i == 0, 0.0, acc / l_i))
    if lse_ref is not None:
        store(lse_ref, (first_query, 0), m + jnp.log(l_i))


def _on_gpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    geometry: Geometry,
    results: tuple[Any, Any],
    interpret: bool = False,
) -> Any:
    shared = q.shape[1] // k.shape[1]

    def whole(array: Any, shared: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *array.shape[2:]), lambda b, h, i: (b, jax.lax.div(h, shared), 0, 0))

    return call_on_gpu(
        functools.partial(_gpu_kernel, scale=scale, geometry=geometry),
        *(q, k, v),
        warps=4,
        stages=gpu_stages(q.dtype),
        grid=(*q.shape[:2], pl.cdiv(geometry.queries, GPU_Q)),
        in_specs=[whole(q), whole(k, shared), whole(v, shared)],
        out_specs=tuple(None if one is None else whole(one) for one in results),
        out_shape=results,
        interpret=interpret,
    )


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

    geometry = Geometry.of(causal, queries, keys)
    return call(
        "attention",
        functools.partial(_attention_kernel, scale=scale, geometry=geometry),
        *(q, k, v),
        gpu=functools.partial(_on_gpu, scale=scale, geometry=geometry, results=(out, lse)),
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
