"""Softmax and log-softmax over the rows of a matrix.

Rows that fit into one block are read once; longer ones twice, the first time for the running maximum and the sum of
exponentials (`online_softmax`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.online_softmax import finite_shift
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid
from assay.kernels.triton.softmax_backward import log_softmax_backward, softmax_backward


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
    inside = rows[:, None] < R

    if SINGLE_PASS:
        kept = inside & (columns < N)
        x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=-float("inf")).to(tl.float32)
        shifted = x - tl.max(x, axis=1)[:, None]
        weights = tl.exp(shifted)
        l_i = tl.sum(weights, axis=1)[:, None]
        y = shifted - tl.log(l_i) if LOG else weights / l_i
        tl.store(y_rows + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=kept)
    else:
        m_i = tl.full([ROWS_PER_PROGRAM], -float("inf"), tl.float32)
        l_i = tl.zeros([ROWS_PER_PROGRAM], tl.float32)
        for start in range(0, N, BLOCK_N):
            kept = inside & (start + columns < N)
            x = tl.load(x_rows + (start + columns) * x_strides[1], mask=kept, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m_i, tl.max(x, axis=1))
            shift = finite_shift(m_new)
            l_i = l_i * tl.exp(m_i - shift) + tl.sum(tl.exp(x - shift[:, None]), axis=1)
            m_i = m_new
        for start in range(0, N, BLOCK_N):
            kept = inside & (start + columns < N)
            x = tl.load(x_rows + (start + columns) * x_strides[1], mask=kept, other=-float("inf")).to(tl.float32)
            shifted = x - m_i[:, None]
            y = shifted - tl.log(l_i)[:, None] if LOG else tl.exp(shifted) / l_i[:, None]
            tl.store(y_rows + (start + columns) * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=kept)


def _launch(x: Tensor, log: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        _softmax_kernel[grid](x, y, *x.shape, x.stride(), y.stride(), LOG=log)
    return y


@custom_op("assay::softmax", lambda x: x.new_empty(x.shape))
def _softmax(x: Tensor) -> Tensor:
    return _launch(x, log=False)


@custom_op("assay::log_softmax", lambda x: x.new_empty(x.shape))
def _log_softmax(x: Tensor) -> Tensor:
    return _launch(x, log=True)


differentiate("assay::softmax", lambda saved, dy: softmax_backward(saved.result, dy), saves="result")
differentiate("assay::log_softmax", lambda saved, dy: log_softmax_backward(saved.result, dy), saves="result")


def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or another number of dimensions.
    """
    check(x=(x, FLOATING, "R N"))
    return _softmax(x)


def log_softmax(x: Tensor) -> Tensor:
    """x - log(sum(exp(x))) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or another number of dimensions.
    """
    check(x=(x, FLOATING, "R N"))
    return _log_softmax(x)
