"""Pairs of a token and one of its experts, sorted by expert, and the rows of each expert divided into blocks.

Chunks of pairs are counted by expert; running sums of the counts are where each chunk's pairs of each expert begin. How
many rows an expert has is known on the device alone, and stays there: there are as many blocks as any division of the
pairs among the experts may need, and those left over are empty. Nothing depends on the order in which programs run.

Few pairs, as decoding has, are sorted by one launch, which compares each with each: the row of a pair is how many stand
before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements that a program holds at once
_LONGEST_CHUNK = 256  # pairs that a program reads
_FEW = 128  # pairs that one program compares each with each


@dataclass(frozen=True)
class Sorted:
    """Pairs (token * k + choice) sorted by expert.

    ``order`` int64[P] are the pairs, of one expert in rising order; ``ends`` int64[E] the row past each expert's last.
    ``blocks`` int64[B,3] hold up to ``height`` rows of one expert each: it, the first row, and the row past the last;
    E, 0 and 0 where the experts leave them over.
    A pair whose id is outside of 0 .. E-1 is nowhere.
    """

    order: Tensor
    ends: Tensor
    blocks: Tensor
    height: int


def sort_by_expert(ids: Tensor, experts: int, tallest: int = 128) -> Sorted:
    """The pairs of ids[T,k], contiguous, in blocks of at most ``tallest`` rows; ``ids`` and ``experts`` not empty."""
    pairs = ids.numel()
    height = min(_height(pairs // experts), tallest)
    most = (pairs + min(pairs, experts) * (height - 1)) // height  # the last block of each expert may hold one row
    blocks = torch.empty((most, 3), dtype=torch.int64, device=ids.device)
    order = torch.empty(pairs, dtype=torch.int64, device=ids.device)
    ends = torch.empty(experts, dtype=torch.int64, device=ids.device)
    found = Sorted(order, ends, blocks, height)
    (_sort_few if pairs <= _FEW else _sort_many)(ids, found)
    return found


def _sort_few(ids: Tensor, found: Sorted) -> None:
    """Fills what is found of at most _FEW ids."""
    pairs, experts = ids.numel(), len(found.ends)
    block_p = triton.next_power_of_2(pairs)
    block_e = min(triton.next_power_of_2(experts), _TILE // block_p)
    _few_kernel[(triton.cdiv(experts, block_e),)](
        *(ids, found.order, found.ends, found.blocks, pairs, experts, len(found.blocks)),
        HEIGHT=found.height,
        BLOCK_E=block_e,
        BLOCK_P=block_p,
        num_warps=8 if block_p == _FEW else 4,
    )


def _sort_many(ids: Tensor, found: Sorted) -> None:
    """Fills what is found of any number of ids."""
    pairs, experts = ids.numel(), len(found.ends)
    block_p = min(triton.next_power_of_2(pairs), _LONGEST_CHUNK)
    block_e = min(triton.next_power_of_2(experts), _TILE // block_p)
    chunks = triton.cdiv(pairs, block_p)
    grid = (chunks * triton.cdiv(experts, block_e),)
    counts = torch.empty((experts, chunks), dtype=torch.int32, device=ids.device)
    _count_kernel[grid](ids, counts, pairs, experts, chunks, BLOCK_E=block_e, BLOCK_P=block_p)
    below = counts.view(-1).cumsum(0)
    _place_kernel[grid](ids, below, found.order, pairs, experts, chunks, BLOCK_E=block_e, BLOCK_P=block_p)

    found.ends.copy_(below.view(experts, chunks)[:, -1])
    most = len(found.blocks)
    block_e = triton.next_power_of_2(experts)
    block_b = max(1, _TILE // block_e)
    _blocks_kernel[(triton.cdiv(most, block_b),)](
        found.ends, found.blocks, most, experts, HEIGHT=found.height, BLOCK_B=block_b, BLOCK_E=block_e
    )


def _height(average: int) -> int:
    """How many rows to a block, for so many rows to an expert: its weights are read once for each block."""
    return 16 if average < 8 else 32 if average < 16 else 64 if average < 64 else 128


@triton.jit(do_not_specialize=["P", "BLOCKS"])
def _few_kernel(
    ids_ptr,
    order_ptr,
    ends_ptr,
    blocks_ptr,
    P,
    E,
    BLOCKS,
    HEIGHT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """All of `Sorted`: each program the ends of BLOCK_E experts, and the first of them the pairs and the blocks.

    A pair that begins a block writes it, behind as many as begin with pairs before.
    """
    program = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_P)
    ids = tl.load(ids_ptr + pairs, mask=pairs < P, other=-1)
    ids = tl.where((ids >= 0) & (ids < E), ids, E)
    experts = program * BLOCK_E + tl.arange(0, BLOCK_E)
    ends = tl.sum((ids[None, :] <= experts[:, None]).to(tl.int32), axis=1)
    tl.store(ends_ptr + experts, ends, mask=experts < E)
    if program > 0:
        return
    same = ids[None, :] == ids[:, None]
    below = ids[None, :] < ids[:, None]
    before = same & (pairs[None, :] < pairs[:, None])
    start = tl.sum(below.to(tl.int32), axis=1)
    place = tl.sum(before.to(tl.int32), axis=1)
    end = start + tl.sum(same.to(tl.int32), axis=1)
    row = start + place
    tl.store(order_ptr + row, pairs, mask=ids < E)
    begins = (ids < E) & (place % HEIGHT == 0)
    to = blocks_ptr + 3 * tl.sum((begins[None, :] & (below | before)).to(tl.int32), axis=1)
    tl.store(to, ids, mask=begins)
    tl.store(to + 1, row, mask=begins)
    tl.store(to + 2, tl.minimum(end, row + HEIGHT), mask=begins)
    left = (pairs >= tl.sum(begins.to(tl.int32), axis=0)) & (pairs < BLOCKS)
    tl.store(blocks_ptr + pairs * 3, tl.full(pairs.shape, 1, tl.int32) * E, mask=left)
    tl.store(blocks_ptr + pairs * 3 + 1, tl.zeros_like(pairs), mask=left)
    tl.store(blocks_ptr + pairs * 3 + 2, tl.zeros_like(pairs), mask=left)


@triton.jit
def _chunk_by_expert(ids_ptr, P, E, CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """This program's experts [BLOCK_E], chunk, pairs [BLOCK_P], and which pair is which expert's."""
    program = tl.program_id(0)
    chunk = (program % CHUNKS).to(tl.int64)
    experts = (program // CHUNKS).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    pairs = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
    ids = tl.load(ids_ptr + pairs, mask=pairs < P, other=-1)
    return experts, chunk, pairs, (ids[None, :] == experts[:, None]) & (experts[:, None] < E)


@triton.jit(do_not_specialize=["P", "CHUNKS"])
def _count_kernel(ids_ptr, counts_ptr, P, E, CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """counts[expert, chunk]: how many of a chunk's pairs are an expert's."""
    experts, chunk, _, own = _chunk_by_expert(ids_ptr, P, E, CHUNKS, BLOCK_E, BLOCK_P)
    tl.store(counts_ptr + experts * CHUNKS + chunk, tl.sum(own.to(tl.int32), axis=1), mask=experts < E)


@triton.jit(do_not_specialize=["P", "CHUNKS"])
def _place_kernel(ids_ptr, below_ptr, order_ptr, P, E, CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """order[row] = pair, behind all pairs of experts below and the expert's own of chunks before."""
    experts, chunk, pairs, own = _chunk_by_expert(ids_ptr, P, E, CHUNKS, BLOCK_E, BLOCK_P)
    before = experts * CHUNKS + chunk - 1
    starts = tl.load(below_ptr + before, mask=(before >= 0) & (experts < E), other=0)
    places = starts[:, None] + tl.cumsum(own.to(tl.int32), axis=1) - 1
    tl.store(order_ptr + places, tl.broadcast_to(pairs[None, :], own.shape), mask=own)


@triton.jit(do_not_specialize=["BLOCKS"])
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
    tl.store(blocks_ptr + blocks * 3, tl.minimum(expert, E), mask=inside)
    tl.store(blocks_ptr + blocks * 3 + 1, tl.where(used, first, 0), mask=inside)
    tl.store(blocks_ptr + blocks * 3 + 2, tl.where(used, tl.minimum(end, first + HEIGHT), 0), mask=inside)
