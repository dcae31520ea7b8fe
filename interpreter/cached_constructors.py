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
_unwrap = tl.core._unwrap_if_constexpr
_equal_dtypes = tl.dtype.__eq__
_equal_shapes = tl.tuple.__eq__
_block_types: dict[Any, dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], Any] = {}
_tensors: dict[str, dict[str, Any]] = {}
_np_dtypes: dict[str, np.dtype[Any]] = {}
_widths: dict[str, int] = {}


def cached_constructors() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to replace, as (owner, name, value): each does the original's work once per shape and element type."""
    yield tl.block_type, "__init__", _init_block_type
    yield tl.block_type, "with_element_ty", _with_element_ty
    yield tl.dtype, "__eq__", _same_dtype
    yield tl.tuple, "__eq__", _same_tuple
    yield tl.tensor, "__init__", _init_tensor
    yield tl.core, "_unwrap_if_constexpr", _unwrapped
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
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    key = (element_ty.name, sizes)
    made = _block_types.get(key)
    if made is None or (made["element_ty"] is not element_ty and made["element_ty"] != element_ty):
        _block_type(self, element_ty, shape)
        self.shape = _shapes.setdefault(sizes, self.shape)
        self.__dict__[_ALIKE] = {}  # which all types made of this one share
        _block_types[key] = dict(self.__dict__)
    else:
        self.__dict__.update(made)


def _with_element_ty(self: Any, scalar: Any) -> Any:
    alike = self.__dict__.get(_ALIKE)
    if alike is None:  # made before the constructor was replaced
        return tl.block_type(scalar, self.shape)
    made = alike.get(scalar.name)
    if made is None or (made.element_ty is not scalar and made.element_ty != scalar):
        made = alike[scalar.name] = tl.block_type(scalar, self.shape)
    return made


def _same_dtype(self: Any, other: Any) -> bool:
    if self is other:
        return True
    if type(other) is tl.dtype:
        return bool(self.name == other.name)
    return bool(_equal_dtypes(self, other))


def _same_tuple(self: Any, other: Any) -> Any:
    """Of two blocks of one shape the shape is one object (`_init_block_type`)."""
    return _YES if self is other else _equal_shapes(self, other)


def _unwrapped(value: Any) -> Any:
    return value if type(value) in _PLAIN else _unwrap(value)


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


_ALIKE = "_alike"  # a block type's attribute: the types of its shape by the names of their elements
_PLAIN = frozenset((tl.tensor, tl.dtype, int, float, bool, str, type(None)))
_YES = tl.constexpr(True)
_OWN = ("handle", "type", "dtype")
