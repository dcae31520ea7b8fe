"""Gradients of what a norm multiplies and adds: sums over the rows of a matrix, for each column.

Rows are divided into parts of a fixed number. One program sums a part, another adds the parts up, always in one order:
there are no atomics, and the same call gives the same bits. How many parts there are follows from the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128
_BLOCK_R = 32
_BLOCK_N = 128


@triton.jit(do_not_specialize=["R"])
def _part_kernel(
    x_ptr,
    dy_ptr,
    mean_ptr,
    root_ptr,
    parts_ptr,
    R,
    N,
    x_strides,
    dy_strides,
    parts_strides,
    CENTRED: tl.constexpr,  # with it a mean is subtracted, and dy alone is summed as well
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = (tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    part = tl.program_id(0).to(tl.int64)
    weight = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    bias = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for start in range(0, ROWS, BLOCK_R):
        rows = part * ROWS + start + tl.arange(0, BLOCK_R)
        kept = (rows[:, None] < R) & (columns < N)
        x = tl.load(x_ptr + rows[:, None] * x_strides[0] + columns * x_strides[1], mask=kept, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_strides[0] + columns * dy_strides[1], mask=kept, other=0.0)
        dy = dy.to(tl.float32)
        if CENTRED:
            x -= tl.load(mean_ptr + rows, mask=rows < R, other=0.0)[:, None]
            bias += dy
        weight += dy * (x * tl.load(root_ptr + rows, mask=rows < R, other=0.0)[:, None])
    into = parts_ptr + part * parts_strides[1] + columns
    tl.store(into, tl.sum(weight, axis=0)[None, :], mask=columns < N)
    if CENTRED:
        tl.store(into + parts_strides[0], tl.sum(bias, axis=0)[None, :], mask=columns < N)


@triton.jit(do_not_specialize=["PARTS"])
def _total_kernel(parts_ptr, y_ptr, PARTS, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, PARTS, BLOCK_P):
        parts = (start + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        total += tl.load(parts_ptr + parts * N + columns, mask=(parts < PARTS) & (columns < N), other=0.0)
    y = tl.sum(total, axis=0)[None, :]
    tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


def column_sums(x: Tensor, dy: Tensor, mean: Tensor | None, root: Tensor, *into: Tensor) -> None:
    """Write into the first of ``into`` [N] the sum over rows of dy (x - mean) root, into a second that of dy.

    x[R,N] and dy[R,N] in any dtype and strides; mean and root float32[R]. A second takes a mean.
    """
    rows, columns = x.shape
    if not columns:
        return
    count = triton.cdiv(rows, _ROWS)
    parts = torch.empty((len(into), count, columns), dtype=torch.float32, device=x.device)
    if count:
        grid = (count, triton.cdiv(columns, _BLOCK_N))  # its first extent alone may exceed 65,535
        _part_kernel[grid](
            *(x, dy, root if mean is None else mean, root, parts, rows, columns),
            *(x.stride(), dy.stride(), parts.stride()),
            CENTRED=mean is not None,
            ROWS=_ROWS,
            BLOCK_R=_BLOCK_R,
            BLOCK_N=_BLOCK_N,
        )
    for part, y in zip(parts, into, strict=True):
        add_parts(part, y)


def add_parts(parts: Tensor, y: Tensor) -> None:
    """Write into y, contiguous, of N elements in any dtype, the sums of the columns of parts float32[P,N]."""
    count, columns = parts.shape
    if columns:
        grid = (triton.cdiv(columns, _BLOCK_N),)
        _total_kernel[grid](parts, y, count, columns, BLOCK_P=_BLOCK_R, BLOCK_N=_BLOCK_N)
