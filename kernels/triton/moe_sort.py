"""Routing data of a mixture of experts: token-expert pairs sorted by expert, and a block schedule for grouped GEMMs.

A counting sort: a histogram of each chunk of pairs by expert, a cumulative sum, which says where the pairs of each
chunk and expert begin, and a scatter. How many rows an expert has is known on the device alone. So that the host need
not wait for it, the schedule has as many blocks as the worst division of pairs among experts takes; the rest is empty.
Nothing depends on the order in which programs run.

Few pairs, as in decoding, are sorted by one launch, which compares each pair with each other: the row of a pair is the
number of pairs that precede it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Bounds of what a program holds at once: elements of a tile [experts, pairs], pairs of a chunk, and pairs of which one
# program compares each with each other, 128 x 128.
_TILE = 4096
_MAX_CHUNK = 256
_MAX_PAIRS_OF_ONE_LAUNCH = 128


@dataclass(frozen=True)
class RoutingData:
    """Pairs (token * top_k + choice) sorted by expert; pairs whose id is not in 0 .. E-1 are left out."""

    sorted_pairs: Tensor  # int64[P]; the pairs of an expert are in ascending order
    expert_ends: Tensor  # int64[E], the row after each expert's last
    block_schedule: Tensor  # int64[blocks,3]: expert, first row and row after the last; E, 0 and 0 if unused
    block_m: int  # the most rows of a block


def sort_by_expert(ids: Tensor, experts: int, max_block_m: int = 128) -> RoutingData:
    """Sort the pairs of ids[T,k] (contiguous, not empty) by expert, in blocks of at most ``max_block_m`` rows."""
    pairs = ids.numel()
    block_m = min(_choose_block_m(pairs // experts), max_block_m)
    max_blocks = (pairs + min(pairs, experts) * (block_m - 1)) // block_m  # each expert's last block may hold one row
    routing = RoutingData(
        sorted_pairs=torch.empty(pairs, dtype=torch.int64, device=ids.device),
        expert_ends=torch.empty(experts, dtype=torch.int64, device=ids.device),
        block_schedule=torch.empty((max_blocks, 3), dtype=torch.int64, device=ids.device),
        block_m=block_m,
    )
    (_sort_in_one_launch if pairs <= _MAX_PAIRS_OF_ONE_LAUNCH else _counting_sort)(ids, routing)
    return routing


def _choose_block_m(rows_per_expert: int) -> int:
    """Return the rows of a block by the mean of an expert: larger blocks read an expert's weights less often, smaller
    ones waste fewer rows."""
    return 16 if rows_per_expert < 8 else 32 if rows_per_expert < 16 else 64 if rows_per_expert < 64 else 128


def _sort_in_one_launch(ids: Tensor, routing: RoutingData) -> None:
    pairs, experts = ids.numel(), len(routing.expert_ends)
    block_p = triton.next_power_of_2(pairs)
    block_e = min(triton.next_power_of_2(experts), _TILE // block_p)
    _sort_kernel[(triton.cdiv(experts, block_e),)](
        *(ids, routing.sorted_pairs, routing.expert_ends, routing.block_schedule),
        *(pairs, experts, len(routing.block_schedule)),
        BLOCK_M=routing.block_m,
        BLOCK_E=block_e,
        BLOCK_P=block_p,
        num_warps=8 if block_p == _MAX_PAIRS_OF_ONE_LAUNCH else 4,  # twice the threads for the largest tile
    )


def _counting_sort(ids: Tensor, routing: RoutingData) -> None:
    pairs, experts = ids.numel(), len(routing.expert_ends)
    block_p = min(triton.next_power_of_2(pairs), _MAX_CHUNK)
    block_e = min(triton.next_power_of_2(experts), _TILE // block_p)
    chunks = triton.cdiv(pairs, block_p)
    grid = (chunks * triton.cdiv(experts, block_e),)
    counts = torch.empty((experts, chunks), dtype=torch.int32, device=ids.device)
    _histogram_kernel[grid](ids, counts, pairs, experts, chunks, BLOCK_E=block_e, BLOCK_P=block_p)
    ends = counts.view(-1).cumsum(0)
    _scatter_kernel[grid](ids, ends, routing.sorted_pairs, pairs, experts, chunks, BLOCK_E=block_e, BLOCK_P=block_p)

    routing.expert_ends.copy_(ends.view(experts, chunks)[:, -1])
    num_blocks = len(routing.block_schedule)
    block_e = triton.next_power_of_2(experts)
    block_b = max(1, _TILE // block_e)
    _block_schedule_kernel[(triton.cdiv(num_blocks, block_b),)](
        *(routing.expert_ends, routing.block_schedule, num_blocks, experts),
        BLOCK_M=routing.block_m,
        BLOCK_B=block_b,
        BLOCK_E=block_e,
    )


@triton.jit(do_not_specialize=["P", "NUM_BLOCKS"])
def _sort_kernel(
    ids_ptr,
    sorted_pairs_ptr,
    expert_ends_ptr,
    block_schedule_ptr,
    P,
    E,
    NUM_BLOCKS,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """All of `RoutingData`: each program writes the ends of BLOCK_E experts, the first one the pairs and the schedule.

    A pair whose row begins a block writes that block, whose index is the number of such pairs that precede it.
    """
    pid = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_P)
    ids = tl.load(ids_ptr + pairs, mask=pairs < P, other=-1)
    ids = tl.where((ids >= 0) & (ids < E), ids, E)
    experts = pid * BLOCK_E + tl.arange(0, BLOCK_E)
    ends = tl.sum((ids[None, :] <= experts[:, None]).to(tl.int32), axis=1)
    tl.store(expert_ends_ptr + experts, ends, mask=experts < E)
    if pid > 0:
        return
    same = ids[None, :] == ids[:, None]
    lower = ids[None, :] < ids[:, None]
    earlier = same & (pairs[None, :] < pairs[:, None])
    start = tl.sum(lower.to(tl.int32), axis=1)
    rank = tl.sum(earlier.to(tl.int32), axis=1)  # among the pairs of the expert
    end = start + tl.sum(same.to(tl.int32), axis=1)
    row = start + rank
    tl.store(sorted_pairs_ptr + row, pairs, mask=ids < E)
    begins = (ids < E) & (rank % BLOCK_M == 0)
    block_ptrs = block_schedule_ptr + 3 * tl.sum((begins[None, :] & (lower | earlier)).to(tl.int32), axis=1)
    tl.store(block_ptrs, ids, mask=begins)
    tl.store(block_ptrs + 1, row, mask=begins)
    tl.store(block_ptrs + 2, tl.minimum(end, row + BLOCK_M), mask=begins)
    # The schedule's other blocks: there are no more blocks than pairs, so ``pairs`` counts them all.
    unused = (pairs >= tl.sum(begins.to(tl.int32), axis=0)) & (pairs < NUM_BLOCKS)
    tl.store(block_schedule_ptr + pairs * 3, tl.full(pairs.shape, 1, tl.int32) * E, mask=unused)
    tl.store(block_schedule_ptr + pairs * 3 + 1, tl.zeros_like(pairs), mask=unused)
    tl.store(block_schedule_ptr + pairs * 3 + 2, tl.zeros_like(pairs), mask=unused)


@triton.jit
def _load_chunk(ids_ptr, P, E, NUM_CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """The program's experts [BLOCK_E], chunk, pairs [BLOCK_P], and which pair [BLOCK_E,BLOCK_P] is which expert's."""
    pid = tl.program_id(0)
    chunk = (pid % NUM_CHUNKS).to(tl.int64)
    experts = (pid // NUM_CHUNKS).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    pairs = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
    ids = tl.load(ids_ptr + pairs, mask=pairs < P, other=-1)
    return experts, chunk, pairs, (ids[None, :] == experts[:, None]) & (experts[:, None] < E)


@triton.jit(do_not_specialize=["P", "NUM_CHUNKS"])
def _histogram_kernel(ids_ptr, counts_ptr, P, E, NUM_CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr):
    """counts[expert, chunk] = the number of the chunk's pairs that are the expert's."""
    experts, chunk, _, match = _load_chunk(ids_ptr, P, E, NUM_CHUNKS, BLOCK_E, BLOCK_P)
    tl.store(counts_ptr + experts * NUM_CHUNKS + chunk, tl.sum(match.to(tl.int32), axis=1), mask=experts < E)


@triton.jit(do_not_specialize=["P", "NUM_CHUNKS"])
def _scatter_kernel(
    ids_ptr, ends_ptr, sorted_pairs_ptr, P, E, NUM_CHUNKS, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr
):
    """sorted_pairs[row] = pair, after all pairs of lower experts and the expert's own of earlier chunks."""
    experts, chunk, pairs, match = _load_chunk(ids_ptr, P, E, NUM_CHUNKS, BLOCK_E, BLOCK_P)
    previous = experts * NUM_CHUNKS + chunk - 1
    starts = tl.load(ends_ptr + previous, mask=(previous >= 0) & (experts < E), other=0)
    rows = starts[:, None] + tl.cumsum(match.to(tl.int32), axis=1) - 1
    tl.store(sorted_pairs_ptr + rows, tl.broadcast_to(pairs[None, :], match.shape), mask=match)


@triton.jit(do_not_specialize=["NUM_BLOCKS"])
def _block_schedule_kernel(
    expert_ends_ptr,
    block_schedule_ptr,
    NUM_BLOCKS,
    E,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    blocks = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(expert_ends_ptr + experts, mask=experts < E, other=0)
    starts = tl.load(expert_ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    num_blocks = tl.cdiv(ends - starts, BLOCK_M)
    lower = tl.cumsum(num_blocks)[None, :] <= blocks[:, None]  # experts all of whose blocks precede this one
    expert = tl.sum(lower.to(tl.int64), axis=1)
    mask_b = blocks < NUM_BLOCKS
    used = mask_b & (expert < E)
    start = tl.load(expert_ends_ptr + expert - 1, mask=used & (expert > 0), other=0)
    end = tl.load(expert_ends_ptr + expert, mask=used, other=0)
    first = start + (blocks - tl.sum(tl.where(lower, num_blocks[None, :], 0), axis=1)) * BLOCK_M
    tl.store(block_schedule_ptr + blocks * 3, tl.minimum(expert, E), mask=mask_b)
    tl.store(block_schedule_ptr + blocks * 3 + 1, tl.where(used, first, 0), mask=mask_b)
    tl.store(block_schedule_ptr + blocks * 3 + 2, tl.where(used, tl.minimum(end, first + BLOCK_M), 0), mask=mask_b)
