"""Selective scan of state-space models: a linear recurrence along a sequence, one step after another.

It is not an associative scan over pairs (decay, term): products of decays underflow to zero before the states do, and
zero times an infinite state is NaN where the recurrence gives infinity.

Channels are along the lanes and states along the sublanes. A block holds _BLOCK_L steps, and the states stay in scratch
memory from one block to the next.

Source: A. Gu, T. Dao, *Mamba*, arXiv:2312.00752 (2023).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array
from assay.kernels.pallas.calls import call

_BLOCK_L = 16  # a tile of vector memory in 16-bit formats
_BLOCK_D = 256


def _kernel(
    u_ref: Any,
    delta_ref: Any,
    a_ref: Any,
    b_ref: Any,
    c_ref: Any,
    skip_ref: Any,
    y_ref: Any,
    state_ref: Any,
    *,
    softplus: bool,
) -> None:
    first = pl.program_id(2) == 0

    @pl.when(first)
    def _() -> None:
        state_ref[...] = jnp.zeros_like(state_ref)

    u, delta = u_ref[0].astype(jnp.float32), delta_ref[0].astype(jnp.float32)
    if softplus:
        delta = jnp.maximum(delta, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(delta)))
    b, c = b_ref[0].astype(jnp.float32).T, c_ref[0].astype(jnp.float32).T
    a, term, state = a_ref[...], delta * u, state_ref[...]
    rows = []
    for t in range(len(u)):
        at = slice(t, t + 1)
        state = jnp.exp(delta[at] * a) * state
        if t == 0:
            state = jnp.where(first, 0.0, state)  # an infinite decay times the initial zero would be NaN
        state += term[at] * b[:, at]
        rows.append(jnp.sum(state * c[:, at], axis=0, keepdims=True))
    state_ref[...] = state
    y_ref[0] = (jnp.concatenate(rows, axis=0) + u * skip_ref[...]).astype(y_ref.dtype)


@functools.partial(jax.jit, static_argnums=(6,))
def _selective_scan(
    u: jax.Array, delta: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, skip: jax.Array, softplus: bool
) -> jax.Array:
    if not u.size or not a.size:
        return (u.astype(jnp.float32) * skip[:, None]).astype(u.dtype)
    (batch, channels, length), states = u.shape, a.shape[1]
    block_d = min(_BLOCK_D, channels)
    channel_spec = pl.BlockSpec((1, _BLOCK_L, block_d), lambda i, j, k: (i, k, j))
    state_spec = pl.BlockSpec((1, _BLOCK_L, states), lambda i, j, k: (i, k, 0))
    y = call(
        "selective_scan",
        functools.partial(_kernel, softplus=softplus),
        *(u.mT, delta.mT, a.T, b.mT, c.mT, skip[None]),
        grid=(batch, pl.cdiv(channels, block_d), pl.cdiv(length, _BLOCK_L)),
        in_specs=[
            *(channel_spec, channel_spec, pl.BlockSpec((states, block_d), lambda i, j, k: (0, j))),
            *(state_spec, state_spec, pl.BlockSpec((1, block_d), lambda i, j, k: (0, j))),
        ],
        out_specs=channel_spec,
        out_shape=jax.ShapeDtypeStruct((batch, length, channels), u.dtype),
        scratch_shapes=[pltpu.VMEM((states, block_d), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )
    return y.mT


def selective_scan(
    u: jax.Array,
    delta: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    skip: jax.Array,
    *,
    softplus: bool = False,
) -> jax.Array:
    """Return y[B,D,L], y_t = sum_s c_st h_st + skip u_t with h_st = exp(delta_t a_s) h_s(t-1) + delta_t b_st u_t.

    u and delta are [B,D,L], a[D,S], b and c [B,S,L], skip[D]; h is zero at first. Computed in float32; ``softplus``:
    softplus is applied to delta. a and skip are float32, the others float32, bfloat16 or float16, not necessarily the
    same; the result has u's dtype. There is no gradient. Raises TypeError or ValueError, naming the argument, for
    another dtype or shape.
    """
    check_array("u", u, ("B", "D", "L"))
    check_array("delta", delta, u.shape)
    check_array("a", a, (u.shape[1], "S"), jnp.float32)
    check_array("b", b, (u.shape[0], a.shape[1], u.shape[2]))
    check_array("c", c, b.shape)
    check_array("skip", skip, (u.shape[1],), jnp.float32)
    return _selective_scan(u, delta, a, b, c, skip, softplus)
