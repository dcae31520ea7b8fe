"""`tl.dot` and `tl.dot_scaled`: in float32, or as the tensor cores of a device form them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton._C.libtriton import ir

from assay.interpreter import dots, functions, tensor_cores
from assay.interpreter.devices import Device
from assay.interpreter.handles import TensorHandle, handle_of, numbers
from assay.interpreter.small_floats import Array

_FP8 = ("fp8e4nv", "fp8e5")
_KINDS = {"fp16": "float16", "bf16": "bfloat16"}
_SCALED_FORMATS = {
    ir.ScaleDotElemTypeTY.E2M1: "fp4",
    ir.ScaleDotElemTypeTY.E4M3: "fp8e4nv",
    ir.ScaleDotElemTypeTY.E5M2: "fp8e5",
    ir.ScaleDotElemTypeTY.BF16: "bf16",
    ir.ScaleDotElemTypeTY.FP16: "fp16",
}


def dot(a: Any, b: Any, c: Any, device: Device | None, *, tf32: bool, promotion: int, warps: int) -> Any:
    """The handle of a b + c; ``promotion`` is Triton's max_num_imprecise_acc."""
    emulated = None if device is None else _on_tensor_cores(a, b, c, device, tf32, promotion, warps)
    if emulated is not None:
        return emulated
    return handle_of(dots.dot(numbers(a), numbers(b), tf32=tf32) + numbers(c), c.dtype)


def _on_tensor_cores(a: Any, b: Any, c: Any, device: Device, tf32: bool, promotion: int, warps: int) -> Any:
    """The product by the device's accumulator model; None where it has none for these operands."""
    formats = [handle.dtype.scalar.name for handle in (a, b)]
    fp8 = all(name in _FP8 for name in formats)
    kind = "float8" if fp8 else "tf32" if tf32 else _KINDS.get(formats[0], "")
    if fp8 and device.converts_fp8(c.data.shape, warps, promotion):
        kind, formats = "small", ["fp16", "fp16"]
    unit = device.units.get(kind)
    if unit is None:
        return None
    if kind != "float8" or not device.imprecise or promotion > a.data.shape[-1]:
        promotion = 0
    values = [dots.cut_to_tf32(numbers(handle)) if tf32 else numbers(handle) for handle in (a, b)]
    left, right = map(tensor_cores.operand, values, formats)
    product = tensor_cores.matmul(left, right, numbers(c), unit, promotion=promotion)
    return TensorHandle(product, c.dtype.scalar)


@dataclass(frozen=True)
class Scaled:
    """An operand of a scaled dot: numbers in float32, scales repeated to their shape, and the format's name."""

    numbers: Array
    scales: Array | None
    format: str

    @staticmethod
    def made(handle: Any, scale: Any, format: Any, k_packed: bool, *, is_rhs: bool) -> Scaled:
        """Of the handles that a kernel gives; two e2m1 stand in a byte."""
        stored = handle.data if format == ir.ScaleDotElemTypeTY.E2M1 else numbers(handle)
        values = dots.unpacked_operand(stored, k_packed, is_rhs=is_rhs)
        return Scaled(values, dots.along_k(_scale(scale), values.shape, is_rhs=is_rhs), _SCALED_FORMATS[format])

    @property
    def product(self) -> Array:
        """The numbers times their scales, in float32."""
        return self.numbers if self.scales is None else self.numbers * self.scales


def dot_scaled(left: Scaled, right: Scaled, c: Any, device: Device | None, *, warps: int) -> Any:
    """The handle of a scaled product plus c: by the device's instruction, or of operands scaled in 16 bits before."""
    if device is None:
        return handle_of(dots.dot(left.product, right.product, tf32=False) + numbers(c), c.dtype)
    formats = [left.format, right.format]
    unit = device.units.get("scaled_fp4" if formats == ["fp4", "fp4"] else "scaled")
    if unit is None or "bf16" in formats or "fp16" in formats:
        half = tl.float16 if "fp16" in formats else tl.bfloat16
        halves = handle_of(left.product, half), handle_of(right.product, half)
        return dot(*halves, c, device, tf32=False, promotion=0, warps=warps)
    a, b = (tensor_cores.operand(side.numbers, side.format, side.scales) for side in (left, right))
    return TensorHandle(tensor_cores.matmul(a, b, numbers(c), unit), c.dtype.scalar)


def _scale(handle: Any) -> Array | None:
    """A scaled dot's scale: a byte is a power of two (e8m0, 255 is NaN), a float what it stands for."""
    if handle is None:
        return None
    return functions.e8m0(handle.data) if handle.dtype.scalar.is_int() else numbers(handle)
