"""Operators of Triton's tensors in one step where the operands are of common types, and else as Triton has them.

Triton's own way asks five functions what the types say already. Here are whole numbers of 32 and 64 bits, float32 and
float64, masks, Python numbers beside these, and pointers beside whole numbers; ranks agree or one operand is a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as plain

from assay.interpreter.cached_constructors import np_dtype
from assay.interpreter.emission import ROUNDED

Operator = Callable[[Any, Any], Any]

FLOATS = ("fp32", "fp64")
INTEGERS = ("int32", "int64")
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}

_WHOLE = {(ours, theirs): max(ours, theirs) for ours in INTEGERS for theirs in INTEGERS}
_NUMBERS = _WHOLE | {(name, name): name for name in FLOATS}
_BITS = _WHOLE | {("int1", "int1"): "int1"}


def fits(number: Any, dtype: str) -> bool:
    """Whether a Python number next to a tensor of ``dtype`` simply becomes one of its elements."""
    if type(number) is int:
        return -(2**24) <= number <= 2**24 and (dtype in INTEGERS or dtype in FLOATS)
    return type(number) is float and dtype in FLOATS and (number == 0 or number != number or 1e-30 < abs(number) < 1e38)


def operators(builder: Any, triton: Mapping[str, Operator]) -> Iterator[tuple[Any, str, Operator]]:
    """What to replace, as (owner, name, value); ``triton`` has Triton's operators by name."""
    kinds = ((_NUMBERS, _ARITHMETIC, False), (_NUMBERS, _COMPARISONS, True), (_BITS, _BITWISE, False))
    for common, ops, truth in kinds:
        for name, op in ops.items():
            otherwise = triton[f"__{name}__"]
            if name == "add":
                otherwise = _offset(builder, otherwise)
            yield tl.tensor, f"__{name}__", _quick(builder, op, common, otherwise, truth=truth)
    for name, op in _ARITHMETIC.items():
        yield tl.tensor, f"__r{name}__", _reflected(builder, op, triton[f"__r{name}__"])


def _quick(
    builder: Any, op: Callable[..., Any], common: Mapping[tuple[str, str], str], otherwise: Operator, *, truth: bool
) -> Operator:
    def operator(self: Any, other: Any) -> Any:
        ours, values = self.dtype, self.handle.data
        if isinstance(other, tl.tensor):
            name = common.get((ours.name, other.dtype.name))
            if name is not None and (name not in FLOATS or builder.emission is ROUNDED):
                dtype = tl.int1 if truth else ours if ours.name == name else other.dtype
                whole = _joint(self.type, other.type, dtype)
                if whole is not None:
                    return tl.tensor(plain.TensorHandle(op(values, other.handle.data), dtype), whole)
        elif (
            fits(other, ours.name)
            and (ours.name, ours.name) in common
            and (ours.name in INTEGERS or builder.emission is ROUNDED)
        ):
            found = op(values, np.array([other], np_dtype(ours)))
            if truth:
                return tl.tensor(plain.TensorHandle(found, tl.int1), self.type.with_element_ty(tl.int1))
            return tl.tensor(plain.TensorHandle(found, ours), self.type)
        return otherwise(self, other)

    return operator


def _reflected(builder: Any, op: Callable[..., Any], otherwise: Operator) -> Operator:
    def operator(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if fits(other, dtype.name) and (dtype.name in INTEGERS or builder.emission is ROUNDED):
            found = op(np.array([other], np_dtype(dtype)), self.handle.data)
            return tl.tensor(plain.TensorHandle(found, dtype), self.type)
        return otherwise(self, other)

    return operator


def _offset(builder: Any, otherwise: Operator) -> Operator:
    """Pointers beside whole numbers."""

    def operator(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if dtype.is_ptr():
            if isinstance(other, tl.tensor):
                whole = _joint(self.type, other.type, dtype) if other.dtype.name in INTEGERS else None
                if whole is not None:
                    return tl.tensor(builder.create_addptr(self.handle, other.handle), whole)
            elif fits(other, "int32"):
                offset = plain.TensorHandle(np.array([other], np.int32), tl.int32)
                return tl.tensor(builder.create_addptr(self.handle, offset), self.type)
        return otherwise(self, other)

    return operator


def _joint(ours: Any, theirs: Any, dtype: Any) -> Any:
    """The type of ``dtype`` and the shape that two types have together; None where that is for Triton to say."""
    if not theirs.is_block():
        return ours.with_element_ty(dtype)
    if not ours.is_block() or ours.shape is theirs.shape:
        return theirs.with_element_ty(dtype)
    shapes = (*ours.shape, None, *theirs.shape)
    if shapes not in _TOGETHER:
        _TOGETHER[shapes] = _together(ours.shape, theirs.shape)
    shape = _TOGETHER[shapes]
    return None if shape is None else tl.block_type(dtype, shape)


def _together(ours: Sequence[int], theirs: Sequence[int]) -> list[int] | None:
    """The shape that two shapes of one rank broadcast to."""
    pairs = [] if len(ours) != len(theirs) else list(zip(ours, theirs, strict=True))
    if not pairs or any(a != b and a != 1 and b != 1 for a, b in pairs):
        return None
    return [max(pair) for pair in pairs]


_TOGETHER: dict[tuple[int | None, ...], list[int] | None] = {}
