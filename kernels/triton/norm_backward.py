"""The gradients of layer norm and RMS norm, from x (nothing is saved by the forward pass but x itself).

With x_hat = (x - mean) rstd, for RMS norm x rstd, and wdy = dy (weight + offset), for each row:

    dx = rstd (wdy - mean(wdy) - x_hat mean(wdy x_hat)), for RMS norm without mean(wdy)
    dweight = sum over rows of dy x_hat
    dbias = sum over rows of dy

The column sums dweight and dbias are split reductions without atomics. Where rows are short (`rows_per_partial`), the
kernel of dx takes several tiles of rows, one after another, and leaves their partial sums: x and dy are read once.
Where rows are long, it leaves each row's mean and rstd, and `_column_sums_kernel` reads x and dy again. Either way
`sum_partials` adds the partial sums. How rows are split depends on the shape alone, never on the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.reduction import sum_partials
from assay.kernels.triton.rows import CONFIGS, HEURISTICS

_MAX_COLUMNS = 8192  # of a tile whose threads have registers for partial sums, too
_MAX_PARTIALS = 512  # of short rows: more rows go into each beyond that
_ROWS = 128  # in a partial sum of long rows
_BLOCK_R = 32
_BLOCK_N = 128


def rows_per_partial(x: Tensor) -> int:
    """Return how many rows of x[R,N] go into one partial sum of the kernel of dx: whole tiles of any configuration.

    0 if rows are too long for that.
    """
    rows, columns = x.shape
    if columns > _MAX_COLUMNS:
        return 0
    largest_tile = _MAX_COLUMNS // int(triton.next_power_of_2(max(columns, 1)))
    return max(largest_tile, int(triton.next_power_of_2(max(triton.cdiv(rows, _MAX_PARTIALS), 1))))


def _prune_configs(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """Drop tiles that split a row, or leave no registers for partial sums, where the kernel of dx has to keep those."""
    if arguments["partials_ptr"] is None:
        return configs
    return [config for config in configs if arguments["N"] <= config.kwargs["BLOCK_N"] <= _MAX_COLUMNS]


@triton.jit
def _load_wdy(dy_ptrs, weight_ptrs, offset, mask, mask_n, HAS_MEAN: tl.constexpr):
    weight = tl.load(weight_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    if not HAS_MEAN:
        weight += offset
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    return dy, dy * weight


@triton.autotune(configs=CONFIGS, key=["N"], prune_configs_by={"early_config_prune": _prune_configs})
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R", "rows_per_partial"])
def _norm_backward_kernel(
    x_ptr,
    weight_ptr,
    dy_ptr,
    dx_ptr,
    mean_ptr,
    rstd_ptr,
    partials_ptr,
    R,
    N,
    rows_per_partial,
    x_strides,
    stride_weight,
    dy_strides,
    dx_strides,
    eps,
    offset,
    HAS_MEAN: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """dx, and the program's row of partials[1 or 2, programs, N] or, where that is None, mean[R] and rstd[R]."""
    block = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    length = BLOCK_N if SINGLE_PASS else N  # one iteration, known at compile time: the row stays in registers
    x = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    dy = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    wdy = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    dweight = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    dbias = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
    row_count = ROWS_PER_PROGRAM if partials_ptr is None else rows_per_partial
    for first_row in range(0, row_count, ROWS_PER_PROGRAM):
        rows = (tl.program_id(0).to(tl.int64) * row_count + first_row + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
        x_rows = x_ptr + rows * x_strides[0]
        dy_rows = dy_ptr + rows * dy_strides[0]
        dx_rows = dx_ptr + rows * dx_strides[0]

        if HAS_MEAN:
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
            if not (SINGLE_PASS and HAS_MEAN):
                x = tl.load(x_rows + columns * x_strides[1], mask=(rows < R) & (columns < N), other=0.0).to(tl.float32)
            centred = tl.where(columns < N, x - mean, 0.0) if HAS_MEAN else x
            squares += centred * centred
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]
        if rstd_ptr is not None:
            tl.store(rstd_ptr + rows, rstd, mask=rows < R)

        wdy_sum = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        wdy_x_hat_sum = tl.zeros([ROWS_PER_PROGRAM, BLOCK_N], tl.float32)
        for start in range(0, length, BLOCK_N):
            columns = start + block
            mask = (rows < R) & (columns < N)
            if not SINGLE_PASS:
                x = tl.load(x_rows + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
            weight_ptrs = weight_ptr + columns * stride_weight
            dy, wdy = _load_wdy(dy_rows + columns * dy_strides[1], weight_ptrs, offset, mask, columns < N, HAS_MEAN)
            if HAS_MEAN:
                wdy_sum += wdy
                wdy_x_hat_sum += tl.where(columns < N, wdy * ((x - mean) * rstd), 0.0)
            else:
                wdy_x_hat_sum += wdy * (x * rstd)
        wdy_mean = (tl.sum(wdy_sum, axis=1) / N)[:, None] if HAS_MEAN else 0.0
        wdy_x_hat_mean = (tl.sum(wdy_x_hat_sum, axis=1) / N)[:, None]

        for start in range(0, length, BLOCK_N):
            columns = start + block
            mask = (rows < R) & (columns < N)
            if not SINGLE_PASS:
                x = tl.load(x_rows + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
                weight_ptrs = weight_ptr + columns * stride_weight
                _, wdy = _load_wdy(dy_rows + columns * dy_strides[1], weight_ptrs, offset, mask, columns < N, HAS_MEAN)
            x_hat = (x - mean if HAS_MEAN else x) * rstd
            dx = ((wdy - wdy_mean if HAS_MEAN else wdy) - x_hat * wdy_x_hat_mean) * rstd
            tl.store(dx_rows + columns * dx_strides[1], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if partials_ptr is not None:  # a row beyond R may have an infinite rstd: 0 times that would be NaN
            dweight += tl.where(rows < R, dy * ((x - mean if HAS_MEAN else x) * rstd), 0.0)
            if HAS_MEAN:
                dbias += dy
    if partials_ptr is not None:
        partial_ptrs = partials_ptr + tl.program_id(0).to(tl.int64) * N + block
        tl.store(partial_ptrs, tl.sum(dweight, axis=0)[None, :], mask=block < N)
        if HAS_MEAN:
            dbias_ptrs = partial_ptrs + tl.num_programs(0).to(tl.int64) * N
            tl.store(dbias_ptrs, tl.sum(dbias, axis=0)[None, :], mask=block < N)


@triton.jit(do_not_specialize=["R"])
def _column_sums_kernel(
    x_ptr,
    dy_ptr,
    mean_ptr,
    rstd_ptr,
    partials_ptr,
    R,
    N,
    x_strides,
    dy_strides,
    partials_strides,
    HAS_MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The program's row of partials[1 or 2, cdiv(R, ROWS), N]: sums of dy x_hat and, with HAS_MEAN, of dy over ROWS."""
    columns = (tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    part = tl.program_id(0).to(tl.int64)
    dweight = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for start in range(0, ROWS, BLOCK_R):
        rows = part * ROWS + start + tl.arange(0, BLOCK_R)
        mask = (rows[:, None] < R) & (columns < N)
        x = tl.load(x_ptr + rows[:, None] * x_strides[0] + columns * x_strides[1], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_strides[0] + columns * dy_strides[1], mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        if HAS_MEAN:
            x -= tl.load(mean_ptr + rows, mask=rows < R, other=0.0)[:, None]
            dbias += dy
        dweight += dy * (x * tl.load(rstd_ptr + rows, mask=rows < R, other=0.0)[:, None])
    partial_ptrs = partials_ptr + part * partials_strides[1] + columns
    tl.store(partial_ptrs, tl.sum(dweight, axis=0)[None, :], mask=columns < N)
    if HAS_MEAN:
        tl.store(partial_ptrs + partials_strides[0], tl.sum(dbias, axis=0)[None, :], mask=columns < N)


def norm_backward(
    x: Tensor,
    weight: Tensor,
    dy: Tensor,
    dx: Tensor,
    column_sums: tuple[Tensor, ...],
    *,
    eps: float,
    offset: float = 0.0,
    has_mean: bool,
) -> None:
    """Write dx[R,N] and ``column_sums``: dweight[N] and, of a layer norm (``has_mean``), dbias[N]; or neither."""
    rows, columns = x.shape
    mean = rstd = partials = None
    row_count = rows_per_partial(x) if column_sums else 0
    if row_count:
        shape = len(column_sums), triton.cdiv(rows, row_count), columns
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    elif column_sums:
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if has_mean else None
    if x.numel():
        strides = (x.stride(), *weight.stride(), dy.stride(), dx.stride())
        _norm_backward_kernel[lambda meta: (triton.cdiv(rows, row_count or meta["ROWS_PER_PROGRAM"]),)](
            *(x, weight, dy, dx, mean, rstd, partials, rows, columns, row_count, *strides, eps, offset),
            HAS_MEAN=has_mean,
        )
    if rstd is not None:
        count = triton.cdiv(rows, _ROWS)
        partials = torch.empty((len(column_sums), count, columns), dtype=torch.float32, device=x.device)
        if count:
            grid = (count, triton.cdiv(columns, _BLOCK_N))  # rows first: only the first extent may exceed 65,535
            _column_sums_kernel[grid](
                *(x, dy, rstd if mean is None else mean, rstd, partials, rows, columns),
                *(x.stride(), dy.stride(), partials.stride()),
                HAS_MEAN=has_mean,
                ROWS=_ROWS,
                BLOCK_R=_BLOCK_R,
                BLOCK_N=_BLOCK_N,
            )
    if partials is not None:
        for part, out in zip(partials, column_sums, strict=True):
            sum_partials(part, out)
