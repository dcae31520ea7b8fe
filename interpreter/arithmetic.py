"""Elementwise arithmetic of Triton's interpreter with the numbers that a GPU gives, and what a compiler makes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as plain

from assay.interpreter import functions
from assay.interpreter.cached_constructors import np_dtype
from assay.interpreter.emission import DIGITS, ROUNDED, coarsened, factors_of, flushed, moved
from assay.interpreter.handles import TensorHandle, handle_of, numbers
from assay.interpreter.libdevice import libdevice
from assay.interpreter.small_floats import NARROW

_COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
_EXACT = (np.negative, np.abs, np.floor, np.ceil)
_LOG2_E = np.float32(1.4426950408889634)


class Arithmetic(plain.InterpreterBuilder):  # type: ignore[misc]
    """`InterpreterBuilder` whose elementwise operations are rounded once, or as ``emission`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.emission = ROUNDED

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        dtype = lhs.dtype.scalar
        if op in _COMPARISONS:
            return TensorHandle(op(numbers(lhs), numbers(rhs)), tl.int1)
        if dtype.name in NARROW:  # in float64, so that the one rounding is the last
            values = op(numbers(lhs).astype(np.float64), numbers(rhs).astype(np.float64))
            return handle_of(values, dtype)
        if lhs.data.dtype == np.bool_ and rhs.data.dtype == np.bool_:
            return TensorHandle((op(lhs.data.astype(np.int8), rhs.data.astype(np.int8)) & 1).astype(np.bool_), dtype)
        values = op(lhs.data, rhs.data)
        wanted = np_dtype(dtype)
        return TensorHandle(values if values.dtype == wanted else values.astype(wanted), dtype)

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

    def _moved(self, arg: Any, *where: Any, name: str) -> Any:
        """Triton's operation ``name``, which changes a block's shape; a product stays one."""
        move = getattr(super(), name)
        return moved(move(arg, *where), arg, lambda factor: move(factor, *where))

    create_expand_dims = partialmethod(_moved, name="create_expand_dims")
    create_broadcast = partialmethod(_moved, name="create_broadcast")
    create_reshape = partialmethod(_moved, name="create_reshape")
    create_trans = partialmethod(_moved, name="create_trans")

    create_minnumf = partialmethod(binary_op, op=np.fmin)
    create_maxnumf = partialmethod(binary_op, op=np.fmax)

    def create_clampf(self, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        propagate = propagate_nans == ir.PROPAGATE_NAN.ALL
        larger, smaller = (np.maximum, np.minimum) if propagate else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, low, larger), high, smaller)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        return handle_of(functions.fma(numbers(x), numbers(y), numbers(z)), z.dtype)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        dtype = arg.dtype.scalar
        if op in _EXACT and dtype.name not in NARROW:
            return TensorHandle(op(arg.data), dtype)
        return handle_of(op(numbers(arg).astype(np.float64)), dtype)

    def create_fdiv(self, lhs: Any, rhs: Any) -> Any:
        """div.full of float32; `tl.div_rn` is right to half an ulp."""
        if not self.emission.approximate or lhs.dtype.scalar != tl.float32:
            return self.binary_op(lhs, rhs, np.divide)
        return handle_of(coarsened(lhs.data.astype(np.float64) / rhs.data, "div"), tl.float32)

    def create_exp(self, arg: Any) -> Any:
        """ex2.approx of the argument times log2 e, rounded; of float64 libdevice's."""
        if not self.emission.approximate or arg.dtype.scalar != tl.float32:
            return self.unary_op(arg, np.exp)
        return handle_of(coarsened(np.exp2((arg.data * _LOG2_E).astype(np.float64)), "exp2"), tl.float32)

    def _function(self, arg: Any, name: str, op: Callable[..., Any], *, flush: bool = True) -> Any:
        """An elementary function, as the compiler has it."""
        return self.unary_op(arg, op if arg.dtype.scalar != tl.float32 else partial(self._emitted, name, op, flush))

    def _emitted(self, name: str, op: Callable[..., Any], flush: bool, *operands: Any) -> Any:
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
    create_rsqrt = partialmethod(_function, name="rsqrt", op=functions.rsqrt)
    create_sin = partialmethod(_function, name="sin", op=np.sin)
    create_cos = partialmethod(_function, name="cos", op=np.cos)
    create_erf = partialmethod(_function, name="erf", op=functions.erf)

    def create_extern_elementwise(
        self, lib_name: str, lib_path: str, symbol: str, arguments: list[Any], ret_type: Any, is_pure: bool
    ) -> Any:
        values = np.broadcast_arrays(*map(numbers, arguments))
        op, name = libdevice(symbol), symbol.removeprefix("__nv_").removeprefix("fast_").removesuffix("f")
        if ret_type.scalar == tl.float32 and name in DIGITS:
            widened = [value.astype(np.float64) if value.dtype.kind == "f" else value for value in values]
            return handle_of(self._emitted(name, op, not name.startswith("log"), *widened), ret_type)
        return handle_of(np.asarray(op(*values)), ret_type)
