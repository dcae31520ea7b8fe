"""Softmax and log-softmax over the rows of a matrix, and their gradients.

A row that fits into one block is read once (SINGLE_PASS). A longer one is read twice: the forward pass first keeps a
running maximum and a sum of exponentials (`online_softmax`), the backward pass first sums y dy.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.online_softmax import finite_shift
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _softmax_kernel(
    x_ptr,
    y_ptr,
    R,
    N,
    x_strides,
    y_strides,
    LOG: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    x_rows = x_ptr + rows[:, None] * x_strides[0]
    y_rows = y_ptr + rows[:, None] * y_strides[0]
    mask_r = rows[:, None] < R

    if SINGLE_PASS:
        mask = mask_r & (columns < N)
        x = tl.load(x_rows + columns * x_strides[1], mask=mask, other=-float("inf")).to(tl.float32)
        shifted = x - tl.max(x, axis=1)[:, None]
        p = tl.exp(shifted)
        l_i = tl.sum(p, axis=1)[:, None]
        y = shifted - tl.log(l_i) if LOG else p / l_i
        tl.store(y_rows + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        m_i = tl.full([ROWS_PER_PROGRAM], -float("inf"), tl.float32)
        l_i = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
        for start in range(0, N, BLOCK_N):
            mask = mask_r & (start + columns < N)
            x = tl.load(x_rows + (start + columns) * x_strides[1], mask=mask, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m_i, tl.max(x, axis=1))
            shift = finite_shift(m_new)
            l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
            m_i = m_new
        for start in range(0, N, BLOCK_N):
            mask = mask_r & (start + columns < N)
            x = tl.load(x_rows + (start + columns) * x_strides[1], mask=mask, other=-float("inf")).to(tl.float32)
            shifted = x - m_i[:, None]
            y = shifted - tl.log(l_i)[:, None] if LOG else tl.exp(shifted) / l_i[:, None]
            tl.store(y_rows + (start + columns) * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _softmax_backward_kernel(
    y_ptr,
    dy_ptr,
    dx_ptr,
    R,
    N,
    y_strides,
    dy_strides,
    dx_strides,
    LOG: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """dx = y (dy - sum(y dy)) of a softmax's y, dx = dy - exp(y) sum(dy) of a log-softmax's (LOG)."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    block = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    y_rows = y_ptr + rows * y_strides[0]
    dy_rows = dy_ptr + rows * dy_strides[0]
    dx_rows = dx_ptr + rows * dx_strides[0]

    length = BLOCK_N if SINGLE_PASS else N  # one iteration, known at compile time: y and dy stay in registers
    y = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    dy = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    products = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        mask = (rows < R) & (columns < N)
        y = tl.load(y_rows + columns * y_strides[1], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_rows + columns * dy_strides[1], mask=mask, other=0.0).to(tl.float32)
        products += dy if LOG else y * dy
    total = tl.sum(products, axis=1)[:, None]

    for start in range(0, length, BLOCK_N):
        columns = start + block
        mask = (rows < R) & (columns < N)
        if not SINGLE_PASS:
            y = tl.load(y_rows + columns * y_strides[1], mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_rows + columns * dy_strides[1], mask=mask, other=0.0).to(tl.float32)
        dx = dy - tl.exp(y) * total if LOG else y * (dy - total)
        tl.store(dx_rows + columns * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _forward(x: Tensor, log: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        _softmax_kernel[grid](x, y, *x.shape, x.stride(), y.stride(), LOG=log)
    return y


def _backward(y: Tensor, dy: Tensor, log: bool) -> Tensor:
    dx = y.new_empty(y.shape)
    if y.numel():
        _softmax_backward_kernel[grid](y, dy, dx, *y.shape, y.stride(), dy.stride(), dx.stride(), LOG=log)
    return dx


@custom_op("assay::softmax", lambda x: x.new_empty(x.shape))
def _softmax(x: Tensor) -> Tensor:
    return _forward(x, log=False)


@custom_op("assay::log_softmax", lambda x: x.new_empty(x.shape))
def _log_softmax(x: Tensor) -> Tensor:
    return _forward(x, log=True)


@custom_op("assay::softmax_backward", lambda y, dy: y.new_empty(y.shape))
def _softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    return _backward(y, dy, log=False)


@custom_op("assay::log_softmax_backward", lambda y, dy: y.new_empty(y.shape))
def _log_softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    return _backward(y, dy, log=True)


differentiate("assay::softmax", lambda saved, dy: _softmax_backward(saved.result, dy), saves="result")
differentiate("assay::log_softmax", lambda saved, dy: _log_softmax_backward(saved.result, dy), saves="result")


@replayed
def softmax(x: Tensor) -> Tensor:
    """Return exp(x) / sum(exp(x)) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or number of dimensions.
    """
    check(x=(x, FLOATING, "R N"))
    return _softmax(x)


@replayed
def log_softmax(x: Tensor) -> Tensor:
    """Return x - log(sum(exp(x))) of each row of x[R,N], computed in float32; dtypes and errors as in `softmax`."""
    check(x=(x, FLOATING, "R N"))
    return _log_softmax(x)


@replayed
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """Return dx[R,N] from the result y[R,N] of a softmax and its gradient dy[R,N], computed in float32.

    y and dy are float32, bfloat16 or float16, not necessarily the same; dx has y's dtype. Raises TypeError or
    ValueError, naming the argument, for another dtype, shape or device.
    """
    check(y=(y, FLOATING, "R N"), dy=(dy, FLOATING, "R N"))
    return _softmax_backward(y, dy)


@replayed
def log_softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """Return dx[R,N] from the result y[R,N] of a log-softmax and its gradient dy[R,N]; otherwise as
    `softmax_backward`."""
    check(y=(y, FLOATING, "R N"), dy=(dy, FLOATING, "R N"))
    return _log_softmax_backward(y, dy)
