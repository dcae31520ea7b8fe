"""Triton kernels whose results depend on the order of programs, or must not; and loads that leave lanes undefined."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
    tl.atomic_add(y_ptr + columns, x.to(tl.float32), mask=columns < N)


@triton.jit
def _add_in_turn(x_ptr, y_ptr, turn_ptr, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
    while tl.atomic_add(turn_ptr, 0) != row:  # the programs before this one
        pass
    y = tl.load(y_ptr + columns, mask=columns < N, other=0.0)
    tl.store(y_ptr + columns, y + x.to(tl.float32), mask=columns < N)
    tl.atomic_xchg(turn_ptr, row + 1)


@triton.jit
def _wait_backwards(x_ptr, y_ptr, turn_ptr, N, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N, other=0.0)
    while tl.atomic_add(turn_ptr, 0) != row:
        pass
    y = tl.load(y_ptr + columns, mask=columns < N, other=0.0)
    tl.store(y_ptr + columns, y + x.to(tl.float32), mask=columns < N)
    tl.atomic_xchg(turn_ptr, row + 1)


@triton.jit
def _sum_rows(x_ptr, y_ptr, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + columns, mask=columns < N)
    if MASKED:
        x = tl.where(columns < N, x, 0.0)
    tl.store(y_ptr + row, tl.sum(x.to(tl.float32), 0))


@triton.jit
def _gather(x_ptr, index_ptr, y_ptr, N, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + places, mask=places < N)
    if MASKED:
        tl.store(y_ptr + places, tl.load(x_ptr + index, mask=places < N), mask=places < N)
    else:
        tl.store(y_ptr + places, tl.load(x_ptr + index), mask=places < N)


@triton.jit
def _load_single(x_ptr, y_ptr, loads, other, WIDTH: tl.constexpr):
    if WIDTH == 0:
        tl.store(y_ptr, tl.load(x_ptr, mask=loads != 0, other=other))
    else:
        places = tl.arange(0, WIDTH)
        tl.store(y_ptr + places, tl.load(x_ptr + places, mask=(places + loads) != places, other=other))


def _block(columns: int) -> int:
    return max(16, triton.next_power_of_2(columns))


def sums_by_atomics(x: Tensor) -> Tensor:
    """Sums of columns in the order in which programs come."""
    x, y = x.contiguous(), torch.zeros(x.shape[1])
    _add_rows[(x.shape[0],)](x, y, x.shape[1], _block(x.shape[1]))
    return y.to(x.dtype)


def sums_in_turn(x: Tensor) -> Tensor:
    """The same, each program after the one before it."""
    x, y, turn = x.contiguous(), torch.zeros(x.shape[1]), torch.zeros(1, dtype=torch.int32)
    _add_in_turn[(x.shape[0],)](x, y, turn, x.shape[1], _block(x.shape[1]))
    return y.to(x.dtype)


def sums_backwards(x: Tensor) -> Tensor:
    """The same, each program after the one that comes next."""
    x, y, turn = x.contiguous(), torch.zeros(x.shape[1]), torch.zeros(1, dtype=torch.int32)
    _wait_backwards[(x.shape[0],)](x, y, turn, x.shape[1], _block(x.shape[1]))
    return y.to(x.dtype)


def sums_undefined(x: Tensor) -> Tensor:
    """Sums of rows over lanes that no load defines."""
    x, y = x.contiguous(), torch.empty(x.shape[0])
    _sum_rows[(x.shape[0],)](x, y, x.shape[1], False, _block(x.shape[1]))
    return y.to(x.dtype)


def sums_masked_later(x: Tensor) -> Tensor:
    """Sums of rows, of which those lanes are left out after the load."""
    x, y = x.contiguous(), torch.empty(x.shape[0])
    _sum_rows[(x.shape[0],)](x, y, x.shape[1], True, _block(x.shape[1]))
    return y.to(x.dtype)


def gathered(x: Tensor, index: Tensor, *, masked: bool) -> Tensor:
    """Elements of x by index; not ``masked``, undefined lanes of the index become addresses."""
    y = torch.empty(len(index), dtype=x.dtype)
    _gather[(1,)](x, index, y, len(index), masked, _block(len(index)))
    return y


def without_value(x: Tensor, other: float, width: int) -> Tensor:
    """What a load gives whose mask is false, of ``width`` lanes or (0) of a scalar."""
    y = torch.full((max(width, 1),), 7, dtype=x.dtype)
    _load_single[(1,)](x, y, 0, other, width)
    return y
