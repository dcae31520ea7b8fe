"""Triton's types and tensors made quickly: in the interpreter most of the time goes into describing shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as plain

_block_type = tl.block_type.__init__
_tensor = tl.tensor.__init__
_np_dtype = plain._get_np_dtype
_block_types: dict[Any, dict[str, Any]] = {}
_converted: dict[Any, Any] = {}
_tensors: dict[str, dict[str, Any]] = {}
_np_dtypes: dict[str, np.dtype[Any]] = {}
_widths: dict[str, int] = {}


def cached_constructors() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to replace, as (owner, name, value): each does the original's work once per shape and element type."""
    yield tl.block_type, "__init__", _init_block_type
    yield tl.block_type, "with_element_ty", _with_element_ty
    yield tl.tensor, "__init__", _init_tensor
    yield plain, "_get_np_dtype", np_dtype
    if [field.name for field in fields(plain.TensorHandle)] == ["data", "dtype", "attr"]:
        yield plain.TensorHandle, "__init__", _init_handle


def np_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's dtype in which the interpreter keeps a Triton type."""
    scalar = dtype.scalar
    found = _np_dtypes.get(scalar.name)
    if found is None:
        found = _np_dtypes[scalar.name] = np.dtype(_np_dtype(scalar))
    return found


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    made = _block_types.get(key)
    if made is None or made["element_ty"] != element_ty:
        _block_type(self, element_ty, shape)
        _block_types[key] = dict(self.__dict__)
    else:
        self.__dict__.update(made)


def _with_element_ty(self: Any, scalar: Any) -> Any:
    key = (self.shape, scalar.name)
    made = _converted.get(key)
    if made is None or made.element_ty != scalar:
        made = _converted[key] = tl.block_type(scalar, self.shape)
    return made


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    made = _tensors.get(type.name)
    if made is None:
        _tensor(self, handle, type)
        _tensors[type.name] = {name: value for name, value in self.__dict__.items() if name not in _OWN}
    else:
        self.__dict__.update(made)
        self.handle, self.type, self.dtype = handle, type, type.scalar


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    widest = _widths.get(dtype.name)
    if widest is None:
        is_address = isinstance(dtype, tl.pointer_type)
        widest = _widths[dtype.name] = 2**63 if is_address else max(1, dtype.primitive_bitwidth // 8)
    if data.itemsize > widest:
        self.__post_init__()  # which says what is wrong


_OWN = ("handle", "type", "dtype")
