"""RMS norm over the rows of a matrix, alone or of the sum of two matrices, which is returned too; and its gradients.

A row that fits into one block is read once; a longer one twice, the first time for the sum of squares.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_numbers
from assay.kernels.triton.norm_backward import norm_backward
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid


@triton.jit
def _load_sum(x_ptrs, residual_ptrs, mask, ADD: tl.constexpr):
    total = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
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

    length = BLOCK_N if SINGLE_PASS else N  # one iteration, known at compile time: the sum stays in registers
    total = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        mask = (rows < R) & (columns < N)
        total = _load_sum(x_rows + columns * x_strides[1], residual_rows + columns * residual_strides[1], mask, ADD)
        squares += total * total
        if ADD:
            tl.store(total_rows + columns * y_strides[1], total.to(total_ptr.dtype.element_ty), mask=mask)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]

    for start in range(0, length, BLOCK_N):
        columns = start + block
        mask = (rows < R) & (columns < N)
        if not SINGLE_PASS:
            total = _load_sum(x_rows + columns * x_strides[1], residual_rows + columns * residual_strides[1], mask, ADD)
        weight = tl.load(weight_ptr + columns * stride_weight, mask=columns < N, other=0.0).to(tl.float32) + offset
        y = total * rstd * weight
        tl.store(y_rows + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=mask)


@custom_op("assay::rmsnorm", lambda x, *rest: x.new_empty(x.shape))
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        strides = (x.stride(), x.stride(), *weight.stride(), y.stride())
        _rmsnorm_kernel[grid](x, x, weight, y, y, *x.shape, *strides, eps, offset, ADD=False)
    return y


@custom_op("assay::add_rmsnorm", lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape)))
def _add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, total = x.new_empty(x.shape), x.new_empty(x.shape)
    if x.numel():
        strides = (x.stride(), residual.stride(), *weight.stride(), y.stride())
        _rmsnorm_kernel[grid](x, residual, weight, y, total, *x.shape, *strides, eps, 0.0, ADD=True)
    return y, total


def _empty_gradients(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, offset: float, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if needs_weight else 0)


@custom_op("assay::rmsnorm_backward", _empty_gradients)
def _rmsnorm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, offset: float, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    dx, dweight = _empty_gradients(x, weight, dy, eps, offset, needs_weight)
    norm_backward(x, weight, dy, dx, (dweight,) if needs_weight else (), eps=eps, offset=offset, has_mean=False)
    return dx, dweight


def _add_rmsnorm_backward(saved: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight = _rmsnorm_backward(saved.last_result, saved.weight, dy, saved.eps, 0.0, saved.needs.weight)
    dx = dx + dtotal
    return dx, dx.to(saved.residual.dtype), dweight


differentiate(
    "assay::rmsnorm",
    lambda saved, dy: _rmsnorm_backward(saved.x, saved.weight, dy, saved.eps, saved.offset, saved.needs.weight),
    saves="x weight",
)
differentiate("assay::add_rmsnorm", _add_rmsnorm_backward, saves="residual weight last_result")


@replayed
def rmsnorm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (weight + offset) of each row of x[R,N], computed in float32; weight[N].

    Both are float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"))
    check_numbers(eps=eps, minimum=0.0)
    check_numbers(offset=offset)
    return _rmsnorm(x, weight, eps, offset)


@replayed
def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x + residual (both [R,N]) times weight[N], and x + residual itself; computed in float32.

    The sum is normalised before it is rounded; gradients are taken at the rounded sum. The tensors are float32,
    bfloat16 or float16, not necessarily the same; the results have x's dtype. Raises TypeError or ValueError, naming
    the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), residual=(residual, FLOATING, "R N"), weight=(weight, FLOATING, "N"))
    check_numbers(eps=eps, minimum=0.0)
    return _add_rmsnorm(x, residual, weight, eps)


@replayed
def rmsnorm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return dx[R,N] and dweight[N] of `rmsnorm`, from its x[R,N] and weight[N] and the gradient dy[R,N] of its result.

    Computed in float32. The tensors are float32, bfloat16 or float16, not necessarily the same; dx has x's dtype,
    dweight that of weight. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"), dy=(dy, FLOATING, "R N"))
    check_numbers(eps=eps, minimum=0.0)
    check_numbers(offset=offset)
    gradients: tuple[Tensor, Tensor] = _rmsnorm_backward(x, weight, dy, eps, offset, True)
    return gradients
