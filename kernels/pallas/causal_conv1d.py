"""Depthwise causal convolution along a sequence, a few taps a channel, and its gradients.

A block holds whole sequences of some channels: a tap reads it turned along the places, with zeros for what came round.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array, check_choice
from assay.kernels.pallas.calls import call
from assay.kernels.pallas.rows import rows_of_block
from assay.kernels.pallas.swiglu import silu_and_slope


def _shifted(x: jax.Array, back: int) -> jax.Array:
    """Of each row of x[D,L] the elements so many places before, or behind where that is negative; zero outside."""
    if not 0 < abs(back) < x.shape[1]:
        return jnp.zeros_like(x) if back else x
    place = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - back
    return jnp.where((place >= 0) & (place < x.shape[1]), jnp.roll(x, back, axis=1), 0.0)


def _convolved(x: jax.Array, weight: jax.Array, ahead: bool = False) -> jax.Array:
    """The sum of taps, or the other way along the sequence."""
    width, y = weight.shape[1], jnp.zeros_like(x)
    for tap in range(width):
        back = width - 1 - tap
        y += _shifted(x * weight[:, tap : tap + 1], -back if ahead else back)
    return y


def _kernel(x_ref: Any, weight_ref: Any, bias_ref: Any, y_ref: Any, *, silu: bool) -> None:
    weight, bias = weight_ref[...].astype(jnp.float32), bias_ref[...].astype(jnp.float32)
    y = _convolved(x_ref[0].astype(jnp.float32), weight) + bias
    y_ref[0] = (silu_and_slope(y)[0] if silu else y).astype(y_ref.dtype)


def _backward_kernel(
    x_ref: Any,
    dy_ref: Any,
    weight_ref: Any,
    bias_ref: Any,
    dx_ref: Any,
    dweight_ref: Any,
    dbias_ref: Any,
    grown_weight_ref: Any,
    grown_bias_ref: Any,
    *,
    silu: bool,
) -> None:
    """With g the gradient before the activation: dx is g convolved the other way; the others grow by sequences."""
    x, g, weight = x_ref[0].astype(jnp.float32), dy_ref[0].astype(jnp.float32), weight_ref[...].astype(jnp.float32)
    if silu:
        y = _convolved(x, weight) + bias_ref[...].astype(jnp.float32)
        g *= silu_and_slope(y)[1]
    dx_ref[0] = _convolved(g, weight, ahead=True).astype(dx_ref.dtype)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        grown_weight_ref[...] = jnp.zeros_like(grown_weight_ref)
        grown_bias_ref[...] = jnp.zeros_like(grown_bias_ref)

    width = weight.shape[1]
    sums = [jnp.sum(g * _shifted(x, width - 1 - tap), axis=1, keepdims=True) for tap in range(width)]
    for tap, total in enumerate(sums):
        grown_weight_ref[:, tap : tap + 1] += total
    grown_bias_ref[...] += jnp.sum(g, axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        dweight_ref[...] = grown_weight_ref[...].astype(dweight_ref.dtype)
        dbias_ref[...] = grown_bias_ref[...].astype(dbias_ref.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
@functools.partial(jax.jit, static_argnums=(3,))
def _causal_conv1d(x: jax.Array, weight: jax.Array, bias: jax.Array, silu: bool) -> jax.Array:
    if not x.size:
        return x
    (batch, channels, places), width = x.shape, weight.shape[1]
    height = rows_of_block(places)
    block = pl.BlockSpec((1, height, places), lambda i, b: (b, i, 0))
    return call(
        "causal_conv1d",
        functools.partial(_kernel, silu=silu),
        *(x, weight, bias[:, None]),
        grid=(pl.cdiv(channels, height), batch),
        in_specs=[block, *(pl.BlockSpec((height, size), lambda i, b: (i, 0)) for size in (width, 1))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )


@functools.partial(jax.jit, static_argnums=(4,))
def _causal_conv1d_backward(
    x: jax.Array, weight: jax.Array, bias: jax.Array, dy: jax.Array, silu: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if not x.size:
        return x, jnp.zeros_like(weight), jnp.zeros_like(bias)
    (batch, channels, places), width = x.shape, weight.shape[1]
    height = rows_of_block(places)
    block = pl.BlockSpec((1, height, places), lambda i, b: (b, i, 0))
    taps, ones = (pl.BlockSpec((height, size), lambda i, b: (i, 0)) for size in (width, 1))
    dx, dweight, dbias = call(
        "causal_conv1d_backward",
        functools.partial(_backward_kernel, silu=silu),
        *(x, dy, weight, bias[:, None]),
        grid=(pl.cdiv(channels, height), batch),
        in_specs=[block, block, taps, ones],
        out_specs=(block, taps, ones),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(weight.shape, weight.dtype),
            jax.ShapeDtypeStruct((channels, 1), bias.dtype),
        ),
        scratch_shapes=[pltpu.VMEM((height, size), jnp.float32) for size in (width, 1)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )
    return dx, dweight, dbias[:, 0]


def _saving(x: jax.Array, weight: jax.Array, bias: jax.Array, silu: bool) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _causal_conv1d(x, weight, bias, silu), (x, weight, bias)


_causal_conv1d.defvjp(_saving, lambda silu, saved, dy: _causal_conv1d_backward(*saved, dy, silu))


def causal_conv1d(x: jax.Array, weight: jax.Array, bias: jax.Array, *, activation: str = "none") -> jax.Array:
    """y[B,D,L]: bias[d] + sum_w weight[d,w] x[b,d,l-W+1+w] of x[B,D,L], weight[D,W] and bias[D], zero before its
    beginning; silu of it with ``activation="silu"``.

    Computed in float32, and compiled for each W, a few taps. Each is float32, bfloat16 or float16, not necessarily the
    same; the result has x's dtype. Raises TypeError or ValueError, naming the argument, for another dtype, shape or
    activation.
    """
    _check(x, weight, bias, activation)
    return _causal_conv1d(x, weight, bias, activation == "silu")


def causal_conv1d_backward(
    x: jax.Array, weight: jax.Array, bias: jax.Array, dy: jax.Array, *, activation: str = "none"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx[B,D,L], dweight[D,W] and dbias[D] of `causal_conv1d`'s arrays, from the gradient dy[B,D,L] of its result.

    Computed in float32 from x. Each has the dtype of what it is the gradient of. Dtypes and errors as there.
    """
    _check(x, weight, bias, activation)
    check_array("dy", dy, x.shape)
    return _causal_conv1d_backward(x, weight, bias, dy, activation == "silu")


def _check(x: jax.Array, weight: jax.Array, bias: jax.Array, activation: str) -> None:
    check_choice("activation", activation, ("none", "silu"))
    check_array("x", x, ("B", "D", "L"))
    check_array("weight", weight, (x.shape[1], "W"))
    check_array("bias", bias, (x.shape[1],))
