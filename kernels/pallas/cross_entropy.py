"""Cross-entropy of logits and labels, and its gradient: blocks of classes follow one another, as keys in attention."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array, check_choice
from assay.kernels.pallas.calls import call

_BLOCK_T, _BLOCK_V = 128, 512
_REDUCTIONS = ("mean", "sum", "none")


class _Options(NamedTuple):
    ignored: int
    smoothing: float
    reduction: str
    softcap: float | None
    z_loss: float

    def capped(self, x_ref: Any) -> jax.Array:
        """The logits in float32, c tanh(x / c) under a cap c."""
        x = x_ref[...].astype(jnp.float32)
        c = self.softcap
        return x if c is None else c - 2.0 * c / (jnp.exp(x * (2.0 / c)) + 1.0)


def _classes(shape: tuple[int, ...]) -> jax.Array:
    """Which class each column of the block is."""
    return pl.program_id(1) * _BLOCK_V + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _loss_kernel(
    x_ref: Any,
    target_ref: Any,
    loss_ref: Any,
    m_ref: Any,
    l_ref: Any,
    label_ref: Any,
    total_ref: Any,
    *,
    classes: int,
    options: _Options,
) -> None:
    """Maximum and sum of exponentials, m and l, are results, as the gradient needs them."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        for ref in (l_ref, label_ref, total_ref):
            ref[...] = jnp.zeros_like(ref)

    x, column = options.capped(x_ref), _classes(x_ref.shape)
    inside = column < classes
    x = jnp.where(inside, x, -jnp.inf)
    m_new = jnp.maximum(m_ref[...], jnp.max(x, axis=1, keepdims=True))
    shift = jnp.where(jnp.abs(m_new) < jnp.inf, m_new, 0.0)  # or infinity less infinity is NaN
    l_ref[...] = l_ref[...] * jnp.exp(m_ref[...] - shift) + jnp.sum(jnp.exp(x - shift), axis=1, keepdims=True)
    m_ref[...] = m_new
    label_ref[...] += jnp.sum(jnp.where(column == target_ref[...], x, 0.0), axis=1, keepdims=True)
    total_ref[...] += jnp.sum(jnp.where(inside, x, 0.0), axis=1, keepdims=True)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        level, m = jnp.log(l_ref[...]), m_ref[...]
        loss = level - (label_ref[...] - m)
        if options.smoothing:
            loss = loss * (1.0 - options.smoothing) + (level - (total_ref[...] / classes - m)) * options.smoothing
        if options.z_loss:
            loss += (m + level) * (m + level) * options.z_loss
        loss_ref[...] = jnp.where(target_ref[...] == options.ignored, 0.0, loss)


def _gradient_kernel(
    x_ref: Any,
    target_ref: Any,
    m_ref: Any,
    l_ref: Any,
    upstream_ref: Any,
    dx_ref: Any,
    *,
    classes: int,
    options: _Options,
) -> None:
    target = target_ref[...]
    dx = jnp.exp(options.capped(x_ref) - m_ref[...]) / l_ref[...]
    if options.z_loss:
        dx += dx * (m_ref[...] + jnp.log(l_ref[...])) * (2.0 * options.z_loss)
    dx = jnp.where(_classes(x_ref.shape) == target, dx - (1.0 - options.smoothing), dx) - options.smoothing / classes
    dx *= upstream_ref[...]
    if options.softcap is not None:
        small = jnp.exp(-2.0 * jnp.abs(x_ref[...].astype(jnp.float32)) / options.softcap)
        dx *= 4.0 * small / ((1.0 + small) * (1.0 + small))  # 1 - tanh^2
    dx_ref[...] = jnp.where(target == options.ignored, 0.0, dx).astype(dx_ref.dtype)


_OF_LOGITS = pl.BlockSpec((_BLOCK_T, _BLOCK_V), lambda i, j: (i, j))
_OF_TOKENS = pl.BlockSpec((_BLOCK_T, 1), lambda i, j: (i, 0))


@functools.partial(jax.jit, static_argnames="options")
def _losses(logits: jax.Array, target: jax.Array, options: _Options) -> tuple[jax.Array, ...]:
    """The loss of each token, its maximum and its sum of exponentials: float32[T,1] each."""
    tokens, classes = logits.shape
    if not tokens:
        return (jnp.zeros((0, 1)),) * 3
    return call(
        "cross_entropy",
        functools.partial(_loss_kernel, classes=classes, options=options),
        *(logits, target.astype(jnp.int32)[:, None]),
        grid=(pl.cdiv(tokens, _BLOCK_T), pl.cdiv(classes, _BLOCK_V)),
        in_specs=[_OF_LOGITS, _OF_TOKENS],
        out_specs=(_OF_TOKENS,) * 3,
        out_shape=(jax.ShapeDtypeStruct((tokens, 1), jnp.float32),) * 3,
        scratch_shapes=[pltpu.VMEM((_BLOCK_T, 1), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )


@functools.partial(jax.jit, static_argnames="options")
def _gradient(
    logits: jax.Array, target: jax.Array, m: jax.Array, l_i: jax.Array, dloss: jax.Array, options: _Options
) -> jax.Array:
    tokens, classes = logits.shape
    if not tokens:
        return logits
    upstream = jnp.broadcast_to(dloss, (tokens,))
    if options.reduction == "mean":
        upstream /= jnp.maximum(jnp.sum(target != options.ignored), 1)
    return call(
        "cross_entropy_backward",
        functools.partial(_gradient_kernel, classes=classes, options=options),
        *(logits, target.astype(jnp.int32)[:, None], m, l_i, upstream.astype(jnp.float32)[:, None]),
        grid=(pl.cdiv(tokens, _BLOCK_T), pl.cdiv(classes, _BLOCK_V)),
        in_specs=[_OF_LOGITS, *[_OF_TOKENS] * 4],
        out_specs=_OF_LOGITS,
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, target: jax.Array, options: _Options) -> jax.Array:
    return _saving(logits, target, options)[0]


def _saving(logits: jax.Array, target: jax.Array, options: _Options) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    losses, m, l_i = _losses(logits, target, options)
    loss = losses[:, 0]
    if options.reduction != "none":
        loss = jnp.sum(loss)
    if options.reduction == "mean":
        loss /= jnp.sum(target != options.ignored)
    return loss, (logits, target, m, l_i)


_cross_entropy.defvjp(_saving, lambda options, saved, dloss: (_gradient(*saved, dloss, options), None))


def cross_entropy(
    logits: jax.Array,
    target: jax.Array,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> jax.Array:
    """-(1 - s) log p_label - s mean log p + z lse^2 of each token, p = softmax(logits[T,V]); zero if it is ignored.

    logits are float32, bfloat16 or float16, target[T] is int32 or int64: 0 to V - 1 or ``ignore_index``. s:
    ``label_smoothing``, from 0 to 1. ``softcap`` c: the logits are c tanh(logits / c). z: ``z_loss``; lse is the
    log-sum-exp. ``reduction``: "none" gives float32[T], "sum" float32[], and "mean" that over the tokens that aren't
    ignored, NaN where all are. Raises TypeError or ValueError, naming the argument, for another dtype, shape or option.
    """
    options = _Options(ignore_index, label_smoothing, reduction, softcap, z_loss)
    _check(logits, target, options)
    return _cross_entropy(logits, target, options)


def cross_entropy_backward(
    logits: jax.Array,
    target: jax.Array,
    dloss: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> jax.Array:
    """dlogits[T,V] of `cross_entropy`'s arguments, from the gradient dloss of its result, float32[] or [T]; of 1 where
    that is left out. It has the dtype of the logits. Raises as `cross_entropy` does.
    """
    options = _Options(ignore_index, label_smoothing, reduction, softcap, z_loss)
    _check(logits, target, options)
    dloss = jnp.ones((), jnp.float32) if dloss is None else dloss
    check_array("dloss", dloss, target.shape if reduction == "none" and dloss.ndim else (), jnp.float32)
    return _gradient(*_saving(logits, target, options)[1], dloss, options)


def _check(logits: jax.Array, target: jax.Array, options: _Options) -> None:
    check_array("logits", logits, ("T", "V"))
    check_array("target", target, logits.shape[:1], jnp.int32, jnp.int64)
    check_choice("reduction", options.reduction, _REDUCTIONS)
    if logits.shape[1] == 0:
        raise ValueError("logits: expected one class or more, got 0")
    if not 0.0 <= options.smoothing <= 1.0:
        raise ValueError(f"label_smoothing: expected a number from 0 to 1, got {options.smoothing}")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap: expected None or a positive number, got {options.softcap}")
