"""Selective scan of state-space models (Gu & Dao, *Mamba*, 2023): a linear recurrence along a sequence, place by place.

In sequence, not as a tree of pairs (decay, term), whose products of decays vanish before the states do: zero times an
infinite state is NaN, where the recurrence says infinity.

Channels lie along the lanes and states along the sublanes. A block holds some places, and the states wait in vector
memory for the next one.
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

_PLACES = 16  # of a block: a tile of vector memory in 16 bits
_CHANNELS = 256


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

    u, step = u_ref[0].astype(jnp.float32), delta_ref[0].astype(jnp.float32)
    if softplus:
        step = jnp.maximum(step, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(step)))
    b, c = b_ref[0].astype(jnp.float32).T, c_ref[0].astype(jnp.float32).T
    a, term, state = a_ref[...], step * u, state_ref[...]
    rows = []
    for place in range(len(u)):
        at = slice(place, place + 1)
        state = jnp.exp(step[at] * a) * state
        if place == 0:
            state = jnp.where(first, 0.0, state)  # an infinite decay meets nothing before the beginning
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
    (batch, channels, places), states = u.shape, a.shape[1]
    width = min(_CHANNELS, channels)
    by_channels = pl.BlockSpec((1, _PLACES, width), lambda i, j, k: (i, k, j))
    by_states = pl.BlockSpec((1, _PLACES, states), lambda i, j, k: (i, k, 0))
    y = call(
        "selective_scan",
        functools.partial(_kernel, softplus=softplus),
        *(u.mT, delta.mT, a.T, b.mT, c.mT, skip[None]),
        grid=(batch, pl.cdiv(channels, width), pl.cdiv(places, _PLACES)),
        in_specs=[
            *(by_channels, by_channels, pl.BlockSpec((states, width), lambda i, j, k: (0, j))),
            *(by_states, by_states, pl.BlockSpec((1, width), lambda i, j, k: (0, j))),
        ],
        out_specs=by_channels,
        out_shape=jax.ShapeDtypeStruct((batch, places, channels), u.dtype),
        scratch_shapes=[pltpu.VMEM((states, width), jnp.float32)],
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
    """y[B,D,L]: y_t = sum_s c_st h_st + skip u_t, with h_st = exp(delta_t a_s) h_s(t-1) + delta_t b_st u_t and h zero
    before the beginning, of each channel of u, delta[B,D,L], with a[D,S], b, c[B,S,L] and skip[D].

    Computed in float32; ``softplus``: delta is softplus of what is given. a and skip are float32, the others float32,
    bfloat16 or float16, not necessarily the same; the result has u's dtype. It has no gradient. Raises TypeError or
    ValueError, naming the argument, for another dtype or shape.
    """
    check_array("u", u, ("B", "D", "L"))
    check_array("delta", delta, u.shape)
    check_array("a", a, (u.shape[1], "S"), jnp.float32)
    check_array("b", b, (u.shape[0], a.shape[1], u.shape[2]))
    check_array("c", c, b.shape)
    check_array("skip", skip, (u.shape[1],), jnp.float32)
    return _selective_scan(u, delta, a, b, c, skip, softplus)
