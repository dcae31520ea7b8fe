"""RMS norm over the rows of a matrix, alone or of the sum of two matrices, which is returned as well.

Rows that fit into one block are read once; longer ones twice, the first time for the sum of squares.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_numbers
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.rmsnorm_backward import norm_gradients
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid


@triton.jit
def _sum_of(x_ptrs, residual_ptrs, kept, ADD: tl.constexpr):
    total = tl.load(x_ptrs, mask=kept, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual_ptrs, mask=kept, other=0.0).to(tl.float32)
    return total


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    R,
    N,
    x_strides,
    residual_strides,
    stride_weight,
    y_strides,
    eps,
    offset,
    ADD: tl.constexpr,  # without it, residual and total are not touched
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    block = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    x_rows = x_ptr + rows * x_strides[0]
    residual_rows = residual_ptr + rows * residual_strides[0]
    y_rows = y_ptr + rows * y_strides[0]
    total_rows = total_ptr + rows * y_strides[0]

    length = BLOCK_N if SINGLE_PASS else N  # loops of one turn, known to the compiler
    total = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        kept = (rows < R) & (columns < N)
        total = _sum_of(x_rows + columns * x_strides[1], residual_rows + columns * residual_strides[1], kept, ADD)
        squares += total * total
        if ADD:
            tl.store(total_rows + columns * y_strides[1], total.to(total_ptr.dtype.element_ty), mask=kept)
    root = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]

    for start in range(0, length, BLOCK_N):
        columns = start + block
        kept = (rows < R) & (columns < N)
        if not SINGLE_PASS:
            total = _sum_of(x_rows + columns * x_strides[1], residual_rows + columns * residual_strides[1], kept, ADD)
        weight = tl.load(weight_ptr + columns * stride_weight, mask=columns < N, other=0.0).to(tl.float32) + offset
        y = total * root * weight
        tl.store(y_rows + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=kept)


@custom_op("assay::rmsnorm", lambda x, *rest: x.new_empty(x.shape))
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        strides = (x.stride(), x.stride(), *weight.stride(), y.stride())
        _rmsnorm_kernel[grid](x, x, weight, y, y, *x.shape, *strides, eps, offset, ADD=False)
    return y


differentiate(
    "assay::rmsnorm",
    lambda saved, dy: norm_gradients(saved.x, saved.weight, dy, saved.eps, saved.offset, saved.needs.weight),
    saves="x weight",
)


@custom_op("assay::add_rmsnorm", lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape)))
def _add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, total = x.new_empty(x.shape), x.new_empty(x.shape)
    if x.numel():
        strides = (x.stride(), residual.stride(), *weight.stride(), y.stride())
        _rmsnorm_kernel[grid](x, residual, weight, y, total, *x.shape, *strides, eps, 0.0, ADD=True)
    return y, total


def _added_gradients(saved: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight = norm_gradients(saved.last_result, saved.weight, dy, saved.eps, 0.0, saved.needs.weight)
    dx = dx + dtotal
    return dx, dx.to(saved.residual.dtype), dweight


differentiate("assay::add_rmsnorm", _added_gradients, saves="residual weight last_result")


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) of each row of x[R,N], computed in float32; weight[N].

    Both are float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"))
    check_numbers(eps=eps, minimum=0.0)
    check_numbers(offset=offset)
    return _rmsnorm(x, weight, eps, offset)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The RMS norm of x + residual (both [R,N]) times weight[N], and x + residual itself; computed in float32.

    The norm is that of the sum in float32, before it is rounded; gradients are taken at the rounded sum. Each is
    float32, bfloat16 or float16, not necessarily the same; the results have x's dtype. Raises TypeError or ValueError,
    naming the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), residual=(residual, FLOATING, "R N"), weight=(weight, FLOATING, "N"))
    check_numbers(eps=eps, minimum=0.0)
    return _add_rmsnorm(x, residual, weight, eps)
