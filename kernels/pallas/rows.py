"""Row-wise kernels: a block holds whole rows, so that the order of a row's sum depends on its length alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.blocks import MAX_BLOCK_ELEMENTS, load, next_power_of_2, num_warps, store
from assay.kernels.pallas.calls import call, call_on_gpu

_BLOCK_ELEMENTS = 2**17  # half a MiB of a TPU's vector memory in float32
_TILE_ROWS = 16  # of a tile of that memory in 16-bit formats; float32 has 8
_GPU_BLOCK_ELEMENTS = 2**12  # unless one row is longer
_MAX_GPU_PARTIALS = 128  # programs with a partial column sum each


class Rows(NamedTuple):
    """Reductions over the rows of a block [rows,width] to [rows,1]; columns beyond the matrix are ignored."""

    columns: int

    def sum(self, block: jax.Array) -> jax.Array:
        return jnp.sum(self._fill_tail(block, 0.0), axis=1, keepdims=True)

    def mean(self, block: jax.Array) -> jax.Array:
        return self.sum(block) / self.columns

    def max(self, block: jax.Array) -> jax.Array:
        return jnp.max(self._fill_tail(block, -jnp.inf), axis=1, keepdims=True)

    def _fill_tail(self, block: jax.Array, value: float) -> jax.Array:
        if block.shape[1] == self.columns:
            return block
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, block.shape, 1) < self.columns, block, value)


def rows_per_block(columns: int) -> int:
    """Return the rows of a TPU's block: whole tiles, at most 256 rows; it depends on the rows' length alone."""
    return min(256, max(_TILE_ROWS, _BLOCK_ELEMENTS // columns // _TILE_ROWS * _TILE_ROWS))


def call_by_rows(
    name: str,
    function: Callable[..., tuple[jax.Array, ...]],
    matrices: Sequence[jax.Array],
    vectors: Sequence[jax.Array] = (),
    *,
    results: Sequence[Any] = (),
    sums: Sequence[Any] = (),
) -> Any:
    """Call ``function(rows, *matrices, *vectors)`` on each block of rows, in float32, and return its results.

    Matrices are [R,N], vectors [N], passed as [1,N]; ``rows`` reduces a block's rows. ``results`` are the dtypes of the
    matrices [R,N] that the function returns first. ``sums`` are those of vectors [N]: the function returns matrices of
    terms, which are summed over the rows. A single result comes alone. Empty inputs give empty results and zero sums.
    """
    rows, columns = matrices[0].shape
    shapes = tuple(jax.ShapeDtypeStruct((rows, columns), dtype) for dtype in results)
    shapes += tuple(jax.ShapeDtypeStruct((1, columns), dtype) for dtype in sums)
    if rows and columns:
        height, fits = rows_per_block(columns), next_power_of_2(columns) <= MAX_BLOCK_ELEMENTS
        block = pl.BlockSpec((height, columns), lambda i: (i, 0))
        vector = pl.BlockSpec((1, columns), lambda i: (0, 0))
        function = functools.partial(function, Rows(columns))
        counts = len(matrices), len(vectors), len(results), len(sums)
        outputs = call(
            name if fits else f"{name} of rows of {columns} elements",
            functools.partial(_tpu_kernel, function=function, counts=counts, rows=rows),
            *(*matrices, *(vector[None] for vector in vectors)),
            gpu=functools.partial(_on_gpu, function=function, counts=counts, shapes=shapes) if fits else None,
            grid=(pl.cdiv(rows, height),),
            in_specs=[block] * len(matrices) + [vector] * len(vectors),
            out_specs=(block,) * len(results) + (vector,) * len(sums),
            out_shape=shapes,
            scratch_shapes=[pltpu.VMEM((1, columns), jnp.float32) for _ in sums],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary" if sums else "parallel",)),
        )
    else:
        outputs = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    outputs = [*outputs[: len(results)], *(total[0] for total in outputs[len(results) :])]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _tpu_kernel(*refs: Any, function: Callable[..., Any], counts: tuple[int, ...], rows: int) -> None:
    """Accumulate column sums in scratch memory, from one block of rows to the next."""
    matrices, vectors, results, sums, acc_refs = _split(refs, *counts, counts[-1])
    outputs = function(*(ref[...].astype(jnp.float32) for ref in (*matrices, *vectors)))
    blocks, terms = _split(outputs, *counts[2:])
    for ref, block in zip(results, blocks, strict=True):
        ref[...] = block.astype(ref.dtype)
    for sum_ref, acc_ref, term in zip(sums, acc_refs, terms, strict=True):
        _add_column_sums(sum_ref, acc_ref, term, rows)


def _add_column_sums(sum_ref: Any, acc_ref: Any, terms: jax.Array, rows: int) -> None:
    """Add the column sums of the block's terms to acc_ref, which the last block stores in sum_ref."""
    block = pl.program_id(0)

    @pl.when(block == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += _column_sums(terms, block * terms.shape[0], rows)

    @pl.when(block == pl.num_programs(0) - 1)
    def _() -> None:
        sum_ref[...] = acc_ref[...].astype(sum_ref.dtype)


def _on_gpu(
    *arrays: jax.Array,
    function: Callable[..., Any],
    counts: tuple[int, ...],
    shapes: Sequence[Any],
    interpret: bool = False,
) -> Any:
    """Run a program for each block of rows, or for several blocks if there are column sums: XLA adds the partials."""
    rows, columns = arrays[0].shape
    results, totals = _split(shapes, *counts[2:])
    width = next_power_of_2(columns)
    height = max(1, _GPU_BLOCK_ELEMENTS // width)
    steps = pl.cdiv(rows, height * _MAX_GPU_PARTIALS) if totals else 1
    programs = pl.cdiv(rows, height * steps)
    outputs = call_on_gpu(
        functools.partial(_gpu_kernel, function=function, counts=counts, block=(height, width), steps=steps),
        *arrays,
        warps=num_warps(height * width),
        grid=(programs,),
        out_shape=(*results, *(jax.ShapeDtypeStruct((programs, columns), jnp.float32) for _ in totals)),
        interpret=interpret,
    )
    sums = [jnp.sum(partials, axis=0, keepdims=True) for partials in outputs[len(results) :]]
    return *outputs[: len(results)], *(total.astype(to.dtype) for total, to in zip(sums, totals, strict=True))


def _gpu_kernel(
    *refs: Any, function: Callable[..., Any], counts: tuple[int, ...], block: tuple[int, int], steps: int
) -> None:
    """Loop over the program's blocks of rows, and store its partial column sums in its own row."""
    matrices, vectors, results, partial_refs = _split(refs, *counts)
    pid, (rows, _), (height, width) = pl.program_id(0), matrices[0].shape, block
    vector_blocks = [load(ref, (0, 0), (1, width)).astype(jnp.float32) for ref in vectors]

    def step(i: Any, acc: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start = (pid * steps + i) * height
        outputs = function(*(load(ref, (start, 0), block).astype(jnp.float32) for ref in matrices), *vector_blocks)
        blocks, terms = _split(outputs, *counts[2:])
        for ref, output in zip(results, blocks, strict=True):
            store(ref, (start, 0), output)
        return tuple(total + _column_sums(term, start, rows) for total, term in zip(acc, terms, strict=True))

    acc = jax.lax.fori_loop(0, steps, step, (jnp.zeros((1, width), jnp.float32),) * len(partial_refs))
    for ref, total in zip(partial_refs, acc, strict=True):
        store(ref, (pid, 0), total)


def _column_sums(terms: jax.Array, start: Any, rows: int) -> jax.Array:
    """Return the column sums of a block at row ``start``, without rows beyond the end, which may hold anything."""
    row = start + jax.lax.broadcasted_iota(jnp.int32, terms.shape, 0)
    return jnp.sum(jnp.where(row < rows, terms, 0.0), axis=0, keepdims=True)


def _split(items: Sequence[Any], *counts: int) -> list[list[Any]]:
    iterator = iter(items)
    return [list(itertools.islice(iterator, count)) for count in counts]
