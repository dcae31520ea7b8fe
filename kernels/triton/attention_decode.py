"""Decode attention: one query token per sequence over a paged KV cache, which may be in an 8-bit format.

Split-KV (Flash-Decoding): the keys of a sequence are divided among num_splits programs, so that a few long sequences
fill a GPU. Each stores its normalised output and log-sum-exp, and a second kernel merges them. num_splits depends on
shapes alone, since sequence lengths are on the device; every sequence divides its own length evenly.

A program takes a tile of BLOCK_M query heads that share a KV head, so that K and V are loaded once for all of them.
Hopper's wgmma has 64 rows and a tile has few heads. So scores are transposed where that is possible, KEY_AXIS = 0: qk
is [BLOCK_N,BLOCK_M] and the accumulator [BLOCK_D,BLOCK_M]. KEY_AXIS is 1, with heads as rows, for tiles of 64 heads;
for 8-bit caches, whose keys pass through registers to be converted; and for float32, which has no tensor cores.

8-bit codes are converted to the query's dtype, which is exact; their scales multiply scores and output in float32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_decode, check_numbers, check_sm_scale
from assay.kernels.triton.online_softmax import finite_shift, online_softmax
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed

LOG2_E = math.log2(math.e)  # folded into the scale of scores, so that exp is a single exp2
LN_2 = tl.constexpr(math.log(2.0))
MAX_SPLITS = 128
_NUM_SMS = 132  # of an H100 or H200
_MIN_KEYS = 256  # of a split: fewer are read faster than merged
_MERGED_ELEMENTS = 4096  # of partial outputs that a program of the merge loads at once
_MAX_HEAD_DIM = 256
_CTAS_PER_SM = 2

_CONFIGS = [
    triton.Config({"BLOCK_N": block_n}, num_warps=num_warps, num_stages=num_stages)
    for block_n, num_warps, num_stages in (
        *((128, 8, 2), (128, 4, 2), (64, 4, 3), (64, 4, 2), (32, 4, 2)),
        *((64, 16, 2), (32, 8, 2), (32, 8, 1)),  # for float32
    )
]


def _prune_configs(configs, named_args, **keywords):
    """Return small blocks with many warps for float32, whose FMAs have their operands in registers.

    With keys as rows BLOCK_N is at least 64, and 128 only where two stages fit shared memory.
    """
    fp32 = named_args["q_ptr"].element_size() == 4
    configs = [c for c in configs if fp32 == (c.num_warps >= 8 and c.kwargs["BLOCK_N"] <= 64)]
    if keywords["KEY_AXIS"] == 1:
        return configs
    max_block_n = 128 if keywords["BLOCK_D"] <= 128 else 64
    return [c for c in configs if 64 <= c.kwargs["BLOCK_N"] <= max_block_n]


@triton.jit
def split_range(length, split, NUM_SPLITS, BLOCK_N: tl.constexpr):
    """Return the first position of a split and the end of it: whole blocks, divided evenly."""
    split_size = tl.cdiv(tl.cdiv(length, NUM_SPLITS), BLOCK_N) * BLOCK_N
    start = split * split_size
    return start, tl.minimum(start + split_size, length)


@triton.jit
def page_and_slot(offs_n, mask_n, page_table_ptr, stride, PAGE_SIZE: tl.constexpr):
    """Return page and slot (int64) of each position; page table entries after the last token are not read."""
    entry = (offs_n // PAGE_SIZE).to(tl.int64)
    page = tl.load(page_table_ptr + entry * stride, mask=mask_n, other=0).to(tl.int64)
    return page, (offs_n % PAGE_SIZE).to(tl.int64)


@triton.jit
def attend_block(m_i, l_i, acc, qk, v, mask_n, qk_scale, KEY_AXIS: tl.constexpr):
    """Add one block of unscaled scores qk and values v[BLOCK_N,BLOCK_D] to m_i, l_i and acc."""
    qk = tl.where(tl.expand_dims(mask_n, 1 - KEY_AXIS), qk * qk_scale, -float("inf"))
    m_i, l_i, p, alpha = online_softmax(m_i, l_i, qk, axis=KEY_AXIS)
    acc = acc * tl.expand_dims(alpha, KEY_AXIS)
    if KEY_AXIS == 0:
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_i, l_i, acc


@triton.jit
def normalize(acc, l_i, KEY_AXIS: tl.constexpr):
    """Return the output [BLOCK_M,BLOCK_D], zero in a row without keys."""
    acc = acc / tl.expand_dims(tl.where(l_i == 0.0, 1.0, l_i), KEY_AXIS)
    return tl.trans(acc) if KEY_AXIS == 0 else acc


@triton.autotune(
    configs=_CONFIGS, key=["GROUP_SIZE", "D", "PAGE_SIZE"], prune_configs_by={"early_config_prune": _prune_configs}
)
@triton.jit(do_not_specialize=["MAX_KEYS", "NUM_SPLITS"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    seq_lens_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    page_table_strides,
    stride_seq_len,
    H_KV,
    GROUP_SIZE,
    MAX_KEYS,
    NUM_SPLITS,
    qk_scale,
    out_scale,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_AXIS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute one split for BLOCK_M heads: out[B,H,NUM_SPLITS,D], normalised, and its lse[B,H,NUM_SPLITS] to base 2.

    q is [B,H,D], k and v are [pages,PAGE_SIZE,H_KV,D], the page table is [B,max_pages].
    """
    pid = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_tiles = tl.cdiv(GROUP_SIZE, BLOCK_M)
    tile = pid % num_tiles
    kv_head = pid // num_tiles % H_KV
    batch = pid // num_tiles // H_KV

    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    head = kv_head * GROUP_SIZE + offs_m
    mask_m = offs_m < GROUP_SIZE
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    mask_d = offs_d < D
    q_ptrs = q_ptr + batch * q_strides[0] + head[:, None] * q_strides[1] + offs_d * q_strides[2]
    q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_d, other=0.0)
    if KEY_AXIS == 0:
        q = tl.trans(q)  # once, before the loop
    k_ptrs = k_ptr + kv_head * k_strides[2] + offs_d * k_strides[3]
    v_ptrs = v_ptr + kv_head * v_strides[2] + offs_d * v_strides[3]
    page_table_ptr += batch * page_table_strides[0]

    length = tl.minimum(tl.load(seq_lens_ptr + batch * stride_seq_len), MAX_KEYS)  # what the page table has room for
    kv_start, kv_end = split_range(length, split, NUM_SPLITS, BLOCK_N)

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M] if KEY_AXIS == 0 else [BLOCK_M, BLOCK_D], tl.float32)
    for start_n in range(kv_start, kv_end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < kv_end  # slots after the last token may hold anything, NaN too
        page, slot = page_and_slot(offs_n, mask_n, page_table_ptr, page_table_strides[1], PAGE_SIZE)
        page, slot = page[:, None], slot[:, None]
        mask = mask_n[:, None] & mask_d
        k = tl.load(k_ptrs + page * k_strides[0] + slot * k_strides[1], mask=mask, other=0.0).to(q.dtype)
        if KEY_AXIS == 0:
            qk = tl.dot(k, q, input_precision="ieee")
        else:
            qk = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = tl.load(v_ptrs + page * v_strides[0] + slot * v_strides[1], mask=mask, other=0.0).to(q.dtype)
        m_i, l_i, acc = attend_block(m_i, l_i, acc, qk, v, mask_n, qk_scale, KEY_AXIS)

    acc = normalize(acc, l_i, KEY_AXIS) * out_scale
    row = (batch * H_KV * GROUP_SIZE + head) * NUM_SPLITS + split
    tl.store(out_ptr + row[:, None] * D + offs_d, acc.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, m_i + tl.log2(l_i), mask=mask_m)


@triton.jit(do_not_specialize=["NUM_SPLITS"])
def _merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    NUM_SPLITS,
    out_scale,
    D: tl.constexpr,
    BLOCK_LSE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of a row with weights 2^lse; the lse of a split without keys is -inf, and its weight zero."""
    row = tl.program_id(0).to(tl.int64)
    offs_lse = tl.arange(0, BLOCK_LSE)[None, :]
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    lse_ptrs = partial_lse_ptr + row * NUM_SPLITS
    lse = tl.load(lse_ptrs + offs_lse, mask=offs_lse < NUM_SPLITS, other=-float("inf"))
    m_i = tl.max(lse, axis=1)
    shift = finite_shift(m_i)
    l_i = tl.sum(tl.exp2(lse - shift[:, None]), axis=1)

    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, NUM_SPLITS, BLOCK_S):
        offs_s = (start + tl.arange(0, BLOCK_S))[:, None]
        weight = tl.exp2(tl.load(lse_ptrs + offs_s, mask=offs_s < NUM_SPLITS, other=-float("inf")) - shift[:, None])
        partial_ptrs = partial_out_ptr + (row * NUM_SPLITS + offs_s) * D + offs_d
        acc += weight * tl.load(partial_ptrs, mask=(offs_s < NUM_SPLITS) & (offs_d < D), other=0.0)

    acc = normalize(tl.sum(acc, axis=0)[None, :], l_i, 1) * out_scale
    tl.store(out_ptr + row * D + offs_d, acc.to(out_ptr.dtype.element_ty), mask=offs_d < D)
    if lse_ptr is not None:
        tl.store(lse_ptr + row + tl.arange(0, 1), m_i * LN_2 + tl.log(l_i))


def choose_num_splits(programs: int, max_keys: int, ctas_per_sm: int) -> int:
    """Return the number of splits that fills a GPU, where ``programs`` would run without splits."""
    num_splits = min(triton.cdiv(_NUM_SMS * ctas_per_sm, programs), MAX_SPLITS)
    return max(1, min(num_splits, triton.cdiv(max_keys, _MIN_KEYS)))


def empty_partials(out: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Return new float32 tensors for the partial outputs [B,H,S,D] and log-sum-exps [B,H,S] of out[B,H,D]."""
    batch, heads, head_dim = out.shape
    partial_out = torch.empty((batch, heads, num_splits, head_dim), dtype=torch.float32, device=out.device)
    partial_lse = torch.empty((batch, heads, num_splits), dtype=torch.float32, device=out.device)
    return partial_out, partial_lse


def merge_splits(
    partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor | None, out_scale: float = 1.0
) -> None:
    """Merge partial_out[B,H,S,D] with partial_lse[B,H,S] (base 2) into out[B,H,D], scaled, and lse[B,H] (base e)."""
    batch, heads, num_splits, head_dim = partial_out.shape
    block_lse, block_d = triton.next_power_of_2(num_splits), max(16, triton.next_power_of_2(head_dim))
    _merge_kernel[(batch * heads,)](
        *(partial_out, partial_lse, out, lse, num_splits, out_scale),
        D=head_dim,
        BLOCK_LSE=block_lse,
        BLOCK_S=max(1, min(block_lse, _MERGED_ELEMENTS // block_d)),
        BLOCK_D=block_d,
    )


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
    (batch, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k_cache.shape
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    group_size, max_keys = heads // kv_heads, block_table.shape[1] * page_size
    native_16 = k_cache.dtype == q.dtype != torch.float32
    max_block_m = 64 if head_dim <= 128 else 32 if native_16 else 16  # limited by a thread's registers
    block_m = min(max_block_m, max(16, triton.next_power_of_2(group_size)))
    keys_as_rows = native_16 and block_m < 64
    programs = batch * kv_heads * triton.cdiv(group_size, block_m)
    num_splits = choose_num_splits(programs, max_keys, _CTAS_PER_SM)
    partial_out, partial_lse = out, None
    if num_splits > 1:
        partial_out, partial_lse = empty_partials(out, num_splits)
    _decode_kernel[(programs, num_splits)](
        *(q, k_cache, v_cache, block_table, seq_lens, partial_out, partial_lse),
        *(q.stride(), k_cache.stride(), v_cache.stride(), block_table.stride(), seq_lens.stride(0)),
        H_KV=kv_heads,
        GROUP_SIZE=group_size,
        MAX_KEYS=max_keys,
        NUM_SPLITS=num_splits,
        qk_scale=scale * k_scale * LOG2_E,
        out_scale=v_scale if num_splits == 1 else 1.0,
        D=head_dim,
        PAGE_SIZE=max(page_size, 1),
        KEY_AXIS=0 if keys_as_rows else 1,
        BLOCK_M=block_m,
        BLOCK_D=max(64 if keys_as_rows else 16, triton.next_power_of_2(head_dim)),
    )
    if partial_lse is not None:
        merge_splits(partial_out, partial_lse, out, None, v_scale)
    return out


@replayed
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
    """Return softmax(q k^T scale) v for q[B,H,D] over the first seq_lens[b] positions of sequence b.

    k_cache and v_cache [P,page,Hkv,D], H a multiple of Hkv and D at most 256, have q's dtype (float32, bfloat16 or
    float16), float8_e4m3fn or float8_e5m2; their numbers are multiplied by k_scale and v_scale. Position p of sequence
    b is slot p % page of page block_table[b, p // page]; block_table is int32[B,max_pages], seq_lens int32[B]. Entries
    and slots after the last position are not used. scale: 1 / sqrt(D) by default.

    Returns out[B,H,D] in q's dtype, zero for an empty sequence. Raises TypeError or ValueError, naming the argument,
    for another dtype, shape or device. Lengths and page numbers are on the device and not checked; but a sequence is
    never read beyond the end of its row of the table.
    """
    check_decode(q, k_cache, v_cache, block_table, seq_lens, _MAX_HEAD_DIM)
    check_numbers(k_scale=k_scale, v_scale=v_scale)
    scale = check_sm_scale(scale, q.shape[2])
    out: Tensor = _attention_decode(q, k_cache, v_cache, block_table, seq_lens, scale, k_scale, v_scale)
    return out
