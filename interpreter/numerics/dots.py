"""`tl.dot` and `tl.dot_scaled`: exact products summed in float32, or as a device's tensor cores sum them, bit for bit.

One tensor-core instruction takes ``block`` products and the running sum. The products are exact and not normalised: the
product of operands of exponents ea and eb has exponent ea + eb. All terms are aligned to the largest exponent,
truncated to ``fraction`` bits and added exactly; the sum is truncated to ``output`` bits (a float16 accumulator is
rounded to nearest even). Source: MMA-Sim, as in ``configs/accumulators.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from assay.formats.accumulator import Accumulator
from assay.interpreter.devices import Device
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
_NO_EXPONENT = -(2**14)  # of zeros, infinities and NaN, which take no part in the alignment
_MIN_EXPONENTS = {"fp16": -14, "bf16": -126, "fp32": -126, "fp8e4nv": -6, "fp8e5": -14, "fp4": 0}


def dot(a: Any, b: Any, c: Any, device: Device | None, *, tf32: bool, promotion: int, warps: int) -> Any:
    """Return the handle of a @ b + c; ``promotion`` is Triton's max_num_imprecise_acc."""
    emulated = None if device is None else _on_tensor_cores(a, b, c, device, tf32, promotion, warps)
    if emulated is not None:
        return emulated
    return handle_of(_plain_matmul(numbers(a), numbers(b), tf32=tf32) + numbers(c), c.dtype)


def _on_tensor_cores(a: Any, b: Any, c: Any, device: Device, tf32: bool, promotion: int, warps: int) -> Any:
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
    product = matmul(*map(operand, values, formats), numbers(c), unit, promotion=promotion)
    return TensorHandle(product, c.dtype.scalar)


def _plain_matmul(a: Array, b: Array, *, tf32: bool) -> Array:
    """Return ``a @ b``: float64 in float64, other floats in float32, integers exactly (|sum| < 2^53)."""
    if a.dtype.kind in "iu":
        return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
    if a.dtype == np.float64:
        return np.matmul(a, b)
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    return np.matmul(truncate_to_tf32(a), truncate_to_tf32(b)) if tf32 else np.matmul(a, b)


def truncate_to_tf32(x: Array) -> Array:
    """Clear the low 13 bits of float32, which mma.sync ignores in a register that it reads as tf32."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@dataclass(frozen=True)
class ScaledOperand:
    """An operand of `tl.dot_scaled`: float32 values, scales of their shape, and Triton's name of the format."""

    values: Array
    scales: Array | None
    format: str

    @classmethod
    def from_handle(cls, handle: Any, scale: Any, format: Any, k_packed: bool, *, is_rhs: bool) -> ScaledOperand:
        """Unpack a kernel's operand [M, K] (rhs: [K, N]); a byte holds two e2m1, packed along K if ``k_packed``."""
        if format == ir.ScaleDotElemTypeTY.E2M1:
            k_axis = -2 if is_rhs else -1
            values = _unpack_e2m1(handle.data, k_axis if k_packed else -3 - k_axis)
        else:
            values = numbers(handle)
        values = values.astype(np.float32, copy=False)
        return cls(values, _repeat_along_k(_scale_values(scale), values.shape, is_rhs), _SCALED_FORMATS[format])

    @property
    def product(self) -> Array:
        return self.values if self.scales is None else self.values * self.scales


def dot_scaled(a: ScaledOperand, b: ScaledOperand, c: Any, device: Device | None, *, warps: int) -> Any:
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
    left, right = (operand(each.values, each.format, each.scales) for each in (a, b))
    return TensorHandle(matmul(left, right, numbers(c), unit), c.dtype.scalar)


def _scale_values(handle: Any) -> Array | None:
    """Return the scales of a scaled dot: bytes are e8m0, floats are themselves."""
    if handle is None:
        return None
    return e8m0(handle.data) if handle.dtype.scalar.is_int() else numbers(handle)


def _repeat_along_k(scale: Array | None, shape: tuple[int, ...], is_rhs: bool) -> Array | None:
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


@dataclass(frozen=True)
class Operand:
    """A matrix, and the exponent of each element: 1 <= |x| 2^-e < 2, less for subnormal numbers."""

    numbers: Array
    exponents: Array


def operand(numbers: Array, format: str, scales: Array | None = None) -> Operand:
    """Return ``numbers`` of a format by Triton's name ("fp4" for e2m1), times powers of two ``scales``."""
    exponents = _exponents(numbers, _MIN_EXPONENTS[format])
    if scales is not None:
        numbers = numbers.astype(np.float64) * scales
        exponents = exponents + np.where(np.isfinite(scales), np.frexp(scales)[1] - 1, 0)
    return Operand(numbers, exponents)


def matmul(a: Operand, b: Operand, c: Array, unit: Accumulator, *, promotion: int = 0) -> Array:
    """Return ``a @ b + c`` for a [..., M, K], b [..., K, N] and c [..., M, N] in float32 or float16, in the dtype of c.

    With ``promotion`` a separate running sum is added to c, rounded to nearest, after every ``promotion`` terms.
    """
    narrow = unit.fraction + 2 + unit.block.bit_length() <= 24  # bits of a block's sum: float32 holds it exactly
    compute = np.float32 if narrow else np.float64
    left, right = a.numbers.astype(compute), b.numbers.astype(compute)
    partial = np.zeros_like(c) if promotion else c
    num_terms = left.shape[-1]
    pending = 0
    for start in range(0, num_terms, unit.block):
        block = slice(start, start + unit.block)
        operands = left[..., block], a.exponents[..., block], right[..., block, :], b.exponents[..., block, :]
        partial = _mma(*operands, partial, unit)
        pending += unit.block
        if promotion and (pending >= promotion or start + unit.block >= num_terms):
            c, partial, pending = c + partial, np.zeros_like(c), 0
    return c if promotion else partial


def _mma(a: Array, ea: Array, b: Array, eb: Array, c: Array, unit: Accumulator) -> Array:
    """Evaluate one instruction: a [..., M, L] and b [..., L, N] of one block, c [..., M, N]; loops over L."""
    ec = _exponents(c, -14 if c.dtype == np.float16 else -126)
    largest = np.maximum(ec, -126)
    for k in range(a.shape[-1]):
        np.maximum(largest, ea[..., k, None] + eb[..., k, None, :], out=largest)
    shift = unit.fraction - largest
    total = np.trunc(np.ldexp(c.astype(np.float64), shift)).astype(a.dtype)
    # A shift beyond the largest exponent occurs only if all products are zero.
    scale = np.ldexp(a.dtype.type(1), np.minimum(shift, np.finfo(a.dtype).maxexp - 1))
    for k in range(a.shape[-1]):
        term = a[..., k, None] * b[..., k, None, :]
        term *= scale
        total += np.trunc(term, out=term)
    return _round_output(np.ldexp(total.astype(np.float64), -shift), unit.output, c.dtype)


def _exponents(numbers: Array, smallest: int) -> Array:
    exponents = np.maximum(np.frexp(numbers)[1] - 1, smallest)
    return np.where((numbers == 0) | ~np.isfinite(numbers), _NO_EXPONENT, exponents)


def _round_output(total: Array, bits: int, dtype: np.dtype[np.floating]) -> Array:
    """Round float64 to nearest even in float16, or truncate to ``bits`` fraction bits of float32."""
    rounded = total.astype(dtype)
    if dtype == np.float16:
        return rounded
    pattern = rounded.view(np.uint32)
    away = (np.abs(rounded.astype(np.float64)) > np.abs(total)) & (np.abs(total) < 2.0**128)
    truncated = (pattern - away) & np.uint32(2**32 - 2 ** (23 - bits))
    return np.where(np.isfinite(total), truncated, pattern).astype(np.uint32).view(np.float32)
