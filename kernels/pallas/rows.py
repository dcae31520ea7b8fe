"""Kernels over the rows of matrices: a block holds whole rows, so that a row's sum is ordered by its length alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.calls import call

_BLOCK = 2**17  # elements of a block: half a MiB of a TPU's vector memory in float32
_TILE = 16  # rows of a tile of that memory in 16 bits; twice that of float32


def rows_of_block(columns: int) -> int:
    """How many rows a block has: whole tiles, 256 rows at most; the rows' length alone decides."""
    return min(256, max(_TILE, _BLOCK // columns // _TILE * _TILE))


def by_rows(
    kernel: Callable[..., None],
    matrices: Sequence[jax.Array],
    vectors: Sequence[jax.Array] = (),
    *,
    results: Sequence[Any] = (),
    sums: Sequence[Any] = (),
) -> Any:
    """Call ``kernel`` with the blocks of matrices[R,N], the vectors[N] as [1,N], and what it writes, one of each.

    ``results`` and ``sums`` are the dtypes of matrices[R,N] and of vectors[N] summed over the rows (`add_rows`): the
    kernel gets their blocks, and one float32[1,N] for each sum, in which it grows. Results come in that order, alone
    where there is but one. Without elements nothing is called: results are empty, sums zero.
    """
    rows, columns = matrices[0].shape
    if rows and columns:
        height = rows_of_block(columns)
        block = pl.BlockSpec((height, columns), lambda i: (i, 0))
        vector = pl.BlockSpec((1, columns), lambda i: (0, 0))
        found = call(
            kernel,
            *(*matrices, *(vector[None] for vector in vectors)),
            grid=(pl.cdiv(rows, height),),
            in_specs=[block] * len(matrices) + [vector] * len(vectors),
            out_specs=[block] * len(results) + [vector] * len(sums),
            out_shape=[jax.ShapeDtypeStruct((rows, columns), dtype) for dtype in results]
            + [jax.ShapeDtypeStruct((1, columns), dtype) for dtype in sums],
            scratch_shapes=[pltpu.VMEM((1, columns), jnp.float32) for _ in sums],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary" if sums else "parallel",)),
        )
    else:
        found = [jnp.zeros((rows, columns), dtype) for dtype in results]
        found += [jnp.zeros((1, columns), dtype) for dtype in sums]
    found = [*found[: len(results)], *(total[0] for total in found[len(results) :])]
    return found[0] if len(found) == 1 else tuple(found)


def add_rows(sum_ref: Any, grown_ref: Any, terms: jax.Array, rows: int) -> None:
    """Add the block's ``terms``, those of the first ``rows`` rows of all, to grown_ref, which the last block stores."""
    block = pl.program_id(0)

    @pl.when(block == 0)
    def _() -> None:
        grown_ref[...] = jnp.zeros_like(grown_ref)

    row = block * terms.shape[0] + jax.lax.broadcasted_iota(jnp.int32, terms.shape, 0)
    grown_ref[...] += jnp.sum(jnp.where(row < rows, terms, 0.0), axis=0, keepdims=True)

    @pl.when(block == pl.num_programs(0) - 1)
    def _() -> None:
        sum_ref[...] = grown_ref[...].astype(sum_ref.dtype)
