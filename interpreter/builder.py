"""The operations of Triton's interpreter with the numbers that a GPU gives.

Triton's `InterpreterBuilder` evaluates each operation of a kernel on NumPy arrays. `FaithfulBuilder` replaces those
with wrong numbers (Triton 3.6 to 3.9): conversions, arithmetic and comparison of bfloat16 and 8-bit floats (stored as
bit patterns), dots, elementary functions, minimum and maximum of NaN, atomics of 16-bit floats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions, min_dot_size
from triton.runtime import interpreter as plain

from assay.formats.devices import TensorCores
from assay.interpreter.numerics import dots
from assay.interpreter.numerics.emission import (
    DIGITS,
    ROUNDED,
    Emission,
    coarsened,
    factors_of,
    flushed,
    reshaped,
)
from assay.interpreter.numerics.floats import NARROW, Array, encode, erf, fma, rsqrt, to_float, to_integer
from assay.interpreter.numerics.libdevice import libdevice
from assay.interpreter.numerics.ptx_floats import run_inline
from assay.interpreter.operators import TensorHandle, handle_of, np_dtype, numbers
from assay.interpreter.sanitizer import MEMORY, Launch, Sanitizer, line_of_kernel

TARGET = GPUTarget("cuda", 90, 32)
"""The device whose numbers these are."""

_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
_EXACT = (np.negative, np.abs, np.floor, np.ceil)
_ORDERLESS = ("AND", "OR", "MAX", "MIN", "UMAX", "UMIN")
"""Atomic operations that leave the same bits in every order."""
_POISON = 0x1B1D5EED4AFE5F5D  # its lower 8, 16 and 32 bits are large odd numbers too; its small multiples no addresses
_HUGE = {"fp16": 2.0**15}
_LOG2_E = np.float32(1.4426950408889634)
_REDUCTIONS = {
    "ADD": np.add,
    "MIN": np.fmin,
    "MAX": np.fmax,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
}


class Arithmetic(plain.InterpreterBuilder):  # type: ignore[misc]
    """`InterpreterBuilder` whose elementwise operations are rounded once, or as ``emission`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.emission = ROUNDED

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        dtype = lhs.dtype.scalar
        if op in _COMPARISONS:
            return TensorHandle(op(numbers(lhs), numbers(rhs)), tl.int1)
        if dtype.name in NARROW:  # in float64: the one rounding is that of the result
            values = op(numbers(lhs).astype(np.float64), numbers(rhs).astype(np.float64))
            return handle_of(values, dtype)
        if lhs.data.dtype == np.bool_ and rhs.data.dtype == np.bool_:
            return TensorHandle((op(lhs.data.astype(np.int8), rhs.data.astype(np.int8)) & 1).astype(np.bool_), dtype)
        values = op(lhs.data, rhs.data)
        stored = np_dtype(dtype)
        return TensorHandle(values if values.dtype == stored else values.astype(stored), dtype)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        dtype = arg.dtype.scalar
        if op in _EXACT and dtype.name not in NARROW:
            return TensorHandle(op(arg.data), dtype)
        return handle_of(op(numbers(arg).astype(np.float64)), dtype)

    def create_fmul(self, lhs: Any, rhs: Any) -> Any:
        product = self.binary_op(lhs, rhs, np.multiply)
        if self.emission.contraction:
            product.attr["factors"] = lhs, rhs
        return product

    def create_fadd(self, lhs: Any, rhs: Any) -> Any:
        if factors := factors_of(lhs):
            return self.create_fma(*factors, rhs)
        if factors := factors_of(rhs):
            return self.create_fma(*factors, lhs)
        return self.binary_op(lhs, rhs, np.add)

    def create_fsub(self, lhs: Any, rhs: Any) -> Any:
        if factors := factors_of(lhs):
            return self.create_fma(*factors, self.create_fneg(rhs))
        if factors := factors_of(rhs):
            return self.create_fma(self.create_fneg(factors[0]), factors[1], lhs)
        return self.binary_op(lhs, rhs, np.subtract)

    def create_fneg(self, arg: Any) -> Any:
        result = self.unary_op(arg, np.negative)
        if factors := factors_of(arg):
            result.attr["factors"] = self.create_fneg(factors[0]), factors[1]
        return result

    def _reshape(self, arg: Any, *rest: Any, name: str) -> Any:
        """Triton's operation ``name``, which changes a block's shape; a product stays contractible."""
        reshape = getattr(super(), name)
        return reshaped(reshape(arg, *rest), arg, lambda factor: reshape(factor, *rest))

    create_expand_dims = partialmethod(_reshape, name="create_expand_dims")
    create_broadcast = partialmethod(_reshape, name="create_broadcast")
    create_reshape = partialmethod(_reshape, name="create_reshape")
    create_trans = partialmethod(_reshape, name="create_trans")

    create_minnumf = partialmethod(binary_op, op=np.fmin)
    create_maxnumf = partialmethod(binary_op, op=np.fmax)

    def create_clampf(self, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        propagate = propagate_nans == ir.PROPAGATE_NAN.ALL
        larger, smaller = (np.maximum, np.minimum) if propagate else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, low, larger), high, smaller)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        return handle_of(fma(numbers(x), numbers(y), numbers(z)), z.dtype)

    def create_fdiv(self, lhs: Any, rhs: Any) -> Any:
        """div.full of float32; `tl.div_rn` is correctly rounded."""
        if not self.emission.approximate or lhs.dtype.scalar != tl.float32:
            return self.binary_op(lhs, rhs, np.divide)
        return handle_of(coarsened(lhs.data.astype(np.float64) / rhs.data, "div"), tl.float32)

    def create_exp(self, arg: Any) -> Any:
        """ex2.approx of the rounded product with log2 e; float64 calls libdevice."""
        if not self.emission.approximate or arg.dtype.scalar != tl.float32:
            return self.unary_op(arg, np.exp)
        return handle_of(coarsened(np.exp2((arg.data * _LOG2_E).astype(np.float64)), "exp2"), tl.float32)

    def _function(self, arg: Any, name: str, op: Callable[..., Any], *, flush: bool = True) -> Any:
        return self.unary_op(arg, op if arg.dtype.scalar != tl.float32 else partial(self._emitted, name, op, flush))

    def _emitted(self, name: str, op: Callable[..., Any], flush: bool, *operands: Any) -> Any:
        """Evaluate a float32 function as the compiler emits it."""
        if flush := flush and self.emission.flush:
            operands = tuple(flushed(values) if values.dtype.kind == "f" else values for values in operands)
        result = op(*operands)
        if self.emission.approximate and name in DIGITS:
            result = coarsened(result, name)
        return flushed(result) if flush else result

    create_exp2 = partialmethod(_function, name="exp2", op=np.exp2)
    create_log = partialmethod(_function, name="log", op=np.log, flush=False)
    create_log2 = partialmethod(_function, name="log2", op=np.log2, flush=False)
    create_sqrt = partialmethod(_function, name="sqrt", op=np.sqrt)
    create_rsqrt = partialmethod(_function, name="rsqrt", op=rsqrt)
    create_sin = partialmethod(_function, name="sin", op=np.sin)
    create_cos = partialmethod(_function, name="cos", op=np.cos)
    create_erf = partialmethod(_function, name="erf", op=erf)

    def create_extern_elementwise(
        self, lib_name: str, lib_path: str, symbol: str, arguments: list[Any], ret_type: Any, is_pure: bool
    ) -> Any:
        values = np.broadcast_arrays(*map(numbers, arguments))
        op, name = libdevice(symbol), symbol.removeprefix("__nv_").removeprefix("fast_").removesuffix("f")
        if ret_type.scalar == tl.float32 and name in DIGITS:
            widened = [value.astype(np.float64) if value.dtype.kind == "f" else value for value in values]
            return handle_of(self._emitted(name, op, not name.startswith("log"), *widened), ret_type)
        return handle_of(np.asarray(op(*values)), ret_type)


class FaithfulBuilder(Arithmetic):
    """`InterpreterBuilder` with the numerics of the GPU's instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.options: Any = replace(
            plain.InterpreterOptions(),
            sanitize_overflow=False,  # compiled kernels check for overflow in debug mode only
            supported_fp8_dtypes=NARROW,
            allowed_dot_input_precisions=CUDAOptions.allowed_dot_input_precisions,
        )
        self.codegen_fns["min_dot_size"] = min_dot_size(TARGET)
        self.device: TensorCores | None = None
        self.warps = 4  # of the running kernel
        self.sanitizer: Sanitizer | None = None
        self.other: Any = None
        """The value of the present load's masked lanes if it has one element (`Semantic.load`), else None."""

    @contextlib.contextmanager
    def settings(
        self, device: TensorCores | None, sanitizer: Sanitizer | None, emission: Emission | None = None
    ) -> Iterator[None]:
        """Set the device of emulated tensor cores, the sanitizer and the emission inside; None changes nothing."""
        before = self.device, self.options, self.sanitizer, self.emission
        self.emission = emission or self.emission
        if device is not None:
            self.device = device
            self.options = replace(self.options, max_num_imprecise_acc_default=device.imprecise)
        self.sanitizer = sanitizer or self.sanitizer
        try:
            yield
        finally:
            self.device, self.options, self.sanitizer, self.emission = before

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
        return _convert(src, dst_type, toward_zero=rounding_mode == ir.ROUNDING_MODE.RTZ)

    def create_fp_trunc(self, src: Any, dst_type: Any) -> Any:
        return _convert(src, dst_type)

    create_fp_ext = create_fp_trunc

    def create_si_to_fp(self, src: Any, dst_type: Any) -> Any:
        values = src.data.astype(np.float64) if dst_type.scalar.name in NARROW else src.data
        return handle_of(values, dst_type)

    create_ui_to_fp = create_si_to_fp

    def create_fp_to_si(self, src: Any, dst_type: Any) -> Any:
        target = np_dtype(dst_type)
        if target == np.bool_:
            return TensorHandle(numbers(src) != 0, dst_type.scalar)
        return TensorHandle(to_integer(numbers(src), target), dst_type.scalar)

    create_fp_to_ui = create_fp_to_si

    def create_int_cast(self, src: Any, dst_type: Any, is_signed: bool) -> Any:
        return TensorHandle(src.data.astype(np_dtype(dst_type)), dst_type.scalar)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        target = np_dtype(dst_type)
        return TensorHandle(np.ascontiguousarray(src.data).view(target).reshape(src.data.shape), dst_type.scalar)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    def get_bf16(self, value: float) -> Any:
        return handle_of(np.array([value], np.float32), tl.bfloat16)

    def create_inline_asm(
        self, text: str, constraints: str, values: list[Any], types: list[Any], is_pure: bool, pack: int
    ) -> Any:
        return run_inline(text, constraints, values, types, pack)

    def create_histogram(self, data: Any, bins: int, mask: Any) -> Any:
        values = data.data[mask.data] if mask is not None else data.data.reshape(-1)
        inside = values[(values >= 0) & (values < bins)]
        return TensorHandle(np.bincount(inside.astype(np.int64), minlength=bins).astype(np.int32), tl.int32)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *policies: Any, **named: Any) -> Any:
        """Without ``other`` the masked lanes are undefined (`tl.load`); the sanitizer says what they hold."""
        if other is None and self.other is not None:
            other = TensorHandle(np.broadcast_to(self.other.data, ptrs.data.shape), self.other.dtype)
        if (
            other is None
            and self.sanitizer is not None
            and self.sanitizer.unloaded != "plain"
            and not np.all(mask.data)
        ):
            self.sanitizer.unloaded_lines[line_of_kernel()] = None
            dtype = ptrs.get_element_ty()
            other = TensorHandle(np.full(ptrs.data.shape, unloaded_value(self.sanitizer.unloaded, dtype)), dtype)
        return super().create_masked_load(ptrs, mask, other, *policies, **named)

    def create_descriptor_load(self, desc: Any, indices: Any, *policies: Any) -> Any:
        loaded = super().create_descriptor_load(desc, indices, *policies)
        return _pad_with_nan(loaded, lambda: desc.materialize_pointers(indices), desc.padding)

    def create_tensor_pointer_load(self, ptr: Any, boundary_check: Any, padding_option: Any, *rest: Any) -> Any:
        """Load a block pointer (up to Triton 3.8)."""
        loaded = super().create_tensor_pointer_load(ptr, boundary_check, padding_option, *rest)
        return _pad_with_nan(loaded, lambda: ptr.materialize_pointers(boundary_check), padding_option)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        tf32 = input_precision == ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32
        return dots.dot(a, b, d, self.device, tf32=tf32, promotion=max_num_imprecise_acc or 0, warps=self.warps)

    def create_dot_scaled(
        self,
        lhs: Any,
        lhs_scale: Any,
        lhs_format: Any,
        rhs: Any,
        rhs_scale: Any,
        rhs_format: Any,
        fast_math: bool,
        lhs_k_pack: bool,
        rhs_k_pack: bool,
        acc: Any,
    ) -> Any:
        a = dots.ScaledOperand.from_handle(lhs, lhs_scale, lhs_format, lhs_k_pack, is_rhs=False)
        b = dots.ScaledOperand.from_handle(rhs, rhs_scale, rhs_format, rhs_k_pack, is_rhs=True)
        return dots.dot_scaled(a, b, acc, self.device, warps=self.warps)

    def create_atomic_rmw(self, rmw: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """Triton's up to 3.9 adds the bit patterns of 16-bit floats and cannot exchange floats."""
        if rmw.name not in _ORDERLESS and isinstance(plain._interpreter, Launch):
            is_sum = rmw == ir.ATOMIC_OP.FADD
            name = f"atomic_{rmw.name.lower().removeprefix('f')}"
            plain._interpreter.note_atomic(name, ptr.data, mask.data, is_sum=is_sum)
        if rmw == ir.ATOMIC_OP.XCHG and val.data.dtype.kind == "f":
            bits = TensorHandle(np.ascontiguousarray(val.data).view(f"u{val.data.itemsize}"), val.dtype)
            before = super().create_atomic_rmw(rmw, ptr, bits, mask, sem, scope)
            return TensorHandle(before.data.view(val.data.dtype), val.dtype.scalar)
        if rmw != ir.ATOMIC_OP.FADD or val.dtype.scalar.name not in ("bf16", "fp16"):
            return super().create_atomic_rmw(rmw, ptr, val, mask, sem, scope)
        add = partial(self.binary_op, op=np.add)
        return _read_modify_write(add, ptr, val, mask, self.ir_sem_to_interpreter_sem[sem])

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        """Triton's, noted by the sanitizer."""
        if isinstance(plain._interpreter, Launch):
            everywhere = np.ones(ptr.data.shape, bool)
            plain._interpreter.note_atomic("atomic_cas", ptr.data, everywhere, is_sum=False)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_descriptor_reduce(self, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        """Reduce into memory element by element; elements outside of the tensor are left out."""
        pointers, mask = desc.materialize_pointers(indices)
        combine = partial(self.binary_op, op=_REDUCTIONS[kind.name])
        relaxed = self.ir_sem_to_interpreter_sem[ir.MEM_SEMANTIC.RELAXED]
        _read_modify_write(combine, pointers, value, mask, relaxed)

    def _atomically(self, *arguments: Any, name: str) -> Any:
        """Triton's atomic load or store ``name``; its last two arguments are semantics and scope."""
        memory, operation = plain._interpreter, getattr(super(), name)
        semantic = self.ir_sem_to_interpreter_sem[arguments[-2]]
        with memory.atomically(semantic) if isinstance(memory, Launch) else contextlib.nullcontext():
            return operation(*arguments)

    # New in Triton 3.9.
    create_atomic_load = partialmethod(_atomically, name="create_atomic_load")
    create_atomic_store = partialmethod(_atomically, name="create_atomic_store")
    create_atomic_poll = partialmethod(_atomically, name="create_atomic_poll")


def unloaded_value(content: str, dtype: Any) -> Array:
    """Return what a lane holds whose mask is false in a load without ``other``, as an array without dimensions.

    NaN, or with "huge" a large number, of floats; a large odd number of integers, which is out of bounds as an index.
    """
    if dtype.is_floating():
        value = np.nan if content == "nan" else _HUGE.get(dtype.name, 2.0**7 if dtype.is_fp8() else 2.0**100)
        return np.asarray(handle_of(np.asarray(value), dtype).data)
    stored = np_dtype(dtype)
    if stored == np.bool_:
        return np.asarray(True)
    pattern = _POISON & ((1 << (8 * stored.itemsize - 1)) - 1)
    return np.asarray(pattern).astype(stored)


def _convert(src: Any, dst_type: Any, *, toward_zero: bool = False) -> Any:
    """Convert between floating formats, rounded once."""
    target, values = dst_type.scalar, numbers(src)
    for dtype in (target, src.dtype.scalar):
        if dtype.is_fp8() and dtype.name not in NARROW:
            raise NotImplementedError(f"{dtype.name} is not interpreted; of 8 bits are {', '.join(NARROW[1:])}")
    if target.name in NARROW:
        return TensorHandle(encode(values, target.name, toward_zero=toward_zero), target)
    return TensorHandle(to_float(values, np_dtype(target), toward_zero=toward_zero), target)


def _pad_with_nan(loaded: Any, pointers: Callable[[], Any], padding: Any) -> Any:
    """Fill a loaded block with NaN out of bounds; Triton's interpreter (3.6 to 3.9) fills bit patterns with zeros."""
    if padding != ir.PADDING_OPTION.PAD_NAN or loaded.dtype.scalar.name not in NARROW:
        return loaded
    mask = pointers()[1]
    inside = mask.data if isinstance(mask, TensorHandle) else mask
    nan = encode(np.array([np.nan], np.float32), loaded.dtype.scalar.name)
    return TensorHandle(np.where(inside, loaded.data, nan), loaded.dtype)


def _read_modify_write(combine: Callable[[Any, Any], Any], ptr: Any, val: Any, mask: Any, semantic: Any) -> Any:
    """Store ``combine(old, val)`` at each address and return the old values; all are handles of one block shape.

    Lanes with equal addresses follow each other in order.
    """
    pointers, memory = ptr.data, plain._interpreter
    if isinstance(memory, Launch):
        pointers = memory.enter_atomic(pointers, mask.data, val.data.itemsize, semantic)
    passes = [np.asarray(mask.data)]
    if np.unique(pointers[mask.data]).size < np.count_nonzero(mask.data):  # shared addresses: one lane a pass
        passes = []
        for index in zip(*np.nonzero(mask.data), strict=True):
            passes.append(np.zeros(mask.data.shape, bool))
            passes[-1][index] = True
    before = np.zeros_like(val.data)
    for active in passes:
        old = MEMORY.load(pointers, active, np.zeros_like(val.data), val.data.dtype)
        MEMORY.store(pointers, combine(TensorHandle(old, val.dtype), val).data, active)
        before = np.where(active, old, before)
    return TensorHandle(before, val.dtype.scalar)
