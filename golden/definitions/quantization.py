"""Quantisers of float tensors, and dequantisation: FP8 in blocks, int4 in groups, microscaled e2m1 (OCP MX 1.0).

A quantiser's scale is the span of a group over the largest code, in float32; codes are the quotients rounded to nearest
even. An exact tie goes to the even code if the scale is a power of two; else the scale's own rounding decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from assay.golden.arithmetic.base import Arithmetic, Idx, N
from assay.golden.definitions.gemm import E2M1, INT4, nibbles, repeat, unpack_int4
from assay.golden.options import Option, choice, count, flag, number
from assay.golden.registry import Fault, altered, define

_GROUP = 128
_KINDS = ("float32", "e8m0", "mx")
_MX = 2.0**8  # of the exponent of e4m3's largest number


def _granularity(*usual: str) -> Option:
    """What shares a scale; a campaign varies over the ``usual`` ones."""
    values = (*usual, "group")
    return Option(usual[0], lambda value: value in values, "one of " + ", ".join(map(repr, values)), usual)


def row_groups(xp: Arithmetic[N], x: N, size: int) -> N:
    """x[R,N] in groups of ``size`` neighbours [R,G,n]; a short one repeats the last number of its row."""
    columns = x.shape[1]
    width = max(min(size, columns), 1)
    columns_read = np.arange(-(-columns // width) * width).clip(max=max(columns - 1, 0))
    return x[:, xp.integers(columns_read.reshape(-1, width))]


def row_maximum(xp: Arithmetic[N], x: N) -> N:
    """The largest along the last axis, and not below zero."""
    return xp.maximum(xp.max(x), xp.exact(xp.integers(0)))


def ungrouped(codes: N, columns: int) -> N:
    """The numbers [R,N] of groups [R,G,n]."""
    rows, groups, width = codes.shape
    return codes.reshape(rows, groups * width)[:, :columns]


_OPTIONS = {
    "group": count(_GROUP),
    "floor": number(None, positive=True),
    "scales": Option("float32", lambda value: value in _KINDS, "one of " + ", ".join(map(repr, _KINDS))),
    "reciprocal": Option(False, lambda value: isinstance(value, bool), "True or False"),
}


def _symmetric(
    xp: Arithmetic[N],
    x: N,
    largest: int,
    format: str,
    stored: N | None,
    *,
    granularity: str,
    group: int,
    floor: float | None,
    scales: str,
    reciprocal: bool,
) -> tuple[N, N]:
    """Codes and scales of x[R,N], whose largest magnitude becomes the largest code."""
    rows, columns = x.shape
    grouped = granularity in ("group", "group128")
    if grouped:
        groups = row_groups(xp, x, group if granularity == "group" else _GROUP)
    else:
        groups = x.reshape(1, 1, rows * columns) if granularity == "tensor" else x.reshape(rows, 1, columns)
    span = row_maximum(xp, xp.abs(groups))
    if floor is not None:
        span = xp.at_least(span, floor)
    scale, own = xp.quantization_scale(span, _MX if scales == "mx" else largest), None
    if stored is not None:
        own = stored.reshape(*scale.shape)
        own = 1 / own if reciprocal else own
    if scales == "float32":
        codes = xp.quantize(groups, scale, format, stored=own)
    else:
        scale = xp.power_of_two(scale, above=scales == "e8m0")
        step = scale if own is None or reciprocal else own  # of two powers that may be right, the kernel's own
        codes = xp.quantize(groups, step, format, stored=step)
    codes = ungrouped(codes, columns) if grouped else codes.reshape(rows, columns)
    scale = 1 / scale if reciprocal else scale
    return codes, scale.reshape(() if granularity == "tensor" else scale.shape[:2])


def _rows(options: Mapping[str, Any]) -> str | None:
    return None if options["granularity"] == "tensor" else "R"


def _scales(options: Mapping[str, Any]) -> str:
    group = options["group"] if options["granularity"] == "group" else _GROUP
    return {"row": "[R,1]", "tensor": "[]"}.get(options["granularity"], f"[R,ceil(N/{group})]")


@define(
    "quantize_fp8",
    lambda options: f"x[R,N]=real(448) -> codes:float8_e4m3fn[R,N]=rounded, scale:float32{_scales(options)}",
    options={"granularity": _granularity("row", "tensor", "group128"), **_OPTIONS},
    rows=_rows,
    may_be_zero=("R",),
    chosen=("scale",),
)
def quantize_fp8(xp: Arithmetic[N], x: N, *, scale: N | None = None, **options: Any) -> tuple[N, N]:
    """Codes of e4m3 and scales amax / 448, per row, of the whole, or per 128 or ``group`` neighbours in a row.

    amax is no less than ``floor``. ``scales``: "float32"; "e8m0", the power of two at or above amax / 448; "mx", that
    at or below amax, over 256 (OCP MX 1.0, section 6.3), whose largest quotients saturate; either is 2^-127 or more.
    ``reciprocal``: 1 / scale is returned, the factor of x.
    """
    return _symmetric(xp, x, 448, "float8_e4m3fn", scale, **options)


@define(
    "quantize_int8",
    lambda options: f"x[R,N]=real(127) -> codes:int8[R,N]=rounded, scale:float32{_scales(options)}",
    options={"granularity": _granularity("row", "tensor"), **{k: v for k, v in _OPTIONS.items() if k != "scales"}},
    rows=_rows,
    may_be_zero=("R",),
    chosen=("scale",),
)
def quantize_int8(xp: Arithmetic[N], x: N, *, scale: N | None = None, **options: Any) -> tuple[N, N]:
    """Codes of int8 and scales amax / 127, per row, of the whole, or per ``group`` neighbours in a row.

    ``floor`` and ``reciprocal`` as of `quantize_fp8`.
    """
    return _symmetric(xp, x, 127, "int8", scale, scales="float32", **options)


def _int4_signature(options: Mapping[str, Any]) -> str:
    groups = f"[R,ceil(N/{options['group']})]"
    return f"x[R,N]=real(15) -> codes:uint8[R,N]=rounded, scale:float32{groups}, zero:uint8{groups}=rounded"


@define(
    "quantize_int4",
    _int4_signature,
    options={"group": count(_GROUP), "symmetric": flag()},
    rows="R",
    chosen=("scale", "zero"),
)
def quantize_int4(
    xp: Arithmetic[N], x: N, *, group: int, symmetric: bool, scale: N | None = None, zero: N | None = None
) -> tuple[N, N, N]:
    """Codes 0 to 15, scales, and the zero-points that represent 0.0, per ``group`` neighbours in a row.

    The range includes zero: scale = (max(x, 0) - min(x, 0)) / 15, zero = round(-min(x, 0) / scale). Symmetric: scale =
    amax / 7, zero 8, codes 1 to 15. ``zero``: a kernel's own zero-points, which its codes must agree with.
    """
    groups = row_groups(xp, x, group)
    below = row_maximum(xp, -groups)
    span = row_maximum(xp, xp.abs(groups)) if symmetric else row_maximum(xp, groups) + below
    step = xp.quantization_scale(span, 7 if symmetric else 15)
    stored = None if scale is None else scale[..., None]
    point = xp.exact(xp.native.full(step.shape, 8)) if symmetric else xp.quantize(below, step, "uint4", stored=stored)
    own = point if zero is None or symmetric else zero[..., None]
    codes = xp.quantize(groups, step, "uint4", zero=own, stored=stored)
    return ungrouped(codes, x.shape[1]), step[..., 0], point[..., 0]


_MX_BLOCK = 32


def _transposed(xp: Any, value: Any) -> Any:
    """Exchange rows and columns of the table of scales, as far as it goes."""
    rows, columns = value.shape
    row, column = xp.integers(range(rows))[:, None] % columns, xp.integers(range(columns))[None, :] % rows
    return value[column + row * 0, row + column * 0]


@define(
    "dequantize_fp8",
    "codes:fp8[M,N], scale:float32[ceil(M/128),ceil(N/128)]=scale -> w:bfloat16[M,N]",
    rows="M",
    columns="N",
    faults=(
        Fault("block_scales_transposed", "the table of scales is read with rows and columns exchanged",
              altered("dequantize_fp8", scale=_transposed), "scale", needs="more than one block"),
        Fault("one_scale_for_all_blocks", "every block takes the scale of the first",
              lambda xp, codes, scale: codes * scale[:1, :1] if codes.shape[0] and codes.shape[1] else codes, "scale",
              needs="more than one block"),
        Fault("divided_by_block_scale", "codes are divided by the scale",
              altered("dequantize_fp8", scale=lambda scale: 1.0 / scale), "scale"),
        Fault("block_scale_left_out", "codes come out as they are", lambda xp, codes, scale: codes, "scale"),
    ),
)  # fmt: skip
def dequantize_fp8(xp: Arithmetic[N], codes: N, scale: N) -> N:
    """codes times the scale of their block of 128 by 128."""
    rows, columns = codes.shape
    return codes * repeat(xp, repeat(xp, scale, rows, axis=0), columns, axis=1)


@define(
    "dequantize_int4",
    lambda options: f"{INT4[options['packing']]} -> w:bfloat16[K,N]",
    options={"packing": choice("plain", "awq", "gptq")},
    independent=("N",),
    sizes={"g": (32, 64, 128)},
    multiples={"K": "g"},
    faults=(
        Fault("int4_zero_points_dropped", "zero-points are missing",
              altered("dequantize_int4", zeros=lambda zeros: zeros * 0), "packing"),
        Fault("int4_nibbles_exchanged", "low and high nibbles are exchanged",
              altered("dequantize_int4", qweight=lambda qweight: (
               (qweight & 0x0F0F0F0F) * 16 + ((qweight >> 4) & 0x0F0F0F0F))), "packing"),
        Fault("int4_scale_of_group_before", "each group takes the scale of the one before",
              altered("dequantize_int4", scales=lambda xp, scales: (
               scales[xp.integers([max(group - 1, 0) for group in range(scales.shape[0])])])), "scale",
              needs="more than one group"),
        Fault("int4_sign", "the code is subtracted from the zero-point", altered("dequantize_int4", w=lambda w: -w),
              "packing"),
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
        lambda: xp.exact(codes - points) * steps, lambda: xp.exact(codes) * steps - xp.exact(points) * steps
    )


def _mx_as_integers(xp: Any, codes: Any, scale: Any) -> Any:
    """Read codes as sign and magnitude of integers."""
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
        Fault("mxfp4_high_nibble_first", "the high nibble of a byte is taken first",
              lambda xp, codes, scale: _mx(xp, codes, scale, (1, 0)), "packing"),
        Fault("mxfp4_codes_as_integers", "codes are read as sign and integer magnitude", _mx_as_integers, "packing"),
        Fault("mxfp4_scale_left_out", "the scale is missing",
              altered("dequantize_mxfp4", scale=lambda scale: scale * 0.0 + 1.0), "scale"),
        Fault("mxfp4_scale_twice", "the scale is applied twice",
              altered("dequantize_mxfp4", scale=lambda scale: scale * scale), "scale"),
    ),
    exempt=("columns_beyond_tile_zero", "truncating_store"),
)  # fmt: skip
def dequantize_mxfp4(xp: Arithmetic[N, Idx], codes: Idx, scale: N) -> N:
    """e2m1 numbers, the even columns in the low nibbles, times the power of two of their block of 32 columns."""
    return _mx(xp, codes, scale, (0, 1))
