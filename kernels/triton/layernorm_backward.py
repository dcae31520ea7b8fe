"""The gradients of layer norm.

With r = 1 / sqrt(variance + eps), h = (x - mean) r and g = dy weight: dx = r (g - mean g - h mean(g h)) of each row;
dweight = sum dy h and dbias = sum dy over the rows (`columns`). Rows that fit into one block are read once, longer ones
four times and once more for dweight and dbias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_numbers
from assay.kernels.triton.columns import SUMMED, add_parts, column_sums, rows_of_part
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.rows import CONFIGS, HEURISTICS


@triton.jit
def _grown(dy_ptrs, weight_ptrs, kept, in_columns):
    weight = tl.load(weight_ptrs, mask=in_columns, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptrs, mask=kept, other=0.0).to(tl.float32)
    return dy, dy * weight


@triton.autotune(configs=CONFIGS, key=["N"], prune_configs_by=SUMMED)
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R", "run"])
def _layernorm_backward_kernel(
    x_ptr,
    weight_ptr,
    dy_ptr,
    dx_ptr,
    mean_ptr,
    root_ptr,
    parts_ptr,
    R,
    N,
    run,
    x_strides,
    stride_weight,
    dy_strides,
    dx_strides,
    eps,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """dx, and of rows of one block this run's parts of dweight and dbias, of others each row's mean and root."""
    block = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    length = BLOCK_N if SINGLE_PASS else N  # loops of one turn, known to the compiler
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    dy = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    grown = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    of_weight = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    of_bias = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    height = ROWS_PER_PROGRAM if parts_ptr is None else run
    for first_row in range(0, height, ROWS_PER_PROGRAM):
        rows = (tl.program_id(0).to(tl.int64) * height + first_row + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
        x_rows = x_ptr + rows * x_strides[0]
        dy_rows = dy_ptr + rows * dy_strides[0]
        dx_rows = dx_ptr + rows * dx_strides[0]

        total = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        for start in range(0, length, BLOCK_N):
            columns = start + block
            x = tl.load(x_rows + columns * x_strides[1], mask=(rows < R) & (columns < N), other=0.0).to(tl.float32)
            total += x
        mean = (tl.sum(total, axis=1) / N)[:, None]
        if mean_ptr is not None:
            tl.store(mean_ptr + rows, mean, mask=rows < R)

        squares = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        for start in range(0, length, BLOCK_N):
            columns = start + block
            if not SINGLE_PASS:
                x = tl.load(x_rows + columns * x_strides[1], mask=(rows < R) & (columns < N), other=0.0).to(tl.float32)
            centred = tl.where(columns < N, x - mean, 0.0)
            squares += centred * centred
        root = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]
        if root_ptr is not None:
            tl.store(root_ptr + rows, root, mask=rows < R)

        sums = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        inner = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        for start in range(0, length, BLOCK_N):
            columns = start + block
            kept = (rows < R) & (columns < N)
            if not SINGLE_PASS:
                x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
            weight_ptrs = weight_ptr + columns * stride_weight
            dy, grown = _grown(dy_rows + columns * dy_strides[1], weight_ptrs, kept, columns < N)
            sums += grown
            inner += tl.where(columns < N, grown * ((x - mean) * root), 0.0)
        first = (tl.sum(sums, axis=1) / N)[:, None]
        second = (tl.sum(inner, axis=1) / N)[:, None]

        for start in range(0, length, BLOCK_N):
            columns = start + block
            kept = (rows < R) & (columns < N)
            if not SINGLE_PASS:
                x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
                weight_ptrs = weight_ptr + columns * stride_weight
                _, grown = _grown(dy_rows + columns * dy_strides[1], weight_ptrs, kept, columns < N)
            dx = ((grown - first) - (x - mean) * root * second) * root
            tl.store(dx_rows + columns * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=kept)
        if parts_ptr is not None:
            of_weight += tl.where(rows < R, dy * ((x - mean) * root), 0.0)
            of_bias += dy
    if parts_ptr is not None:
        into = parts_ptr + tl.program_id(0).to(tl.int64) * N + block
        tl.store(into, tl.sum(of_weight, axis=0)[None, :], mask=block < N)
        tl.store(into + tl.num_programs(0).to(tl.int64) * N, tl.sum(of_bias, axis=0)[None, :], mask=block < N)


def _results(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, bias_dtype: torch.dtype, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = weight.shape if of_weight else (0,)
    return x.new_empty(x.shape), weight.new_empty(shape), weight.new_empty(shape, dtype=bias_dtype)


@custom_op("assay::layernorm_backward", _results)
def norm_gradients(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, bias_dtype: torch.dtype, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx and, if those are asked for, dweight and dbias of `assay::layernorm`, from the gradient of its result."""
    dx, dweight, dbias = _results(x, weight, dy, eps, bias_dtype, of_weight)
    run = rows_of_part(x) if of_weight else 0
    parts = x.new_empty((2, triton.cdiv(len(x), run), x.shape[1]), dtype=torch.float32) if run else None
    both = x.new_empty((2, len(x)), dtype=torch.float32) if of_weight and parts is None else None
    mean, root = (None, None) if both is None else both
    if x.numel():
        strides = (x.stride(), *weight.stride(), dy.stride(), dx.stride())
        _layernorm_backward_kernel[lambda meta: (triton.cdiv(len(x), run or meta["ROWS_PER_PROGRAM"]),)](
            x, weight, dy, dx, mean, root, parts, *x.shape, run, *strides, eps
        )
    if parts is not None:
        for part, total in zip(parts, (dweight, dbias), strict=True):
            add_parts(part, total)
    elif mean is not None and root is not None:
        column_sums(x, dy, mean, root, dweight, dbias)
    return dx, dweight, dbias


def layernorm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5, bias_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx[R,N], dweight[N] and dbias[N] of `layernorm`'s x[R,N] and weight[N], from the gradient dy[R,N] of its result.

    Computed in float32 from x. Each is float32, bfloat16 or float16, not necessarily the same; dx has x's dtype,
    dweight that of weight, dbias bias_dtype or that of weight too. Raises TypeError or ValueError, naming the argument,
    for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"), dy=(dy, FLOATING, "R N"))
    check_numbers(eps=eps, minimum=0.0)
    if bias_dtype is not None and bias_dtype not in FLOATING:
        raise TypeError(f"bias_dtype: expected float32, bfloat16 or float16, got {bias_dtype}")
    found: tuple[Tensor, Tensor, Tensor] = norm_gradients(x, weight, dy, eps, bias_dtype or weight.dtype, True)
    return found
