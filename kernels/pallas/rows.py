"""Functions of the rows of matrices: a block holds whole rows, so that a row's sum is ordered by its length alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from assay.kernels.pallas.calls import call, call_on_gpu
from assay.kernels.pallas.tiles import WIDEST, load, side, store, warps

_BLOCK = 2**17  # elements of a block: half a MiB of a TPU's vector memory in float32
_TILE = 16  # rows of a tile of that memory in 16 bits; twice that of float32
_GPU_BLOCK = 2**12  # elements of a GPU's block, unless one row is longer
_GPU_PROGRAMS = 128  # at most so many add rows


class Rows(NamedTuple):
    """Sums and maxima of the rows of a block [rows,width], as [rows,1]; the block may be wider than the matrix."""

    columns: int

    def sum(self, block: jax.Array) -> jax.Array:
        return jnp.sum(self._until_end(block, 0.0), axis=1, keepdims=True)

    def mean(self, block: jax.Array) -> jax.Array:
        return self.sum(block) / self.columns

    def max(self, block: jax.Array) -> jax.Array:
        return jnp.max(self._until_end(block, -jnp.inf), axis=1, keepdims=True)

    def _until_end(self, block: jax.Array, other: float) -> jax.Array:
        if block.shape[1] == self.columns:
            return block
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, block.shape, 1) < self.columns, block, other)


def rows_of_block(columns: int) -> int:
    """How many rows a TPU's block has: whole tiles, 256 rows at most; the rows' length alone decides."""
    return min(256, max(_TILE, _BLOCK // columns // _TILE * _TILE))


def by_rows(
    name: str,
    function: Callable[..., tuple[jax.Array, ...]],
    matrices: Sequence[jax.Array],
    vectors: Sequence[jax.Array] = (),
    *,
    results: Sequence[Any] = (),
    sums: Sequence[Any] = (),
) -> Any:
    """``function(rows, *matrices, *vectors)``, block by block of matrices[R,N], with the vectors[N] as [1,N].

    Its arguments and its results are float32; rows are the `Rows` of them. ``results`` and ``sums`` are the dtypes of
    matrices[R,N], and of vectors[N] that are summed over the rows, of which it returns the terms. They come in that
    order, alone where there is but one. Without elements nothing is called: results are empty, sums zero.
    """
    rows, columns = matrices[0].shape
    shapes = tuple(jax.ShapeDtypeStruct((rows, columns), dtype) for dtype in results)
    shapes += tuple(jax.ShapeDtypeStruct((1, columns), dtype) for dtype in sums)
    if rows and columns:
        height, fits = rows_of_block(columns), side(columns) <= WIDEST
        block = pl.BlockSpec((height, columns), lambda i: (i, 0))
        vector = pl.BlockSpec((1, columns), lambda i: (0, 0))
        function = functools.partial(function, Rows(columns))
        counts = len(matrices), len(vectors), len(results), len(sums)
        found = call(
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
        found = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    found = [*found[: len(results)], *(total[0] for total in found[len(results) :])]
    return found[0] if len(found) == 1 else tuple(found)


def _tpu_kernel(*refs: Any, function: Callable[..., Any], counts: tuple[int, ...], rows: int) -> None:
    """Sums grow in scratch memory from one block of rows to the next."""
    matrices, vectors, results, sums, grown = _split(refs, *counts, counts[-1])
    found = function(*(ref[...].astype(jnp.float32) for ref in (*matrices, *vectors)))
    blocks, terms = _split(found, *counts[2:])
    for ref, one in zip(results, blocks, strict=True):
        ref[...] = one.astype(ref.dtype)
    for sum_ref, grown_ref, one in zip(sums, grown, terms, strict=True):
        _add_rows(sum_ref, grown_ref, one, rows)


def _add_rows(sum_ref: Any, grown_ref: Any, terms: jax.Array, rows: int) -> None:
    """Add the block's ``terms``, those of the first ``rows`` rows of all, to grown_ref, which the last block stores."""
    block = pl.program_id(0)

    @pl.when(block == 0)
    def _() -> None:
        grown_ref[...] = jnp.zeros_like(grown_ref)

    grown_ref[...] += _sum_of_rows(terms, block * terms.shape[0], rows)

    @pl.when(block == pl.num_programs(0) - 1)
    def _() -> None:
        sum_ref[...] = grown_ref[...].astype(sum_ref.dtype)


def _on_gpu(
    *arrays: jax.Array,
    function: Callable[..., Any],
    counts: tuple[int, ...],
    shapes: Sequence[Any],
    interpret: bool = False,
) -> Any:
    """A program for each block of rows; where rows are added, for several of them, whose sums XLA adds."""
    rows, columns = arrays[0].shape
    results, totals = _split(shapes, *counts[2:])
    width = side(columns)
    height = max(1, _GPU_BLOCK // width)
    steps = pl.cdiv(rows, height * _GPU_PROGRAMS) if totals else 1
    programs = pl.cdiv(rows, height * steps)
    found = call_on_gpu(
        functools.partial(_gpu_kernel, function=function, counts=counts, block=(height, width), steps=steps),
        *arrays,
        warps=warps(height * width),
        grid=(programs,),
        out_shape=(*results, *(jax.ShapeDtypeStruct((programs, columns), jnp.float32) for _ in totals)),
        interpret=interpret,
    )
    parts = [jnp.sum(part, axis=0, keepdims=True) for part in found[len(results) :]]
    return *found[: len(results)], *(part.astype(to.dtype) for part, to in zip(parts, totals, strict=True))


def _gpu_kernel(
    *refs: Any, function: Callable[..., Any], counts: tuple[int, ...], block: tuple[int, int], steps: int
) -> None:
    """Sums grow from one of the program's blocks of rows to the next, and end in the program's own row."""
    matrices, vectors, results, parts = _split(refs, *counts)
    program, (rows, _), (height, width) = pl.program_id(0), matrices[0].shape, block
    loaded = [load(ref, (0, 0), (1, width)).astype(jnp.float32) for ref in vectors]

    def step(place: Any, grown: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (program * steps + place) * height
        found = function(*(load(ref, (first, 0), block).astype(jnp.float32) for ref in matrices), *loaded)
        blocks, terms = _split(found, *counts[2:])
        for ref, one in zip(results, blocks, strict=True):
            store(ref, (first, 0), one)
        return tuple(total + _sum_of_rows(one, first, rows) for total, one in zip(grown, terms, strict=True))

    grown = jax.lax.fori_loop(0, steps, step, (jnp.zeros((1, width), jnp.float32),) * len(parts))
    for ref, total in zip(parts, grown, strict=True):
        store(ref, (program, 0), total)


def _sum_of_rows(terms: jax.Array, first: Any, rows: int) -> jax.Array:
    """The sum of a block's rows but for those behind the end, which may be anything; the block begins at ``first``."""
    row = first + jax.lax.broadcasted_iota(jnp.int32, terms.shape, 0)
    return jnp.sum(jnp.where(row < rows, terms, 0.0), axis=0, keepdims=True)


def _split(items: Sequence[Any], *counts: int) -> list[list[Any]]:
    """The first so many of the items, the next so many, and so on."""
    left = iter(items)
    return [list(itertools.islice(left, count)) for count in counts]
