"""Attention and its gradients, as in FlashAttention.

On a TPU the blocks of keys are the last axis of the grid, and m_i, l_i and the accumulator are scratch memory; on a GPU
they are steps of a loop. The backward pass recomputes the probabilities from the log-sum-exp: one kernel for dQ, one
for dK and dV, so that no two programs add to the same block.

Sources: T. Dao et al., *FlashAttention*, arXiv:2205.14135 (2022); T. Dao, *FlashAttention-2*, arXiv:2307.08691 (2023),
algorithm 2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.lax import div, rem

from assay.kernels.pallas.arguments import check_array, check_choice
from assay.kernels.pallas.blocks import dot, load, next_power_of_2, store
from assay.kernels.pallas.calls import call, call_on_gpu

_BLOCK_M, _BLOCK_N = 128, 128  # queries and keys of a TPU's block
_GPU_BLOCK_M, _GPU_BLOCK_N = 64, 32
_TPU_PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


def _gpu_stages(dtype: Any) -> int:
    """Return the stages of a GPU's loop that fit shared memory.

    With heads of 128 float32 columns dK and dV took 287,232 bytes, compiled for sm_90 with three stages; a block has
    232,448. With one stage they took 114,688.
    """
    return 1 if dtype == jnp.float32 else 2


class Mask(NamedTuple):
    """A causal mask over ``queries`` and ``keys``: query i attends to the keys up to i + offset, or to all (None)."""

    queries: int
    keys: int
    offset: int | None

    @classmethod
    def of(cls, causal: str, queries: int, keys: int) -> Mask:
        return cls(queries, keys, {"none": None, "bottom_right": keys - queries, "top_left": 0}[causal])

    def block(self, start_m: Any, start_n: Any, shape: tuple[int, int] = (_BLOCK_M, _BLOCK_N)) -> jax.Array:
        """Return the mask of the block at (start_m, start_n); False out of bounds."""
        offs_m = start_m + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        offs_n = start_n + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        in_bounds = (offs_m < self.queries) & (offs_n < self.keys)
        return in_bounds if self.offset is None else in_bounds & (offs_n <= offs_m + self.offset)

    def block_is_visible(self, start_m: Any, start_n: Any) -> Any:
        """Return whether a TPU's block has any True."""
        return True if self.offset is None else start_n < start_m + _BLOCK_M + self.offset

    def num_key_blocks(self, start_m: Any) -> Any:
        """Return how many of a GPU's key blocks, from the first on, its query block at start_m attends to."""
        blocks = pl.cdiv(self.keys, _GPU_BLOCK_N)
        if self.offset is None:
            return blocks
        return jnp.clip(div(start_m + _GPU_BLOCK_M + self.offset + _GPU_BLOCK_N - 1, _GPU_BLOCK_N), 0, blocks)

    def first_query_block(self, start_n: Any) -> Any:
        """Return the first of a GPU's query blocks that attends to its key block at start_n."""
        if self.offset is None:
            return 0
        return jnp.clip(div(start_n - self.offset, _GPU_BLOCK_M), 0, pl.cdiv(self.queries, _GPU_BLOCK_M))


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
    mask: Mask,
) -> None:
    block = pl.program_id(3)
    start_m, start_n = pl.program_id(2) * _BLOCK_M, block * _BLOCK_N

    @pl.when(block == 0)
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(mask.block_is_visible(start_m, start_n))
    def _() -> None:
        visible = mask.block(start_m, start_n)
        p, alpha, m_ref[...], l_ref[...] = _online_softmax(
            q_ref[0, 0], k_ref[0, 0], visible, scale, m_ref[...], l_ref[...]
        )
        v = v_ref[0, 0]
        v = jnp.where(start_n + jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) < mask.keys, v, 0)
        finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
        acc_ref[...] = acc_ref[...] * alpha + dot(p.astype(v.dtype), jnp.where(finite, v, 0))

        @pl.when(jnp.any(~finite))
        def _() -> None:
            acc_ref[...] = _add_nonfinite_values(acc_ref[...], v, visible)

    @pl.when(block == pl.num_programs(3) - 1)
    def _() -> None:
        l_i = l_ref[...]
        out_ref[0, 0] = jnp.where(l_i == 0, 0.0, acc_ref[...] / l_i).astype(out_ref.dtype)
        if lse_ref is not None:
            lse_ref[0, 0] = m_ref[...] + jnp.log(l_i)


def _online_softmax(
    q: jax.Array, k: jax.Array, visible: jax.Array, scale: float, m_i: jax.Array, l_i: jax.Array
) -> tuple[jax.Array, ...]:
    """Return p of a block of keys, the factor of earlier sums, and the new m_i and l_i."""
    qk = jnp.where(visible, dot(q, k, contract=(1, 1)) * scale, -jnp.inf)
    m_new = jnp.maximum(m_i, jnp.max(qk, axis=1, keepdims=True))
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)  # no key yet: exp(-inf - 0) is zero, not NaN
    p, alpha = jnp.exp(qk - shift), jnp.exp(m_i - shift)
    return p, alpha, m_new, l_i * alpha + jnp.sum(p, axis=1, keepdims=True)


def _add_nonfinite_values(acc: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Add infinities and NaN of v to the rows that attend to them; p v would make masked ones NaN, as 0 * infinity."""
    for infinity in (jnp.inf, -jnp.inf):
        nonfinite = (v == infinity) | (v != v)
        acc = jnp.where(dot(visible.astype(v.dtype), nonfinite.astype(v.dtype)) > 0, acc + infinity, acc)
    return acc


def _gpu_kernel(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, lse_ref: Any, *, scale: float, mask: Mask) -> None:
    """Loop over the key blocks of one block of queries."""
    start_m = pl.program_id(2) * _GPU_BLOCK_M
    block_d, block_dv = next_power_of_2(q_ref.shape[1], 16), next_power_of_2(v_ref.shape[1], 16)
    q = load(q_ref, (start_m, 0), (_GPU_BLOCK_M, block_d))

    def step(block: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (m_i, l_i, acc), start_n = state, block * _GPU_BLOCK_N
        k = load(k_ref, (start_n, 0), (_GPU_BLOCK_N, block_d))
        v = load(v_ref, (start_n, 0), (_GPU_BLOCK_N, block_dv))
        visible = mask.block(start_m, start_n, (_GPU_BLOCK_M, _GPU_BLOCK_N))
        p, alpha, m_i, l_i = _online_softmax(q, k, visible, scale, m_i, l_i)
        finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
        acc = acc * alpha + dot(p.astype(v.dtype), jnp.where(finite, v, 0))
        any_nonfinite = jnp.max((~finite).astype(jnp.int32)) > 0
        acc = jax.lax.cond(any_nonfinite, lambda acc: _add_nonfinite_values(acc, v, visible), lambda acc: acc, acc)
        return m_i, l_i, acc

    state = jnp.full((_GPU_BLOCK_M, 1), -jnp.inf), jnp.zeros((_GPU_BLOCK_M, 1)), jnp.zeros((_GPU_BLOCK_M, block_dv))
    m_i, l_i, acc = jax.lax.fori_loop(0, mask.num_key_blocks(start_m), step, state)
    store(out_ref, (start_m, 0), jnp.where(l_i == 0, 0.0, acc / l_i))
    if lse_ref is not None:
        store(lse_ref, (start_m, 0), m_i + jnp.log(l_i))


def _forward_on_gpu(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, mask: Mask, out_shape: Any, interpret: bool = False
) -> Any:
    group_size = q.shape[1] // k.shape[1]

    def head_spec(array: Any, divisor: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *array.shape[2:]), lambda b, h, i: (b, div(h, divisor), 0, 0))

    return call_on_gpu(
        functools.partial(_gpu_kernel, scale=scale, mask=mask),
        *(q, k, v),
        warps=4,
        stages=_gpu_stages(q.dtype),
        grid=(*q.shape[:2], pl.cdiv(mask.queries, _GPU_BLOCK_M)),
        in_specs=[head_spec(q), head_spec(k, group_size), head_spec(v, group_size)],
        out_specs=tuple(None if shape is None else head_spec(shape) for shape in out_shape),
        out_shape=out_shape,
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("causal", "scale", "save_lse"))
def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: str, scale: float, save_lse: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return out and, for the gradients, the natural log-sum-exp of each row, float32[B,H,Sq,1]."""
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    out = jax.ShapeDtypeStruct((batch, heads, queries, value_dim), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, queries, 1), jnp.float32) if save_lse else None
    if not q.size or not v.size:
        return jnp.zeros(out.shape, out.dtype), None if lse is None else jnp.full(lse.shape, -jnp.inf)

    def q_index(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, h, i, 0

    def kv_index(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        return b, div(h, heads // kv_heads), j, 0

    mask = Mask.of(causal, queries, keys)
    return call(
        "attention",
        functools.partial(_attention_kernel, scale=scale, mask=mask),
        *(q, k, v),
        gpu=functools.partial(_forward_on_gpu, scale=scale, mask=mask, out_shape=(out, lse)),
        grid=(batch, heads, pl.cdiv(queries, _BLOCK_M), pl.cdiv(keys, _BLOCK_N)),
        in_specs=[
            pl.BlockSpec((1, 1, _BLOCK_M, head_dim), q_index),
            pl.BlockSpec((1, 1, _BLOCK_N, head_dim), kv_index),
            pl.BlockSpec((1, 1, _BLOCK_N, value_dim), kv_index),
        ],
        out_specs=(
            pl.BlockSpec((1, 1, _BLOCK_M, value_dim), q_index),
            pl.BlockSpec((1, 1, _BLOCK_M, 1), q_index) if save_lse else None,
        ),
        out_shape=(out, lse),
        scratch_shapes=[pltpu.VMEM((_BLOCK_M, size), jnp.float32) for size in (1, 1, value_dim)],
        compiler_params=_TPU_PARAMETERS,
    )


def _load_block(ref: Any, start: Any, length: int) -> jax.Array:
    """Return a block of rows, zero beyond ``length``, where it may hold anything, NaN too."""
    block = ref[0, 0]
    row = start + jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
    return jnp.where(row < length, block, 0)


def _load_blocks(refs: Sequence[Any], start_m: Any, start_n: Any, mask: Mask) -> list[jax.Array]:
    """Return the blocks of q, k, v, out, lse and dout."""
    bounds = ((start_m, mask.queries), (start_n, mask.keys))
    return [_load_block(ref, *bounds[index in (1, 2)]) for index, ref in enumerate(refs)]


def _p_and_ds(blocks: Sequence[jax.Array], visible: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Return probabilities and the gradients of scores, in the inputs' dtype."""
    q, k, v, out, lse, dout = blocks
    p = jnp.where(visible, jnp.exp(dot(q, k, contract=(1, 1)) * scale - lse), 0.0)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=1, keepdims=True)
    ds = jnp.where(visible, p * (dot(dout, v, contract=(1, 1)) - delta), 0.0)
    return p.astype(q.dtype), ds.astype(q.dtype)


def _add_nonfinite_keys(dq: jax.Array, k: jax.Array, visible: jax.Array) -> jax.Array:
    """Make dq NaN where a row attends to a key that isn't finite; ds k would spread masked ones, as 0 * infinity."""
    nonfinite = ~(jnp.abs(k.astype(jnp.float32)) < jnp.inf)
    return jnp.where(dot(visible.astype(k.dtype), nonfinite.astype(k.dtype)) > 0, jnp.nan, dq)


def _dq_kernel(*refs: Any, scale: float, mask: Mask) -> None:
    *inputs, dq_ref, dq_acc_ref = refs
    block = pl.program_id(3)
    start_m, start_n = pl.program_id(2) * _BLOCK_M, block * _BLOCK_N

    @pl.when(block == 0)
    def _() -> None:
        dq_acc_ref[...] = jnp.zeros_like(dq_acc_ref)

    @pl.when(mask.block_is_visible(start_m, start_n))
    def _() -> None:
        blocks, visible = _load_blocks(inputs, start_m, start_n, mask), mask.block(start_m, start_n)
        k = blocks[1]
        finite = jnp.abs(k.astype(jnp.float32)) < jnp.inf
        dq_acc_ref[...] += dot(_p_and_ds(blocks, visible, scale)[1], jnp.where(finite, k, 0))

        @pl.when(jnp.any(~finite))
        def _() -> None:
            dq_acc_ref[...] = _add_nonfinite_keys(dq_acc_ref[...], k, visible)

    @pl.when(block == pl.num_programs(3) - 1)
    def _() -> None:
        dq_ref[0, 0] = (dq_acc_ref[...] * scale).astype(dq_ref.dtype)


def _dkdv_kernel(*refs: Any, scale: float, mask: Mask, query_blocks: int) -> None:
    """The last axis of the grid is the query heads that share the KV head, times their query blocks."""
    *inputs, dk_ref, dv_ref, dk_acc_ref, dv_acc_ref = refs
    step = pl.program_id(3)
    start_m, start_n = rem(step, query_blocks) * _BLOCK_M, pl.program_id(2) * _BLOCK_N

    @pl.when(step == 0)
    def _() -> None:
        dk_acc_ref[...] = jnp.zeros_like(dk_acc_ref)
        dv_acc_ref[...] = jnp.zeros_like(dv_acc_ref)

    @pl.when(mask.block_is_visible(start_m, start_n))
    def _() -> None:
        blocks = _load_blocks(inputs, start_m, start_n, mask)
        p, ds = _p_and_ds(blocks, mask.block(start_m, start_n), scale)
        dk_acc_ref[...] += dot(ds, blocks[0], contract=(0, 0))
        dv_acc_ref[...] += dot(p, blocks[5], contract=(0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        dk_ref[0, 0] = (dk_acc_ref[...] * scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_acc_ref[...].astype(dv_ref.dtype)


def _load_gpu_blocks(refs: Sequence[Any], head: Any, start_m: Any, start_n: Any) -> list[jax.Array]:
    """Return the blocks of q, k, v, out, lse and dout for the program's query head number ``head``."""
    blocks = []
    for index, ref in enumerate(refs):
        of_keys = index in (1, 2)
        height = _GPU_BLOCK_N if of_keys else _GPU_BLOCK_M
        width = 1 if index == 4 else next_power_of_2(ref.shape[2], 16)
        block = load(ref, (0, start_n, 0) if of_keys else (head, start_m, 0), (1, height, width))
        blocks.append(block.reshape(height, width))
    return blocks


def _gpu_dq_kernel(*refs: Any, scale: float, mask: Mask) -> None:
    """Loop over the key blocks of one block of queries."""
    *inputs, dq_ref = refs
    start_m = pl.program_id(2) * _GPU_BLOCK_M

    def step(block: Any, dq: jax.Array) -> jax.Array:
        start_n = block * _GPU_BLOCK_N
        blocks = _load_gpu_blocks(inputs, 0, start_m, start_n)
        visible, k = mask.block(start_m, start_n, (_GPU_BLOCK_M, _GPU_BLOCK_N)), blocks[1]
        finite = jnp.abs(k.astype(jnp.float32)) < jnp.inf
        dq += dot(_p_and_ds(blocks, visible, scale)[1], jnp.where(finite, k, 0))
        any_nonfinite = jnp.max((~finite).astype(jnp.int32)) > 0
        return jax.lax.cond(any_nonfinite, lambda dq: _add_nonfinite_keys(dq, k, visible), lambda dq: dq, dq)

    dq = jnp.zeros((_GPU_BLOCK_M, next_power_of_2(dq_ref.shape[2], 16)))
    dq = jax.lax.fori_loop(0, mask.num_key_blocks(start_m), step, dq)
    store(dq_ref, (0, start_m, 0), (dq * scale)[None])


def _gpu_dkdv_kernel(*refs: Any, scale: float, mask: Mask) -> None:
    """Loop over the query heads that share the KV head, and the query blocks that attend to one block of keys."""
    *inputs, dk_ref, dv_ref = refs
    start_n = pl.program_id(2) * _GPU_BLOCK_N
    first, query_blocks = mask.first_query_block(start_n), pl.cdiv(mask.queries, _GPU_BLOCK_M)
    num_blocks = query_blocks - first

    def step(i: Any, acc: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        head, start_m = div(i, num_blocks), (first + rem(i, num_blocks)) * _GPU_BLOCK_M
        blocks = _load_gpu_blocks(inputs, head, start_m, start_n)
        p, ds = _p_and_ds(blocks, mask.block(start_m, start_n, (_GPU_BLOCK_M, _GPU_BLOCK_N)), scale)
        return acc[0] + dot(ds, blocks[0], contract=(0, 0)), acc[1] + dot(p, blocks[5], contract=(0, 0))

    acc = tuple(jnp.zeros((_GPU_BLOCK_N, next_power_of_2(ref.shape[2], 16))) for ref in (dk_ref, dv_ref))
    dk, dv = jax.lax.fori_loop(0, inputs[0].shape[0] * num_blocks, step, acc)
    store(dk_ref, (0, start_n, 0), (dk * scale)[None])
    store(dv_ref, (0, start_n, 0), dv[None])


def _backward_on_gpu(*arrays: jax.Array, kernel: Any, by_keys: bool, out_shape: Any, interpret: bool = False) -> Any:
    """Run a program for each block of queries of a head or, ``by_keys``, of keys of a KV head and all its heads."""
    group_size = arrays[0].shape[1] // arrays[1].shape[1]
    shapes = out_shape if by_keys else (out_shape,)

    def head_spec(array: Any, is_kv: bool) -> pl.BlockSpec:
        heads, divisor = group_size if by_keys and not is_kv else 1, group_size if is_kv and not by_keys else 1
        return pl.BlockSpec((None, heads, *array.shape[2:]), lambda b, h, i: (b, div(h, divisor), 0, 0))

    results = call_on_gpu(
        *(kernel, *arrays),
        warps=4,
        stages=_gpu_stages(arrays[0].dtype),
        grid=(*shapes[0].shape[:2], pl.cdiv(shapes[0].shape[2], _GPU_BLOCK_N if by_keys else _GPU_BLOCK_M)),
        in_specs=[head_spec(array, index in (1, 2)) for index, array in enumerate(arrays)],
        out_specs=tuple(head_spec(shape, by_keys) for shape in shapes),
        out_shape=shapes,
        interpret=interpret,
    )
    return results if by_keys else results[0]


@functools.partial(jax.jit, static_argnums=(6, 7))
def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    causal: str,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv in the inputs' dtype, from the results of `_forward` and dout."""
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    if not q.size or not v.size:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    group_size, query_blocks, key_blocks = heads // kv_heads, pl.cdiv(queries, _BLOCK_M), pl.cdiv(keys, _BLOCK_N)
    mask = Mask.of(causal, queries, keys)
    arrays = q, k, v, out, lse, dout
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays[:3])

    def specs(q_index: Any, kv_index: Any) -> list[pl.BlockSpec]:
        heights = _BLOCK_M, _BLOCK_N, _BLOCK_N, _BLOCK_M, _BLOCK_M, _BLOCK_M
        return [
            pl.BlockSpec((1, 1, height, array.shape[3]), kv_index if array is k or array is v else q_index)
            for height, array in zip(heights, arrays, strict=True)
        ]

    def gpu(kernel: Any, by_keys: bool, out_shape: Any) -> Any:
        kernel = functools.partial(kernel, scale=scale, mask=mask)
        return functools.partial(_backward_on_gpu, kernel=kernel, by_keys=by_keys, out_shape=out_shape)

    in_specs = specs(lambda b, h, i, j: (b, h, i, 0), lambda b, h, i, j: (b, div(h, group_size), j, 0))
    dq = call(
        "attention_backward",
        functools.partial(_dq_kernel, scale=scale, mask=mask),
        *arrays,
        gpu=gpu(_gpu_dq_kernel, by_keys=False, out_shape=shapes[0]),
        grid=(batch, heads, query_blocks, key_blocks),
        in_specs=in_specs,
        out_specs=in_specs[0],
        out_shape=shapes[0],
        scratch_shapes=[pltpu.VMEM((_BLOCK_M, head_dim), jnp.float32)],
        compiler_params=_TPU_PARAMETERS,
    )
    in_specs = specs(
        lambda b, g, j, t: (b, g * group_size + div(t, query_blocks), rem(t, query_blocks), 0),
        lambda b, g, j, t: (b, g, j, 0),
    )
    dk, dv = call(
        "attention_backward",
        functools.partial(_dkdv_kernel, scale=scale, mask=mask, query_blocks=query_blocks),
        *arrays,
        gpu=gpu(_gpu_dkdv_kernel, by_keys=True, out_shape=shapes[1:]),
        grid=(batch, kv_heads, key_blocks, group_size * query_blocks),
        in_specs=in_specs,
        out_specs=tuple(in_specs[1:3]),
        out_shape=shapes[1:],
        scratch_shapes=[pltpu.VMEM((_BLOCK_N, size), jnp.float32) for size in (head_dim, value_dim)],
        compiler_params=_TPU_PARAMETERS,
    )
    return dq, dk, dv


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: str, scale: float) -> jax.Array:
    return _forward(q, k, v, causal, scale, save_lse=False)[0]


def _attention_fwd(q: jax.Array, k: jax.Array, v: jax.Array, causal: str, scale: float) -> tuple[jax.Array, Any]:
    out, lse = _forward(q, k, v, causal, scale, save_lse=True)
    return out, (q, k, v, out, lse)


_attention.defvjp(_attention_fwd, lambda causal, scale, saved, dout: _backward(*saved, dout, causal, scale))


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: str = "none", scale: float | None = None
) -> jax.Array:
    """Return softmax(q k^T scale, masked) v for q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]; H is a multiple of Hkv.

    All share one dtype, float32, bfloat16 or float16. Scores are float32; probabilities are rounded to that dtype.
    ``scale`` is 1 / sqrt(D) by default; ``causal`` is "none", "bottom_right" or "top_left". A query that attends to no
    key gives zeros. Raises TypeError or ValueError, naming the argument, for another dtype, shape or mask.
    """
    return _attention(q, k, v, causal, _check(q, k, v, causal, scale))


def attention_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, *, causal: str = "none", scale: float | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv of `attention`, in the inputs' dtype, from the gradient dout[B,H,Sq,Dv] of its result.

    The forward pass runs first; `jax.grad` of `attention` has saved its results. Products are accumulated in float32; p
    and ds are rounded to the inputs' dtype before they are multiplied. Options and errors are as in `attention`.
    """
    scale = _check(q, k, v, causal, scale)
    check_array("dout", dout, (*q.shape[:3], v.shape[3]), q.dtype)
    _, saved = _attention_fwd(q, k, v, causal, scale)
    return _backward(*saved, dout, causal, scale)


def _check(q: jax.Array, k: jax.Array, v: jax.Array, causal: str, scale: float | None) -> float:
    """Return the scale; raise TypeError or ValueError unless arguments are as in `attention`."""
    check_array("q", q, ("B", "H", "Sq", "D"))
    check_array("k", k, (q.shape[0], "Hkv", "Sk", q.shape[3]), q.dtype)
    check_array("v", v, (*k.shape[:3], "Dv"), q.dtype)
    check_choice("causal", causal, ("none", "bottom_right", "top_left"))
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected heads that divide the {q.shape[1]} query heads, got {k.shape[1]}")
    return float(max(q.shape[3], 1) ** -0.5 if scale is None else scale)
