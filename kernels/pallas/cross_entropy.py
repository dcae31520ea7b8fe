"""Cross-entropy of logits and labels, and its gradient: blocks of classes follow one another, as keys in attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array, check_choice
from assay.kernels.pallas.calls import call, call_on_gpu
from assay.kernels.pallas.tiles import load, store

_BLOCK_T, _BLOCK_V = 128, 512
_GPU_T, _GPU_V = 8, 512
_REDUCTIONS = ("mean", "sum", "none")


class _Options(NamedTuple):
    ignored: int
    smoothing: float
    reduction: str
    softcap: float | None
    z_loss: float

    def capped(self, x: jax.Array) -> jax.Array:
        """The logits in float32, c tanh(x / c) under a cap c."""
        x, c = x.astype(jnp.float32), self.softcap
        return x if c is None else c - 2.0 * c / (jnp.exp(x * (2.0 / c)) + 1.0)


def _classes(first: Any, shape: tuple[int, ...]) -> jax.Array:
    """Which class each column of a block is that begins with the ``first``."""
    return first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _grown(
    x: jax.Array, column: jax.Array, target: jax.Array, classes: int, sums: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Maximum, sum of exponentials, logit of the label and sum of logits, grown by a block of capped logits."""
    m, l_i, label, total = sums
    inside = column < classes
    x = jnp.where(inside, x, -jnp.inf)
    m_new = jnp.maximum(m, jnp.max(x, axis=1, keepdims=True))
    shift = jnp.where(jnp.abs(m_new) < jnp.inf, m_new, 0.0)  # or infinity less infinity is NaN
    l_i = l_i * jnp.exp(m - shift) + jnp.sum(jnp.exp(x - shift), axis=1, keepdims=True)
    label += jnp.sum(jnp.where(column == target, x, 0.0), axis=1, keepdims=True)
    return m_new, l_i, label, total + jnp.sum(jnp.where(inside, x, 0.0), axis=1, keepdims=True)


def _loss(target: jax.Array, sums: Sequence[jax.Array], classes: int, options: _Options) -> jax.Array:
    """The loss of each token, from what `_grown` gives in the end."""
    m, l_i, label, total = sums
    level = jnp.log(l_i)
    loss = level - (label - m)
    if options.smoothing:
        loss = loss * (1.0 - options.smoothing) + (level - (total / classes - m)) * options.smoothing
    if options.z_loss:
        loss += (m + level) * (m + level) * options.z_loss
    return jnp.where(target == options.ignored, 0.0, loss)


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

    x, target, refs = options.capped(x_ref[...]), target_ref[...], (m_ref, l_ref, label_ref, total_ref)
    column = _classes(pl.program_id(1) * _BLOCK_V, x.shape)
    for ref, grown in zip(refs, _grown(x, column, target, classes, [ref[...] for ref in refs]), strict=True):
        ref[...] = grown

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        loss_ref[...] = _loss(target, [ref[...] for ref in refs], classes, options)


def _gradient_of_logits(
    column: jax.Array,
    x: jax.Array,
    target: jax.Array,
    m: jax.Array,
    l_i: jax.Array,
    upstream: jax.Array,
    *,
    classes: int,
    options: _Options,
) -> jax.Array:
    dx = jnp.exp(options.capped(x) - m) / l_i
    if options.z_loss:
        dx += dx * (m + jnp.log(l_i)) * (2.0 * options.z_loss)
    dx = jnp.where(column == target, dx - (1.0 - options.smoothing), dx) - options.smoothing / classes
    dx *= upstream
    if options.softcap is not None:
        small = jnp.exp(-2.0 * jnp.abs(x.astype(jnp.float32)) / options.softcap)
        dx *= 4.0 * small / ((1.0 + small) * (1.0 + small))  # 1 - tanh^2
    return jnp.where(target == options.ignored, 0.0, dx)


def _gradient_kernel(*refs: Any, classes: int, options: _Options) -> None:
    *inputs, dx_ref = refs
    column = _classes(pl.program_id(1) * _BLOCK_V, dx_ref.shape)
    blocks = [ref[...] for ref in inputs]
    dx_ref[...] = _gradient_of_logits(column, *blocks, classes=classes, options=options).astype(dx_ref.dtype)


def _gpu_loss_kernel(x_ref: Any, target_ref: Any, loss_ref: Any, m_ref: Any, l_ref: Any, *, options: _Options) -> None:
    """The blocks of classes are steps of the program that has the tokens."""
    first, classes = pl.program_id(0) * _GPU_T, x_ref.shape[1]
    target = load(target_ref, (first, 0), (_GPU_T, 1))

    def step(block: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x = options.capped(load(x_ref, (first, block * _GPU_V), (_GPU_T, _GPU_V)))
        return _grown(x, _classes(block * _GPU_V, x.shape), target, classes, sums)

    nothing = (jnp.full((_GPU_T, 1), -jnp.inf), *[jnp.zeros((_GPU_T, 1))] * 3)
    sums = jax.lax.fori_loop(0, pl.cdiv(classes, _GPU_V), step, nothing)
    for ref, result in zip((loss_ref, m_ref, l_ref), (_loss(target, sums, classes, options), *sums[:2]), strict=True):
        store(ref, (first, 0), result)


def _gpu_gradient_kernel(x_ref: Any, *refs: Any, options: _Options) -> None:
    *inputs, dx_ref = refs
    first, first_class = pl.program_id(0) * _GPU_T, pl.program_id(1) * _GPU_V
    x = load(x_ref, (first, first_class), (_GPU_T, _GPU_V))
    of_tokens = [load(ref, (first, 0), (_GPU_T, 1)) for ref in inputs]
    dx = _gradient_of_logits(_classes(first_class, x.shape), x, *of_tokens, classes=x_ref.shape[1], options=options)
    store(dx_ref, (first, first_class), dx)


def _on_gpu(*arrays: jax.Array, kernel: Any, class_blocks: int, results: Any, interpret: bool = False) -> Any:
    grid = (pl.cdiv(len(arrays[0]), _GPU_T), class_blocks)
    return call_on_gpu(kernel, *arrays, warps=4, grid=grid, out_shape=results, interpret=interpret)


_OF_LOGITS = pl.BlockSpec((_BLOCK_T, _BLOCK_V), lambda i, j: (i, j))
_OF_TOKENS = pl.BlockSpec((_BLOCK_T, 1), lambda i, j: (i, 0))


@functools.partial(jax.jit, static_argnames="options")
def _losses(logits: jax.Array, target: jax.Array, options: _Options) -> tuple[jax.Array, ...]:
    """The loss of each token, its maximum and its sum of exponentials: float32[T,1] each."""
    tokens, classes = logits.shape
    if not tokens:
        return (jnp.zeros((0, 1)),) * 3
    results = (jax.ShapeDtypeStruct((tokens, 1), jnp.float32),) * 3
    return call(
        "cross_entropy",
        functools.partial(_loss_kernel, classes=classes, options=options),
        *(logits, target.astype(jnp.int32)[:, None]),
        gpu=functools.partial(
            _on_gpu,
            kernel=functools.partial(_gpu_loss_kernel, options=options),
            class_blocks=1,
            results=results,
        ),
        grid=(pl.cdiv(tokens, _BLOCK_T), pl.cdiv(classes, _BLOCK_V)),
        in_specs=[_OF_LOGITS, _OF_TOKENS],
        out_specs=(_OF_TOKENS,) * 3,
        out_shape=results,
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
    result = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    upstream = jnp.broadcast_to(dloss, (tokens,))
    if options.reduction == "mean":
        upstream /= jnp.maximum(jnp.sum(target != options.ignored), 1)
    return call(
        "cross_entropy_backward",
        functools.partial(_gradient_kernel, classes=classes, options=options),
        *(logits, target.astype(jnp.int32)[:, None], m, l_i, upstream.astype(jnp.float32)[:, None]),
        gpu=functools.partial(
            _on_gpu,
            kernel=functools.partial(_gpu_gradient_kernel, options=options),
            class_blocks=pl.cdiv(classes, _GPU_V),
            results=result,
        ),
        grid=(pl.cdiv(tokens, _BLOCK_T), pl.cdiv(classes, _BLOCK_V)),
        in_specs=[_OF_LOGITS, *[_OF_TOKENS] * 4],
        out_specs=_OF_LOGITS,
        out_shape=result,
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
