"""Copies of 8-bit matrices that lie the other way round: Hopper's wgmma reads 8-bit operands along K only.

A row-major b would else be turned round in registers, in every program and block; one copy costs a read and a write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64
_FEWEST_ROWS = 33  # of the product: with fewer it doesn't run on wgmma, and reads an operand hardly more than once


@triton.jit
def _transpose_kernel(x_ptr, y_ptr, ROWS, COLUMNS, x_strides, TILE: tl.constexpr):
    """y[COLUMNS, ROWS], contiguous, of x[ROWS, COLUMNS]."""
    across = tl.cdiv(COLUMNS, TILE)
    program = tl.program_id(0).to(tl.int64)
    rows = (program // across * TILE + tl.arange(0, TILE))[:, None]
    columns = (program % across * TILE + tl.arange(0, TILE))[None, :]
    inside = (rows < ROWS) & (columns < COLUMNS)
    x = tl.load(x_ptr + rows * x_strides[0] + columns * x_strides[1], mask=inside, other=0)
    tl.store(y_ptr + columns * ROWS + rows, x, mask=inside)


def along_k(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a[M,K] and b[K,N] of 8 bits, each with neighbours along K side by side, copied where it isn't so.

    A product of few rows takes both as they lie.
    """
    if a.shape[0] < _FEWEST_ROWS:
        return a, b
    a_lies_so, b_lies_so = a.stride(1) == 1 or a.shape[1] <= 1, b.stride(0) == 1 or b.shape[0] <= 1
    return a if a_lies_so else _transposed(a.t()), b if b_lies_so else _transposed(b).t()


def _transposed(x: Tensor) -> Tensor:
    """A contiguous copy of x transposed."""
    y = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(x.shape[0], _TILE) * triton.cdiv(x.shape[1], _TILE)
    if tiles:
        codes = x.view(torch.uint8), y.view(torch.uint8)
        _transpose_kernel[(tiles,)](*codes, *x.shape, x.stride(), TILE=_TILE)
    return y
