"""`TritonSemantic` with short ways for the commonest operands; what a kernel means stays Triton's business."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as plain

from assay.interpreter.cached_constructors import np_dtype
from assay.interpreter.emission import moved
from assay.interpreter.operators import FLOATS, INTEGERS, fits


class _Format(str):
    """A format's name that is also its own value, as Triton 3.6 and 3.7 expect of a constant."""

    @property
    def value(self) -> str:
        return str(self)


class Semantic(plain.TritonSemantic):  # type: ignore[misc]
    """Two operands of one type need neither conversion nor broadcast; a Python number takes a wide tensor's type."""

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *rest: Any, **flags: Any) -> Any:
        if isinstance(lhs, tl.tensor):
            if isinstance(rhs, tl.tensor):
                if lhs.type.name == rhs.type.name and lhs.dtype.name in (*FLOATS, *INTEGERS):
                    return lhs, rhs
            elif fits(rhs, lhs.dtype.name):
                return lhs, _like(rhs, lhs)
        elif isinstance(rhs, tl.tensor) and fits(lhs, rhs.dtype.name):
            return _like(lhs, rhs), rhs
        return super().binary_op_type_checking_impl(lhs, rhs, *rest, **flags)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        """NumPy's rule is Triton's where the ranks agree or one operand is a scalar."""
        ours, theirs = _shape(lhs), _shape(rhs)
        if ours == theirs:
            return lhs, rhs
        if ours and theirs and len(ours) != len(theirs):
            return super().broadcast_impl_value(lhs, rhs)
        try:
            shape = np.broadcast_shapes(ours, theirs)
        except ValueError:
            return super().broadcast_impl_value(lhs, rhs)  # whose error says more
        return _broadcast(lhs, ours, shape), _broadcast(rhs, theirs, shape)

    def _has_native_tma(self) -> bool:
        """The target has: compute capability 9.0."""
        return True

    def dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: str, rhs: Any, rhs_scale: Any, rhs_format: str, *rest: Any
    ) -> Any:
        return super().dot_scaled(lhs, lhs_scale, _Format(lhs_format), rhs, rhs_scale, _Format(rhs_format), *rest)


def _like(number: float, tensor: Any) -> Any:
    """A tensor of ``tensor``'s type, full of ``number``."""
    value = np.array([number], np_dtype(tensor.dtype))
    data = np.broadcast_to(value, tensor.handle.data.shape)
    return tl.tensor(plain.TensorHandle(data, tensor.dtype), tensor.type)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tensor.handle.data.shape if tensor.type.is_block() else ()


def _broadcast(tensor: Any, shape: tuple[int, ...], target: tuple[int, ...]) -> Any:
    if shape == target:
        return tensor

    def spread(handle: Any) -> Any:
        return plain.TensorHandle(np.broadcast_to(handle.data, target), handle.dtype)

    handle = moved(spread(tensor.handle), tensor.handle, spread)
    return tl.tensor(handle, tl.block_type(tensor.dtype, list(target)))
