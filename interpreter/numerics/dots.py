"""`tl.dot` and `tl.dot_scaled`: products summed in float32, or as a device's tensor cores sum them, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from assay.formats import matrix_units
from assay.formats.devices import TensorCores
from assay.formats.matrix_units import Operand, matmul, truncate_to_tf32
from assay.interpreter.numerics.floats import Array, e8m0
from assay.interpreter.operators import TensorHandle, handle_of, numbers

_FP8 = ("fp8e4nv", "fp8e5")
_OPERAND_KEYS = {"fp16": "float16", "bf16": "bfloat16"}  # Triton's names to keys of configs/tensor_cores.toml
_SCALED_FORMATS = {
    ir.ScaleDotElemTypeTY.E2M1: "fp4",
    ir.ScaleDotElemTypeTY.E4M3: "fp8e4nv",
    ir.ScaleDotElemTypeTY.E5M2: "fp8e5",
    ir.ScaleDotElemTypeTY.BF16: "bf16",
    ir.ScaleDotElemTypeTY.FP16: "fp16",
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_FORMATS = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2",
    "fp4": "float4_e2m1fn",
}  # fmt: skip


def dot(a: Any, b: Any, c: Any, device: TensorCores | None, *, tf32: bool, promotion: int, warps: int) -> Any:
    """Return the handle of a @ b + c; ``promotion`` is Triton's max_num_imprecise_acc."""
    emulated = None if device is None else _on_tensor_cores(a, b, c, device, tf32, promotion, warps)
    if emulated is not None:
        return emulated
    return handle_of(_plain_matmul(numbers(a), numbers(b), tf32=tf32) + numbers(c), c.dtype)


def _on_tensor_cores(a: Any, b: Any, c: Any, device: TensorCores, tf32: bool, promotion: int, warps: int) -> Any:
    """Evaluate a dot by the device's accumulator model; return None if the device has none for these operands."""
    formats = [handle.dtype.scalar.name for handle in (a, b)]
    fp8 = all(name in _FP8 for name in formats)
    key = "float8" if fp8 else "tf32" if tf32 else _OPERAND_KEYS.get(formats[0], "")
    if fp8 and device.converts_fp8(c.data.shape, warps, promotion):
        key, formats = "small", ["fp16", "fp16"]
    unit = device.units.get(key)
    if unit is None:
        return None
    if key != "float8" or not device.imprecise or promotion > a.data.shape[-1]:
        promotion = 0
    values = [truncate_to_tf32(numbers(handle)) if tf32 else numbers(handle) for handle in (a, b)]
    left, right = map(operand, values, formats)
    product = matmul(left, right, numbers(c), unit, promotion=promotion)
    return TensorHandle(product, c.dtype.scalar)


def _plain_matmul(a: Array, b: Array, *, tf32: bool) -> Array:
    """Return ``a @ b``: float64 in float64, other floats in float32, integers exactly (|sum| < 2^53)."""
    if a.dtype.kind in "iu":
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
    if a.dtype == np.float64:
        return np.matmul(a, b)
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    return np.matmul(truncate_to_tf32(a), truncate_to_tf32(b)) if tf32 else np.matmul(a, b)


@dataclass(frozen=True)
class ScaledOperand:
    """An operand of `tl.dot_scaled`: float32 values, scales of their shape, and Triton's name of the format."""

    values: Array
    scales: Array | None
    format: str
    scale_format: str

    @classmethod
    def from_handle(cls, handle: Any, scale: Any, format: Any, k_packed: bool, *, is_rhs: bool) -> ScaledOperand:
        """Unpack a kernel's operand [M, K] (rhs: [K, N]); a byte holds two e2m1, packed along K if ``k_packed``."""
        if format == ir.ScaleDotElemTypeTY.E2M1:
            k_axis = -2 if is_rhs else -1
            values = _unpack_e2m1(handle.data, k_axis if k_packed else -3 - k_axis)
        else:
            values = numbers(handle)
        values = values.astype(np.float32, copy=False)
        scales, scale_format = None, "e8m0"
        if scale is not None and scale.dtype.scalar.is_int():
            scales = e8m0(scale.data)
        elif scale is not None:
            scales, scale_format = numbers(scale), scale.dtype.scalar.name
        return cls(values, _repeat_scales(scales, values.shape, is_rhs), _SCALED_FORMATS[format], scale_format)

    @property
    def product(self) -> Array:
        return self.values if self.scales is None else self.values * self.scales


def dot_scaled(a: ScaledOperand, b: ScaledOperand, c: Any, device: TensorCores | None, *, warps: int) -> Any:
    """Return the handle of a scaled product plus c.

    A device without scaled instructions multiplies operands by their scales in 16 bits first, as Triton does.
    """
    if device is None:
        return handle_of(_plain_matmul(a.product, b.product, tf32=False) + numbers(c), c.dtype)
    formats = [a.format, b.format]
    unit = device.units.get("scaled_fp4" if formats == ["fp4", "fp4"] else "scaled")
    if unit is None or "bf16" in formats or "fp16" in formats:
        half = tl.float16 if "fp16" in formats else tl.bfloat16
        halves = handle_of(a.product, half), handle_of(b.product, half)
        return dot(*halves, c, device, tf32=False, promotion=0, warps=warps)
    left, right = (operand(each.values, each.format, each.scales, each.scale_format) for each in (a, b))
    return TensorHandle(matmul(left, right, numbers(c), unit), c.dtype.scalar)


def _repeat_scales(scale: Array | None, shape: tuple[int, ...], is_rhs: bool) -> Array | None:
    """Repeat scales [M, K/group] (rhs: [N, K/group]) to an operand's ``shape``."""
    if scale is None:
        return None
    repeated = np.repeat(scale, shape[-2 if is_rhs else -1] // scale.shape[-1], axis=-1)
    return np.swapaxes(repeated, -1, -2) if is_rhs else repeated


def _unpack_e2m1(patterns: Array, axis: int) -> Array:
    """Decode bytes of two e2m1 patterns, low nibble first, packed along ``axis``."""
    pairs = np.stack([patterns & 15, patterns >> 4], axis=-1)
    adjacent = np.moveaxis(pairs, axis - 1, -2)
    return np.moveaxis(_E2M1[adjacent.reshape(*adjacent.shape[:-2], -1)], -1, axis)


def operand(numbers: Array, format: str, scales: Array | None = None, scale_format: str = "e8m0") -> Operand:
    """Return ``numbers`` of a format by Triton's name ("fp4" for e2m1), times ``scales`` of the same shape."""
    return matrix_units.operand(numbers, _FORMATS[format], scales, _FORMATS.get(scale_format, "float8_e8m0fnu"))
