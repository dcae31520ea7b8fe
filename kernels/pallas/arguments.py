"""Checks of a kernel's arguments, whose errors name the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

FLOATING = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def check_array(name: str, array: Any, shape: Sequence[int | str], *dtypes: Any) -> None:
    """Raise TypeError unless ``array`` is a jax array of one of ``dtypes``, or of FLOATING; ValueError for its shape.

    A size given by its letter may be anything.
    """
    if not isinstance(array, jax.Array):
        raise TypeError(f"{name}: expected a jax.Array, got {type(array).__name__}")
    allowed = tuple(map(jnp.dtype, dtypes)) or FLOATING
    if array.dtype not in allowed:
        raise TypeError(f"{name}: expected {' or '.join(map(str, allowed))}, got {array.dtype}")
    fits = array.ndim == len(shape) and all(
        isinstance(size, str) or size == actual for size, actual in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape [{', '.join(map(str, shape))}], got {list(array.shape)}")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of the words ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")
