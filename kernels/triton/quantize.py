"""Quantisers: codes of e4m3, int8 and four bits, and the scales that make numbers of them again.

A group of neighbours in a row shares a scale; a whole row is a group too. A group that fits into one block is read
once, a longer one twice: first for its range. Where the whole matrix has one scale, a kernel of its own finds the
largest magnitude by atomic maxima, which give the same number in any order. Quotients are IEEE's, and codes rounded to
nearest even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from assay.kernels.triton.arguments import FLOATING, check, check_choice
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid

_GROUP = 128
_FP8 = ("row", "tensor", "group128")
_INT8 = ("row", "tensor")


@triton.jit
def _groups_of_program(x_ptr, N, ACROSS, x_strides, ROWS_PER_PROGRAM: tl.constexpr):
    """The program's groups [ROWS_PER_PROGRAM,1] (int64): numbers, rows, first columns, and pointers to them in x.

    ACROSS groups of N columns make a row; the last may be short.
    """
    groups = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    rows = groups // ACROSS
    first = groups % ACROSS * N
    return groups, rows, first, x_ptr + rows * x_strides[0] + first * x_strides[1]


@triton.jit
def _kept(columns, first, inside, N, COLUMNS):
    """Which columns of a group, counted from its first, it has."""
    return inside & (columns < N) & (first + columns < COLUMNS)


@triton.jit
def _range(
    x_groups,
    first,
    inside,
    N,
    COLUMNS,
    stride,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """The least and largest number of each group [ROWS_PER_PROGRAM,1], zero included, and its last block of columns."""
    low = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    high = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        kept = _kept(columns, first, inside, N, COLUMNS)
        x = tl.load(x_groups + columns * stride, mask=kept, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.min(x, axis=1))
        high = tl.maximum(high, tl.max(x, axis=1))
    return low[:, None], high[:, None], x


@triton.autotune(configs=CONFIGS, key=["N"], reset_to_zero=["span_ptr"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _span_kernel(
    x_ptr,
    span_ptr,
    R,
    N,
    x_strides,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """The largest magnitude of x[R,N], where a zero stood."""
    rows, _, first, x_rows = _groups_of_program(x_ptr, N, 1, x_strides, ROWS_PER_PROGRAM)
    low, high, _ = _range(x_rows, first, rows < R, N, N, x_strides[1], ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS)
    tl.atomic_max(span_ptr, tl.max(tl.maximum(high, -low)), sem="relaxed")


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _quantize_kernel(
    x_ptr,
    span_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    R,
    N,
    COLUMNS,
    ACROSS,
    x_strides,
    stride_codes,
    LARGEST: tl.constexpr,  # magnitude of a code, or where codes are shifted the span of all codes
    WHOLE: tl.constexpr,  # one scale, of the magnitude behind span_ptr
    POINT: tl.constexpr,  # the code of zero; None where each group has its own
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    groups, rows, first, x_groups = _groups_of_program(x_ptr, N, ACROSS, x_strides, ROWS_PER_PROGRAM)
    inside = groups < R
    if WHOLE:
        span = tl.load(span_ptr + tl.zeros_like(groups))
    else:
        low, high, x = _range(x_groups, first, inside, N, COLUMNS, x_strides[1], ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS)
        span = high - low if POINT is None else tl.maximum(high, -low)
    scale = tl.div_rn(span, tl.full([ROWS_PER_PROGRAM, 1], LARGEST, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)  # of zeros, and of numbers so small that their codes are those of zero
    tl.store(scale_ptr + groups, scale, mask=groups < (1 if WHOLE else R))

    least: tl.constexpr = 0.0 if POINT is None else POINT - LARGEST
    if POINT is None:
        point = tl.clamp(libdevice.rint(tl.div_rn(-low, scale)), 0.0, LARGEST)
        tl.store(zero_ptr + groups, point.to(tl.uint8), mask=inside)
    else:
        point = POINT
    codes_groups = codes_ptr + rows * stride_codes + first
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        kept = _kept(columns, first, inside, N, COLUMNS)
        if WHOLE or not SINGLE_PASS:
            x = tl.load(x_groups + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
        codes = tl.div_rn(x, tl.broadcast_to(scale, [ROWS_PER_PROGRAM, BLOCK_N]))
        if codes_ptr.dtype.element_ty.is_int():
            codes = tl.clamp(libdevice.rint(codes) + point, least, least + (1 if POINT is None else 2) * LARGEST)
        tl.store(codes_groups + columns, codes.to(codes_ptr.dtype.element_ty), mask=kept)


def _launch(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, group: int, largest: float, point: float | None
) -> None:
    """Write codes[R,N], scale and zero of x[R,N], in groups of ``group`` columns, or as a whole for scale []."""
    rows, columns = x.shape
    if not x.numel():
        scale.fill_(1.0)
        return
    span, whole = scale, scale.dim() == 0
    if whole:
        span = torch.zeros((), dtype=torch.float32, device=x.device)
        _span_kernel[grid](x, span, rows, columns, x.stride())
    width = min(group, columns)
    across = triton.cdiv(columns, width)
    _quantize_kernel[grid](
        *(x, span, codes, scale, zero, rows * across, width, columns, across, x.stride(), codes.stride(0)),
        LARGEST=largest,
        WHOLE=whole,
        POINT=point,
    )


def _symmetric_results(x: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    shape = {"row": (rows, 1), "tensor": (), "group128": (rows, (columns + _GROUP - 1) // _GROUP)}[granularity]
    return x.new_empty((rows, columns), dtype=dtype), x.new_empty(shape, dtype=torch.float32)


def _symmetric(x: Tensor, granularity: str, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    codes, scale = _symmetric_results(x, granularity, dtype)
    group = _GROUP if granularity == "group128" else max(x.shape[1], 1)
    _launch(x, codes, scale, scale, group, largest, 0.0)
    return codes, scale


@custom_op("assay::quantize_fp8", lambda x, kind: _symmetric_results(x, kind, torch.float8_e4m3fn))
def _quantize_fp8(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    return _symmetric(x, granularity, torch.float8_e4m3fn, 448.0)


@custom_op("assay::quantize_int8", lambda x, kind: _symmetric_results(x, kind, torch.int8))
def _quantize_int8(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    return _symmetric(x, granularity, torch.int8, 127.0)


def _int4_results(x: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], (x.shape[1] + group - 1) // group)
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.uint8)


@custom_op("assay::quantize_int4", _int4_results)
def _quantize_int4(x: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, zero = _int4_results(x, group, symmetric)
    if symmetric:
        zero.fill_(8)
    _launch(x, codes, scale, zero, group, *((7.0, 8.0) if symmetric else (15.0, None)))
    return codes, scale, zero


def quantize_fp8(x: Tensor, *, granularity: str = "row") -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [R,N] of x[R,N] (float32, bfloat16 or float16) and float32 scales, amax / 448.

    A scale is that of a "row" [R,1], of the whole "tensor" [], or of 128 neighbours in a row, "group128"
    [R,ceil(N/128)]; 1 where amax / 448 is zero. A code is x / scale, rounded to nearest even. NaN stays NaN, and
    doesn't count in amax. Raises TypeError or ValueError, naming the argument, for another dtype, shape or granularity.
    """
    check_choice("granularity", granularity, _FP8)
    check(x=(x, FLOATING, "R N"))
    return _quantize_fp8(x, granularity)


def quantize_int8(x: Tensor, *, granularity: str = "row") -> tuple[Tensor, Tensor]:
    """Codes int8 [R,N], -127 to 127, of x[R,N] (float32, bfloat16 or float16) and float32 scales, amax / 127.

    As `quantize_fp8`, of a "row" or the whole "tensor"; what the code of NaN is, is not said.
    """
    check_choice("granularity", granularity, _INT8)
    check(x=(x, FLOATING, "R N"))
    return _quantize_int8(x, granularity)


def quantize_int4(x: Tensor, *, group: int = 128, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [R,N], 0 to 15, of x[R,N], scales float32 and zero-points uint8, both [R,ceil(N/group)].

    For ``group`` neighbours in a row, x is about (code - zero) scale: scale = (max(x, 0) - min(x, 0)) / 15, zero =
    round(-min(x, 0) / scale); symmetric: scale = amax / 7, zero = 8, codes 1 to 15. A scale of zero becomes 1. Raises
    TypeError or ValueError, naming the argument, for another dtype or shape, or a group that is not a positive int.
    """
    check(x=(x, FLOATING, "R N"))
    if type(group) is not int or group < 1:
        raise ValueError(f"group: expected a positive whole number, got {group!r}")
    return _quantize_int4(x, group, symmetric)
