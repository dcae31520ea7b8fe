"""Matrix products as a tensor core is documented to form them: exact products, summed in float32 (integers exactly)."""

from __future__ import annotations

import numpy as np

from assay.interpreter.small_floats import Array

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def dot(a: Array, b: Array, *, tf32: bool) -> Array:
    """``a @ b``: float64 in float64, other floats in float32 (``tf32``: operands cut to 10 bits), integers exactly."""
    if a.dtype.kind in "iu":
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
    if a.dtype == np.float64:
        return np.matmul(a, b)
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    return np.matmul(cut_to_tf32(a), cut_to_tf32(b)) if tf32 else np.matmul(a, b)


def cut_to_tf32(x: Array) -> Array:
    """The bits that mma.sync reads of a float32 register: the low 13 are ignored."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def unpacked_operand(values: Array, k_packed: bool, *, is_rhs: bool) -> Array:
    """An operand of a scaled dot in float32, not scaled yet.

    ``values`` are float32 [M, K] (rhs: [K, N]), or bytes of two e2m1 patterns, low nibble first, packed along K or,
    unless ``k_packed``, along the other axis.
    """
    if values.dtype == np.uint8:
        k_axis = -2 if is_rhs else -1
        values = _unpacked(values, k_axis if k_packed else -3 - k_axis)
    return values.astype(np.float32, copy=False)


def along_k(scale: Array | None, shape: tuple[int, ...], *, is_rhs: bool) -> Array | None:
    """Scales [M, K/group] (rhs: [N, K/group]) repeated to an operand's ``shape``; None stands for ones."""
    if scale is None:
        return None
    repeated = np.repeat(scale, shape[-2 if is_rhs else -1] // scale.shape[-1], axis=-1)
    return np.swapaxes(repeated, -1, -2) if is_rhs else repeated


def _unpacked(patterns: Array, axis: int) -> Array:
    pairs = np.stack([patterns & 15, patterns >> 4], axis=-1)
    moved = np.moveaxis(pairs, axis - 1, -2)  # the packed axis, beside the pair's
    return np.moveaxis(_E2M1[moved.reshape(*moved.shape[:-2], -1)], -1, axis)
