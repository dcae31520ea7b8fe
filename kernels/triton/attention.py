"""Attention with grouped query heads, masks, softcap, ALiBi and sinks: FlashAttention-2's forward pass.

A program computes BLOCK_M rows of the output for one KV head. A row is one query of one head: the GROUP_SIZE query
heads that share a KV head are packed query by query (row = query * GROUP_SIZE + head), so that K and V are loaded once
for all of them. Q and the accumulator [BLOCK_M,BLOCK_DV] stay in registers; blocks of K and V pass through shared
memory, by TMA where their layout allows it. Blocks that the mask hides from every row are skipped; blocks that it cuts
are processed first, with the mask, then the full ones, without.

Source: T. Dao, *FlashAttention-2*, arXiv:2307.08691 (2023), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import (
    FLOAT32,
    FLOATING,
    check,
    check_choice,
    check_heads,
    check_positive,
    check_sm_scale,
)
from assay.kernels.triton.attention_backward import attention_gradients
from assay.kernels.triton.attention_blocks import (
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
    sequence_of_tile,
)
from assay.kernels.triton.layouts import can_use_tma, make_descriptor, set_block_shapes
from assay.kernels.triton.online_softmax import finite_shift, online_softmax
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.tiles import size_bucket

MAX_HEAD_DIM = 256
_LN_2 = tl.constexpr(math.log(2.0))
_BLOCK_SANITIZED = tl.constexpr(16)  # columns of V per step in the path for non-finite values
_MIN_SCALE = 2.0**-149  # the least positive float32; a scale nearer to zero counts as zero


@triton.jit
def _attend(state, inputs, first, last, options, BLOCK_N: tl.constexpr, MASKED, SANITIZE_V, EVEN_D, EVEN_DV):
    """Add K and V blocks number first..last-1 (`nth_block`) to the state: m_i, l_i and acc.

    MASKED: the mask or the end of the keys cuts these blocks. SANITIZE_V: V's infinities and NaN count as zero, since
    tl.dot would multiply those of masked keys by p = 0, which is NaN.
    """
    m_i, l_i, acc = state
    q, fp32_source, k_source, v_source, k_start, mask_d, mask_dv = inputs
    blocks, (Sk, lo, hi), (scale, exp2_scale, softcap), (slope, diagonal) = options
    for n in tl.range(first, last, num_stages=1 if SANITIZE_V else None):
        start_n = nth_block(n, blocks) * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_source, k_start + start_n, offs_n < Sk, mask_d, MASKED, EVEN_D)
        qk = dot_nt(q, k, fp32_source, k_start + start_n, offs_n < Sk, MASKED)
        if softcap is not None:
            qk = softcap - 2.0 * softcap / (tl.exp2(qk * exp2_scale) + 1.0)  # softcap * tanh(scale * qk / softcap)
        if slope is not None:
            qk = qk if softcap is not None else qk * scale
            # The bias has no log2(e) in it, so score and bias get it together; elsewhere it is in scale or softcap.
            qk = (qk - slope * tl.abs(diagonal - offs_n[None, :]).to(tl.float32)) * LOG2_E
        if MASKED:
            qk = tl.where(band_mask(offs_n, lo, hi), qk, -float("inf"))

        softmax_scale = scale if softcap is None and slope is None else None
        m_i, l_i, p, alpha = online_softmax(m_i, l_i, qk, softmax_scale)
        acc = acc * alpha[:, None]
        v = load_tile(v_source, k_start + start_n, offs_n < Sk, mask_dv, MASKED, EVEN_DV)
        if SANITIZE_V:
            v = tl.where(v - v == 0.0, v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_i, l_i, acc


@triton.jit
def _add_nonfinite_values(acc, inputs, num_blocks, options, BLOCK_N: tl.constexpr):
    """Add V's infinities and NaN to the rows that attend to them: two dots count them for each row and column."""
    _, _, _, v_source, k_start, _, mask_dv = inputs
    blocks, (Sk, lo, hi), _, _ = options
    for n in tl.range(num_blocks, num_stages=1):
        start_n = nth_block(n, blocks) * BLOCK_N
        offs_n = start_n + tl.arange(0, BLOCK_N)
        v = load_tile(v_source, k_start + start_n, offs_n < Sk, mask_dv, True, False)
        attended = tl.broadcast_to(band_mask(offs_n, lo, hi), [acc.shape[0], BLOCK_N]).to(tl.bfloat16)
        positive = tl.dot(attended, ((v == float("inf")) | (v != v)).to(tl.bfloat16))
        acc = tl.where(positive > 0, acc + float("inf"), acc)
        negative = tl.dot(attended, ((v == -float("inf")) | (v != v)).to(tl.bfloat16))
        acc = tl.where(negative > 0, acc - float("inf"), acc)
    return acc


@triton.jit
def _store(ptrs, acc, l_i, mask):
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # a row that attends to nothing is zero
    tl.store(ptrs, acc.to(ptrs.dtype.element_ty), mask=mask)


_PRE_HOOK = set_block_shapes(k_ptr=(1, 1, "BLOCK_N", "BLOCK_D"), v_desc=(1, 1, "BLOCK_N", "BLOCK_DV"))
# Only tiles whose share fits a thread's registers: accumulator, probabilities and, for float32, the FMAs' operands.
_CONFIGS_16 = make_configs(
    _PRE_HOOK,
    *((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)),
    *((64, 64, 8, 2), (64, 32, 8, 2)),  # for BLOCK_D + BLOCK_DV > 256
)
_CONFIGS_32 = {  # by the most columns of K and V together
    128: make_configs(_PRE_HOOK, (128, 16, 8, 1), (64, 16, 8, 1), (32, 32, 8, 1)),
    256: make_configs(_PRE_HOOK, (32, 32, 8, 1), (32, 16, 8, 1)),
    512: make_configs(_PRE_HOOK, (16, 16, 8, 1)),
}
CONFIGS = [*_CONFIGS_16, *flatten_configs(_CONFIGS_32)]


def prune_configs(_: list[triton.Config], arguments: Mapping[str, Any], **__: Any) -> list[triton.Config]:
    """Return configurations with tall tiles, unless rows are few or heads too wide for a thread's registers."""
    if arguments["q_ptr"].element_size() == 4:
        return configs_for_head_dims(_CONFIGS_32, arguments)
    columns = arguments["BLOCK_D"] + arguments["BLOCK_DV"]
    rows = triton.cdiv(arguments["Sq"], arguments["B"]) * arguments["GROUP_SIZE"]
    block_m = min(64 if columns > 256 else 128, max(64, triton.next_power_of_2(rows)))
    plain = not arguments["HAS_MASK"] and arguments["slopes_ptr"] is None  # masks and biases take registers too
    max_block_n = 128 if columns <= 128 or plain else 64
    configs = [c for c in _CONFIGS_16 if c.kwargs["BLOCK_M"] == block_m and c.kwargs["BLOCK_N"] <= max_block_n]
    if block_m == 64:  # of these tiles, those of 8 warps are for wide heads, and no others
        configs = [c for c in configs if (c.num_warps == 8) == (columns > 256)]
    return configs


@triton.autotune(
    configs=CONFIGS,
    key=["SQ_BUCKET", "ATTENDED_BUCKET", "GROUP_SIZE", "D", "DV", "HAS_MASK"],
    prune_configs_by={"early_config_prune": prune_configs},
)
@triton.jit(do_not_specialize=[*SIZES, "SQ_BUCKET", "ATTENDED_BUCKET"])
def _attention_kernel(
    q_ptr,
    k_ptr,  # or a TMA descriptor
    k_fp32_ptr,  # k of float32 for `dot_nt`, or None
    v_ptr,
    v_desc,  # or None without TMA; then k_ptr is no descriptor, either
    slopes_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    stride_slope,
    stride_sink,
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
    q_factor,
    scale,
    exp2_scale,
    softcap,
    HAS_MASK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute out[B,H,Sq,DV] and lse[B,H,Sq], both contiguous, from q[B,H,Sq,D], k[B,H_KV,Sk,D] and v[B,H_KV,Sk,DV].

    Varlen (cu_seqlens are given): tensors have a batch of one, Sq and Sk are totals, B counts the sequences, and out is
    [Sq,H,DV]. scale, exp2_scale, softcap: as in `recompute_p`; but with slopes, scale and softcap are not multiplied by
    log2(e), which `_attend` applies after the bias. q_factor: None, or -1 or 0, a factor of q for a scale <= 0.
    """
    pid = tl.program_id(0).to(tl.int64)
    VARLEN: tl.constexpr = cu_seqlens_q_ptr is not None
    cu_seqlens = cu_seqlens_q_ptr, cu_seqlens_k_ptr, B, stride_cu_q, stride_cu_k
    num_tiles = count_tiles(Sq.to(tl.int64) * GROUP_SIZE, cu_seqlens, BLOCK_M)
    tile = num_tiles - 1 - pid % num_tiles  # the last first: under a causal mask it has the most blocks
    batch = pid // num_tiles // H_KV
    kv_head = pid // num_tiles % H_KV
    # From here on, Sq, Sk and tile are those of the program's sequence.
    q_start, Sq, k_start, Sk, tile = sequence_of_tile(tile, Sq, Sk, cu_seqlens, GROUP_SIZE, BLOCK_M)
    if VARLEN:
        if max_offset is not None:
            max_offset += Sk - Sq  # aligned at the bottom right of each sequence
        if tile * BLOCK_M >= Sq * GROUP_SIZE:
            return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_m = rows // GROUP_SIZE
    head = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    mask_m = offs_m < Sq
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    offs_dv = tl.arange(0, BLOCK_DV).to(tl.int64)[None, :]
    mask_d = offs_d < D
    mask_dv = offs_dv < DV
    q_rows = q_ptr + batch * q_strides[0] + head * q_strides[1] + (q_start + offs_m) * q_strides[2]
    q = tl.load(q_rows[:, None] + offs_d * q_strides[3], mask=mask_m[:, None] & mask_d, other=0.0)
    if q_factor is not None:
        q = (q * q_factor).to(q.dtype)

    query = offs_m.to(tl.int32)[:, None]
    first_query = (tile * BLOCK_M // GROUP_SIZE).to(tl.int32)
    last_query = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP_SIZE, Sq - 1).to(tl.int32)
    lo, hi = None, Sk - 1  # the keys that a row attends to
    if min_offset is not None:
        lo = query + min_offset
    if max_offset is not None:
        hi = tl.minimum(query + max_offset, hi)

    slope, diagonal, fp32_source = None, None, None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head * stride_slope, mask=mask_m, other=0.0)[:, None]
        diagonal = query + (Sk - Sq)
    if sinks_ptr is None:
        m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
    else:  # a sink is a key without a value
        m_i = tl.load(sinks_ptr + head * stride_sink, mask=mask_m, other=0.0) * LOG2_E
        l_i = tl.exp2(m_i - finite_shift(m_i))
    if k_fp32_ptr is not None:
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_rows = k_fp32_ptr + batch * k_strides[0] + kv_head * k_strides[1] + offs_n * k_strides[2]
        fp32_source = q_rows[:, None], q_strides[3], mask_m[:, None], q_factor, k_rows, k_strides[2], k_strides[3], D
    if v_desc is not None:
        k_source = k_ptr, batch.to(tl.int32), kv_head.to(tl.int32)
        v_source = v_desc, batch.to(tl.int32), kv_head.to(tl.int32)
    else:
        offs_n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_ptrs = k_ptr + batch * k_strides[0] + kv_head * k_strides[1] + offs_n * k_strides[2] + offs_d * k_strides[3]
        v_ptrs = v_ptr + batch * v_strides[0] + kv_head * v_strides[1] + offs_n * v_strides[2] + offs_dv * v_strides[3]
        k_source, v_source = (k_ptrs, k_strides[2]), (v_ptrs, v_strides[2])  # type: ignore[assignment]
    inputs = q, fp32_source, k_source, v_source, k_start, mask_d, mask_dv
    EVEN_D: tl.constexpr = BLOCK_D == D
    EVEN_DV: tl.constexpr = BLOCK_DV == DV
    blocks = block_range(first_query, last_query, min_offset, max_offset, Sk, BLOCK_N)
    num_masked, num_blocks = blocks[2], blocks[2] + blocks[3]
    m_0, l_0 = m_i, l_i
    state = m_0, l_0, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    options = blocks, (Sk, lo, hi), (scale, exp2_scale, softcap), (slope, diagonal)
    state = _attend(state, inputs, 0, num_masked, options, BLOCK_N, True, False, EVEN_D, EVEN_DV)
    state = _attend(state, inputs, num_masked, num_blocks, options, BLOCK_N, False, False, EVEN_D, EVEN_DV)
    m_i, l_i, acc = state

    if VARLEN:
        out_row = (q_start + offs_m) * (H_KV * GROUP_SIZE) + head
    else:
        out_row = (batch * H_KV * GROUP_SIZE + head) * Sq + offs_m
    out_ptrs = out_ptr + out_row[:, None] * DV
    if lse_ptr is not None:
        lse = m_i * _LN_2 + tl.log(l_i)  # natural; m_i is in units of log2(e)
        tl.store(lse_ptr + out_row, lse, mask=mask_m)
    # The sum is NaN if any element is infinite or NaN: some value of V is, masked or not, or a sum has overflowed.
    if HAS_MASK and tl.sum(acc * 0.0) != 0.0:
        # Seldom taken, so it may take neither registers nor shared memory from the loops above: few columns, one stage.
        BLOCK: tl.constexpr = min(BLOCK_DV, _BLOCK_SANITIZED)
        for column in tl.range(0, DV, BLOCK, num_stages=1):
            offs_c = column + tl.arange(0, BLOCK).to(tl.int64)[None, :]
            rows_n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
            ptrs = v_ptr + batch * v_strides[0] + kv_head * v_strides[1] + rows_n * v_strides[2] + offs_c * v_strides[3]
            columns = q, fp32_source, k_source, (ptrs, v_strides[2]), k_start, mask_d, offs_c < DV
            start = m_0, l_0, tl.zeros([BLOCK_M, BLOCK], tl.float32)
            _, _, finite = _attend(start, columns, 0, num_blocks, options, BLOCK_N, True, True, EVEN_D, False)
            total = _add_nonfinite_values(finite, columns, num_blocks, options, BLOCK_N)
            _store(out_ptrs + offs_c, total, l_i, mask_m[:, None] & (offs_c < DV))
    else:
        _store(out_ptrs + offs_dv, acc, l_i, mask_m[:, None] & mask_dv)


def launch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    options: AttentionOptions,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write attention of q[B,H,Sq,D] to k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv] into out[B,H,Sq,Dv] and lse[B,H,Sq], contiguous.

    cu_seqlens: of queries and of keys, int32[sequences + 1]. Then B is one, out is [Sq,H,Dv], and max_offset counts
    from the bottom right of each sequence.
    """
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    group_size = heads // kv_heads
    sequences = 1 if cu_seqlens is None else cu_seqlens[0].shape[0] - 1
    mean_queries, attended = triton.cdiv(queries, sequences), triton.cdiv(keys, sequences)
    min_offset, max_offset, softcap = options.min_offset, options.max_offset, options.softcap
    if min_offset is not None and max_offset is not None:
        attended = min(attended, max_offset - min_offset + 1)
    log2e_factor = 1.0 if options.slopes is not None else LOG2_E.value  # with ALiBi the kernel applies log2(e)
    # The running maximum is of unscaled scores and needs a positive scale: q takes the sign, or zero.
    q_factor = None if options.scale >= _MIN_SCALE else -1.0 if options.scale <= -_MIN_SCALE else 0.0
    scale = options.scale if q_factor is None else -options.scale if q_factor else 1.0
    has_mask = cu_seqlens is not None or min_offset is not None or max_offset is not None
    use_tma = can_use_tma(k, v)
    vectors = options.slopes, options.sinks, *(cu_seqlens or (None, None))

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        rows, block_m = queries * group_size, meta["BLOCK_M"]
        num_tiles = triton.cdiv(rows, block_m) if cu_seqlens is None else rows // block_m + sequences
        return (num_tiles * kv_heads * batch,)

    _attention_kernel[grid](
        q,
        *(make_descriptor(k) if use_tma else k, k if k.element_size() == 4 else None),
        *(v, make_descriptor(v) if use_tma else None),
        *(*vectors, out, lse),
        *(q.stride(), k.stride(), v.stride()),
        *(0 if vector is None else vector.stride(0) for vector in vectors),
        *(queries, keys, sequences, group_size, kv_heads, size_bucket(mean_queries), size_bucket(attended)),
        *(min_offset, max_offset),
        *(q_factor, scale * log2e_factor),
        *((None, None) if softcap is None else (2.0 * LOG2_E.value * scale / softcap, softcap * log2e_factor)),
        *(has_mask, head_dim, value_dim),
        *(max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim)),  # a tl.dot takes 16 at least
    )


def _empty_results(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("assay::attention", _empty_results)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    min_offset: int | None,
    max_offset: int | None,
) -> tuple[Tensor, Tensor]:
    out, lse = _empty_results(q, k, v)
    if lse.numel():
        options = AttentionOptions(slopes, sinks, scale, softcap, min_offset, max_offset)
        launch_attention(q, k, v, out, lse, options.without_open_bounds(q.shape[2], k.shape[2]))
    return out, lse


def _gradients(saved: SimpleNamespace, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    tensors = saved.q, saved.k, saved.v, saved.slopes, saved.sinks, saved.result, saved.last_result, dout, dlse
    options = saved.scale, saved.softcap, saved.min_offset, saved.max_offset
    gradients: tuple[Tensor, ...] = attention_gradients(*tensors, *options)
    return gradients


differentiate("assay::attention", _gradients, saves="q k v slopes sinks result last_result")


@replayed
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax(q k^T scale) v for q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]; H a multiple of Hkv, D, Dv <= 256.

    All three are float32, bfloat16 or float16. Scores, exponentials and the accumulator are float32; probabilities are
    rounded to the inputs' dtype before they are multiplied by v.

    causal: "none"; otherwise query i attends to the keys up to i + o, with o = Sk - Sq ("bottom_right") or 0
    ("top_left"). scale: 1 / sqrt(D) by default. window: (left, right), the keys from i + o - left to i + o + right.
    softcap: c tanh(score / c), after the scale and before bias and mask. alibi: adds -slopes[h] |i + Sk - Sq - j|,
    slopes float32[H]. sinks: float32[H], one more logit per head, without a value.

    Returns out[B,H,Sq,Dv], zero in a row that attends to nothing; with return_lse also the natural log-sum-exp,
    float32[B,H,Sq], -inf in such a row unless it has a sink. Raises TypeError or ValueError, naming the argument, for
    another dtype, shape, device or option.
    """
    out, lse = _attention(q, k, v, *check_attention(q, k, v, causal, scale, window, softcap, alibi, sinks, slopes))
    return (out, lse) if return_lse else out


@replayed
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of `attention`, in the inputs' dtype, for the gradient dout[B,H,Sq,Dv] of its output.

    The forward pass runs first; autograd through `attention` has saved its results, and also gives the gradients of
    slopes and sinks. Products are accumulated in float32; p and ds are rounded to the inputs' dtype before they are
    multiplied. Options and errors are those of `attention`.
    """
    options = check_attention(q, k, v, causal, scale, window, softcap, alibi, sinks, slopes)
    check(q=(q, FLOATING, "B H Sq D"), v=(v, ("q",), "B Hkv Sk Dv"), dout=(dout, ("q",), "B H Sq Dv"))
    out, lse = _attention(q, k, v, *options)
    slopes, sinks, *rest = options
    dq, dk, dv, _, _ = attention_gradients(q, k, v, slopes, sinks, out, lse, dout, torch.zeros_like(lse), *rest)
    return dq, dk, dv


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi: bool,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> AttentionOptions:
    """Return the operator's options; raise TypeError or ValueError unless arguments are as in `attention`."""
    if alibi and slopes is None:
        raise ValueError("slopes: expected a tensor float32[H], as alibi=True, got None")
    slopes = slopes if alibi else None
    vectors = {name: (x, FLOAT32, "H") for name, x in (("slopes", slopes), ("sinks", sinks)) if x is not None}
    check(q=(q, FLOATING, "B H Sq D"), k=(k, ("q",), "B Hkv Sk D"), v=(v, ("q",), "B Hkv Sk Dv"), **vectors)
    check_heads(q.shape[1], "k", k.shape[1], MAX_HEAD_DIM, q=q.shape[3], v=v.shape[3])
    check_choice("causal", causal, ("none", "bottom_right", "top_left"))
    check_positive("softcap", softcap)
    if window is not None and not (_is_pair(window) and min(window) >= 0):
        raise ValueError(f"window: expected None or (left, right), whole numbers of at least 0, got {window!r}")
    scale = check_sm_scale(scale, q.shape[3])
    widest = q.shape[2] + k.shape[2]  # a wider window masks nothing
    offset = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    min_offset = None if window is None else offset - min(window[0], widest)
    max_offset = offset if causal != "none" else None if window is None else offset + min(window[1], widest)
    return AttentionOptions(slopes, sinks, scale, softcap, min_offset, max_offset)


def _is_pair(window: object) -> bool:
    return isinstance(window, Sequence) and [isinstance(end, int) for end in window] == [True, True]
