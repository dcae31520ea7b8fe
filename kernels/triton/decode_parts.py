"""What decoding over a paged cache shares: parts of a sequence for programs of their own, and the merge of the parts.

The keys of a sequence are split among programs, so that a few long sequences fill a GPU; each leaves its output and its
log-sum-exp, and a second kernel merges them (Flash-Decoding). Into how many parts is decided by shapes, before anything
is known of the lengths, which lie on the device; how long the parts are, by each sequence's own length.

Hopper's matrix instructions take 64 rows. A tile has few heads; so keys can be the rows of its scores, [keys, heads],
and columns of the values those of the output, [columns, heads]: AXIS, that of the keys, is then 0. It is 1 where heads
are the rows of both.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.online_softmax import finite_shift, online_softmax

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2.0))
_MULTIPROCESSORS = 132  # of an H100 or H200
_LEAST_KEYS = 256  # of a program: fewer are read sooner than merged
MOST_SPLITS = 128
_MERGED = 4096  # elements of parts that a program reads at once


@triton.jit
def part_of(length, split, SPLITS, BLOCK_N: tl.constexpr):
    """First and last position, exclusive, of a part of a sequence: whole blocks, as even as they can be."""
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first = split * share
    return first, tl.minimum(first + share, length)


@triton.jit
def slots_of(position, used, row_of_table, stride, PAGE: tl.constexpr):
    """Page and slot (int64) of each position; behind the last token entries of the table may be anything."""
    entry = (position // PAGE).to(tl.int64)
    page = tl.load(row_of_table + entry * stride, mask=used, other=0).to(tl.int64)
    return page, (position % PAGE).to(tl.int64)


@triton.jit
def add_block(m_i, l_i, acc, s, v, used, score_scale, AXIS: tl.constexpr):
    """Running maximum, sum and output with one more block of keys: scores s, to be scaled, values v, which are used."""
    s = tl.where(tl.expand_dims(used, 1 - AXIS), s * score_scale, -float("inf"))
    m_i, l_i, p, rescale = online_softmax(m_i, l_i, s, axis=AXIS)
    acc = acc * tl.expand_dims(rescale, AXIS)
    if AXIS == 0:
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_i, l_i, acc


@triton.jit
def normalised(acc, l_i, AXIS: tl.constexpr):
    """The output [heads, columns], zero where there was nothing to attend to."""
    acc = acc / tl.expand_dims(tl.where(l_i == 0.0, 1.0, l_i), AXIS)
    return tl.trans(acc) if AXIS == 0 else acc


@triton.jit(do_not_specialize=["SPLITS"])
def _merge_kernel(
    parts_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    SPLITS,
    out_scale,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A row's parts weighted by 2^lse; a part without keys has an lse of -inf, and no weight."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK_S)[None, :]
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    lse_ptrs = part_lse_ptr + row * SPLITS
    lse = tl.load(lse_ptrs + splits, mask=splits < SPLITS, other=-float("inf"))
    m_i = tl.max(lse, axis=1)
    shift = finite_shift(m_i)
    l_i = tl.sum(tl.exp2(lse - shift[:, None]), axis=1)

    acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for start in range(0, SPLITS, BLOCK_P):
        split = (start + tl.arange(0, BLOCK_P))[:, None]
        weight = tl.exp2(tl.load(lse_ptrs + split, mask=split < SPLITS, other=-float("inf")) - shift[:, None])
        part_ptrs = parts_ptr + (row * SPLITS + split) * D + d
        acc += weight * tl.load(part_ptrs, mask=(split < SPLITS) & (d < D), other=0.0)

    acc = normalised(tl.sum(acc, axis=0)[None, :], l_i, 1) * out_scale
    tl.store(out_ptr + row * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)
    if lse_ptr is not None:
        tl.store(lse_ptr + row + tl.arange(0, 1), m_i * LN_2 + tl.log(l_i))


def splits_for(programs: int, keys: int, resident: int) -> int:
    """How many programs share a sequence of at most so many keys, where one each would be ``programs`` in all.

    ``resident``: how many a multiprocessor holds at once.
    """
    wanted = min(triton.cdiv(_MULTIPROCESSORS * resident, programs), MOST_SPLITS)
    return max(1, min(wanted, triton.cdiv(keys, _LEAST_KEYS)))


def empty_parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Where the parts of out[B,H,D] go, and the logarithms to base two of their sums of exponentials: float32."""
    batch, heads, width = out.shape
    parts = torch.empty((batch, heads, splits, width), dtype=torch.float32, device=out.device)
    lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=out.device)
    return parts, lse


def merge_parts(parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None, out_scale: float = 1.0) -> None:
    """Write the whole of parts[B,H,S,D] with part_lse[B,H,S], times a factor, into out[B,H,D]; its lse, in base e, into
    lse[B,H]."""
    batch, heads, splits, width = parts.shape
    block_s, block_d = triton.next_power_of_2(splits), max(16, triton.next_power_of_2(width))
    _merge_kernel[(batch * heads,)](
        *(parts, part_lse, out, lse, splits, out_scale),
        D=width,
        BLOCK_S=block_s,
        BLOCK_P=max(1, min(block_s, _MERGED // block_d)),
        BLOCK_D=block_d,
    )
