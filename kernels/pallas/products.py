"""The product of two blocks, as a TPU's matrix unit makes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dot(a: jax.Array, b: jax.Array, *, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """The float32 sums of a's and b's products over dimension ``over`` of each: (1, 0) is a b, (1, 1) a b^T.

    Unless told the highest precision a TPU multiplies float32 as bfloat16. Products of narrower formats are exact.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = ((over[0],), (over[1],)), ((), ())
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
