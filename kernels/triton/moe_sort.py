"""Pairs of a token and one of its experts, sorted by expert, and the rows of each expert divided into blocks.

How many rows an expert has is known on the device alone, and stays there: there are as many blocks as any division of
the pairs among the experts may need, and those left over are empty. Nothing depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements that a program holds at once
_LONGEST_BLOCK = 2048  # ids that a program reads at once


def sort_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, int]:
    """Pairs (token * k + choice, int64) of ids[T,k] sorted by expert; blocks int64[B,3] of sorted rows; their height.

    The sort is stable. A block holds rows of one expert: it is (expert, first row, row past the last). A pair whose id
    is outside of 0 .. experts-1 is in no block. ``ids`` and ``experts`` are not empty.
    """
    pairs, choices = ids.numel(), ids.shape[1]
    order = torch.empty(pairs, dtype=torch.int64, device=ids.device)
    ends = torch.empty(experts, dtype=torch.int64, device=ids.device)
    block_p = min(triton.next_power_of_2(pairs), _LONGEST_BLOCK)
    block_e = _TILE // block_p
    _sort_kernel[(triton.cdiv(experts, block_e),)](
        ids, order, ends, pairs, experts, choices, ids.stride(), BLOCK_E=block_e, BLOCK_P=block_p
    )
    height = _height(pairs // experts)
    most = (pairs + min(pairs, experts) * (height - 1)) // height  # the last block of each expert may hold one row
    blocks = torch.empty((most, 3), dtype=torch.int64, device=ids.device)
    block_e = triton.next_power_of_2(experts)
    block_b = max(1, _TILE // block_e)
    _blocks_kernel[(triton.cdiv(most, block_b),)](
        ends, blocks, most, experts, HEIGHT=height, BLOCK_B=block_b, BLOCK_E=block_e
    )
    return order, blocks, height


def _height(average: int) -> int:
    """How many rows to a block, for so many rows to an expert: its weights are read once for each block."""
    return 32 if average < 16 else 64 if average < 64 else 128 if average < 512 else 256


@triton.jit(do_not_specialize=["P"])
def _sort_kernel(
    ids_ptr,
    order_ptr,
    ends_ptr,
    P,
    E,
    CHOICES,
    ids_strides,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The pairs of this program's experts, in rising order, each expert's behind those of the experts below it.

    A pair is token * CHOICES + choice. A pair whose id is that of no expert is in no expert's rows.
    """
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    offsets = tl.arange(0, BLOCK_P).to(tl.int64)
    below = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, P, BLOCK_P):
        pairs = first + offsets
        ids = tl.load(at(ids_ptr, pairs, CHOICES, ids_strides), mask=pairs < P, other=-1)[None, :]
        below += tl.sum(((ids >= 0) & (ids < experts[:, None])).to(tl.int32), axis=1)
    ends = below.to(tl.int64)
    for first in range(0, P, BLOCK_P):
        pairs = first + offsets
        ids = tl.load(at(ids_ptr, pairs, CHOICES, ids_strides), mask=pairs < P, other=-1)[None, :]
        own = (ids == experts[:, None]) & (experts[:, None] < E)
        places = ends[:, None] + tl.cumsum(own.to(tl.int32), axis=1) - 1
        tl.store(order_ptr + places, tl.broadcast_to(pairs[None, :], own.shape), mask=own)
        ends += tl.sum(own.to(tl.int32), axis=1)
    tl.store(ends_ptr + experts, ends, mask=experts < E)


@triton.jit
def _blocks_kernel(
    ends_ptr,
    blocks_ptr,
    BLOCKS,
    E,
    HEIGHT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Of each block of up to HEIGHT sorted rows: their expert, the first, and the row past the last.

    Blocks that the experts leave over have no rows.
    """
    blocks = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    heights = tl.cdiv(ends - starts, HEIGHT)
    below = tl.cumsum(heights)[None, :] <= blocks[:, None]
    expert = tl.sum(below.to(tl.int64), axis=1)
    inside = blocks < BLOCKS
    used = inside & (expert < E)
    start = tl.load(ends_ptr + expert - 1, mask=used & (expert > 0), other=0)
    end = tl.load(ends_ptr + expert, mask=used, other=0)
    first = start + (blocks - tl.sum(tl.where(below, heights[None, :], 0), axis=1)) * HEIGHT
    tl.store(blocks_ptr + blocks * 3, expert, mask=inside)
    tl.store(blocks_ptr + blocks * 3 + 1, tl.where(used, first, 0), mask=inside)
    tl.store(blocks_ptr + blocks * 3 + 2, tl.minimum(end, first + HEIGHT), mask=inside)


@triton.jit
def at(pointer, pairs, CHOICES, strides):
    """Where [token, choice] of each pair lies."""
    return pointer + pairs // CHOICES * strides[0] + pairs % CHOICES * strides[1]
