"""Matrix products as a tensor core is documented to form them: exact products, summed in float32 (integers exactly)."""

from __future__ import annotations

import numpy as np

from assay.verify.interpreter.narrow import Array

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def dot(a: Array, b: Array, *, tf32: bool) -> Array:
    """``a @ b``: float64 in float64, other floats in float32 (``tf32``: operands cut to 10 bits), integers exactly."""
    if a.dtype.kind in "iu":
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
    if a.dtype == np.float64:
        return np.matmul(a, b)
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    return np.matmul(_tf32(a), _tf32(b)) if tf32 else np.matmul(a, b)


def _tf32(x: Array) -> Array:
    """The bits that mma.sync reads of a float32 register: the low 13 are ignored."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def scaled_operand(values: Array, scale: Array | None, k_packed: bool, *, is_rhs: bool) -> Array:
    """An operand of a scaled dot in float32.

    ``values`` are float32 [M, K] (rhs: [K, N]), or bytes of two e2m1 patterns, low nibble first, packed along K or,
    unless ``k_packed``, along the other axis. ``scale`` is [M, K/group] (rhs: [N, K/group]), or None for ones.
    """
    k_axis = -2 if is_rhs else -1
    if values.dtype == np.uint8:
        axis = k_axis if k_packed else -3 - k_axis
        values = _unpacked(values, axis)
    values = values.astype(np.float32, copy=False)
    if scale is None:
        return values
    along_k = np.repeat(scale, values.shape[k_axis] // scale.shape[-1], axis=-1)
    return values * (np.swapaxes(along_k, -1, -2) if is_rhs else along_k)


def _unpacked(patterns: Array, axis: int) -> Array:
    pairs = np.stack([patterns & 15, patterns >> 4], axis=-1)
    moved = np.moveaxis(pairs, axis - 1, -2)  # the packed axis, beside the pair's
    return np.moveaxis(_E2M1[moved.reshape(*moved.shape[:-2], -1)], -1, axis)
