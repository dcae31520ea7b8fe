"""The gradients of RMS norm.

With r = 1 / sqrt(mean x^2 + eps), h = x r and g = dy (weight + offset): dx = r (g - h mean(g h)), of each row, and
dweight = sum dy h over the rows (`columns`). Rows that fit into one block are read once, longer ones three times and
once more for dweight.
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
def _grown(dy_ptrs, weight_ptrs, offset, kept, in_columns):
    weight = tl.load(weight_ptrs, mask=in_columns, other=0.0).to(tl.float32) + offset
    dy = tl.load(dy_ptrs, mask=kept, other=0.0).to(tl.float32)
    return dy, dy * weight


@triton.autotune(configs=CONFIGS, key=["N"], prune_configs_by=SUMMED)
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R", "run"])
def _rmsnorm_backward_kernel(
    x_ptr,
    weight_ptr,
    dy_ptr,
    dx_ptr,
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
    offset,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """dx, and of rows of one block this run's part of dweight, of others each row's root."""
    block = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    length = BLOCK_N if SINGLE_PASS else N  # loops of one turn, known to the compiler
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    dy = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    grown = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    part = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    height = ROWS_PER_PROGRAM if parts_ptr is None else run
    for first in range(0, height, ROWS_PER_PROGRAM):
        rows = (tl.program_id(0).to(tl.int64) * height + first + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
        x_rows = x_ptr + rows * x_strides[0]
        dy_rows = dy_ptr + rows * dy_strides[0]
        dx_rows = dx_ptr + rows * dx_strides[0]

        squares = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        for start in range(0, length, BLOCK_N):
            columns = start + block
            x = tl.load(x_rows + columns * x_strides[1], mask=(rows < R) & (columns < N), other=0.0).to(tl.float32)
            squares += x * x
        root = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]
        if root_ptr is not None:
            tl.store(root_ptr + rows, root, mask=rows < R)

        inner = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        for start in range(0, length, BLOCK_N):
            columns = start + block
            kept = (rows < R) & (columns < N)
            if not SINGLE_PASS:
                x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
            weight_ptrs = weight_ptr + columns * stride_weight
            dy, grown = _grown(dy_rows + columns * dy_strides[1], weight_ptrs, offset, kept, columns < N)
            inner += grown * (x * root)
        mean = (tl.sum(inner, axis=1) / N)[:, None]

        for start in range(0, length, BLOCK_N):
            columns = start + block
            kept = (rows < R) & (columns < N)
            if not SINGLE_PASS:
                x = tl.load(x_rows + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
                weight_ptrs = weight_ptr + columns * stride_weight
                _, grown = _grown(dy_rows + columns * dy_strides[1], weight_ptrs, offset, kept, columns < N)
            dx = (grown - x * root * mean) * root
            tl.store(dx_rows + columns * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=kept)
        if parts_ptr is not None:
            part += tl.where(rows < R, dy * (x * root), 0.0)
    if parts_ptr is not None:
        into = parts_ptr + tl.program_id(0).to(tl.int64) * N + block
        tl.store(into, tl.sum(part, axis=0)[None, :], mask=block < N)


def _results(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, offset: float, of_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if of_weight else 0)


@custom_op("assay::rmsnorm_backward", _results)
def norm_gradients(
    x: Tensor, weight: Tensor, dy: Tensor, eps: float, offset: float, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """dx and, if it is asked for, dweight of `assay::rmsnorm`, from the gradient of its result."""
    dx, dweight = _results(x, weight, dy, eps, offset, of_weight)
    run = rows_of_part(x) if of_weight else 0
    parts = x.new_empty((triton.cdiv(len(x), run), x.shape[1]), dtype=torch.float32) if run else None
    root = x.new_empty(len(x), dtype=torch.float32) if of_weight and parts is None else None
    if x.numel():
        strides = (x.stride(), *weight.stride(), dy.stride(), dx.stride())
        _rmsnorm_backward_kernel[lambda meta: (triton.cdiv(len(x), run or meta["ROWS_PER_PROGRAM"]),)](
            x, weight, dy, dx, root, parts, *x.shape, run, *strides, eps, offset
        )
    if parts is not None:
        add_parts(parts, dweight)
    elif root is not None:
        column_sums(x, dy, None, root, dweight)
    return dx, dweight


def rmsnorm_backward(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """dx[R,N] and dweight[N] of `rmsnorm`'s x[R,N] and weight[N], from the gradient dy[R,N] of its result.

    Computed in float32 from x. Each is float32, bfloat16 or float16, not necessarily the same; dx has x's dtype,
    dweight that of weight. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(x=(x, FLOATING, "R N"), weight=(weight, FLOATING, "N"), dy=(dy, FLOATING, "R N"))
    check_numbers(eps=eps, minimum=0.0)
    check_numbers(offset=offset)
    found: tuple[Tensor, Tensor] = norm_gradients(x, weight, dy, eps, offset, True)
    return found
