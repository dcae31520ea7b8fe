"""Building blocks of the attention kernels, forward and backward: loads, Q K^T, masks, and autotuning configurations.

Causal masks and windows are one band of relative positions: query i attends to the keys j with
``min_offset <= j - i <= max_offset``, either bound None where that side is open.

A kernel takes dense sequences, or sequences of different lengths packed end to end (varlen), which ``cu_seqlens``
delimits as in FlashAttention.

Jit functions take tuples here, or they would have two dozen parameters each; Triton passes tuples through and
specialises on None in them. The first lines of the function that takes one name its slots:

- ``state``: values that a loop over blocks updates and returns;
- ``inputs``, ``rows``, ``tensors``: what it reads, blocks by the sources of `load_tile` and `dot_nt`;
- ``options``: a `block_range`; (size, lo, hi) of `band_mask`; the scales of `recompute_p`; slope and diagonal of ALiBi.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))  # folded into the scale of scores, so that exp is a single exp2
_BLOCK_K = tl.constexpr(32)  # columns of float32 operands that fit a thread's registers at once
_BLOCK_SEQUENCES = tl.constexpr(128)  # entries of cu_seqlens that a step of the search reads
_MAX_REGISTERS = 255  # of a thread
FP32_STAGES = 1  # num_stages of configurations for float32, and of no others
SIZES = ("Sq", "Sk", "B", "GROUP_SIZE", "H_KV", "min_offset", "max_offset")  # not worth specialising a kernel for


class AttentionOptions(NamedTuple):
    """Options of attention: ALiBi slopes float32[H], sinks float32[H], scale, softcap, and the bounds of the band."""

    slopes: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float | None
    min_offset: int | None
    max_offset: int | None

    def without_open_bounds(self, queries: int, keys: int) -> AttentionOptions:
        """Replace a bound of the band by None if it masks no pair of ``queries`` and ``keys``."""
        lo, hi = self.min_offset, self.max_offset
        return self._replace(
            min_offset=None if lo is None or lo <= 1 - queries else lo,
            max_offset=None if hi is None or hi >= keys - 1 else hi,
        )


@triton.jit
def load_tile(source, start, mask_n, mask_d, MASKED: tl.constexpr, EVEN_D: tl.constexpr):
    """Load rows ``start`` onwards, zero outside. source: a TMA descriptor, batch and head; or pointers, row stride."""
    USE_TMA: tl.constexpr = len(source) == 3
    if USE_TMA:
        tile = source[0].load([source[1], source[2], start, 0])
        tile = tl.reshape(tile, [tile.shape[2], tile.shape[3]])
    else:
        ptrs = source[0] + start.to(tl.int64) * source[1]
        if MASKED:
            tile = tl.load(ptrs, mask=mask_n[:, None] & mask_d, other=0.0)
        elif not EVEN_D:
            tile = tl.load(ptrs, mask=mask_d, other=0.0)
        else:
            tile = tl.load(ptrs)
    return tile


@triton.jit
def dot_nt(a, b, fp32_source, start, mask_n, MASKED: tl.constexpr):
    """Return a b^T in float32, for a[M,D] and b[N,D].

    fp32_source is None for 16-bit inputs. float32 inputs are multiplied by FMAs, whose operands are in registers, and
    whole rows do not fit there. They are loaded again instead, _BLOCK_K columns at a time: fp32_source is (pointers
    [M,1] to the rows of a, their column stride, their mask, a factor of a (-1, 0, or None for 1), pointers [N,1] to the
    first block of b, its row stride, its column stride, D).
    """
    if fp32_source is None:
        qk = tl.dot(a, tl.trans(b), input_precision="ieee")
    else:
        a_ptrs, a_stride, mask_m, a_factor, b_ptrs, b_row_stride, b_stride, D = fp32_source
        BLOCK_K: tl.constexpr = min(a.shape[1], _BLOCK_K)
        b_ptrs += start.to(tl.int64) * b_row_stride
        qk = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
        for k in tl.range(0, D, BLOCK_K, num_stages=1):
            offs_k = k + tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
            mask_k = offs_k < D
            a_block = tl.load(a_ptrs + offs_k * a_stride, mask=mask_m & mask_k, other=0.0)
            if a_factor is not None:
                a_block = a_block * a_factor
            mask_b = (mask_n[:, None] & mask_k) if MASKED else mask_k
            b_block = tl.load(b_ptrs + offs_k * b_stride, mask=mask_b, other=0.0)
            qk = tl.dot(a_block, tl.trans(b_block), qk, input_precision="ieee")
    return qk


@triton.jit
def count_tiles(rows, cu_seqlens, BLOCK: tl.constexpr):
    """Return the number of tiles of ``rows`` rows; for varlen an upper bound, see `sequence_of_tile`."""
    if cu_seqlens[0] is None:
        num_tiles = tl.cdiv(rows, BLOCK)
    else:
        num_tiles = rows // BLOCK + cu_seqlens[2]
    return num_tiles


@triton.jit
def sequence_of_tile(tile, size, other_size, cu_seqlens, GROUP_SIZE, BLOCK: tl.constexpr):
    """Find the sequence that a tile belongs to.

    cu_seqlens: pointers to the offsets of the tiled side (queries or keys) and of the other side, the number of
    sequences, and both strides; dense inputs have None for the pointers. Every position of the tiled side has
    GROUP_SIZE rows. Returns start and length on the tiled side, start and length on the other, and the tile's index
    within its sequence.

    The tiles of sequence b are numbered from start_b * GROUP_SIZE // BLOCK + b on. That leaves room for all its tiles,
    and for at most one more, which is empty.
    """
    start, other_start = 0, 0
    starts_ptr, other_starts_ptr, B, stride, other_stride = cu_seqlens
    if starts_ptr is not None:
        sequence = tl.full([], -1, tl.int32)  # the last one whose first tile is not after this one
        for first in tl.range(0, B, _BLOCK_SEQUENCES):
            offs_b = first + tl.arange(0, _BLOCK_SEQUENCES)
            starts = tl.load(starts_ptr + offs_b * stride, mask=offs_b < B, other=0).to(tl.int64)
            started = (starts * GROUP_SIZE // BLOCK + offs_b <= tile) & (offs_b < B)
            sequence += tl.sum(started.to(tl.int32))
        start = tl.load(starts_ptr + sequence * stride)
        other_start = tl.load(other_starts_ptr + sequence * other_stride)
        size = tl.load(starts_ptr + (sequence + 1) * stride) - start
        other_size = tl.load(other_starts_ptr + (sequence + 1) * other_stride) - other_start
        tile -= start.to(tl.int64) * GROUP_SIZE // BLOCK + sequence
    return start, size, other_start, other_size, tile


@triton.jit
def band_mask(offs_n, lo, hi):
    """Return lo <= offs_n <= hi, [M,N]; bounds are scalars or [M,1], and lo may be None."""
    mask = offs_n[None, :] <= hi
    if lo is not None:
        mask = mask & (offs_n[None, :] >= lo)
    return mask


@triton.jit
def block_range(first_row, last_row, min_offset, max_offset, size, BLOCK: tl.constexpr):
    """Return the blocks of ``size`` positions that the band leaves to rows first_row..last_row.

    Four numbers: the first block; how many masked blocks come before the full ones; how many masked blocks there are,
    before and after, the block that ``size`` cuts included; how many full blocks, which every row attends to.
    `nth_block` goes through the masked ones first.
    """
    some_start, all_start, some_end, all_end = 0, 0, size, size  # attended to by some row, or by all rows
    if min_offset is not None:
        some_start = tl.maximum(first_row + min_offset, 0)
        all_start = tl.maximum(last_row + min_offset, 0)
    if max_offset is not None:
        some_end = tl.maximum(tl.minimum(last_row + max_offset + 1, size), 0)
        all_end = tl.maximum(tl.minimum(first_row + max_offset + 1, size), 0)
    begin = some_start // BLOCK
    end = tl.maximum(tl.cdiv(some_end, BLOCK), begin)
    full_begin = tl.minimum(tl.cdiv(all_start, BLOCK), end)
    num_full = tl.maximum(all_end // BLOCK - full_begin, 0)
    return begin, full_begin - begin, end - begin - num_full, num_full


@triton.jit
def nth_block(n, blocks):
    """Return the n-th block of a `block_range`: the masked ones on both sides, then the full ones."""
    begin, num_before, num_masked, num_full = blocks
    block = begin + n + tl.where(n >= num_before, num_full, 0)
    return tl.where(n >= num_masked, begin + num_before + n - num_masked, block)


@triton.jit
def recompute_p(qk, lse, slope, distance, scales):
    """Return the probabilities of the forward pass from qk and the log-sum-exps.

    scales: (scale, exp2_scale, softcap). Scale, softcap, slope and lse are multiplied by log2(e). exp2_scale is 2
    log2(e) scale / softcap of the plain scale and softcap: 2^(qk exp2_scale) = e^(2 x), for tanh(x).
    """
    scale, exp2_scale, softcap = scales
    if softcap is not None:
        qk = softcap - 2.0 * softcap / (tl.exp2(qk * exp2_scale) + 1.0)  # softcap * tanh(scale * qk / softcap)
    else:
        qk = qk * scale
    if slope is not None:
        qk = qk - slope * distance
    return tl.exp2(qk - lse)


@triton.jit
def softcap_backward(ds, qk, scales):
    """Multiply ds by the derivative of the softcap, 1 - tanh^2."""
    _, exp2_scale, softcap = scales
    if softcap is not None:
        sigmoid = 1.0 / (tl.exp2(qk * exp2_scale) + 1.0)
        ds = ds * (4.0 * sigmoid * (1.0 - sigmoid))
    return ds


def make_configs(
    pre_hook: Callable[[Mapping[str, Any]], None], *tiles: tuple[int, int, int, int]
) -> list[triton.Config]:
    """Return configurations of (BLOCK_M, BLOCK_N, num_warps, num_stages); those of `FP32_STAGES` are for float32.

    They allow a thread every register that 8 warps leave it: ptxas would otherwise spill some for more occupancy.
    """
    return [
        triton.Config(
            {"BLOCK_M": block_m, "BLOCK_N": block_n},
            num_warps=num_warps,
            num_stages=num_stages,
            maxnreg=_MAX_REGISTERS if num_stages == FP32_STAGES else None,
            pre_hook=pre_hook,
        )
        for block_m, block_n, num_warps, num_stages in tiles
    ]


def flatten_configs(table: Mapping[int, list[triton.Config]]) -> list[triton.Config]:
    """Return the configurations of a table without duplicates."""
    return list(dict.fromkeys(config for configs in table.values() for config in configs))


def configs_for_head_dims(
    table: Mapping[int, list[triton.Config]], arguments: Mapping[str, Any]
) -> list[triton.Config]:
    """Return the entry of the smallest limit on BLOCK_D + BLOCK_DV that the kernel's arguments respect."""
    columns = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    return table[min(limit for limit in table if columns <= limit)]
