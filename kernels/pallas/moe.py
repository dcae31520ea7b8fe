"""Mixture of experts: pairs of token and expert are sorted, and each block of rows meets the weights of one expert.

Which expert a block has is fetched before its weights, as in T. Gale et al., *MegaBlocks*, 2022.
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
from assay.kernels.pallas.products import dot
from assay.kernels.pallas.swiglu import silu_and_slope

_BLOCK = 128  # of rows, columns and of what is summed


def _grow(acc_refs: tuple[Any, ...], x_ref: Any, weight_refs: tuple[Any, ...], left: Any) -> None:
    """Add the block's share of x weight^T to each accumulator: that of the ``left`` columns which are still inside."""
    inside = jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 1) < left
    x = jnp.where(inside, x_ref[...], 0)
    for acc_ref, weight_ref in zip(acc_refs, weight_refs, strict=True):
        acc_ref[...] += dot(x, jnp.where(inside, weight_ref[0, 0], 0), over=(1, 1))


def _gate_up_kernel(
    expert_ref: Any, used_ref: Any, x_ref: Any, gate_ref: Any, up_ref: Any, hidden_ref: Any, *acc_refs: Any, inner: int
) -> None:
    used, block, last = pl.program_id(0) < used_ref[0], pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(block == 0)
    def _() -> None:
        for acc_ref in acc_refs:
            acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(used)
    def _() -> None:
        _grow(acc_refs, x_ref, (gate_ref, up_ref), inner - block * _BLOCK)

    @pl.when(used & (block == last))
    def _() -> None:
        gate, up = acc_refs
        hidden_ref[...] = (silu_and_slope(gate[...])[0] * up[...]).astype(hidden_ref.dtype)


def _down_kernel(
    expert_ref: Any, used_ref: Any, hidden_ref: Any, down_ref: Any, out_ref: Any, acc_ref: Any, *, inner: int
) -> None:
    used, block, last = pl.program_id(0) < used_ref[0], pl.program_id(2), pl.num_programs(2) - 1

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when(used)
    def _() -> None:
        _grow((acc_ref,), hidden_ref, (down_ref,), inner - block * _BLOCK)

    @pl.when(used & (block == last))
    def _() -> None:
        out_ref[...] = acc_ref[...]


def _grouped(
    kernel: Any, expert: jax.Array, used: jax.Array, rows: jax.Array, weights: jax.Array, parts: int, dtype: Any
) -> jax.Array:
    """Call ``kernel`` on blocks of rows[R,K] and of each of the ``parts`` of their expert's weights[E,parts,N,K]."""
    columns, inner = weights.shape[2:]

    def of_part(part: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, _BLOCK, _BLOCK), lambda i, j, k, expert, used: (expert[i], part, j, k))

    return call(
        "moe",
        functools.partial(kernel, inner=inner),
        *(expert, used, rows, *[weights] * parts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(len(rows) // _BLOCK, pl.cdiv(columns, _BLOCK), pl.cdiv(inner, _BLOCK)),
            in_specs=[
                pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k, expert, used: (i, k)),
                *(of_part(part) for part in range(parts)),
            ],
            out_specs=pl.BlockSpec((_BLOCK, _BLOCK), lambda i, j, k, expert, used: (i, j)),
            scratch_shapes=[pltpu.VMEM((_BLOCK, _BLOCK), jnp.float32)] * parts,
        ),
        out_shape=jax.ShapeDtypeStruct((len(rows), columns), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


def _sorted_by_expert(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row of each pair, such that a block has one expert; each block's expert; and how many blocks are used."""
    pairs = ids.reshape(-1)
    counts = jnp.sum(pairs[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    ends = jnp.cumsum((counts + _BLOCK - 1) // _BLOCK)  # in blocks, as each expert begins a new one
    order = jnp.argsort(pairs)  # stable
    place = jnp.zeros_like(pairs).at[order].set(jnp.arange(pairs.size, dtype=pairs.dtype))
    before = jnp.cumsum(counts) - counts
    first_row = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]]) * _BLOCK
    most = pairs.size // _BLOCK + min(experts, pairs.size)
    expert = jnp.minimum(jnp.sum(ends <= jnp.arange(most)[:, None], axis=1), experts - 1)
    return first_row[pairs] + place - before[pairs], expert.astype(jnp.int32), ends[-1:].astype(jnp.int32)


@jax.jit
def _moe(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    (tokens, width), (experts, _, inner) = x.shape, w_down.shape
    if not (x.size and w_down.size and ids.size):
        return jnp.zeros_like(x)
    row, expert, used = _sorted_by_expert(ids, experts)
    given = jnp.repeat(x, ids.shape[1], axis=0)
    rows = jnp.zeros((len(expert) * _BLOCK, width), x.dtype).at[row].set(given)
    gate_up = w_gate_up.reshape(experts, 2, inner, width)
    hidden = _grouped(_gate_up_kernel, expert, used, rows, gate_up, 2, x.dtype)
    out = _grouped(_down_kernel, expert, used, hidden, w_down[:, None], 1, jnp.float32)
    shares = out[row].reshape(tokens, -1, width) * weights[:, :, None]
    return jnp.sum(shares, axis=1).astype(x.dtype)


def moe(x: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """y[T,D]: the sum over a token's experts ids[T,k] of weights[T,k] w_down (silu(w_gate x) * (w_up x)).

    x[T,D], w_gate_up[E,2F,D] (rows of w_gate first) and w_down[E,D,F] are float32, bfloat16 or float16 alike; weights
    are float32, ids int32, from 0 to E - 1, which isn't checked. The hidden activation is rounded to that dtype, all
    else is float32. It has no gradient. Raises TypeError or ValueError, naming the argument, for another dtype or
    shape.
    """
    check_array("x", x, ("T", "D"))
    check_array("w_down", w_down, ("E", x.shape[1], "F"), x.dtype)
    check_array("w_gate_up", w_gate_up, (w_down.shape[0], 2 * w_down.shape[2], x.shape[1]), x.dtype)
    check_array("ids", ids, (x.shape[0], "k"), jnp.int32)
    check_array("weights", weights, ids.shape, jnp.float32)
    if w_down.shape[0] == 0:
        raise ValueError("w_down: expected one expert or more, got 0")
    return _moe(x, w_gate_up, w_down, weights, ids)
