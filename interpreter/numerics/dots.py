"""`tl.dot` and `tl.dot_scaled`: exact products summed in float32, or as a device's tensor cores sum them, bit for bit.

One tensor-core instruction takes ``block`` products and the running sum. The products are exact and not normalised: the
product of operands of exponents ea and eb has exponent ea + eb. All terms are aligned to the largest exponent,
truncated to ``fraction`` bits and added exactly; the sum is truncated to ``output`` bits (a float16 accumulator is
rounded to nearest even). Source: MMA-Sim, as in ``configs/accumulators.toml``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from assay.formats.accumulator import Accumulator
from assay.formats.devices import TensorCores
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


def truncate_to_tf32(x: Array) -> Array:
    """Clear the low 13 bits of float32, which mma.sync ignores in a register that it reads as tf32."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


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


@dataclass(frozen=True)
class Operand:
    """A matrix, the exponent of each element (1 <= |x| 2^-e < 2, less for subnormal numbers), and that of its scale."""

    numbers: Array
    exponents: Array
    scale_exponents: Array


def operand(numbers: Array, format: str, scales: Array | None = None, scale_format: str = "e8m0") -> Operand:
    """Return ``numbers`` of a format by Triton's name ("fp4" for e2m1), times ``scales`` of the same shape."""
    exponents = _exponents(numbers, _MIN_EXPONENTS[format])
    if scales is None:
        return Operand(numbers, exponents, np.zeros_like(exponents))
    smallest = _MIN_EXPONENTS.get(scale_format, -127)
    scale_exponents = np.where(np.isfinite(scales), np.maximum(np.frexp(scales)[1] - 1, smallest), 0)
    return Operand(numbers.astype(np.float64) * scales, exponents + scale_exponents, scale_exponents)


def matmul(a: Operand, b: Operand, c: Array, unit: Accumulator, *, promotion: int = 0) -> Array:
    """Return ``a @ b + c`` for a [..., M, K], b [..., K, N] and c [..., M, N] in float32 or float16, in the dtype of c.

    With ``promotion`` a separate running sum is added to c, rounded to nearest, after every ``promotion`` terms.
    """
    narrow = unit.fraction + 2 + unit.block.bit_length() <= 24  # bits of a block's sum: float32 holds it exactly
    compute = np.float32 if narrow else np.float64
    a_numbers: Array = a.numbers.astype(compute)
    b_numbers: Array = b.numbers.astype(compute)
    partial = np.zeros_like(c) if promotion else c
    num_terms = a_numbers.shape[-1]
    pending = 0
    for start in range(0, num_terms, unit.block):
        k = slice(start, start + unit.block)
        left, right = a_numbers[..., k], b_numbers[..., k, :]
        if unit.group:
            ea, eb = a.scale_exponents[..., k], b.scale_exponents[..., k, :]
            partial = _add_aligned(*_grouped(left, ea, right, eb, unit.group), partial, unit, compute)
        else:
            ea, eb = a.exponents[..., k], b.exponents[..., k, :]
            exponents = (ea[..., i, None] + eb[..., i, None, :] for i in range(left.shape[-1]))
            products = (left[..., i, None] * right[..., i, None, :] for i in range(left.shape[-1]))
            partial = _add_aligned(exponents, products, partial, unit, compute)
        pending += unit.block
        if promotion and (pending >= promotion or start + unit.block >= num_terms):
            c, partial, pending = c + partial, np.zeros_like(c), 0
    return c if promotion else partial


def _grouped(a: Array, ea: Array, b: Array, eb: Array, group: int) -> tuple[list[Array], list[Array]]:
    """Return the scales' exponents and the exact sums of each ``group`` products of a [..., M, L] and b [..., L, N]."""
    exponents, sums = [], []
    for i in range(0, a.shape[-1], group):
        left, right = a[..., i : i + group], b[..., i : i + group, :]
        nonzero = np.matmul(np.abs(left), np.abs(right)) != 0
        exponents.append(np.where(nonzero, ea[..., i, None] + eb[..., i, None, :], _NO_EXPONENT))
        sums.append(np.matmul(left, right))
    return exponents, sums


def _add_aligned(
    exponents: Iterable[Array], terms: Iterable[Array], c: Array, unit: Accumulator, compute: Any
) -> Array:
    """Evaluate one instruction: add ``terms`` of these exponents (overwritten) and the running sum c [..., M, N]."""
    half = c.dtype == np.float16
    largest = np.maximum(_exponents(c, -14 if half else -126), unit.zero + 112 if half else unit.zero)
    for each in exponents:
        np.maximum(largest, each, out=largest)
    shift = unit.fraction - largest
    total = np.trunc(np.ldexp(c.astype(np.float64), shift)).astype(compute)
    # A shift beyond the largest exponent occurs only if all terms are zero.
    scale = np.ldexp(compute(1), np.minimum(shift, np.finfo(compute).maxexp - 1))
    for term in terms:
        term *= scale
        total += np.trunc(term, out=term)
    result: Array = _round_output(np.ldexp(total.astype(np.float64), -shift), unit.output, c.dtype)
    result += c.dtype.type(0)  # a zero result is positive
    return result


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
