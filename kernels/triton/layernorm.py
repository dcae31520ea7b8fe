"""Layer norm over the rows of a matrix, and its gradients.

The variance takes a second pass over the row: E[x^2] - E[x]^2 would need one, but cancels where the mean is large
against the standard deviation. A row that fits into one block stays in registers; a longer one is read three times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_numbers
from assay.kernels.triton.norm_backward import norm_backward
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed
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

    length = BLOCK_N if SINGLE_PASS else N  # one iteration, known at compile time: x stays in registers
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    total = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        mask = (rows < R) & (columns < N)
        x = tl.load(x_rows + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
        total += x
    mean = (tl.sum(total, axis=1) / N)[:, None]

    squares = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_N):
        columns = start + block
        if not SINGLE_PASS:
            mask = (rows < R) & (columns < N)
            x = tl.load(x_rows + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
        centred = tl.where(columns < N, x - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]

    for start in range(0, length, BLOCK_N):
        columns = start + block
        mask = (rows < R) & (columns < N)
        if not SINGLE_PASS:
            x = tl.load(x_rows + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns * stride_weight, mask=columns < N, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + columns * stride_bias, mask=columns < N, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * weight + bias
        tl.store(y_rows + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=mask)


@custom_op("assay::layernorm", lambda x, *rest: x.new_empty(x.shape))
def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    if x.numel():
        strides = (x.stride(), *weight.stride(), *bias.stride(), y.stride())
        _layernorm_kernel[grid](x, weight, bias, y, *x.shape, *strides, eps)
    return y


def _empty_gradients(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, bias_dtype: torch.dtype, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = weight.shape if needs_weight else (0,)
    return x.new_empty(x.shape), weight.new_empty(shape), weight.new_empty(shape, dtype=bias_dtype)


@custom_op("assay::layernorm_backward", _empty_gradients)
def _layernorm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, bias_dtype: torch.dtype, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _empty_gradients(x, weight, dy, eps, bias_dtype, needs_weight)
    norm_backward(x, weight, dy, dx, (dweight, dbias) if needs_weight else (), eps=eps, has_mean=True)
    return dx, dweight, dbias


differentiate(
    "assay::layernorm",
    lambda saved, dy: _layernorm_backward(
        *(saved.x, saved.weight, dy, saved.eps, saved.bias.dtype), saved.needs.weight or saved.needs.bias
    ),
    saves="x weight bias",
)


@replayed
def layernorm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias of each row of x[R,N]; weight[N], bias[N].

    Computed in float32, with the biased variance. The tensors are float32, bfloat16 or float16, not necessarily the
    same; the result has x's dtype. Raises TypeError or ValueError, naming the argument, for another dtype, shape or
    device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"), bias=(bias, FLOATING, "N"))
    check_numbers(eps=eps, minimum=0.0)
    return _layernorm(x, weight, bias, eps)


@replayed
def layernorm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5, bias_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx[R,N], dweight[N] and dbias[N] of `layernorm`, from its x[R,N] and weight[N] and the gradient dy[R,N].

    Computed in float32. The tensors are float32, bfloat16 or float16, not necessarily the same; dx has x's dtype,
    dweight that of weight, dbias bias_dtype or that of weight too. Raises TypeError or ValueError, naming the argument,
    for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"), dy=(dy, FLOATING, "R N"))
    check_numbers(eps=eps, minimum=0.0)
    if bias_dtype is not None and bias_dtype not in FLOATING:
        raise TypeError(f"bias_dtype: expected float32, bfloat16 or float16, got {bias_dtype}")
    gradients: tuple[Tensor, Tensor, Tensor] = _layernorm_backward(x, weight, dy, eps, bias_dtype or weight.dtype, True)
    return gradients
