"""Blocks of matrices as a GPU's programs load and store them: their sides are powers of two, and may reach beyond."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

WIDEST = 2**20  # elements of the largest block that Triton takes


def side(size: int, least: int = 1) -> int:
    """The power of two that holds so many elements, and at least ``least``."""
    return max(least, pl.next_power_of_2(size))


def warps(elements: int) -> int:
    """How many warps of 32 threads work on so many elements: 32 elements a thread, if 4 to 32 warps can do that."""
    return min(32, max(4, side(elements) // 1024))


def load(ref: Any, first: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    """The block of ``ref`` that begins at ``first``; zero is what lies behind an end of it."""
    return plt.load(_at(ref, first, shape), mask=_inside(ref, first, shape), other=jnp.zeros((), ref.dtype))


def store(ref: Any, first: tuple[Any, ...], block: jax.Array) -> None:
    """Store ``block`` where it begins at ``first``, rounded to ref's dtype, but for what lies behind an end of that."""
    plt.store(_at(ref, first, block.shape), block.astype(ref.dtype), mask=_inside(ref, first, block.shape))


def _at(ref: Any, first: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    return ref.at[tuple(pl.ds(start, size) for start, size in zip(first, shape, strict=True))]


def _inside(ref: Any, first: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    places = [start + jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis, start in enumerate(first)]
    return functools.reduce(operator.and_, (place < size for place, size in zip(places, ref.shape, strict=True)))
