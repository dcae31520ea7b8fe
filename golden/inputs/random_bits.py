"""A counter-based generator: 64 random bits per element, from the seed, the tensor's name and the coordinates.

The mixing function is the finaliser of SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, *Fast splittable pseudorandom
number generators*, OOPSLA 2014). Everything is integer arithmetic, hence the same on every platform.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]

_WEYL = np.uint64(0x9E3779B97F4A7C15)


def mix(state: Bits) -> Bits:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit moves every output bit."""
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def key(seed: int, name: str) -> np.uint64:
    """The starting state of a tensor."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def bits(seed: int, name: str, shape: Sequence[int], *, start: Sequence[int] = (), ignore: Sequence[int] = ()) -> Bits:
    """Bits for each element of ``shape``, whose first element has the coordinates ``start`` (the origin if empty).

    Along the axes in ``ignore`` all elements share theirs.
    """
    state = np.full((1,) * len(shape), key(seed, name), dtype=np.uint64)
    for axis, size in enumerate(shape):
        length = 1 if axis in ignore else size
        first = start[axis] if start and axis not in ignore else 0
        position = np.arange(first, first + length, dtype=np.uint64).reshape(
            [-1 if i == axis else 1 for i in range(len(shape))]
        )
        with np.errstate(over="ignore"):
            state = mix(state + (position + np.uint64(1)) * _WEYL + np.uint64(axis))
    return np.broadcast_to(mix(state) if not len(shape) else state, tuple(shape))


def uniform(draw: Bits, count: int = 53) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with ``count`` bits."""
    return (draw >> np.uint64(64 - count)).astype(np.float64) * 2.0**-count


def integers(draw: Bits, below: int) -> npt.NDArray[np.int64]:
    """Whole numbers in 0..below-1."""
    return (uniform(draw) * below).astype(np.int64)


def normal(draw: Bits) -> npt.NDArray[np.float64]:
    """Close to standard normal, within 3.5: the sum of four 16-bit uniforms, in exact arithmetic."""
    lanes = sum(((draw >> np.uint64(16 * lane)) & np.uint64(0xFFFF)).astype(np.float64) for lane in range(4))
    return (np.asarray(lanes) - 131070.0) * (math.sqrt(3.0) / 65536.0)
