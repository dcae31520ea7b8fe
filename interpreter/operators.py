"""Triton's tensors, types and operators with fast paths for common operands; all semantics are Triton's.

Triton's interpreter spends most of its time on describing shapes and checking types. Here block types, tensors and
comparisons of types are cached, and operators skip the checks for int32, int64, float32, float64, masks, Python numbers
and pointers plus integers, where ranks agree or one operand is a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as plain

from assay.interpreter.numerics.emission import ROUNDED, reshaped
from assay.interpreter.numerics.floats import NARROW, Array, decode, encode

TensorHandle = plain.TensorHandle
Operator = Callable[[Any, Any], Any]
Replacement = tuple[Any, str, Callable[..., Any]]
"""Owner, name and value of an attribute to replace."""

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
_SAME_SHAPE = "_same_shape"  # attribute of a block type: types of its shape by the names of their elements
_UNWRAPPED = frozenset((tl.tensor, tl.dtype, int, float, bool, str, type(None)))
_TRUE = tl.constexpr(True)
_PER_TENSOR = ("handle", "type", "dtype")


def numbers(handle: Any) -> Array:
    """Return the values of a handle: bit patterns decoded to float32, other data unchanged."""
    name = handle.dtype.scalar.name
    return decode(handle.data, name) if name in NARROW else handle.data


def handle_of(values: Array, dtype: Any) -> Any:
    """Return a handle of ``values``, rounded (to nearest even) to a floating ``dtype`` or wrapped to an integer one."""
    scalar = dtype.scalar
    data = encode(values, scalar.name) if scalar.name in NARROW else values.astype(np_dtype(scalar))
    return TensorHandle(data, scalar)


def np_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy dtype in which the interpreter stores a Triton type."""
    scalar = dtype.scalar
    result = _np_dtypes.get(scalar.name)
    if result is None:
        result = _np_dtypes[scalar.name] = np.dtype(_np_dtype(scalar))
    return result


def cached_constructors() -> Iterator[Replacement]:
    """Yield replacements that do the original's work once per shape and element type."""
    yield tl.block_type, "__init__", _init_block_type
    yield tl.block_type, "with_element_ty", _with_element_ty
    yield tl.dtype, "__eq__", _same_dtype
    yield tl.tuple, "__eq__", _same_tuple
    yield tl.tensor, "__init__", _init_tensor
    yield tl.core, "_unwrap_if_constexpr", lambda value: value if type(value) in _UNWRAPPED else _unwrap(value)
    yield plain, "_get_np_dtype", np_dtype
    if [field.name for field in fields(plain.TensorHandle)] == ["data", "dtype", "attr"]:  # as in 3.6 to 3.9
        yield plain.TensorHandle, "__init__", _init_handle


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    key = (element_ty.name, sizes)
    attributes = _block_types.get(key)
    if attributes is None or (attributes["element_ty"] is not element_ty and attributes["element_ty"] != element_ty):
        _block_type(self, element_ty, shape)
        self.shape = _shapes.setdefault(sizes, self.shape)
        self.__dict__[_SAME_SHAPE] = {}  # shared by all types with these attributes
        _block_types[key] = dict(self.__dict__)
    else:
        self.__dict__.update(attributes)


def _with_element_ty(self: Any, scalar: Any) -> Any:
    same_shape = self.__dict__.get(_SAME_SHAPE)
    if same_shape is None:  # constructed before the constructor was replaced
        return tl.block_type(scalar, self.shape)
    result = same_shape.get(scalar.name)
    if result is None or (result.element_ty is not scalar and result.element_ty != scalar):
        result = same_shape[scalar.name] = tl.block_type(scalar, self.shape)
    return result


def _same_dtype(self: Any, other: Any) -> bool:
    if self is other:
        return True
    if type(other) is tl.dtype:
        return bool(self.name == other.name)
    return bool(_equal_dtypes(self, other))


def _same_tuple(self: Any, other: Any) -> Any:
    """Blocks of equal shape share one shape object (`_init_block_type`)."""
    return _TRUE if self is other else _equal_shapes(self, other)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    attributes = _tensors.get(type.name)
    if attributes is None:
        _tensor(self, handle, type)
        _tensors[type.name] = {name: value for name, value in self.__dict__.items() if name not in _PER_TENSOR}
    else:
        self.__dict__.update(attributes)
        self.handle, self.type, self.dtype = handle, type, type.scalar


def _init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    widest = _widths.get(dtype.name)
    if widest is None:
        is_pointer = isinstance(dtype, tl.pointer_type)
        widest = _widths[dtype.name] = 2**63 if is_pointer else max(1, dtype.primitive_bitwidth // 8)
    if data.itemsize > widest:
        self.__post_init__()  # raises the error


FLOATS = ("fp32", "fp64")
INTEGERS = ("int32", "int64")
_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_INTEGER_PAIRS = {(a, b): max(a, b) for a in INTEGERS for b in INTEGERS}
_NUMBER_PAIRS = _INTEGER_PAIRS | {(name, name): name for name in FLOATS}
_BIT_PAIRS = _INTEGER_PAIRS | {("int1", "int1"): "int1"}
"""The common type of two types' names, where Triton's promotion needs no conversion of values."""


def fits(number: Any, dtype: str) -> bool:
    """Whether Triton converts a Python number beside a tensor of ``dtype`` to it without a range check."""
    if type(number) is int:
        return -(2**24) <= number <= 2**24 and (dtype in INTEGERS or dtype in FLOATS)
    return type(number) is float and dtype in FLOATS and (number == 0 or number != number or 1e-30 < abs(number) < 1e38)


def operators(builder: Any, triton: Mapping[str, Operator]) -> Iterator[Replacement]:
    """Yield fast operators of `tl.tensor`; ``triton`` has Triton's operators by name."""
    for pairs, ops, is_comparison in (
        (_NUMBER_PAIRS, _ARITHMETIC, False),
        (_NUMBER_PAIRS, _COMPARISONS, True),
        (_BIT_PAIRS, _BITWISE, False),
    ):
        for name, op in ops.items():
            fallback = triton[f"__{name}__"]
            if name == "add":
                fallback = _pointer_add(builder, fallback)
            yield tl.tensor, f"__{name}__", _fast_operator(builder, op, pairs, fallback, is_comparison=is_comparison)
    for name, op in _ARITHMETIC.items():
        yield tl.tensor, f"__r{name}__", _fast_reflected(builder, op, triton[f"__r{name}__"])


def _fast_operator(
    builder: Any,
    op: Callable[..., Any],
    pairs: Mapping[tuple[str, str], str],
    fallback: Operator,
    *,
    is_comparison: bool,
) -> Operator:
    def operator(self: Any, other: Any) -> Any:
        ours, values = self.dtype, self.handle.data
        if isinstance(other, tl.tensor):
            name = pairs.get((ours.name, other.dtype.name))
            if name is not None and (name not in FLOATS or builder.emission is ROUNDED):
                dtype = tl.int1 if is_comparison else ours if ours.name == name else other.dtype
                result_type = _broadcast_type(self.type, other.type, dtype)
                if result_type is not None:
                    return tl.tensor(TensorHandle(op(values, other.handle.data), dtype), result_type)
        elif (
            fits(other, ours.name)
            and (ours.name, ours.name) in pairs
            and (ours.name in INTEGERS or builder.emission is ROUNDED)
        ):
            result = op(values, np.array([other], np_dtype(ours)))
            if is_comparison:
                return tl.tensor(TensorHandle(result, tl.int1), self.type.with_element_ty(tl.int1))
            return tl.tensor(TensorHandle(result, ours), self.type)
        return fallback(self, other)

    return operator


def _fast_reflected(builder: Any, op: Callable[..., Any], fallback: Operator) -> Operator:
    def operator(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if fits(other, dtype.name) and (dtype.name in INTEGERS or builder.emission is ROUNDED):
            result = op(np.array([other], np_dtype(dtype)), self.handle.data)
            return tl.tensor(TensorHandle(result, dtype), self.type)
        return fallback(self, other)

    return operator


def _pointer_add(builder: Any, fallback: Operator) -> Operator:
    """Pointer plus integer offsets."""

    def operator(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if dtype.is_ptr():
            if isinstance(other, tl.tensor):
                result_type = _broadcast_type(self.type, other.type, dtype) if other.dtype.name in INTEGERS else None
                if result_type is not None:
                    return tl.tensor(builder.create_addptr(self.handle, other.handle), result_type)
            elif fits(other, "int32"):
                offset = TensorHandle(np.array([other], np.int32), tl.int32)
                return tl.tensor(builder.create_addptr(self.handle, offset), self.type)
        return fallback(self, other)

    return operator


def _broadcast_type(ours: Any, theirs: Any, dtype: Any) -> Any:
    """Return the type of ``dtype`` in the broadcast shape of two types; None leaves the decision to Triton."""
    if not theirs.is_block():
        return ours.with_element_ty(dtype)
    if not ours.is_block() or ours.shape is theirs.shape:
        return theirs.with_element_ty(dtype)
    shapes = (*ours.shape, None, *theirs.shape)
    if shapes not in _broadcast_shapes:
        _broadcast_shapes[shapes] = _broadcast_shape(ours.shape, theirs.shape)
    shape = _broadcast_shapes[shapes]
    return None if shape is None else tl.block_type(dtype, shape)


def _broadcast_shape(ours: Sequence[int], theirs: Sequence[int]) -> list[int] | None:
    pairs = [] if len(ours) != len(theirs) else list(zip(ours, theirs, strict=True))
    if not pairs or any(a != b and a != 1 and b != 1 for a, b in pairs):
        return None
    return [max(pair) for pair in pairs]


_broadcast_shapes: dict[tuple[int | None, ...], list[int] | None] = {}


class _Format(str):
    """A format's name with a ``value``, which Triton 3.6 and 3.7 read as of a constant."""

    @property
    def value(self) -> str:
        return str(self)


class Semantic(plain.TritonSemantic):  # type: ignore[misc]
    """`TritonSemantic` that skips conversion and broadcasting of operands of equal type and of fitting numbers."""

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *rest: Any, **flags: Any) -> Any:
        if isinstance(lhs, tl.tensor):
            if isinstance(rhs, tl.tensor):
                if lhs.type.name == rhs.type.name and lhs.dtype.name in (*FLOATS, *INTEGERS):
                    return lhs, rhs
            elif fits(rhs, lhs.dtype.name):
                return lhs, _full_like(rhs, lhs)
        elif isinstance(rhs, tl.tensor) and fits(lhs, rhs.dtype.name):
            return _full_like(lhs, rhs), rhs
        return super().binary_op_type_checking_impl(lhs, rhs, *rest, **flags)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        """NumPy's rule equals Triton's where the ranks agree or one operand is a scalar."""
        ours, theirs = _shape(lhs), _shape(rhs)
        if ours == theirs:
            return lhs, rhs
        if ours and theirs and len(ours) != len(theirs):
            return super().broadcast_impl_value(lhs, rhs)
        try:
            shape = np.broadcast_shapes(ours, theirs)
        except ValueError:
            return super().broadcast_impl_value(lhs, rhs)  # raises the clearer error
        return _broadcast(lhs, ours, shape), _broadcast(rhs, theirs, shape)

    def load(self, ptr: Any, mask: Any, other: Any, *policies: Any) -> Any:
        """Triton's, which takes an ``other`` of one element for none where it is zero: the builder is told of it."""
        kind = ptr.type.scalar
        if other is None or not kind.is_ptr() or kind.element_ty.is_block() or other.handle.data.size != 1:
            return super().load(ptr, mask, other, *policies)
        other = self.cast(other, tl.int8 if kind.element_ty == tl.int1 else kind.element_ty)
        self.builder.other = other.handle
        try:
            return super().load(ptr, mask, other, *policies)
        finally:
            self.builder.other = None

    def _has_native_tma(self) -> bool:
        return True  # the target has compute capability 9.0

    def dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: str, rhs: Any, rhs_scale: Any, rhs_format: str, *rest: Any
    ) -> Any:
        return super().dot_scaled(lhs, lhs_scale, _Format(lhs_format), rhs, rhs_scale, _Format(rhs_format), *rest)


def _full_like(number: float, tensor: Any) -> Any:
    value = np.array([number], np_dtype(tensor.dtype))
    data = np.broadcast_to(value, tensor.handle.data.shape)
    return tl.tensor(TensorHandle(data, tensor.dtype), tensor.type)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tensor.handle.data.shape if tensor.type.is_block() else ()


def _broadcast(tensor: Any, shape: tuple[int, ...], target: tuple[int, ...]) -> Any:
    if shape == target:
        return tensor

    def broadcast(handle: Any) -> Any:
        return TensorHandle(np.broadcast_to(handle.data, target), handle.dtype)

    handle = reshaped(broadcast(tensor.handle), tensor.handle, broadcast)
    return tl.tensor(handle, tl.block_type(tensor.dtype, list(target)))


_CONSTEXPR_OPERATORS = (
    "add", "sub", "mul", "mod", "truediv", "floordiv", "gt", "ge", "lt", "le", "eq", "ne", "and", "or", "xor",
    "rshift", "lshift", "radd", "rsub", "rmul", "rtruediv", "rfloordiv",
)  # fmt: skip


def constexpr_operators() -> Iterator[Replacement]:
    """Yield operators of `tl.constexpr` that leave a tensor operand to the tensor's reflected operator.

    Triton's compiler does so (`CodeGenerator._apply_binary_method`); run as Python, `tl.constexpr` would wrap the
    resulting tensor into a constant (3.6 to 3.9).
    """
    for name in (f"__{operator}__" for operator in _CONSTEXPR_OPERATORS):
        if name in vars(tl.constexpr):
            yield tl.constexpr, name, _deferring(vars(tl.constexpr)[name])


def _deferring(operator: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operator)
    def deferred(self: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, tl.tensor) else operator(self, other)

    return deferred
