"""The operations of Triton's interpreter with the numbers that a GPU gives.

Triton's `InterpreterBuilder` evaluates each operation of a kernel on NumPy arrays. `FaithfulBuilder` replaces those
whose numbers are wrong there: conversions, arithmetic and comparison of bfloat16 and 8-bit floats (which are kept as
bit patterns), dots, elementary functions, and minimum and maximum of NaN.
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

from assay.interpreter import functions, products
from assay.interpreter.arithmetic import Arithmetic
from assay.interpreter.atomics import as_bits, read_modify_write
from assay.interpreter.cached_constructors import np_dtype
from assay.interpreter.devices import Device
from assay.interpreter.emission import Emission
from assay.interpreter.handles import TensorHandle, handle_of, numbers
from assay.interpreter.inline_asm import run_inline
from assay.interpreter.sanitizer import Launch, Sanitizer
from assay.interpreter.small_floats import NARROW, encode

_REDUCTIONS = {
    "ADD": np.add,
    "MIN": np.fmin,
    "MAX": np.fmax,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
}
TARGET = GPUTarget("cuda", 90, 32)
"""The device whose numbers these are."""


class FaithfulBuilder(Arithmetic):
    """`InterpreterBuilder` with the numerics of the GPU's instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.options: Any = replace(
            plain.InterpreterOptions(),
            sanitize_overflow=False,  # a launch checks for it in debug mode only
            supported_fp8_dtypes=NARROW,
            allowed_dot_input_precisions=CUDAOptions.allowed_dot_input_precisions,
        )
        self.codegen_fns["min_dot_size"] = min_dot_size(TARGET)
        self.device: Device | None = None
        self.warps = 4  # of the kernel that runs
        self.sanitizer: Sanitizer | None = None

    @contextlib.contextmanager
    def settings(
        self, device: Device | None, sanitizer: Sanitizer | None, emission: Emission | None = None
    ) -> Iterator[None]:
        """Inside it, dots are formed as by the tensor cores of ``device``, accesses checked, and arithmetic is what the
        compiler makes of it; None: as before."""
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

    # conversions

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
        """Toward zero and saturated, as cvt.rzi does."""
        target = np_dtype(dst_type)
        if target == np.bool_:
            return TensorHandle(numbers(src) != 0, dst_type.scalar)
        return TensorHandle(functions.to_integer(numbers(src), target), dst_type.scalar)

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
        counted = data.data[mask.data] if mask is not None else data.data.reshape(-1)
        inside = counted[(counted >= 0) & (counted < bins)]
        return TensorHandle(np.bincount(inside.astype(np.int64), minlength=bins).astype(np.int32), tl.int32)

    # loads of padded blocks

    def create_descriptor_load(self, desc: Any, indices: Any, *policies: Any) -> Any:
        loaded = super().create_descriptor_load(desc, indices, *policies)
        return _padded(loaded, lambda: desc.materialize_pointers(indices), desc.padding)

    def create_tensor_pointer_load(self, ptr: Any, boundary_check: Any, padding_option: Any, *rest: Any) -> Any:
        """Of block pointers, which Triton had up to 3.8."""
        loaded = super().create_tensor_pointer_load(ptr, boundary_check, padding_option, *rest)
        return _padded(loaded, lambda: ptr.materialize_pointers(boundary_check), padding_option)

    # products

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        tf32 = input_precision == ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32
        return products.dot(a, b, d, self.device, tf32=tf32, promotion=max_num_imprecise_acc or 0, warps=self.warps)

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
        left = products.Scaled.made(lhs, lhs_scale, lhs_format, lhs_k_pack, is_rhs=False)
        right = products.Scaled.made(rhs, rhs_scale, rhs_format, rhs_k_pack, is_rhs=True)
        return products.dot_scaled(left, right, acc, self.device, warps=self.warps)

    # atomics

    def create_atomic_rmw(self, rmw: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """As Triton's, which adds the patterns of 16-bit floats and exchanges no floats."""
        if rmw == ir.ATOMIC_OP.XCHG and val.data.dtype.kind == "f":
            before = super().create_atomic_rmw(rmw, ptr, as_bits(val), mask, sem, scope)
            return TensorHandle(before.data.view(val.data.dtype), val.dtype.scalar)
        if rmw != ir.ATOMIC_OP.FADD or val.dtype.scalar.name not in ("bf16", "fp16"):
            return super().create_atomic_rmw(rmw, ptr, val, mask, sem, scope)
        add = partial(self.binary_op, op=np.add)
        return read_modify_write(add, ptr, val, mask, self.ir_sem_to_interpreter_sem[sem])

    def create_descriptor_reduce(self, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        """Into memory, element by element; what lies outside of the tensor is left out."""
        pointers, mask = desc.materialize_pointers(indices)
        combine = partial(self.binary_op, op=_REDUCTIONS[kind.name])
        relaxed = self.ir_sem_to_interpreter_sem[ir.MEM_SEMANTIC.RELAXED]
        read_modify_write(combine, pointers, value, mask, relaxed)

    def _atomically(self, *given: Any, name: str) -> Any:
        """Triton's operation ``name``, its last arguments semantics and scope, of atomic loads and stores."""
        memory, operation = plain._interpreter, getattr(super(), name)
        semantic = self.ir_sem_to_interpreter_sem[given[-2]]
        with memory.atomically(semantic) if isinstance(memory, Launch) else contextlib.nullcontext():
            return operation(*given)

    # of Triton 3.9
    create_atomic_load = partialmethod(_atomically, name="create_atomic_load")
    create_atomic_store = partialmethod(_atomically, name="create_atomic_store")
    create_atomic_poll = partialmethod(_atomically, name="create_atomic_poll")


def _convert(src: Any, dst_type: Any, *, toward_zero: bool = False) -> Any:
    """Between floating formats, rounded once."""
    target, values = dst_type.scalar, numbers(src)
    for dtype in (target, src.dtype.scalar):
        if dtype.is_fp8() and dtype.name not in NARROW:
            raise NotImplementedError(f"{dtype.name} is not interpreted; of 8 bits are {', '.join(NARROW[1:])}")
    if target.name in NARROW:
        return TensorHandle(encode(values, target.name, toward_zero=toward_zero), target)
    return TensorHandle(functions.to_float(values, np_dtype(target), toward_zero=toward_zero), target)


def _padded(loaded: Any, pointers: Callable[[], Any], padding: Any) -> Any:
    """A loaded block with NaN outside where that is the padding: of bit patterns Triton's makes zeros."""
    if padding != ir.PADDING_OPTION.PAD_NAN or loaded.dtype.scalar.name not in NARROW:
        return loaded
    mask = pointers()[1]
    inside = mask.data if isinstance(mask, TensorHandle) else mask
    nan = encode(np.array([np.nan], np.float32), loaded.dtype.scalar.name)
    return TensorHandle(np.where(inside, loaded.data, nan), loaded.dtype)
