"""Gradients of what a norm multiplies and adds: sums over the rows of a matrix, for each column.

Rows are divided into parts. One program sums a part, others add the parts up, always in one order: there are no
atomics, and the same call gives the same bits. How many parts there are follows from the shape alone. Where rows are
short enough, their gradient's own kernel leaves the parts (`rows_of_part`), and nothing is read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128
_LONGEST = 8192  # elements of a row whose gradient's kernel has room for sums, and of its tile
_PARTS = 512  # at most, of rows that come many to a part
_MOST_PARTS = 256  # that one program adds up
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


@triton.jit(do_not_specialize=["PARTS", "run"])
def _total_kernel(parts_ptr, y_ptr, PARTS, N, run, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[i]: the sum of a run of parts, from number i run on."""
    columns = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    own = tl.program_id(1).to(tl.int64)
    end = tl.minimum((own + 1) * run, PARTS)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(own * run, end, BLOCK_P):
        parts = (start + tl.arange(0, BLOCK_P))[:, None]
        total += tl.load(parts_ptr + parts * N + columns, mask=(parts < end) & (columns < N), other=0.0)
    y = tl.sum(total, axis=0)[None, :]
    tl.store(y_ptr + own * N + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


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
    """Write into y, contiguous, of N elements in any dtype, the sums of the columns of parts float32[P,N].

    Many parts are added up in runs first, so that there are more programs than one for each few columns.
    """
    if len(parts) > _MOST_PARTS:
        run = max(_BLOCK_R, int(triton.next_power_of_2(triton.cdiv(len(parts), _MOST_PARTS))))
        sums = parts.new_empty((triton.cdiv(len(parts), run), parts.shape[1]))
        _add_runs(parts, sums, run)
        parts = sums
    _add_runs(parts, y, max(len(parts), 1))


def _add_runs(parts: Tensor, y: Tensor, run: int) -> None:
    count, columns = parts.shape
    if columns:
        grid = (triton.cdiv(columns, _BLOCK_N), triton.cdiv(max(count, 1), run))
        _total_kernel[grid](parts, y, count, columns, run, BLOCK_P=_BLOCK_R, BLOCK_N=_BLOCK_N)


def rows_of_part(x: Tensor) -> int:
    """How many rows of x[R,N] a program of their gradient's kernel takes one after another, whose sum is one part:
    whole tiles, whichever is configured. 0: rows are too long for that, and `column_sums` reads them."""
    rows, columns = x.shape
    if columns > _LONGEST:
        return 0
    tallest = _LONGEST // int(triton.next_power_of_2(max(columns, 1)))
    return max(tallest, int(triton.next_power_of_2(max(triton.cdiv(rows, _PARTS), 1))))


def _with_room(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """Where a kernel leaves parts, the tiles that a row fits into, and whose threads have room for the sums."""
    if arguments["parts_ptr"] is None:
        return configs
    return [config for config in configs if arguments["N"] <= config.kwargs["BLOCK_N"] <= _LONGEST]


SUMMED = {"early_config_prune": _with_room}
"""How a kernel prunes its configurations, those of `rows`: it leaves parts if it is given ``parts_ptr``."""
