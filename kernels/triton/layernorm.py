"""Layer norm over the rows of a matrix, in two passes: the mean, then the squares of what deviates from it.

E[x^2] - E[x]^2 would need one pass and lose every digit where the mean is large against the spread. Rows that fit into
one block stay in registers between the passes; longer ones are read three times.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_numbers
from assay.kernels.triton.layernorm_backward import norm_gradients
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _layernorm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    R,
    N,
    x_strides,
    stride_weight,
    stride_bias,
    y_strides,
    eps,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    block = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    x_rows = x_ptr + rows * x_strides[0]
    y_rows = y_ptr + rows * y_strides[0]

    length = BLOCK_N if SINGLE_PASS else N  # loops of one turn, known to the compiler
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    total = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        kept = (rows < R) & (columns < N)
        x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
        total += x
    mean = (tl.sum(total, axis=1) / N)[:, None]

    squares = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        if not SINGLE_PASS:
            kept = (rows < R) & (columns < N)
            x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
        centred = tl.where(columns < N, x - mean, 0.0)
        squares += centred * centred
    root = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]

    for start in range(0, length, BLOCK_N):
        columns = start + block
        kept = (rows < R) & (columns < N)
        if not SINGLE_PASS:
            x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns * stride_weight, mask=columns < N, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + columns * stride_bias, mask=columns < N, other=0.0).to(tl.float32)
        y = (x - mean) * root * weight + bias
        tl.store(y_rows + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=kept)


@custom_op("assay::layernorm", lambda x, *rest: x.new_empty(x.shape))
def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        strides = (x.stride(), *weight.stride(), *bias.stride(), y.stride())
        _layernorm_kernel[grid](x, weight, bias, y, *x.shape, *strides, eps)
    return y


differentiate(
    "assay::layernorm",
    lambda saved, dy: norm_gradients(
        *(saved.x, saved.weight, dy, saved.eps, saved.bias.dtype), saved.needs.weight or saved.needs.bias
    ),
    saves="x weight bias",
)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias of each row of x[R,N], computed in float32; weight[N], bias[N].

    The variance is the biased one. Each is float32, bfloat16 or float16, not necessarily the same; the result has x's
    dtype. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"), bias=(bias, FLOATING, "N"))
    check_numbers(eps=eps, minimum=0.0)
    return _layernorm(x, weight, bias, eps)
