"""The gradients of softmax, y (dy - sum y dy), and of log-softmax, dy - exp(y) sum dy, of each row.

Rows that fit into one block are read once, longer ones twice.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid


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
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    block = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    y_rows = y_ptr + rows * y_strides[0]
    dy_rows = dy_ptr + rows * dy_strides[0]
    dx_rows = dx_ptr + rows * dx_strides[0]

    length = BLOCK_N if SINGLE_PASS else N  # loops of one turn, known to the compiler
    y = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    dy = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    products = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        kept = (rows < R) & (columns < N)
        y = tl.load(y_rows + columns * y_strides[1], mask=kept, other=0.0).to(tl.float32)
        dy = tl.load(dy_rows + columns * dy_strides[1], mask=kept, other=0.0).to(tl.float32)
        products += dy if LOG else y * dy
    total = tl.sum(products, axis=1)[:, None]

    for start in range(0, length, BLOCK_N):
        columns = start + block
        kept = (rows < R) & (columns < N)
        if not SINGLE_PASS:
            y = tl.load(y_rows + columns * y_strides[1], mask=kept, other=0.0).to(tl.float32)
            dy = tl.load(dy_rows + columns * dy_strides[1], mask=kept, other=0.0).to(tl.float32)
        dx = dy - tl.exp(y) * total if LOG else y * (dy - total)
        tl.store(dx_rows + columns * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=kept)


def _launch(y: Tensor, dy: Tensor, log: bool) -> Tensor:
    dx = y.new_empty(y.shape)
    if y.numel():
        _softmax_backward_kernel[grid](y, dy, dx, *y.shape, y.stride(), dy.stride(), dx.stride(), LOG=log)
    return dx


@custom_op("assay::softmax_backward", lambda y, dy: y.new_empty(y.shape))
def _softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    return _launch(y, dy, log=False)


@custom_op("assay::log_softmax_backward", lambda y, dy: y.new_empty(y.shape))
def _log_softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    return _launch(y, dy, log=True)


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """dx[R,N] from a softmax's result y[R,N] and the gradient dy[R,N] of that, computed in float32.

    Each is float32, bfloat16 or float16, not necessarily the same; dx has y's dtype. Raises TypeError or ValueError,
    naming the argument, for another dtype, shape or device.
    """
    check(y=(y, FLOATING, "R N"), dy=(dy, FLOATING, "R N"))
    return _softmax_backward(y, dy)


def log_softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """dx[R,N] from a log-softmax's result y[R,N] and the gradient dy[R,N] of that, computed in float32.

    Dtypes and errors as in `softmax_backward`.
    """
    check(y=(y, FLOATING, "R N"), dy=(dy, FLOATING, "R N"))
    return _log_softmax_backward(y, dy)
