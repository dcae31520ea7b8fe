"""The second stage of a split reduction: y[n] is the sum of partials[p, n] over p.

The order of additions depends on the shape alone and there are no atomics, so the same call gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_MAX_PARTIALS = 256  # that one program adds; more are added in groups first, for more programs than one per BLOCK_N
_BLOCK_P = 32  # partials and columns that a program adds at once, in a [32, 128] tile of float32
_BLOCK_N = 128


@triton.jit(do_not_specialize=["P", "group_size"])
def _sum_partials_kernel(partials_ptr, y_ptr, P, N, group_size, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[group] = the sum of partials group * group_size to (group + 1) * group_size - 1."""
    columns = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    group = tl.program_id(1).to(tl.int64)
    end = tl.minimum((group + 1) * group_size, P)
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(group * group_size, end, BLOCK_P):
        offs_p = (start + tl.arange(0, BLOCK_P))[:, None]
        total += tl.load(partials_ptr + offs_p * N + columns, mask=(offs_p < end) & (columns < N), other=0.0)
    y = tl.sum(total, axis=0)[None, :]
    tl.store(y_ptr + group * N + columns, y.to(y_ptr.dtype.element_ty), mask=columns < N)


def sum_partials(partials: Tensor, y: Tensor) -> None:
    """Write the sums of the columns of partials (float32[P,N], contiguous) into y (N elements, contiguous)."""
    if len(partials) > _MAX_PARTIALS:
        group_size = max(_BLOCK_P, int(triton.next_power_of_2(triton.cdiv(len(partials), _MAX_PARTIALS))))
        sums = partials.new_empty((triton.cdiv(len(partials), group_size), partials.shape[1]))
        _sum_groups(partials, sums, group_size)
        partials = sums
    _sum_groups(partials, y, max(len(partials), 1))


def _sum_groups(partials: Tensor, y: Tensor, group_size: int) -> None:
    count, columns = partials.shape
    if columns:
        grid = (triton.cdiv(columns, _BLOCK_N), triton.cdiv(max(count, 1), group_size))
        _sum_partials_kernel[grid](partials, y, count, columns, group_size, BLOCK_P=_BLOCK_P, BLOCK_N=_BLOCK_N)
