"""Pairs of a token and one of its experts, sorted by expert, and the rows of each expert divided into blocks.

Chunks of pairs are counted by expert; running sums of the counts are where each chunk's pairs of each expert begin. How
many rows an expert has is known on the device alone, and stays there: there are as many blocks as any division of the
pairs among the experts may need, and those left over are empty. Nothing depends on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements that a program holds at once
_LONGEST_CHUNK = 256  # pairs that a program reads


@dataclass(frozen=True)
class Sorted:
    """Pairs (token * k + choice) sorted by expert.

    ``order`` int64[P] are the pairs, of one expert in rising order; ``ends`` int64[E] the row past each expert's last.
    ``blocks`` int64[B,3] hold up to ``height`` rows of one expert each: it, the first row, and the row past the last.
    A pair whose id is outside of 0 .. E-1 is nowhere.
    """

    order: Tensor
    ends: Tensor
    blocks: Tensor
    height: int


def sort_by_expert(ids: Tensor, experts: int, tallest: int = 128) -> Sorted:
    """The pairs of ids[T,k], contiguous, in blocks of at most ``tallest`` rows; ``ids`` and ``experts`` not empty."""
    pairs = ids.numel()
    block_p = min(triton.next_power_of_2(pairs), _LONGEST_CHUNK)
    block_e = min(triton.next_power_of_2(experts), _TILE // block_p)
    chunks = triton.cdiv(pairs, block_p)
    grid = (chunks * triton.cdiv(experts, block_e),)
    counts = torch.empty((experts, chunks), dtype=torch.int32, device=ids.device)
    _count_kernel[grid](ids, counts, pairs, experts, chunks, BLOCK_E=block_e, BLOCK_P=block_p)
    below = counts.view(-1).cumsum(0)
    order = torch.empty(pairs, dtype=torch.int64, device=ids.device)
    _place_kernel[grid](ids, below, order, pairs, experts, chunks, BLOCK_E=block_e, BLOCK_P=block_p)

    ends = below.view(experts, chunks)[:, -1].contiguous()
    height = min(_height(pairs // experts), tallest)
    most = (pairs + min(pairs, experts) * (height - 1)) // height  # the last block of each expert may hold one row
    blocks = torch.empty((most, 3), dtype=torch.int64, device=ids.device)
    block_e = triton.next_power_of_2(experts)
    block_b = max(1, _TILE // block_e)
    _blocks_kernel[(triton.cdiv(most, block_b),)](
        ends, blocks, most, experts, HEIGHT=height, BLOCK_B=block_b, BLOCK_E=block_e
    )
    return Sorted(order, ends, blocks, height)


def _height(average: int) -> int:
    """How many rows to a block, for so many rows to an expert: its weights are read once for each block."""
    return 16 if average < 8 else 32 if average < 16 else 64 if average < 64 else 128


@triton.jit
def _chunk_by_expert(ids_ptr, P, E, CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """This program's experts [BLOCK_E], chunk, pairs [BLOCK_P], and which pair is which expert's."""
    program = tl.program_id(0)
    chunk = (program % CHUNKS).to(tl.int64)
    experts = (program // CHUNKS).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    pairs = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
    ids = tl.load(ids_ptr + pairs, mask=pairs < P, other=-1)
    return experts, chunk, pairs, (ids[None, :] == experts[:, None]) & (experts[:, None] < E)


@triton.jit(do_not_specialize=["CHUNKS"])
def _count_kernel(ids_ptr, counts_ptr, P, E, CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """counts[expert, chunk]: how many of a chunk's pairs are an expert's."""
    experts, chunk, _, own = _chunk_by_expert(ids_ptr, P, E, CHUNKS, BLOCK_E, BLOCK_P)
    tl.store(counts_ptr + experts * CHUNKS + chunk, tl.sum(own.to(tl.int32), axis=1), mask=experts < E)


@triton.jit(do_not_specialize=["CHUNKS"])
def _place_kernel(ids_ptr, below_ptr, order_ptr, P, E, CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """order[row] = pair, behind all pairs of experts below and the expert's own of chunks before."""
    experts, chunk, pairs, own = _chunk_by_expert(ids_ptr, P, E, CHUNKS, BLOCK_E, BLOCK_P)
    before = experts * CHUNKS + chunk - 1
    starts = tl.load(below_ptr + before, mask=(before >= 0) & (experts < E), other=0)
    places = starts[:, None] + tl.cumsum(own.to(tl.int32), axis=1) - 1
    tl.store(order_ptr + places, tl.broadcast_to(pairs[None, :], own.shape), mask=own)


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
