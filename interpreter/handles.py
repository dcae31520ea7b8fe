"""The numbers in a handle of Triton's interpreter, and handles of numbers."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter as plain

from assay.interpreter.cached_constructors import np_dtype
from assay.interpreter.small_floats import NARROW, Array, decode, encode

TensorHandle = plain.TensorHandle


def numbers(handle: Any) -> Array:
    """What a handle's data stand for: bit patterns decoded to float32, other data as they are."""
    name = handle.dtype.scalar.name
    return decode(handle.data, name) if name in NARROW else handle.data


def handle_of(values: Array, dtype: Any) -> Any:
    """A handle of ``values`` rounded (to nearest even) to a floating ``dtype``, or wrapped to an integer one."""
    scalar = dtype.scalar
    data = encode(values, scalar.name) if scalar.name in NARROW else values.astype(np_dtype(scalar))
    return TensorHandle(data, scalar)
