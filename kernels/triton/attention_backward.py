"""Gradients of attention without atomics: one kernel for dQ, one for dK and dV.

Both recompute the probabilities P from the stored log-sum-exp, as FlashAttention-2 does. The first kernel stores
delta = rowsum(dO * O), less the gradient of the log-sum-exp, and the second reads it:

    dP = dO V^T,  dS = P * (dP - delta),  dQ = dS K * scale,  dK = dS^T Q * scale,  dV = P^T dO

Source: T. Dao, *FlashAttention-2*, arXiv:2307.08691 (2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.attention_blocks import (
    FP32_STAGES,
    LOG2_E,
    SIZES,
    AttentionOptions,
    band_mask,
    block_range,
    configs_for_head_dims,
    count_tiles,
    dot_nt,
    flatten_configs,
    load_tile,
    make_configs,
    nth_block,
    recompute_p,
    sequence_of_tile,
    softcap_backward,
)
from assay.kernels.triton.layouts import can_use_tma, make_descriptor, set_block_shapes
from assay.kernels.triton.online_softmax import finite_shift
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.tiles import size_bucket

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

# By the most columns of K and V together: only tiles whose share fits a thread's registers. The last number is 1 for
# float32, and only there (`FP32_STAGES`).
_DQ_HOOK = set_block_shapes(k_ptr=(1, 1, "BLOCK_N", "BLOCK_D"), v_ptr=(1, 1, "BLOCK_N", "BLOCK_DV"))
_DQ_TABLE = {
    128: make_configs(_DQ_HOOK, (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 16, 8, 1), (32, 32, 8, 1)),
    256: make_configs(_DQ_HOOK, (128, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 1)),
    512: make_configs(_DQ_HOOK, (64, 16, 8, 2), (16, 16, 8, 1)),
}
_DKDV_HOOK = set_block_shapes(q_ptr=(1, 1, "BLOCK_M", "BLOCK_D"), dout_ptr=(1, 1, "BLOCK_M", "BLOCK_DV"))
_DKDV_TABLE = {
    128: make_configs(_DKDV_HOOK, (64, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2), (16, 64, 8, 1), (32, 32, 8, 1)),
    256: make_configs(_DKDV_HOOK, (32, 64, 4, 2), (32, 64, 8, 2), (16, 64, 8, 1)),
    512: make_configs(_DKDV_HOOK, (16, 64, 8, 2), (16, 32, 8, 2), (16, 16, 8, 1)),
}
DQ_CONFIGS, DKDV_CONFIGS = flatten_configs(_DQ_TABLE), flatten_configs(_DKDV_TABLE)
_MAX_VARLEN_ACCUMULATORS = 64  # of dK and dV, that a thread has registers for beside a sequence's offsets


def prune_dq_configs(_: list[triton.Config], arguments: Mapping[str, Any], **__: Any) -> list[triton.Config]:
    """Return the configurations of dQ that fit a thread's registers."""
    is_float32 = arguments["dq_ptr"].element_size() == 4
    return [c for c in configs_for_head_dims(_DQ_TABLE, arguments) if (c.num_stages == FP32_STAGES) == is_float32]


def prune_dkdv_configs(_: list[triton.Config], arguments: Mapping[str, Any], **__: Any) -> list[triton.Config]:
    """Return the configurations of dK and dV that fit a thread's registers."""
    is_float32 = arguments["dk_ptr"].element_size() == 4
    varlen = arguments.get("cu_seqlens_k_ptr") is not None
    columns = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    return [
        c
        for c in configs_for_head_dims(_DKDV_TABLE, arguments)
        if (c.num_stages == FP32_STAGES) == is_float32
        and (not varlen or c.kwargs["BLOCK_N"] * columns <= _MAX_VARLEN_ACCUMULATORS * 32 * c.num_warps)
    ]


@triton.jit
def _add_keys(state, rows, inputs, first, last, options, BLOCK_N: tl.constexpr, MASKED, EVEN_D, EVEN_DV):
    """Add K and V blocks number first..last-1 (`nth_block`) to the state: dq / scale, and -dslope of each row.

    MASKED: the mask or the end of the keys cuts these blocks.
    """
    dq, dslope = state
    q, dout, lse, delta = rows
    k_source, v_source, k_fp32, v_fp32, k_start, mask_d, mask_dv = inputs
    blocks, (Sk, lo, hi), scales, (slope, diagonal) = options
    for n in tl.range(first, last):
        start_n = nth_block(n, blocks) * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_source, k_start + start_n, offs_n < Sk, mask_d, MASKED, EVEN_D)
        qk = dot_nt(q, k, k_fp32, k_start + start_n, offs_n < Sk, MASKED)
        distance = None
        if slope is not None:
            distance = tl.abs(diagonal - offs_n[None, :]).to(tl.float32)
        p = recompute_p(qk, lse, slope, distance, scales)
        v = load_tile(v_source, k_start + start_n, offs_n < Sk, mask_dv, MASKED, EVEN_DV)
        ds = p * (dot_nt(dout, v, v_fp32, k_start + start_n, offs_n < Sk, MASKED) - delta)
        if slope is not None:
            dslope += tl.sum(_zero_masked(ds, offs_n, lo, hi, MASKED) * distance, axis=1)
        ds = softcap_backward(ds, qk, scales)
        ds = _zero_masked(ds, offs_n, lo, hi, MASKED)
        if MASKED:
            k = tl.where(k - k == 0.0, k, 0.0)  # or a masked infinity times ds = 0 is NaN
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq, dslope


@triton.jit
def _zero_masked(ds, offs_n, lo, hi, MASKED: tl.constexpr):
    if MASKED:
        ds = tl.where(band_mask(offs_n, lo, hi), ds, 0.0)
    return ds


@triton.autotune(
    configs=DQ_CONFIGS,
    key=["SQ_BUCKET", "ATTENDED_BUCKET", "GROUP_SIZE", "D", "DV"],
    prune_configs_by={"early_config_prune": prune_dq_configs},
)
@triton.jit(do_not_specialize=[*SIZES, "SQ_BUCKET", "ATTENDED_BUCKET"])
def _attention_dq_kernel(
    q_ptr,
    k_ptr,  # or a TMA descriptor, as v_ptr
    v_ptr,
    kv_fp32_ptrs,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    slopes_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    dq_ptr,
    delta_ptr,
    dslopes_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    lse_strides,
    dlse_strides,
    dq_strides,
    stride_slope,
    stride_cu_q,
    stride_cu_k,
    Sq,
    Sk,
    B,
    GROUP_SIZE,
    H_KV,
    SQ_BUCKET,
    ATTENDED_BUCKET,
    min_offset,
    max_offset,
    scale,
    exp2_scale,
    softcap,
    dq_scale,
    USE_TMA: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute dq[B,H,Sq,D], and delta and the rows' shares of dslopes, float32[B,H,Sq] and contiguous.

    A program holds BLOCK_M rows of dQ and goes through the K and V blocks that they attend to. Rows are packed query
    heads, and varlen inputs are as in the forward kernel.
    """
    pid = tl.program_id(0).to(tl.int64)
    total_queries = Sq  # of all sequences, if varlen
    cu_seqlens = cu_seqlens_q_ptr, cu_seqlens_k_ptr, B, stride_cu_q, stride_cu_k
    num_tiles = count_tiles(Sq.to(tl.int64) * GROUP_SIZE, cu_seqlens, BLOCK_M)
    tile = num_tiles - 1 - pid % num_tiles  # the last first: under a causal mask it has the most blocks
    batch = pid // num_tiles // H_KV
    kv_head = pid // num_tiles % H_KV
    # From here on, Sq, Sk and tile are those of the program's sequence.
    q_start, Sq, k_start, Sk, tile = sequence_of_tile(tile, Sq, Sk, cu_seqlens, GROUP_SIZE, BLOCK_M)
    if cu_seqlens_q_ptr is not None:
        if max_offset is not None:
            max_offset += Sk - Sq
        if tile * BLOCK_M >= Sq * GROUP_SIZE:
            return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP_SIZE
    head = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    mask_m = query < Sq
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    offs_dv = tl.arange(0, BLOCK_DV).to(tl.int64)[None, :]
    mask_d = offs_d < D
    mask_dv = offs_dv < DV
    offs_m = q_start + query
    q_rows = q_ptr + batch * q_strides[0] + (head * q_strides[1] + offs_m * q_strides[2])[:, None]
    q = tl.load(q_rows + offs_d * q_strides[3], mask=mask_m[:, None] & mask_d, other=0.0)
    dout_rows = dout_ptr + batch * dout_strides[0] + (head * dout_strides[1] + offs_m * dout_strides[2])[:, None]
    dout = tl.load(dout_rows + offs_dv * dout_strides[3], mask=mask_m[:, None] & mask_dv, other=0.0)
    out_rows = batch * out_strides[0] + (head * out_strides[1] + offs_m * out_strides[2])[:, None]
    out = tl.load(out_ptr + out_rows + offs_dv * out_strides[3], mask=mask_m[:, None] & mask_dv, other=0.0)
    dlse_rows = batch * dlse_strides[0] + head * dlse_strides[1] + offs_m * dlse_strides[2]
    dlse = tl.load(dlse_ptr + dlse_rows, mask=mask_m, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1) - dlse
    delta_rows = (batch * H_KV * GROUP_SIZE + head) * total_queries + offs_m
    tl.store(delta_ptr + delta_rows, delta, mask=mask_m)
    lse_rows = batch * lse_strides[0] + head * lse_strides[1] + offs_m * lse_strides[2]
    lse = finite_shift(tl.load(lse_ptr + lse_rows, mask=mask_m, other=0.0)) * LOG2_E
    dq_ptrs = dq_ptr + batch * dq_strides[0] + (head * dq_strides[1] + offs_m * dq_strides[2])[:, None]

    query = query.to(tl.int32)[:, None]
    lo, hi = None, Sk - 1  # the keys that a row attends to
    if min_offset is not None:
        lo = query + min_offset
    if max_offset is not None:
        hi = tl.minimum(query + max_offset, hi)
    slope, diagonal = None, None
    if slopes_ptr is not None:
        slope = (tl.load(slopes_ptr + head * stride_slope, mask=mask_m, other=0.0) * LOG2_E)[:, None]
        diagonal = query + (Sk - Sq)
    k_fp32, v_fp32 = None, None
    if kv_fp32_ptrs is not None:
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_rows = kv_fp32_ptrs[0] + batch * k_strides[0] + kv_head * k_strides[1] + offs_n * k_strides[2]
        v_rows = kv_fp32_ptrs[1] + batch * v_strides[0] + kv_head * v_strides[1] + offs_n * v_strides[2]
        k_fp32 = q_rows, q_strides[3], mask_m[:, None], None, k_rows, k_strides[2], k_strides[3], D
        v_fp32 = dout_rows, dout_strides[3], mask_m[:, None], None, v_rows, v_strides[2], v_strides[3], DV
    if USE_TMA:
        k_source = k_ptr, batch.to(tl.int32), kv_head.to(tl.int32)
        v_source = v_ptr, batch.to(tl.int32), kv_head.to(tl.int32)
    else:
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_ptrs = k_ptr + batch * k_strides[0] + kv_head * k_strides[1] + offs_n * k_strides[2] + offs_d * k_strides[3]
        v_ptrs = v_ptr + batch * v_strides[0] + kv_head * v_strides[1] + offs_n * v_strides[2] + offs_dv * v_strides[3]
        k_source, v_source = (k_ptrs, k_strides[2]), (v_ptrs, v_strides[2])  # type: ignore[assignment]
    EVEN_D: tl.constexpr = BLOCK_D == D
    EVEN_DV: tl.constexpr = BLOCK_DV == DV
    first_query = (tile * BLOCK_M // GROUP_SIZE).to(tl.int32)
    last_query = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP_SIZE, Sq - 1).to(tl.int32)
    blocks = block_range(first_query, last_query, min_offset, max_offset, Sk, BLOCK_N)
    num_masked, num_blocks = blocks[2], blocks[2] + blocks[3]
    tensors = (q, dout, lse[:, None], delta[:, None]), (k_source, v_source, k_fp32, v_fp32, k_start, mask_d, mask_dv)
    scales = scale, exp2_scale, softcap
    options = blocks, (Sk, lo, hi), scales, (slope, diagonal)
    state = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    state = _add_keys(state, *tensors, 0, num_masked, options, BLOCK_N, True, EVEN_D, EVEN_DV)
    state = _add_keys(state, *tensors, num_masked, num_blocks, options, BLOCK_N, False, EVEN_D, EVEN_DV)
    dq, dslope = state

    dq = dq * dq_scale
    tl.store(dq_ptrs + offs_d * dq_strides[3], dq.to(dq_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_d)
    if slopes_ptr is not None:
        tl.store(dslopes_ptr + delta_rows, -dslope, mask=mask_m)


@triton.jit
def _add_queries(
    state, tensors, inputs, first, number, options, BLOCK_M: tl.constexpr, MASKED, VARLEN, EVEN_D, EVEN_DV
):
    """Add ``number`` Q and dO blocks of each head, from number ``first`` on (`nth_block`), to dk / scale and dv.

    MASKED: the mask or the end of the queries cuts these blocks.
    """
    dk, dv = state
    k, v, k_fp32, v_fp32 = tensors
    q_source, dout_source, lse_ptrs, delta_ptrs, mask_d, mask_dv, heads, queries = inputs
    first_head, group_size = heads
    q_start, total_queries = queries
    blocks, (Sq, lo, hi), scales, (slopes_ptr, stride_slope, diagonal) = options
    for i in tl.range(0, group_size * number):
        head = first_head + i // number
        start_m = nth_block(first + i % number, blocks) * BLOCK_M
        offs_m = start_m + tl.arange(0, BLOCK_M)
        q = load_tile(_of_head(q_source, head), q_start + start_m, offs_m < Sq, mask_d, MASKED, EVEN_D)
        # Behind the batch's first row of lse and delta, which are contiguous [B,H,Sq].
        lse_rows = head.to(tl.int64) * total_queries + q_start + offs_m
        lse = tl.load(lse_ptrs + lse_rows, mask=offs_m < Sq, other=0.0)[None, :] * LOG2_E
        delta = tl.load(delta_ptrs + lse_rows, mask=offs_m < Sq, other=0.0)[None, :]
        qk = dot_nt(k, q, _fp32_of_head(k_fp32, head), q_start + start_m, offs_m < Sq, MASKED)
        slope, distance = None, None
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + head * stride_slope) * LOG2_E
            distance = tl.abs(offs_m[None, :] - diagonal).to(tl.float32)
        p = recompute_p(qk, finite_shift(lse), slope, distance, scales)
        dout = load_tile(_of_head(dout_source, head), q_start + start_m, offs_m < Sq, mask_dv, MASKED, EVEN_DV)
        if MASKED and VARLEN:  # TMA reads on into the next sequence, whose infinities times zero are NaN
            q = tl.where((offs_m < Sq)[:, None], q, 0.0)
            dout = tl.where((offs_m < Sq)[:, None], dout, 0.0)
        dp = dot_nt(v, dout, _fp32_of_head(v_fp32, head), q_start + start_m, offs_m < Sq, MASKED)
        ds = p * (dp - delta)
        ds = softcap_backward(ds, qk, scales)
        if MASKED:
            mask = band_mask(offs_m, lo, hi)
            p = tl.where(mask, p, 0.0)
            ds = tl.where(mask, ds, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _of_head(source, head):
    """Return the source of one head for `load_tile`."""
    USE_TMA: tl.constexpr = len(source) == 2
    if USE_TMA:
        result = source[0], source[1], head
    else:
        result = source[0] + head.to(tl.int64) * source[1], source[2]
    return result


@triton.jit
def _fp32_of_head(source, head):
    """Return the float32 source of one head for `dot_nt`, or None; slot 4, a factor there, is b's head stride here."""
    result = None
    if source is not None:
        ptrs, stride, mask, head_stride, other_ptrs, row_stride, other_stride, D = source
        other_ptrs = other_ptrs + head.to(tl.int64) * head_stride
        result = ptrs, stride, mask, None, other_ptrs, row_stride, other_stride, D
    return result


@triton.autotune(
    configs=DKDV_CONFIGS,
    key=["SK_BUCKET", "ATTENDING_BUCKET", "GROUP_SIZE", "D", "DV"],
    prune_configs_by={"early_config_prune": prune_dkdv_configs},
)
@triton.jit(do_not_specialize=[*SIZES, "SK_BUCKET", "ATTENDING_BUCKET"])
def _attention_dkdv_kernel(
    q_ptr,  # or a TMA descriptor, as dout_ptr
    k_ptr,
    v_ptr,
    dout_ptr,
    q_dout_fp32_ptrs,
    lse_ptr,
    delta_ptr,
    slopes_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    dk_ptr,
    dv_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    stride_slope,
    stride_cu_q,
    stride_cu_k,
    Sq,
    Sk,
    B,
    GROUP_SIZE,
    H_KV,
    SK_BUCKET,
    ATTENDING_BUCKET,
    min_offset,
    max_offset,
    scale,
    exp2_scale,
    softcap,
    dk_scale,
    USE_TMA: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute dk[B,H_KV,Sk,D] and dv[B,H_KV,Sk,DV] from contiguous lse and delta, float32[B,H,Sq].

    A program holds BLOCK_N rows of dK and dV and goes through the queries that attend to them, head by head of those
    that share the KV head. The order is fixed and no other program adds to these rows. Scores are transposed,
    [BLOCK_N,BLOCK_M], so that both gradients are products with P and dS as they are. The band is that of a key's
    queries here: min_offset <= i - j <= max_offset.
    """
    pid = tl.program_id(0).to(tl.int64)
    VARLEN: tl.constexpr = cu_seqlens_k_ptr is not None
    total_queries = Sq
    cu_seqlens = cu_seqlens_k_ptr, cu_seqlens_q_ptr, B, stride_cu_k, stride_cu_q
    num_tiles = count_tiles(Sk, cu_seqlens, BLOCK_N)
    tile = pid % num_tiles
    batch = pid // num_tiles // H_KV
    kv_head = pid // num_tiles % H_KV
    # From here on, Sq, Sk and tile are those of the program's sequence.
    k_start, Sk, q_start, Sq, tile = sequence_of_tile(tile, Sk, Sq, cu_seqlens, 1, BLOCK_N)
    if VARLEN:
        if min_offset is not None:
            min_offset -= Sk - Sq
        if tile * BLOCK_N >= Sk:
            return

    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (offs_n < Sk)[:, None]
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    offs_dv = tl.arange(0, BLOCK_DV).to(tl.int64)[None, :]
    mask_d = offs_d < D
    mask_dv = offs_dv < DV
    rows = (k_start + offs_n)[:, None]
    k_rows = k_ptr + batch * k_strides[0] + kv_head * k_strides[1] + rows * k_strides[2]
    v_rows = v_ptr + batch * v_strides[0] + kv_head * v_strides[1] + rows * v_strides[2]
    k = tl.load(k_rows + offs_d * k_strides[3], mask=mask_n & mask_d, other=0.0)
    v = tl.load(v_rows + offs_dv * v_strides[3], mask=mask_n & mask_dv, other=0.0)

    key = offs_n.to(tl.int32)[:, None]
    lo, hi = None, Sq - 1  # the queries that attend to a key
    if min_offset is not None:
        lo = key + min_offset
    if max_offset is not None:
        hi = tl.minimum(key + max_offset, hi)
    k_fp32, v_fp32 = None, None
    if q_dout_fp32_ptrs is not None:
        offs_m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        q_rows = q_dout_fp32_ptrs[0] + batch * q_strides[0] + offs_m * q_strides[2]
        dout_rows = q_dout_fp32_ptrs[1] + batch * dout_strides[0] + offs_m * dout_strides[2]
        # For `_fp32_of_head`: slot 4 is the stride of heads.
        k_fp32 = k_rows, k_strides[3], mask_n, q_strides[1], q_rows, q_strides[2], q_strides[3], D
        v_fp32 = v_rows, v_strides[3], mask_n, dout_strides[1], dout_rows, dout_strides[2], dout_strides[3], DV
    if USE_TMA:
        q_source = q_ptr, batch.to(tl.int32)
        dout_source = dout_ptr, batch.to(tl.int32)
    else:
        offs_m = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        q_ptrs = q_ptr + batch * q_strides[0] + offs_m * q_strides[2] + offs_d * q_strides[3]
        dout_ptrs = dout_ptr + batch * dout_strides[0] + offs_m * dout_strides[2] + offs_dv * dout_strides[3]
        q_source = q_ptrs, q_strides[1], q_strides[2]  # type: ignore[assignment]
        dout_source = dout_ptrs, dout_strides[1], dout_strides[2]  # type: ignore[assignment]
    batch_rows = batch * H_KV * GROUP_SIZE * total_queries
    heads = (kv_head * GROUP_SIZE).to(tl.int32), GROUP_SIZE
    lse_ptrs, delta_ptrs = lse_ptr + batch_rows, delta_ptr + batch_rows
    bias = slopes_ptr, stride_slope, key - (Sk - Sq)
    EVEN_D: tl.constexpr = BLOCK_D == D
    EVEN_DV: tl.constexpr = BLOCK_DV == DV
    first_key = (tile * BLOCK_N).to(tl.int32)
    last_key = tl.minimum((tile + 1) * BLOCK_N, Sk).to(tl.int32) - 1
    blocks = block_range(first_key, last_key, min_offset, max_offset, Sq, BLOCK_M)
    num_masked, num_full = blocks[2], blocks[3]
    tensors = k, v, k_fp32, v_fp32
    inputs = q_source, dout_source, lse_ptrs, delta_ptrs, mask_d, mask_dv, heads, (q_start, total_queries)
    scales = scale, exp2_scale, softcap
    options = blocks, (Sq, lo, hi), scales, bias
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    state = _add_queries(state, tensors, inputs, 0, num_masked, options, BLOCK_M, True, VARLEN, EVEN_D, EVEN_DV)
    state = _add_queries(state, tensors, inputs, num_masked, num_full, options, BLOCK_M, False, VARLEN, EVEN_D, EVEN_DV)
    dk, dv = state

    dk_ptrs = dk_ptr + batch * dk_strides[0] + kv_head * dk_strides[1] + rows * dk_strides[2] + offs_d * dk_strides[3]
    dv_ptrs = dv_ptr + batch * dv_strides[0] + kv_head * dv_strides[1] + rows * dv_strides[2] + offs_dv * dv_strides[3]
    tl.store(dk_ptrs, (dk * dk_scale).to(dk_ptr.dtype.element_ty), mask=mask_n & mask_d)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=mask_n & mask_dv)


def launch_attention_backward(
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    options: AttentionOptions,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write dq, dk, dv, delta and the rows' shares of dslopes (or None) from q, k, v, out, lse, dout and dlse.

    delta and the shares are float32[B,H,Sq] and contiguous. cu_seqlens: as in `launch_attention`.
    """
    q, k, v, out, lse, dout, dlse = inputs
    dq, dk, dv, delta, dslope_rows = results
    scale, softcap, min_offset, max_offset = options[2:]
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    group_size = heads // kv_heads
    sequences = 1 if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    mean_queries, mean_keys = triton.cdiv(queries, sequences), triton.cdiv(keys, sequences)
    attended, attending = mean_keys, mean_queries
    if min_offset is not None and max_offset is not None:
        attended, attending = (min(size, max_offset - min_offset + 1) for size in (mean_keys, mean_queries))
    log2e = LOG2_E.value
    scales = scale * log2e, *((None, None) if softcap is None else (2.0 * log2e * scale / softcap, softcap * log2e))
    blocks = [max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim)]
    vectors = options.slopes, *(cu_seqlens or (None, None))
    vector_strides = [0 if vector is None else vector.stride(0) for vector in vectors]
    sizes = queries, keys, sequences, group_size, kv_heads
    fp32 = q.element_size() == 4

    def count(rows: int, block: int) -> int:
        return triton.cdiv(rows, block) if cu_seqlens is None else rows // block + sequences

    use_tma = can_use_tma(k, v)
    _attention_dq_kernel[lambda meta: (count(queries * group_size, meta["BLOCK_M"]) * kv_heads * batch,)](
        *(q, *(make_descriptor(x) if use_tma else x for x in (k, v)), (k, v) if fp32 else None),
        *(out, dout, lse, dlse, *vectors, dq, delta, dslope_rows),
        *(x.stride() for x in (q, k, v, out, dout, lse, dlse, dq)),
        *vector_strides,
        *(*sizes, size_bucket(mean_queries), size_bucket(attended)),
        *(min_offset, max_offset),
        *(*scales, scale),
        *(use_tma, head_dim, value_dim, *blocks),
    )
    if keys:
        use_tma = can_use_tma(q, dout)
        _attention_dkdv_kernel[lambda meta: (count(keys, meta["BLOCK_N"]) * kv_heads * batch,)](
            *(
                make_descriptor(q) if use_tma else q,
                k,
                v,
                make_descriptor(dout) if use_tma else dout,
                (q, dout) if fp32 else None,
            ),
            *(lse.contiguous(), delta, *vectors, dk, dv),
            *(x.stride() for x in (q, k, v, dout, dk, dv)),
            *vector_strides,
            *(*sizes, size_bucket(mean_keys), size_bucket(attending)),
            *(None if bound is None else -bound for bound in (max_offset, min_offset)),  # of i - j, not j - i
            *(*scales, scale),
            *(use_tma, head_dim, value_dim, *blocks),
        )


def _empty_results(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None, *_: object
) -> Gradients:
    vectors = [q.new_empty(0 if x is None else x.shape[0], dtype=torch.float32) for x in (slopes, sinks)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), vectors[0], vectors[1]


@custom_op("assay::attention_backward", _empty_results)
def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor,
    scale: float,
    softcap: float | None,
    min_offset: int | None,
    max_offset: int | None,
) -> Gradients:
    """Return dq, dk, dv, dslopes and dsinks (empty without slopes or sinks) of the operator `assay::attention`.

    out and lse are that operator's results, dout and dlse their gradients; options are its own.
    """
    dq, dk, dv, dslopes, dsinks = gradients = _empty_results(q, k, v, slopes, sinks)
    if lse.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    dslope_rows = None if slopes is None else torch.empty_like(delta)
    options = AttentionOptions(slopes, sinks, scale, softcap, min_offset, max_offset)
    options = options.without_open_bounds(q.shape[2], k.shape[2])
    launch_attention_backward((q, k, v, out, lse, dout, dlse), (dq, dk, dv, delta, dslope_rows), options)
    if dslope_rows is not None:
        dslopes.copy_(dslope_rows.sum((0, 2)))
    if sinks is not None:  # a sink has the probability of a key whose value is zero
        p = torch.exp(sinks[:, None] - lse).where(lse > -torch.inf, 0.0)
        dsinks.copy_(-(p * delta).sum((0, 2)))
    return gradients
