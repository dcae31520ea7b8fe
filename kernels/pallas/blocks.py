"""Blocks of arrays: matrix products, and a GPU program's loads and stores, whose sides are powers of two."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

MAX_BLOCK_ELEMENTS = 2**20  # Triton's limit


def dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Return the product in float32, contracting one dimension of each: (1, 0) is a b, (1, 1) a b^T.

    A TPU multiplies float32 as bfloat16 unless the precision is HIGHEST. Products of narrower formats are exact.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = ((contract[0],), (contract[1],)), ((), ())
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def next_power_of_2(size: int, minimum: int = 1) -> int:
    """Return the least power of two that is at least ``size`` and ``minimum``."""
    return max(minimum, pl.next_power_of_2(size))


def num_warps(elements: int) -> int:
    """Return 4 to 32 warps for a block: 32 elements per thread where possible."""
    return min(32, max(4, next_power_of_2(elements) // 1024))


def load(ref: Any, start: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    """Load the block of ``ref`` at ``start``, zero out of bounds."""
    return plt.load(_slice(ref, start, shape), mask=_in_bounds(ref, start, shape), other=jnp.zeros((), ref.dtype))


def store(ref: Any, start: tuple[Any, ...], block: jax.Array) -> None:
    """Store ``block`` at ``start``, rounded to ref's dtype, but for what is out of bounds."""
    plt.store(_slice(ref, start, block.shape), block.astype(ref.dtype), mask=_in_bounds(ref, start, block.shape))


def _slice(ref: Any, start: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    return ref.at[tuple(pl.ds(first, size) for first, size in zip(start, shape, strict=True))]


def _in_bounds(ref: Any, start: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    indices = [first + jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis, first in enumerate(start)]
    return functools.reduce(operator.and_, (index < size for index, size in zip(indices, ref.shape, strict=True)))
