"""Depthwise causal convolution along a sequence, with a few taps per channel, and its gradients.

A block holds whole sequences of some channels; each tap is a roll along the sequence, with zeros for what wraps around.
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
from assay.kernels.pallas.rows import rows_per_block
from assay.kernels.pallas.swiglu import silu_and_derivative


def _shift(x: jax.Array, steps: int) -> jax.Array:
    """Return x[d,l - steps] for each row of x[D,L], zero outside."""
    if not 0 < abs(steps) < x.shape[1]:
        return jnp.zeros_like(x) if steps else x
    source = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - steps
    return jnp.where((source >= 0) & (source < x.shape[1]), jnp.roll(x, steps, axis=1), 0.0)


def _convolve(x: jax.Array, weight: jax.Array, reverse: bool = False) -> jax.Array:
    width, y = weight.shape[1], jnp.zeros_like(x)
    for tap in range(width):
        steps = width - 1 - tap
        y += _shift(x * weight[:, tap : tap + 1], -steps if reverse else steps)
    return y


def _kernel(x_ref: Any, weight_ref: Any, bias_ref: Any, y_ref: Any, *, silu: bool) -> None:
    weight, bias = weight_ref[...].astype(jnp.float32), bias_ref[...].astype(jnp.float32)
    y = _convolve(x_ref[0].astype(jnp.float32), weight) + bias
    y_ref[0] = (silu_and_derivative(y)[0] if silu else y).astype(y_ref.dtype)


def _backward_kernel(
    x_ref: Any,
    dy_ref: Any,
    weight_ref: Any,
    bias_ref: Any,
    dx_ref: Any,
    dweight_ref: Any,
    dbias_ref: Any,
    dweight_acc_ref: Any,
    dbias_acc_ref: Any,
    *,
    silu: bool,
) -> None:
    """Compute dx by the reversed convolution; accumulate dweight and dbias over the sequences, the grid's last axis."""
    x, g, weight = x_ref[0].astype(jnp.float32), dy_ref[0].astype(jnp.float32), weight_ref[...].astype(jnp.float32)
    if silu:
        y = _convolve(x, weight) + bias_ref[...].astype(jnp.float32)
        g *= silu_and_derivative(y)[1]
    dx_ref[0] = _convolve(g, weight, reverse=True).astype(dx_ref.dtype)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        dweight_acc_ref[...] = jnp.zeros_like(dweight_acc_ref)
        dbias_acc_ref[...] = jnp.zeros_like(dbias_acc_ref)

    width = weight.shape[1]
    sums = [jnp.sum(g * _shift(x, width - 1 - tap), axis=1, keepdims=True) for tap in range(width)]
    for tap, total in enumerate(sums):
        dweight_acc_ref[:, tap : tap + 1] += total
    dbias_acc_ref[...] += jnp.sum(g, axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        dweight_ref[...] = dweight_acc_ref[...].astype(dweight_ref.dtype)
        dbias_ref[...] = dbias_acc_ref[...].astype(dbias_ref.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
@functools.partial(jax.jit, static_argnums=(3,))
def _causal_conv1d(x: jax.Array, weight: jax.Array, bias: jax.Array, silu: bool) -> jax.Array:
    if not x.size:
        return x
    (batch, channels, length), width = x.shape, weight.shape[1]
    height = rows_per_block(length)
    block = pl.BlockSpec((1, height, length), lambda i, b: (b, i, 0))
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
    (batch, channels, length), width = x.shape, weight.shape[1]
    height = rows_per_block(length)
    block = pl.BlockSpec((1, height, length), lambda i, b: (b, i, 0))
    weight_spec, bias_spec = (pl.BlockSpec((height, size), lambda i, b: (i, 0)) for size in (width, 1))
    dx, dweight, dbias = call(
        "causal_conv1d_backward",
        functools.partial(_backward_kernel, silu=silu),
        *(x, dy, weight, bias[:, None]),
        grid=(pl.cdiv(channels, height), batch),
        in_specs=[block, block, weight_spec, bias_spec],
        out_specs=(block, weight_spec, bias_spec),
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(weight.shape, weight.dtype),
            jax.ShapeDtypeStruct((channels, 1), bias.dtype),
        ),
        scratch_shapes=[pltpu.VMEM((height, size), jnp.float32) for size in (width, 1)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )
    return dx, dweight, dbias[:, 0]


_causal_conv1d.defvjp(
    lambda x, weight, bias, silu: (_causal_conv1d(x, weight, bias, silu), (x, weight, bias)),
    lambda silu, saved, dy: _causal_conv1d_backward(*saved, dy, silu),
)


def causal_conv1d(x: jax.Array, weight: jax.Array, bias: jax.Array, *, activation: str = "none") -> jax.Array:
    """Return y[B,D,L] = bias[d] + sum_w weight[d,w] x[b,d,l-W+1+w], or silu of it (``activation`` "silu").

    x[B,D,L] is zero before its beginning; weight[D,W], bias[D]. Computed in float32, and compiled for each W, a few
    taps. Each is float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype, shape or activation.
    """
    _check(x, weight, bias, activation)
    return _causal_conv1d(x, weight, bias, activation == "silu")


def causal_conv1d_backward(
    x: jax.Array, weight: jax.Array, bias: jax.Array, dy: jax.Array, *, activation: str = "none"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dx[B,D,L], dweight[D,W] and dbias[D] of `causal_conv1d`, from the gradient dy[B,D,L] of its result.

    Computed in float32 from x. Each has its input's dtype. Dtypes and errors are as in `causal_conv1d`.
    """
    _check(x, weight, bias, activation)
    check_array("dy", dy, x.shape)
    return _causal_conv1d_backward(x, weight, bias, dy, activation == "silu")


def _check(x: jax.Array, weight: jax.Array, bias: jax.Array, activation: str) -> None:
    check_choice("activation", activation, ("none", "silu"))
    check_array("x", x, ("B", "D", "L"))
    check_array("weight", weight, (x.shape[1], "W"))
    check_array("bias", bias, (x.shape[1],))
