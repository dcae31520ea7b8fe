"""Quantisers to FP8 e4m3, int8 and 4 bits: codes, scales and zero-points of x[R,N], by group, row or tensor.

A group is neighbours in a row, or the whole row. One that fits into a block is read once, a longer one twice: first for
its range. For a scale per tensor another kernel finds the largest magnitude by atomic maxima, which don't depend on the
order. Quotients are IEEE's (`tl.div_rn`: plain division is approximate in Triton), codes rounded to nearest even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from assay.kernels.triton.arguments import FLOATING, check, check_choice
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid

_GROUP_SIZE = 128
_FP8_GRANULARITIES = ("row", "tensor", "group128")
_INT8_GRANULARITIES = ("row", "tensor")


@triton.jit
def _groups_of_program(x_ptr, N, GROUPS_PER_ROW, x_strides, ROWS_PER_PROGRAM: tl.constexpr):
    """Return this program's groups [ROWS_PER_PROGRAM,1] (int64): indices, rows, first columns, and pointers into x.

    A row has GROUPS_PER_ROW groups of N columns; the last may be short.
    """
    groups = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    rows = groups // GROUPS_PER_ROW
    first_column = groups % GROUPS_PER_ROW * N
    return groups, rows, first_column, x_ptr + rows * x_strides[0] + first_column * x_strides[1]


@triton.jit
def _column_mask(columns, first_column, group_mask, N, COLUMNS):
    """Return the mask of columns, counted from the first of the group."""
    return group_mask & (columns < N) & (first_column + columns < COLUMNS)


@triton.jit
def _min_max(
    x_groups,
    first_column,
    group_mask,
    N,
    COLUMNS,
    stride,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """Return min(x, 0) and max(x, 0) of each group [ROWS_PER_PROGRAM,1], and its last block of columns."""
    low = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    high = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        mask = _column_mask(columns, first_column, group_mask, N, COLUMNS)
        x = tl.load(x_groups + columns * stride, mask=mask, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.min(x, axis=1))
        high = tl.maximum(high, tl.max(x, axis=1))
    return low[:, None], high[:, None], x


@triton.autotune(configs=CONFIGS, key=["N"], reset_to_zero=["amax_ptr"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _amax_kernel(
    x_ptr,
    amax_ptr,
    R,
    N,
    x_strides,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """amax[] = max |x[R,N]|; amax is zero before."""
    rows, _, first_column, x_rows = _groups_of_program(x_ptr, N, 1, x_strides, ROWS_PER_PROGRAM)
    low, high, _ = _min_max(x_rows, first_column, rows < R, N, N, x_strides[1], ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS)
    tl.atomic_max(amax_ptr, tl.max(tl.maximum(high, -low)), sem="relaxed")


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _quantize_kernel(
    x_ptr,
    amax_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    R,
    N,
    COLUMNS,
    GROUPS_PER_ROW,
    x_strides,
    stride_codes,
    MAX_CODE: tl.constexpr,  # largest magnitude of a code; the number of steps where ZERO_POINT is None
    PER_TENSOR: tl.constexpr,  # one scale, from amax_ptr
    ZERO_POINT: tl.constexpr,  # None where each group has its own
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """Codes, scales [R] and zero-points [R] of R groups of N columns."""
    groups, rows, first_column, x_groups = _groups_of_program(x_ptr, N, GROUPS_PER_ROW, x_strides, ROWS_PER_PROGRAM)
    group_mask = groups < R
    if PER_TENSOR:
        extent = tl.load(amax_ptr + tl.zeros_like(groups))
    else:
        low, high, x = _min_max(
            x_groups, first_column, group_mask, N, COLUMNS, x_strides[1], ROWS_PER_PROGRAM, BLOCK_N, SINGLE_PASS
        )
        extent = high - low if ZERO_POINT is None else tl.maximum(high, -low)
    scale = tl.div_rn(extent, tl.full([ROWS_PER_PROGRAM, 1], MAX_CODE, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)  # zeros, and numbers so small that the quotient underflows
    tl.store(scale_ptr + groups, scale, mask=groups < (1 if PER_TENSOR else R))

    min_code: tl.constexpr = 0.0 if ZERO_POINT is None else ZERO_POINT - MAX_CODE
    if ZERO_POINT is None:
        zero = tl.clamp(libdevice.rint(tl.div_rn(-low, scale)), 0.0, MAX_CODE)
        tl.store(zero_ptr + groups, zero.to(tl.uint8), mask=group_mask)
    else:
        zero = ZERO_POINT
    codes_groups = codes_ptr + rows * stride_codes + first_column
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        mask = _column_mask(columns, first_column, group_mask, N, COLUMNS)
        if PER_TENSOR or not SINGLE_PASS:  # else _min_max has loaded the only block
            x = tl.load(x_groups + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
        codes = tl.div_rn(x, tl.broadcast_to(scale, [ROWS_PER_PROGRAM, BLOCK_N]))
        if codes_ptr.dtype.element_ty.is_int():
            max_code: tl.constexpr = min_code + (1 if ZERO_POINT is None else 2) * MAX_CODE
            codes = tl.clamp(libdevice.rint(codes) + zero, min_code, max_code)
        tl.store(codes_groups + columns, codes.to(codes_ptr.dtype.element_ty), mask=mask)


def _launch(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, group_size: int, max_code: float, zero_point: float | None
) -> None:
    """Write codes[R,N], scale and zero of x[R,N], by group of columns, or per tensor for scale []."""
    rows, columns = x.shape
    if not x.numel():
        scale.fill_(1.0)
        return
    amax, per_tensor = scale, scale.dim() == 0
    if per_tensor:
        amax = torch.zeros((), dtype=torch.float32, device=x.device)
        _amax_kernel[grid](x, amax, rows, columns, x.stride())
    width = min(group_size, columns)
    groups_per_row = triton.cdiv(columns, width)
    _quantize_kernel[grid](
        *(x, amax, codes, scale, zero, rows * groups_per_row, width, columns, groups_per_row),
        *(x.stride(), codes.stride(0)),
        MAX_CODE=max_code,
        PER_TENSOR=per_tensor,
        ZERO_POINT=zero_point,
    )


def _empty_symmetric(x: Tensor, granularity: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    groups_per_row = (columns + _GROUP_SIZE - 1) // _GROUP_SIZE
    shape = {"row": (rows, 1), "tensor": (), "group128": (rows, groups_per_row)}[granularity]
    return x.new_empty((rows, columns), dtype=dtype), x.new_empty(shape, dtype=torch.float32)


def _quantize_symmetric(x: Tensor, granularity: str, dtype: torch.dtype, max_code: float) -> tuple[Tensor, Tensor]:
    codes, scale = _empty_symmetric(x, granularity, dtype)
    group_size = _GROUP_SIZE if granularity == "group128" else max(x.shape[1], 1)
    _launch(x, codes, scale, scale, group_size, max_code, 0.0)
    return codes, scale


@custom_op("assay::quantize_fp8", lambda x, granularity: _empty_symmetric(x, granularity, torch.float8_e4m3fn))
def _quantize_fp8(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    return _quantize_symmetric(x, granularity, torch.float8_e4m3fn, 448.0)


@custom_op("assay::quantize_int8", lambda x, granularity: _empty_symmetric(x, granularity, torch.int8))
def _quantize_int8(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    return _quantize_symmetric(x, granularity, torch.int8, 127.0)


def _empty_int4(x: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], (x.shape[1] + group - 1) // group)
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.uint8)


@custom_op("assay::quantize_int4", _empty_int4)
def _quantize_int4(x: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, zero = _empty_int4(x, group, symmetric)
    if symmetric:
        zero.fill_(8)
    _launch(x, codes, scale, zero, group, *((7.0, 8.0) if symmetric else (15.0, None)))
    return codes, scale, zero


@replayed
def quantize_fp8(x: Tensor, *, granularity: str = "row") -> tuple[Tensor, Tensor]:
    """Return codes float8_e4m3fn [R,N] of x[R,N] (float32, bfloat16 or float16) and float32 scales, amax / 448.

    There is a scale for each "row" [R,1], the whole "tensor" [], or 128 neighbours in a row, "group128"
    [R,ceil(N/128)]; it is 1 where amax / 448 is zero. A code is x / scale, rounded to nearest even. NaN stays NaN, and
    doesn't count in amax. Raises TypeError or ValueError, naming the argument, for another dtype, shape or granularity.
    """
    check_choice("granularity", granularity, _FP8_GRANULARITIES)
    check(x=(x, FLOATING, "R N"))
    return _quantize_fp8(x, granularity)


@replayed
def quantize_int8(x: Tensor, *, granularity: str = "row") -> tuple[Tensor, Tensor]:
    """Return codes int8 [R,N], -127 to 127, of x[R,N] (float32, bfloat16 or float16) and float32 scales, amax / 127.

    As `quantize_fp8`, for each "row" or the whole "tensor"; the code of NaN is unspecified.
    """
    check_choice("granularity", granularity, _INT8_GRANULARITIES)
    check(x=(x, FLOATING, "R N"))
    return _quantize_int8(x, granularity)


@replayed
def quantize_int4(x: Tensor, *, group: int = 128, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 [R,N], 0 to 15, of x[R,N], scales float32 and zero-points uint8, both [R,ceil(N/group)].

    In each ``group`` of neighbours in a row x is about (code - zero) scale, with scale = (max(x, 0) - min(x, 0)) / 15
    and zero = round(-min(x, 0) / scale); symmetric: scale = amax / 7, zero = 8, codes 1 to 15. A scale of zero becomes
    1. Raises TypeError or ValueError, naming the argument, for another dtype, shape or group.
    """
    check(x=(x, FLOATING, "R N"))
    if type(group) is not int or group < 1:
        raise ValueError(f"group: expected a positive whole number, got {group!r}")
    return _quantize_int4(x, group, symmetric)
