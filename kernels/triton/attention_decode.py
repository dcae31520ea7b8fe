"""Attention of one new token per sequence over a paged cache, which may be in an 8-bit format.

The keys of a sequence are split among programs, and their parts merged (`decode_parts`). The query heads that share a
key head are one tile, so that keys and values are read once for all of them.

Keys in the query's own 16 bits are the rows of matrix instructions, and a tile's heads their columns; but a tile of 64
heads has rows enough itself, 8-bit keys would pass through registers, and float32 meets no matrix instructions. Codes
of 8 bits become the query's dtype in registers, which is exact; their scales multiply scores and output, in float32.
Scores are kept in units of log2(e), so that an exponential is one exp2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_decode, check_numbers, check_sm_scale
from assay.kernels.triton.decode_parts import (
    LOG2_E,
    add_block,
    empty_parts,
    merge_parts,
    normalised,
    part_of,
    slots_of,
    splits_for,
)
from assay.kernels.triton.operators import custom_op

_WIDEST = 256
_RESIDENT = 2  # programs that a multiprocessor holds at once

_CONFIGS = [
    triton.Config({"BLOCK_N": block_n}, num_warps=warps, num_stages=stages)
    for block_n, warps, stages in (
        *((128, 8, 2), (128, 4, 2), (64, 4, 3), (64, 4, 2), (32, 4, 2)),
        *((64, 16, 2), (32, 8, 2), (32, 8, 1)),
    )
]


def _fitting(configs, named_args, **keywords):
    """Float32, which tensor cores don't multiply, takes small tiles and many warps: its operands are in registers.

    Keys that are rows are 64 at least, and 128 where shared memory has room for them.
    """
    wide = named_args["q_ptr"].element_size() == 4
    fitting = [c for c in configs if wide == (c.num_warps >= 8 and c.kwargs["BLOCK_N"] <= 64)]
    if keywords["AXIS"] == 1:
        return fitting
    most = 128 if keywords["BLOCK_D"] <= 128 else 64
    return [c for c in fitting if 64 <= c.kwargs["BLOCK_N"] <= most]


@triton.autotune(configs=_CONFIGS, key=["GROUP", "D", "PAGE"], prune_configs_by={"early_config_prune": _fitting})
@triton.jit(do_not_specialize=["KEYS", "SPLITS"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    table_strides,
    stride_length,
    GROUPS,
    GROUP,
    KEYS,
    SPLITS,
    score_scale,
    out_scale,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    AXIS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One part of one sequence for a tile of the query heads that share a key head: its output, normalised, and lse."""
    program = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    tiles = tl.cdiv(GROUP, BLOCK_M)
    tile = program % tiles
    group = program // tiles % GROUPS
    batch = program // tiles // GROUPS

    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    head = group * GROUP + member
    inside = member < GROUP
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    in_d = d < D
    q_ptrs = q_ptr + batch * q_strides[0] + head[:, None] * q_strides[1] + d * q_strides[2]
    q = tl.load(q_ptrs, mask=inside[:, None] & in_d, other=0.0)
    if AXIS == 0:
        q = tl.trans(q)  # once, before the loop
    k_ptrs = k_ptr + group * k_strides[2] + d * k_strides[3]
    v_ptrs = v_ptr + group * v_strides[2] + d * v_strides[3]
    row_of_table = table_ptr + batch * table_strides[0]

    length = tl.minimum(tl.load(lengths_ptr + batch * stride_length), KEYS)  # the table has no more pages
    first, last = part_of(length, split, SPLITS, BLOCK_N)

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M] if AXIS == 0 else [BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        used = position < last  # behind the last token entries of the table and slots of the cache hold anything
        page, slot = slots_of(position, used, row_of_table, table_strides[1], PAGE)
        page, slot = page[:, None], slot[:, None]
        kept = used[:, None] & in_d
        k = tl.load(k_ptrs + page * k_strides[0] + slot * k_strides[1], mask=kept, other=0.0).to(q.dtype)
        if AXIS == 0:
            s = tl.dot(k, q, input_precision="ieee")
        else:
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = tl.load(v_ptrs + page * v_strides[0] + slot * v_strides[1], mask=kept, other=0.0).to(q.dtype)
        m_i, l_i, acc = add_block(m_i, l_i, acc, s, v, used, score_scale, AXIS)

    acc = normalised(acc, l_i, AXIS) * out_scale
    row = (batch * GROUPS * GROUP + head) * SPLITS + split
    tl.store(out_ptr + row[:, None] * D + d, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_d)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, m_i + tl.log2(l_i), mask=inside)


@custom_op("assay::attention_decode", lambda q, *others: q.new_empty(q.shape))
def _attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> Tensor:
    (batch, heads, width), (_, page, groups, _) = q.shape, k_cache.shape
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    group, keys = heads // groups, block_table.shape[1] * page
    plain = k_cache.dtype == q.dtype != torch.float32
    most_heads = 64 if width <= 128 else 32 if plain else 16  # that a thread's registers have room for
    block_m = min(most_heads, max(16, triton.next_power_of_2(group)))
    rows_of_keys = plain and block_m < 64
    block_d = max(64 if rows_of_keys else 16, triton.next_power_of_2(width))
    programs = batch * groups * triton.cdiv(group, block_m)
    splits = splits_for(programs, keys, _RESIDENT)
    parts, lse = out, None
    if splits > 1:
        parts, lse = empty_parts(out, splits)
    _decode_kernel[(programs, splits)](
        *(q, k_cache, v_cache, block_table, seq_lens, parts, lse),
        *(q.stride(), k_cache.stride(), v_cache.stride(), block_table.stride(), seq_lens.stride(0)),
        GROUPS=groups,
        GROUP=group,
        KEYS=keys,
        SPLITS=splits,
        score_scale=scale * k_scale * LOG2_E,
        out_scale=v_scale if splits == 1 else 1.0,
        D=width,
        PAGE=max(page, 1),
        AXIS=0 if rows_of_keys else 1,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
    )
    if lse is not None:
        merge_parts(parts, lse, out, None, v_scale)
    return out


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """softmax(q k^T scale) v for q[B,H,D] over the first seq_lens[b] positions of sequence b; H a multiple of Hkv.

    k_cache and v_cache [P,page,Hkv,D] are in q's dtype (float32, bfloat16 or float16), or in float8_e4m3fn or
    float8_e5m2; a slot stands for its number times k_scale or v_scale. Position p of sequence b lies in page
    block_table[b, p // page], at p % page; block_table is int32[B,max_pages], seq_lens int32[B], and neither entries
    nor slots behind the last position are used. scale: 1 / sqrt(D) where left out. D is at most 256.

    Returns out[B,H,D] in q's dtype, zero for an empty sequence. Raises TypeError or ValueError, naming the argument,
    for another dtype, shape or device. Lengths and page numbers lie on the device and aren't checked, but that no
    sequence is read beyond the end of its row of the table.
    """
    check_decode(q, k_cache, v_cache, block_table, seq_lens, _WIDEST)
    check_numbers(k_scale=k_scale, v_scale=v_scale)
    scale = check_sm_scale(scale, q.shape[2])
    return _attention_decode(q, k_cache, v_cache, block_table, seq_lens, scale, k_scale, v_scale)
