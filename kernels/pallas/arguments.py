"""Checks of a kernel's arguments; every error names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

FLOATING = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def check_array(name: str, array: Any, shape: Sequence[int | str], *dtypes: Any) -> None:
    """Raise TypeError unless ``array`` is a jax array of one of ``dtypes`` (default FLOATING); ValueError for shapes.

    A size given as a letter may be anything.
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


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
