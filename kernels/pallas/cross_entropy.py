"""Cross-entropy of logits and labels, and its gradient; an online softmax over blocks of classes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.arguments import check_array, check_choice
from assay.kernels.pallas.blocks import load, store
from assay.kernels.pallas.calls import call, call_on_gpu

_BLOCK_T, _BLOCK_V = 128, 512
_GPU_BLOCK_T, _GPU_BLOCK_V = 8, 512


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    reduction: str
    softcap: float | None
    z_loss: float

    def apply_softcap(self, x: jax.Array) -> jax.Array:
        """Return the logits in float32, c tanh(x / c) with a softcap c."""
        x, c = x.astype(jnp.float32), self.softcap
        return x if c is None else c - 2.0 * c / (jnp.exp(x * (2.0 / c)) + 1.0)


def _class_ids(start: Any, shape: tuple[int, ...]) -> jax.Array:
    return start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _update(
    x: jax.Array, class_ids: jax.Array, target: jax.Array, classes: int, state: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Add a block of logits to the state: m_i, l_i, the label's logit, the sum of logits."""
    m_i, l_i, label, total = state
    mask = class_ids < classes
    x = jnp.where(mask, x, -jnp.inf)
    m_new = jnp.maximum(m_i, jnp.max(x, axis=1, keepdims=True))
    shift = jnp.where(jnp.abs(m_new) < jnp.inf, m_new, 0.0)  # infinity - infinity would be NaN
    l_i = l_i * jnp.exp(m_i - shift) + jnp.sum(jnp.exp(x - shift), axis=1, keepdims=True)
    label += jnp.sum(jnp.where(class_ids == target, x, 0.0), axis=1, keepdims=True)
    return m_new, l_i, label, total + jnp.sum(jnp.where(mask, x, 0.0), axis=1, keepdims=True)


def _loss(target: jax.Array, state: Sequence[jax.Array], classes: int, options: _Options) -> jax.Array:
    """Return the loss of each token from the final state of `_update`."""
    m_i, l_i, label, total = state
    log_l = jnp.log(l_i)  # lse = m_i + log_l, kept apart so that m_i cancels against the label's logit first
    loss = log_l - (label - m_i)
    if options.label_smoothing:
        loss = loss * (1.0 - options.label_smoothing) + (log_l - (total / classes - m_i)) * options.label_smoothing
    if options.z_loss:
        loss += (m_i + log_l) * (m_i + log_l) * options.z_loss
    return jnp.where(target == options.ignore_index, 0.0, loss)


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
    """m_i and l_i are results: the gradient needs them."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        for ref in (l_ref, label_ref, total_ref):
            ref[...] = jnp.zeros_like(ref)

    x, target, refs = options.apply_softcap(x_ref[...]), target_ref[...], (m_ref, l_ref, label_ref, total_ref)
    class_ids = _class_ids(pl.program_id(1) * _BLOCK_V, x.shape)
    for ref, value in zip(refs, _update(x, class_ids, target, classes, [ref[...] for ref in refs]), strict=True):
        ref[...] = value

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        loss_ref[...] = _loss(target, [ref[...] for ref in refs], classes, options)


def _dlogits(
    class_ids: jax.Array,
    x: jax.Array,
    target: jax.Array,
    m_i: jax.Array,
    l_i: jax.Array,
    upstream: jax.Array,
    *,
    classes: int,
    options: _Options,
) -> jax.Array:
    dx = jnp.exp(options.apply_softcap(x) - m_i) / l_i
    if options.z_loss:
        dx += dx * (m_i + jnp.log(l_i)) * (2.0 * options.z_loss)
    dx = jnp.where(class_ids == target, dx - (1.0 - options.label_smoothing), dx) - options.label_smoothing / classes
    dx *= upstream
    if options.softcap is not None:
        exp = jnp.exp(-2.0 * jnp.abs(x.astype(jnp.float32)) / options.softcap)
        dx *= 4.0 * exp / ((1.0 + exp) * (1.0 + exp))  # 1 - tanh^2
    return jnp.where(target == options.ignore_index, 0.0, dx)


def _gradient_kernel(*refs: Any, classes: int, options: _Options) -> None:
    *inputs, dx_ref = refs
    class_ids = _class_ids(pl.program_id(1) * _BLOCK_V, dx_ref.shape)
    blocks = [ref[...] for ref in inputs]
    dx_ref[...] = _dlogits(class_ids, *blocks, classes=classes, options=options).astype(dx_ref.dtype)


def _gpu_loss_kernel(x_ref: Any, target_ref: Any, loss_ref: Any, m_ref: Any, l_ref: Any, *, options: _Options) -> None:
    """Loop over the blocks of classes."""
    start, classes = pl.program_id(0) * _GPU_BLOCK_T, x_ref.shape[1]
    target = load(target_ref, (start, 0), (_GPU_BLOCK_T, 1))

    def step(block: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x = options.apply_softcap(load(x_ref, (start, block * _GPU_BLOCK_V), (_GPU_BLOCK_T, _GPU_BLOCK_V)))
        return _update(x, _class_ids(block * _GPU_BLOCK_V, x.shape), target, classes, state)

    state = (jnp.full((_GPU_BLOCK_T, 1), -jnp.inf), *[jnp.zeros((_GPU_BLOCK_T, 1))] * 3)
    state = jax.lax.fori_loop(0, pl.cdiv(classes, _GPU_BLOCK_V), step, state)
    for ref, result in zip((loss_ref, m_ref, l_ref), (_loss(target, state, classes, options), *state[:2]), strict=True):
        store(ref, (start, 0), result)


def _gpu_gradient_kernel(x_ref: Any, *refs: Any, options: _Options) -> None:
    *inputs, dx_ref = refs
    start, start_class = pl.program_id(0) * _GPU_BLOCK_T, pl.program_id(1) * _GPU_BLOCK_V
    x = load(x_ref, (start, start_class), (_GPU_BLOCK_T, _GPU_BLOCK_V))
    token_blocks = [load(ref, (start, 0), (_GPU_BLOCK_T, 1)) for ref in inputs]
    dx = _dlogits(_class_ids(start_class, x.shape), x, *token_blocks, classes=x_ref.shape[1], options=options)
    store(dx_ref, (start, start_class), dx)


def _on_gpu(*arrays: jax.Array, kernel: Any, class_blocks: int, out_shape: Any, interpret: bool = False) -> Any:
    grid = (pl.cdiv(len(arrays[0]), _GPU_BLOCK_T), class_blocks)
    return call_on_gpu(kernel, *arrays, warps=4, grid=grid, out_shape=out_shape, interpret=interpret)


_LOGITS_SPEC = pl.BlockSpec((_BLOCK_T, _BLOCK_V), lambda i, j: (i, j))
_TOKENS_SPEC = pl.BlockSpec((_BLOCK_T, 1), lambda i, j: (i, 0))


@functools.partial(jax.jit, static_argnames="options")
def _losses(logits: jax.Array, target: jax.Array, options: _Options) -> tuple[jax.Array, ...]:
    """Return the loss of each token, m_i and l_i: float32[T,1] each."""
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
            out_shape=results,
        ),
        grid=(pl.cdiv(tokens, _BLOCK_T), pl.cdiv(classes, _BLOCK_V)),
        in_specs=[_LOGITS_SPEC, _TOKENS_SPEC],
        out_specs=(_TOKENS_SPEC,) * 3,
        out_shape=results,
        scratch_shapes=[pltpu.VMEM((_BLOCK_T, 1), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    )


@functools.partial(jax.jit, static_argnames="options")
def _gradient(
    logits: jax.Array, target: jax.Array, m_i: jax.Array, l_i: jax.Array, dloss: jax.Array, options: _Options
) -> jax.Array:
    tokens, classes = logits.shape
    if not tokens:
        return logits
    result = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
    upstream = jnp.broadcast_to(dloss, (tokens,))
    if options.reduction == "mean":
        upstream /= jnp.maximum(jnp.sum(target != options.ignore_index), 1)
    return call(
        "cross_entropy_backward",
        functools.partial(_gradient_kernel, classes=classes, options=options),
        *(logits, target.astype(jnp.int32)[:, None], m_i, l_i, upstream.astype(jnp.float32)[:, None]),
        gpu=functools.partial(
            _on_gpu,
            kernel=functools.partial(_gpu_gradient_kernel, options=options),
            class_blocks=pl.cdiv(classes, _GPU_BLOCK_V),
            out_shape=result,
        ),
        grid=(pl.cdiv(tokens, _BLOCK_T), pl.cdiv(classes, _BLOCK_V)),
        in_specs=[_LOGITS_SPEC, *[_TOKENS_SPEC] * 4],
        out_specs=_LOGITS_SPEC,
        out_shape=result,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, target: jax.Array, options: _Options) -> jax.Array:
    return _cross_entropy_fwd(logits, target, options)[0]


def _cross_entropy_fwd(
    logits: jax.Array, target: jax.Array, options: _Options
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    losses, m_i, l_i = _losses(logits, target, options)
    loss = losses[:, 0]
    if options.reduction != "none":
        loss = jnp.sum(loss)
    if options.reduction == "mean":
        loss /= jnp.sum(target != options.ignore_index)
    return loss, (logits, target, m_i, l_i)


_cross_entropy.defvjp(_cross_entropy_fwd, lambda options, saved, dloss: (_gradient(*saved, dloss, options), None))


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
    """Return -(1 - s) log p_label - s mean log p + z lse^2 of each token, p = softmax(logits[T,V]); 0 if it is ignored.

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
    """Return dlogits[T,V] of `cross_entropy`, in the logits' dtype, from the gradient dloss of its result.

    dloss is float32[] or float32[T], 1 by default. Options and errors are as in `cross_entropy`.
    """
    options = _Options(ignore_index, label_smoothing, reduction, softcap, z_loss)
    _check(logits, target, options)
    dloss = jnp.ones((), jnp.float32) if dloss is None else dloss
    check_array("dloss", dloss, target.shape if reduction == "none" and dloss.ndim else (), jnp.float32)
    return _gradient(*_cross_entropy_fwd(logits, target, options)[1], dloss, options)


def _check(logits: jax.Array, target: jax.Array, options: _Options) -> None:
    check_array("logits", logits, ("T", "V"))
    check_array("target", target, logits.shape[:1], jnp.int32, jnp.int64)
    check_choice("reduction", options.reduction, ("mean", "sum", "none"))
    if logits.shape[1] == 0:
        raise ValueError("logits: expected one class or more, got 0")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: expected a number from 0 to 1, got {options.label_smoothing}")
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap: expected None or a positive number, got {options.softcap}")
