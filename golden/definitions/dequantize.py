"""Weights from their codes: 8-bit floats in blocks, four bits in groups, and microscaled e2m1 (OCP MX 1.0)."""

from __future__ import annotations

from typing import Any

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.microscaling import E2M1
from assay.golden.definitions.quantized import INT4, nibbles, repeat, unpack_int4
from assay.golden.options import choice
from assay.golden.registry import Fault, define

_MX_BLOCK = 32


def _scale_of_neighbour(xp: Any, codes: Any, scale: Any) -> Any:
    """Rows and columns of the table of scales exchanged, as far as it goes."""
    rows, columns = scale.shape
    row, column = xp.integers(range(rows))[:, None] % columns, xp.integers(range(columns))[None, :] % rows
    return dequantize_fp8(xp, codes, scale[column + row * 0, row + column * 0])


def _first_scale(xp: Any, codes: Any, scale: Any) -> Any:
    return codes * scale[:1, :1] if codes.shape[0] and codes.shape[1] else codes


@define(
    "dequantize_fp8",
    "codes:fp8[M,N], scale:float32[ceil(M/128),ceil(N/128)]=scale -> w:bfloat16[M,N]",
    rows="M",
    columns="N",
    faults=(
        Fault("block_scales_transposed", "the table of scales is read with rows and columns exchanged",
              _scale_of_neighbour, "scale", needs="more than one block"),
        Fault("one_scale_for_all_blocks", "every block takes the scale of the first", _first_scale, "scale",
              needs="more than one block"),
        Fault("divided_by_block_scale", "codes are divided by the scale",
              lambda xp, codes, scale: dequantize_fp8(xp, codes, 1.0 / scale), "scale"),
        Fault("block_scale_left_out", "codes come out as they are", lambda xp, codes, scale: codes, "scale"),
    ),
)  # fmt: skip
def dequantize_fp8(xp: Arithmetic[N], codes: N, scale: N) -> N:
    """codes times the scale of their block of 128 by 128."""
    rows, columns = codes.shape
    return codes * repeat(xp, repeat(xp, scale, rows, axis=0), columns, axis=1)


def _without_zero(xp: Any, qweight: Any, scales: Any, zeros: Any, *, packing: str) -> Any:
    return dequantize_int4(xp, qweight, scales, zeros * 0, packing=packing)


def _swapped(xp: Any, qweight: Any, scales: Any, zeros: Any, *, packing: str) -> Any:
    """Even and odd nibbles of each byte exchanged."""
    turned = (qweight & 0x0F0F0F0F) * 16 + ((qweight >> 4) & 0x0F0F0F0F)
    return dequantize_int4(xp, turned, scales, zeros, packing=packing)


def _group_before(xp: Any, qweight: Any, scales: Any, zeros: Any, *, packing: str) -> Any:
    before = xp.integers([max(group - 1, 0) for group in range(scales.shape[0])])
    return dequantize_int4(xp, qweight, scales[before], zeros, packing=packing)


def _signed(xp: Any, qweight: Any, scales: Any, zeros: Any, *, packing: str) -> Any:
    return -dequantize_int4(xp, qweight, scales, zeros, packing=packing)


@define(
    "dequantize_int4",
    lambda options: f"{INT4[options['packing']]} -> w:bfloat16[K,N]",
    options={"packing": choice("plain", "awq", "gptq")},
    independent=("N",),
    sizes={"g": (32, 64, 128)},
    multiples={"K": "g"},
    faults=(
        Fault("int4_zero_points_dropped", "zero-points are left out", _without_zero, "packing"),
        Fault("int4_nibbles_exchanged", "low and high nibbles are exchanged", _swapped, "packing"),
        Fault("int4_scale_of_group_before", "each group takes the scale of the one before", _group_before, "scale",
              needs="more than one group"),
        Fault("int4_sign", "the code is subtracted from the zero-point", _signed, "packing"),
    ),
)  # fmt: skip
def dequantize_int4(xp: Arithmetic[N, Idx], qweight: Idx, scales: N, zeros: Idx, *, packing: str) -> N:
    """(code - zero) scale, group by group along K; or code scale - zero scale."""
    codes, points = unpack_int4(xp, qweight, zeros, packing)
    inner = codes.shape[0]
    group = inner // max(scales.shape[0], 1) or 1
    points = points[xp.integers(range(inner)) // group]
    steps = repeat(xp, scales, inner, axis=0, group=group)
    return xp.any_formula(
        lambda: xp.exact(codes - points) * steps,
        lambda: xp.exact(codes) * steps - xp.exact(points) * steps,
    )


def _mx_high_first(xp: Any, codes: Any, scale: Any) -> Any:
    return _mx(xp, codes, scale, (1, 0))


def _mx_as_integers(xp: Any, codes: Any, scale: Any) -> Any:
    """Codes as sign and magnitude of whole numbers."""
    numbers = nibbles(xp, codes, (0, 1), axis=1)
    signed = xp.exact(xp.native.asarray([*range(8), *(-code for code in range(8))])[numbers])
    return signed * repeat(xp, scale, signed.shape[1], axis=1, group=_MX_BLOCK)


def _mx(xp: Arithmetic[N, Idx], codes: Idx, scale: N, order: tuple[int, int]) -> N:
    numbers = xp.exact(xp.native.asarray(E2M1)[nibbles(xp, codes, order, axis=1)])
    return numbers * repeat(xp, scale, numbers.shape[1], axis=1, group=_MX_BLOCK)


@define(
    "dequantize_mxfp4",
    "codes:uint8[M,N/2]=bits, scale:float8_e8m0fnu[M,N/32]=scale -> w:bfloat16[M,N]",
    rows="M",
    multiples={"N": "32"},
    faults=(
        Fault("mxfp4_high_nibble_first", "the high nibble of a byte is taken first", _mx_high_first, "packing"),
        Fault("mxfp4_codes_as_integers", "codes are taken for sign and whole number", _mx_as_integers, "packing"),
        Fault("mxfp4_scale_left_out", "the scale is left out",
              lambda xp, codes, scale: _mx(xp, codes, scale * 0.0 + 1.0, (0, 1)), "scale"),
        Fault("mxfp4_scale_twice", "the scale is applied twice",
              lambda xp, codes, scale: _mx(xp, codes, scale * scale, (0, 1)), "scale"),
    ),
    exempt=("columns_beyond_tile_zero", "truncating_store"),
)  # fmt: skip
def dequantize_mxfp4(xp: Arithmetic[N, Idx], codes: Idx, scale: N) -> N:
    """e2m1 numbers, the even columns in the low nibbles, times the power of two of their block of 32 columns."""
    return _mx(xp, codes, scale, (0, 1))
