"""What attention and its gradients share: blocks, who sees whom, and where the blocks of a head lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from assay.kernels.pallas.arguments import check_array, check_choice

BLOCK_Q, BLOCK_K = 128, 128
GPU_Q, GPU_K = 64, 32


def gpu_stages(dtype: Any) -> int:
    """How many stages of its loop a GPU holds at once.

    With heads of 128 float32 columns the gradients of keys and values, compiled for sm_90, had 287,232 bytes of shared
    memory with three stages, where a block may have 232,448, and 114,688 with one.
    """
    return 1 if dtype == jnp.float32 else 2


_MASKS = ("none", "bottom_right", "top_left")


def check_attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: str) -> None:
    """Raise TypeError or ValueError, naming the argument, unless they are arguments of `attention`."""
    check_array("q", q, ("B", "H", "Sq", "D"))
    check_array("k", k, (q.shape[0], "Hkv", "Sk", q.shape[3]), q.dtype)
    check_array("v", v, (*k.shape[:3], "Dv"), q.dtype)
    check_choice("causal", causal, _MASKS)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected heads that divide the {q.shape[1]} query heads, got {k.shape[1]}")


class Geometry(NamedTuple):
    """What a block of scores has to know of the whole."""

    queries: int
    keys: int
    ahead: int | None
    """How many keys beyond its own place a query sees; None: all of them."""

    @classmethod
    def of(cls, causal: str, queries: int, keys: int) -> Geometry:
        """That of a mask's name."""
        return cls(queries, keys, {"none": None, "bottom_right": keys - queries, "top_left": 0}[causal])

    def seen(self, first_query: Any, first_key: Any, block: tuple[int, int] = (BLOCK_Q, BLOCK_K)) -> jax.Array:
        """Which query of a block sees which key of another, as bool of ``block``; what lies behind an end doesn't."""
        query = first_query + jax.lax.broadcasted_iota(jnp.int32, block, 0)
        key = first_key + jax.lax.broadcasted_iota(jnp.int32, block, 1)
        inside = (query < self.queries) & (key < self.keys)
        return inside if self.ahead is None else inside & (key <= query + self.ahead)

    def meet(self, first_query: Any, first_key: Any) -> Any:
        """Whether any query of the block may see any key of the other."""
        return True if self.ahead is None else first_key < first_query + BLOCK_Q + self.ahead

    def key_blocks(self, first_query: Any) -> Any:
        """How many of a GPU's blocks of keys, from the first on, a block of its queries may see."""
        blocks = pl.cdiv(self.keys, GPU_K)
        if self.ahead is None:
            return blocks
        return jnp.clip(jax.lax.div(first_query + GPU_Q + self.ahead + GPU_K - 1, GPU_K), 0, blocks)

    def unmet_query_blocks(self, first_key: Any) -> Any:
        """How many of a GPU's blocks of queries, from the first on, see nothing of a block of its keys."""
        if self.ahead is None:
            return 0
        return jnp.clip(jax.lax.div(first_key - self.ahead, GPU_Q), 0, pl.cdiv(self.queries, GPU_Q))
