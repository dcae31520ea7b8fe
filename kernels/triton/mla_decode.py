"""Multi-head latent attention of one new token per sequence over a paged cache, in the absorbed form.

All heads share one latent vector a token, which is key and value alike: a block of them is copied into shared memory
once, for a tile of heads, and multiplied as keys and then as values. A sequence's tokens are split among programs, and
their parts merged (`decode_parts`).

A tile has 16 or 32 heads, and Hopper's matrix instructions take 64 rows: tokens are the rows of the scores, and latent
columns those of the output.

Source of the absorbed form: DeepSeek-AI, *DeepSeek-V2*, arXiv:2405.04434 (2024), section 2.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_mla, check_sm_scale
from assay.kernels.triton.decode_parts import (
    LN_2,
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

_WIDEST, _WIDEST_ROPE = 512, 64  # columns: DeepSeek's, and what shared memory has room for
_RESIDENT = 1  # programs that a multiprocessor's shared memory has room for
_CONFIGS = [
    triton.Config({"BLOCK_N": block_n}, num_warps=warps, num_stages=stages)
    for block_n, warps, stages in ((64, 4, 2), (64, 8, 2), (32, 8, 1), (16, 8, 1))
]


def _fitting(configs, named_args, **keywords):
    """A block of 64 tokens, the rows of matrix instructions, with warps enough for the registers that its heads take;
    float32, which tensor cores don't multiply, has its operands in registers: its blocks are small."""
    if named_args["q_ptr"].element_size() == 4:
        return [c for c in configs if c.num_stages == 1]
    return [c for c in configs if c.num_stages == 2 and (keywords["BLOCK_M"] == 16 or c.num_warps == 8)]


@triton.autotune(configs=_CONFIGS, key=["H", "D", "DR", "PAGE"], prune_configs_by={"early_config_prune": _fitting})
@triton.jit(do_not_specialize=["KEYS", "SPLITS"])
def _mla_kernel(
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    rope_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    q_rope_strides,
    cache_strides,
    rope_strides,
    table_strides,
    stride_length,
    H,
    KEYS,
    SPLITS,
    score_scale,
    lse_unit,
    D: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One part of one sequence for a tile of heads: its output, normalised, and lse."""
    program = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    tiles = tl.cdiv(H, BLOCK_M)
    batch = program // tiles
    head = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = head < H
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    r = tl.arange(0, BLOCK_DR).to(tl.int64)[None, :]
    in_d, in_r = d < D, r < DR
    q_ptrs = q_ptr + batch * q_strides[0] + head[:, None] * q_strides[1] + d * q_strides[2]
    q = tl.load(q_ptrs, mask=inside[:, None] & in_d, other=0.0)
    q_rope_ptrs = q_rope_ptr + batch * q_rope_strides[0] + head[:, None] * q_rope_strides[1] + r * q_rope_strides[2]
    q_rope = tl.load(q_rope_ptrs, mask=inside[:, None] & in_r, other=0.0)
    q, q_rope = tl.trans(q), tl.trans(q_rope)  # once, before the loop
    cache_ptrs = cache_ptr + d * cache_strides[2]
    rope_ptrs = rope_ptr + r * rope_strides[2]
    row_of_table = table_ptr + batch * table_strides[0]

    length = tl.minimum(tl.load(lengths_ptr + batch * stride_length), KEYS)  # the table has no more pages
    first, last = part_of(length, split, SPLITS, BLOCK_N)

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        used = position < last
        if PAGE % BLOCK_N == 0:  # a block lies in one page
            page = tl.load(row_of_table + start // PAGE * table_strides[1]).to(tl.int64)
            slot = (position % PAGE).to(tl.int64)[:, None]
        else:
            page, slot = slots_of(position, used, row_of_table, table_strides[1], PAGE)
            page, slot = page[:, None], slot[:, None]
        c_ptrs = cache_ptrs + page * cache_strides[0] + slot * cache_strides[1]
        c = tl.load(c_ptrs, mask=used[:, None] & in_d, other=0.0)
        r_ptrs = rope_ptrs + page * rope_strides[0] + slot * rope_strides[1]
        rope = tl.load(r_ptrs, mask=used[:, None] & in_r, other=0.0)
        s = tl.dot(c, q, input_precision="ieee")
        s = tl.dot(rope, q_rope, s, input_precision="ieee")
        m_i, l_i, acc = add_block(m_i, l_i, acc, s, c, used, score_scale, 0)

    acc = normalised(acc, l_i, 0)
    row = (batch * H + head) * SPLITS + split
    tl.store(out_ptr + row[:, None] * D + d, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_d)
    tl.store(lse_ptr + row, (m_i + tl.log2(l_i)) * lse_unit, mask=inside)


def _results(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@custom_op("assay::mla_decode", _results)
def _mla_decode(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _results(q)
    (batch, heads, width), rope_width, page = q.shape, q_rope.shape[2], cache.shape[1]
    if lse.numel() == 0:
        return out, lse
    keys = block_table.shape[1] * page
    block_m = 16 if heads <= 16 or q.dtype == torch.float32 else 32
    programs = batch * triton.cdiv(heads, block_m)
    splits = splits_for(programs, keys, _RESIDENT)
    parts, part_lse = (out, lse) if splits == 1 else empty_parts(out, splits)
    _mla_kernel[(programs, splits)](
        *(q, q_rope, cache, rope_cache, block_table, seq_lens, parts, part_lse),
        *(q.stride(), q_rope.stride(), cache.stride(), rope_cache.stride(), block_table.stride(), seq_lens.stride(0)),
        H=heads,
        KEYS=keys,
        SPLITS=splits,
        score_scale=scale * LOG2_E,
        lse_unit=LN_2.value if splits == 1 else 1.0,  # parts are merged in base two
        D=width,
        DR=rope_width,
        PAGE=max(page, 1),
        BLOCK_M=block_m,
        BLOCK_D=max(64, triton.next_power_of_2(width)),
        BLOCK_DR=max(16, triton.next_power_of_2(rope_width)),
    )
    if splits > 1:
        merge_parts(parts, part_lse, out, lse)
    return out, lse


def mla_decode(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax((q c^T + q_rope r^T) scale) c for q[B,H,D], q_rope[B,H,Dr] over the first seq_lens[b] positions.

    c and r are the rows of cache[P,page,D] and rope_cache[P,page,Dr], which all heads share; they may be views of one
    cache [P,page,D+Dr]. All four are float32, bfloat16 or float16. Position p of sequence b lies in page
    block_table[b, p // page], at p % page; block_table is int32[B,max_pages], seq_lens int32[B], and neither entries
    nor slots behind the last position are used. scale: 1 / sqrt(D + Dr) where left out. D is at most 512, Dr 64.

    Returns out[B,H,D] in q's dtype, zero for an empty sequence, and with return_lse the log-sum-exp float32[B,H], of
    natural logarithms, -inf for an empty one. Raises TypeError or ValueError, naming the argument, for another dtype,
    shape or device. Lengths and page numbers lie on the device and aren't checked, but that no sequence is read beyond
    the end of its row of the table.
    """
    check_mla(q, q_rope, cache, rope_cache, block_table, seq_lens, _WIDEST, _WIDEST_ROPE)
    scale = check_sm_scale(scale, q.shape[2] + q_rope.shape[2])
    out, lse = _mla_decode(q, q_rope, cache, rope_cache, block_table, seq_lens, scale)
    return (out, lse) if return_lse else out
