"""Atomics that Triton's interpreter lacks: on 16-bit floats, exchanges of floats, reductions into a descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter as plain

from assay.interpreter.handles import TensorHandle
from assay.interpreter.sanitizer import MEMORY, Launch

Combine = Callable[[Any, Any], Any]


def read_modify_write(combine: Combine, ptr: Any, val: Any, mask: Any, semantic: Any) -> Any:
    """What was at each address, where now ``combine(old, val)`` is: handles [block] of pointers, numbers and booleans.

    Where several lanes meet at one address, one comes after the other, in their order.
    """
    pointers, memory = ptr.data, plain._interpreter
    if isinstance(memory, Launch):
        pointers = memory.enter_atomic(pointers, mask.data, val.data.itemsize, semantic)
    lanes = [np.asarray(mask.data)]
    if np.unique(pointers[mask.data]).size < np.count_nonzero(mask.data):
        lanes = [_alone(mask.data.shape, index) for index in np.ndindex(mask.data.shape) if mask.data[index]]
    before = np.zeros_like(val.data)
    for active in lanes:
        old = MEMORY.load(pointers, active, np.zeros_like(val.data), val.data.dtype)
        MEMORY.store(pointers, combine(TensorHandle(old, val.dtype), val).data, active)
        before = np.where(active, old, before)
    return TensorHandle(before, val.dtype.scalar)


def as_bits(handle: Any) -> Any:
    """Floats as unsigned integers of their width."""
    data = np.ascontiguousarray(handle.data)
    return TensorHandle(data.view(f"u{data.itemsize}"), handle.dtype)


def _alone(shape: tuple[int, ...], index: tuple[int, ...]) -> Any:
    only = np.zeros(shape, bool)
    only[index] = True
    return only
