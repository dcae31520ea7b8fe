"""Multi-head latent attention (MLA), decode: one token per sequence over a paged latent cache, in the absorbed form.

All heads share one latent vector per token, which is both key and value. A block of latents is loaded into shared
memory once and used by two dots, for a tile of BLOCK_M heads. Keys are split among programs, and splits merged, as in
`attention_decode`. A tile has 16 or 32 heads and Hopper's wgmma 64 rows, so scores are transposed, [BLOCK_N,BLOCK_M].

Source: DeepSeek-AI, *DeepSeek-V2*, arXiv:2405.04434 (2024), section 2.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_mla, check_sm_scale
from assay.kernels.triton.attention_decode import (
    LN_2,
    LOG2_E,
    attend_block,
    choose_num_splits,
    empty_partials,
    merge_splits,
    normalize,
    page_and_slot,
    split_range,
)
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed

_MAX_D, _MAX_DR = 512, 64  # DeepSeek's columns of latents and of rope keys; more do not fit shared memory
_CTAS_PER_SM = 1
_CONFIGS = [  # those of one stage are for float32
    triton.Config({"BLOCK_N": block_n}, num_warps=num_warps, num_stages=num_stages)
    for block_n, num_warps, num_stages in ((64, 4, 2), (64, 8, 2), (32, 8, 1), (16, 8, 1))
]


def _prune_configs(configs, named_args, **keywords):
    """Return blocks of 64 tokens, with 8 warps for the registers of 32 heads; small ones for float32's FMAs.

    Not with 8 warps for 16 heads: there a warpgroup takes 8 columns of scores, `wgmma` n8, whose operand begins in the
    middle of a swizzle's 32 bytes and ends with the block's shared memory. That is one of the suspected causes of an
    illegal access on an H100 (docs/gpu.md). It was not confirmed, nor the speed of the form measured.
    """
    if named_args["q_ptr"].element_size() == 4:
        return [c for c in configs if c.num_stages == 1]
    return [c for c in configs if c.num_stages == 2 and c.num_warps == (4 if keywords["BLOCK_M"] == 16 else 8)]


@triton.autotune(
    configs=_CONFIGS, key=["H", "D", "DR", "PAGE_SIZE"], prune_configs_by={"early_config_prune": _prune_configs}
)
@triton.jit(do_not_specialize=["MAX_KEYS", "NUM_SPLITS"])
def _mla_kernel(
    q_ptr,
    q_rope_ptr,
    cache_ptr,
    rope_cache_ptr,
    page_table_ptr,
    seq_lens_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    q_rope_strides,
    cache_strides,
    rope_cache_strides,
    page_table_strides,
    stride_seq_len,
    H,
    MAX_KEYS,
    NUM_SPLITS,
    qk_scale,
    lse_scale,
    D: tl.constexpr,
    DR: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one split for BLOCK_M heads: out[B,H,NUM_SPLITS,D], normalised, and lse[B,H,NUM_SPLITS].

    q is [B,H,D], q_rope [B,H,DR], cache [pages,PAGE_SIZE,D], rope_cache [pages,PAGE_SIZE,DR].
    """
    pid = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_tiles = tl.cdiv(H, BLOCK_M)
    batch = pid // num_tiles
    head = pid % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = head < H
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    offs_r = tl.arange(0, BLOCK_DR).to(tl.int64)[None, :]
    mask_d, mask_r = offs_d < D, offs_r < DR
    q_ptrs = q_ptr + batch * q_strides[0] + head[:, None] * q_strides[1] + offs_d * q_strides[2]
    q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_d, other=0.0)
    q_rope_rows = q_rope_ptr + batch * q_rope_strides[0] + head[:, None] * q_rope_strides[1]
    q_rope = tl.load(q_rope_rows + offs_r * q_rope_strides[2], mask=mask_m[:, None] & mask_r, other=0.0)
    q, q_rope = tl.trans(q), tl.trans(q_rope)  # once, before the loop
    cache_ptrs = cache_ptr + offs_d * cache_strides[2]
    rope_cache_ptrs = rope_cache_ptr + offs_r * rope_cache_strides[2]
    page_table_ptr += batch * page_table_strides[0]

    length = tl.minimum(tl.load(seq_lens_ptr + batch * stride_seq_len), MAX_KEYS)  # what the page table has room for
    kv_start, kv_end = split_range(length, split, NUM_SPLITS, BLOCK_N)

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    for start_n in range(kv_start, kv_end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < kv_end
        if PAGE_SIZE % BLOCK_N == 0:  # the block is in one page
            page = tl.load(page_table_ptr + start_n // PAGE_SIZE * page_table_strides[1]).to(tl.int64)
            slot = (offs_n % PAGE_SIZE).to(tl.int64)[:, None]
        else:
            page, slot = page_and_slot(offs_n, mask_n, page_table_ptr, page_table_strides[1], PAGE_SIZE)
            page, slot = page[:, None], slot[:, None]
        c_ptrs = cache_ptrs + page * cache_strides[0] + slot * cache_strides[1]
        c = tl.load(c_ptrs, mask=mask_n[:, None] & mask_d, other=0.0)
        k_rope_ptrs = rope_cache_ptrs + page * rope_cache_strides[0] + slot * rope_cache_strides[1]
        k_rope = tl.load(k_rope_ptrs, mask=mask_n[:, None] & mask_r, other=0.0)
        qk = tl.dot(c, q, input_precision="ieee")
        qk = tl.dot(k_rope, q_rope, qk, input_precision="ieee")
        m_i, l_i, acc = attend_block(m_i, l_i, acc, qk, c, mask_n, qk_scale, 0)

    acc = normalize(acc, l_i, 0)
    row = (batch * H + head) * NUM_SPLITS + split
    tl.store(out_ptr + row[:, None] * D + offs_d, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d)
    tl.store(lse_ptr + row, (m_i + tl.log2(l_i)) * lse_scale, mask=mask_m)


def _empty_results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@custom_op("assay::mla_decode", _empty_results)
def _mla_decode(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, lse = _empty_results(q)
    (batch, heads, latent_dim), rope_dim, page_size = q.shape, q_rope.shape[2], cache.shape[1]
    if lse.numel() == 0:
        return out, lse
    max_keys = block_table.shape[1] * page_size
    block_m = 16 if heads <= 16 or q.dtype == torch.float32 else 32
    programs = batch * triton.cdiv(heads, block_m)
    num_splits = choose_num_splits(programs, max_keys, _CTAS_PER_SM)
    partial_out, partial_lse = (out, lse) if num_splits == 1 else empty_partials(out, num_splits)
    _mla_kernel[(programs, num_splits)](
        *(q, q_rope, cache, rope_cache, block_table, seq_lens, partial_out, partial_lse),
        *(q.stride(), q_rope.stride(), cache.stride(), rope_cache.stride(), block_table.stride(), seq_lens.stride(0)),
        H=heads,
        MAX_KEYS=max_keys,
        NUM_SPLITS=num_splits,
        qk_scale=scale * LOG2_E,
        lse_scale=LN_2.value if num_splits == 1 else 1.0,  # splits are merged in base 2
        D=latent_dim,
        DR=rope_dim,
        PAGE_SIZE=max(page_size, 1),
        BLOCK_M=block_m,
        BLOCK_D=max(64, triton.next_power_of_2(latent_dim)),
        BLOCK_DR=max(16, triton.next_power_of_2(rope_dim)),
    )
    if num_splits > 1:
        merge_splits(partial_out, partial_lse, out, lse)
    return out, lse


@replayed
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
    """Return softmax((q c^T + q_rope r^T) scale) c for q[B,H,D], q_rope[B,H,Dr] over seq_lens[b] cached positions.

    c and r are the rows of cache[P,page,D] and rope_cache[P,page,Dr], which all heads share; they may be views of one
    cache [P,page,D+Dr]. All four are float32, bfloat16 or float16; D is at most 512, Dr 64. Position p of sequence b is
    slot p % page of page block_table[b, p // page]; block_table is int32[B,max_pages], seq_lens int32[B]. Entries and
    slots after the last position are not used. scale: 1 / sqrt(D + Dr) by default.

    Returns out[B,H,D] in q's dtype, zero for an empty sequence; with return_lse also the natural log-sum-exp
    float32[B,H], -inf for an empty sequence. Raises TypeError or ValueError, naming the argument, for another dtype,
    shape or device. Lengths and page numbers are on the device and not checked; but a sequence is never read beyond
    the end of its row of the table.
    """
    check_mla(q, q_rope, cache, rope_cache, block_table, seq_lens, _MAX_D, _MAX_DR)
    scale = check_sm_scale(scale, q.shape[2] + q_rope.shape[2])
    out, lse = _mla_decode(q, q_rope, cache, rope_cache, block_table, seq_lens, scale)
    return (out, lse) if return_lse else out
