"""Attention's kernel and its launch: dense sequences, or sequences of several lengths that are laid end to end.

A program takes a tile of rows. The query heads that share a key head are packed into it, query by query, so that keys
and values are read once for all of them. Of the key blocks only those are read that the mask lets some row see: those
that it cuts through first, then those that every row sees entirely, which need no mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.attention_blocks import (
    LOG2_E,
    block_after,
    dot_rows,
    load_rows,
    of_sequence,
    span_seen,
    tiles_in_all,
    visible,
)
from assay.kernels.triton.attention_configs import CONFIGS, fitting
from assay.kernels.triton.layouts import can_use_tma, make_descriptor
from assay.kernels.triton.online_softmax import finite_shift, online_softmax
from assay.kernels.triton.tiles import size_bucket

_LN_2 = tl.constexpr(math.log(2.0))
_PART = tl.constexpr(16)  # columns of the values that are attended to with care at once
_LEAST_SCALE = 2.0**-149  # float32's least number

_SIZES = ["Sq", "Sk", "SEQUENCES", "GROUP", "GROUPS", "SQ_CLASS", "SEEN_CLASS", "first_seen", "last_seen"]


@triton.jit
def _attend(state, inputs, first, last, span, limits, scales, bias, BLOCK_N: tl.constexpr, CUT, CLEAN, D_CUT, DV_CUT):
    """Add blocks first..last-1 of keys to the state of a tile: running maximum, sum, and acc of weighted values.

    They are counted in the order in which they are added, which ``span`` turns into places. CUT: the mask or the end of
    the keys cuts through them. CLEAN: of the values only finite ones are added, as a dot makes NaN of 0 * infinity.
    """
    m_i, l_i, acc = state
    q, again, k_source, v_source, first_key, in_d, in_dv = inputs
    Sk, lowest, highest = limits
    scale, tanh_scale, cap = scales
    slope, aligned = bias
    for count in tl.range(first, last, num_stages=1 if CLEAN else None):
        start = block_after(count, span) * BLOCK_N
        key = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_source, first_key + start, key < Sk, in_d, CUT, D_CUT)
        s = dot_rows(q, k, again, first_key + start, key < Sk, CUT)
        if cap is not None:
            s = cap - 2.0 * cap / (tl.exp2(s * tanh_scale) + 1.0)
        if slope is not None:
            s = s if cap is not None else s * scale
            s = (s - slope * tl.abs(aligned - key[None, :]).to(tl.float32)) * LOG2_E
        if CUT:
            s = tl.where(visible(key, lowest, highest), s, -float("inf"))

        unit = scale if cap is None and slope is None else None
        m_i, l_i, p, rescale = online_softmax(m_i, l_i, s, unit)
        acc = acc * rescale[:, None]
        v = load_rows(v_source, first_key + start, key < Sk, in_dv, CUT, DV_CUT)
        if CLEAN:
            v = tl.where(v - v == 0.0, v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_i, l_i, acc


@triton.jit
def _add_infinities(acc, inputs, blocks, span, limits, BLOCK_N: tl.constexpr):
    """Infinities and NaN among the values, for the rows that see them."""
    _, _, _, v_source, first_key, _, in_dv = inputs
    Sk, lowest, highest = limits
    for count in tl.range(blocks, num_stages=1):
        start = block_after(count, span) * BLOCK_N
        key = start + tl.arange(0, BLOCK_N)
        v = load_rows(v_source, first_key + start, key < Sk, in_dv, True, True)
        seen = tl.broadcast_to(visible(key, lowest, highest), [acc.shape[0], BLOCK_N]).to(tl.bfloat16)
        up = tl.dot(seen, ((v == float("inf")) | (v != v)).to(tl.bfloat16))
        acc = tl.where(up > 0, acc + float("inf"), acc)
        down = tl.dot(seen, ((v == -float("inf")) | (v != v)).to(tl.bfloat16))
        acc = tl.where(down > 0, acc - float("inf"), acc)
    return acc


@triton.autotune(
    configs=CONFIGS,
    key=["SQ_CLASS", "SEEN_CLASS", "GROUP", "D", "DV", "MASKED"],
    prune_configs_by={"early_config_prune": fitting},
)
@triton.jit(do_not_specialize=_SIZES)
def _attention_kernel(
    q_ptr,
    k_ptr,
    k_rows_ptr,
    v_ptr,
    v_tiles,
    slopes_ptr,
    sinks_ptr,
    q_starts_ptr,
    k_starts_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    stride_slope,
    stride_sink,
    stride_q_start,
    stride_k_start,
    Sq,
    Sk,
    SEQUENCES,
    GROUP,
    GROUPS,
    SQ_CLASS,
    SEEN_CLASS,
    first_seen,
    last_seen,
    sign,
    scale,
    tanh_scale,
    cap,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    PACKED: tl.constexpr = q_starts_ptr is not None  # sequences end to end: Sq and Sk are those of all of them
    starts = q_starts_ptr, k_starts_ptr, SEQUENCES, stride_q_start, stride_k_start
    tiles = tiles_in_all(Sq.to(tl.int64) * GROUP, starts, BLOCK_M)
    tile = tiles - 1 - program % tiles  # the last first: under a causal mask it has the most to do
    batch_group = program // tiles
    batch = batch_group // GROUPS
    group = batch_group % GROUPS
    first_query, Sq, first_key, Sk, tile = of_sequence(tile, Sq, Sk, starts, GROUP, BLOCK_M)
    if PACKED:
        if last_seen is not None:
            last_seen += Sk - Sq
        if tile * BLOCK_M >= Sq * GROUP:
            return

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    head = group * GROUP + rows % GROUP
    inside = query < Sq
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)[None, :]
    in_d = d < D
    in_dv = dv < DV
    q_rows = q_ptr + batch * q_strides[0] + head * q_strides[1] + (first_query + query) * q_strides[2]
    q_ptrs = q_rows[:, None] + d * q_strides[3]
    q = tl.load(q_ptrs, mask=inside[:, None] & in_d, other=0.0)
    if sign is not None:
        q = (q * sign).to(q.dtype)

    place = query.to(tl.int32)[:, None]
    earliest = (tile * BLOCK_M // GROUP).to(tl.int32)
    latest = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, Sq - 1).to(tl.int32)
    lowest, highest = None, Sk - 1  # keys that a row sees
    if first_seen is not None:
        lowest = place + first_seen
    if last_seen is not None:
        highest = tl.minimum(place + last_seen, highest)

    slope, aligned, again = None, None, None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head * stride_slope, mask=inside, other=0.0)[:, None]
        aligned = place + (Sk - Sq)
    if sinks_ptr is None:
        m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
    else:  # a sink is a key without a value
        m_i = tl.load(sinks_ptr + head * stride_sink, mask=inside, other=0.0) * LOG2_E
        l_i = tl.exp2(m_i - finite_shift(m_i))
    if k_rows_ptr is not None:
        key = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_rows = k_rows_ptr + batch * k_strides[0] + group * k_strides[1] + key * k_strides[2]
        again = q_rows[:, None], q_strides[3], inside[:, None], sign, k_rows, k_strides[2], k_strides[3], D
    if v_tiles is not None:
        k_source = k_ptr, batch.to(tl.int32), group.to(tl.int32)
        v_source = v_tiles, batch.to(tl.int32), group.to(tl.int32)
    else:
        key = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_ptrs = k_ptr + batch * k_strides[0] + group * k_strides[1] + key * k_strides[2] + d * k_strides[3]
        v_ptrs = v_ptr + batch * v_strides[0] + group * v_strides[1] + key * v_strides[2] + dv * v_strides[3]
        k_source, v_source = (k_ptrs, k_strides[2]), (v_ptrs, v_strides[2])  # type: ignore[assignment]
    inputs = q, again, k_source, v_source, first_key, in_d, in_dv
    limits = Sk, lowest, highest
    scales = scale, tanh_scale, cap
    bias = slope, aligned
    D_CUT: tl.constexpr = BLOCK_D != D
    DV_CUT: tl.constexpr = BLOCK_DV != DV
    span = span_seen(earliest, latest, first_seen, last_seen, Sk, BLOCK_N)
    cuts, blocks = span[2], span[2] + span[3]
    m_0, l_0 = m_i, l_i
    state = m_0, l_0, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    state = _attend(state, inputs, 0, cuts, span, limits, scales, bias, BLOCK_N, True, False, D_CUT, DV_CUT)
    state = _attend(state, inputs, cuts, blocks, span, limits, scales, bias, BLOCK_N, False, False, D_CUT, DV_CUT)
    m_i, l_i, acc = state

    if PACKED:
        out_row = (first_query + query) * (GROUPS * GROUP) + head
    else:
        out_row = (batch * GROUPS * GROUP + head) * Sq + query
    out_ptrs = out_ptr + out_row[:, None] * DV
    if lse_ptr is not None:
        lse = m_i * _LN_2 + tl.log(l_i)
        tl.store(lse_ptr + out_row, lse, mask=inside)
    if MASKED and tl.sum(acc * 0.0) != 0.0:  # a value is infinite or NaN, seen or not; or a sum has overflowed
        PART: tl.constexpr = min(BLOCK_DV, _PART)
        for column in tl.range(0, DV, PART, num_stages=1):  # seldom run: it is to take no registers and no memory
            part = column + tl.arange(0, PART).to(tl.int64)[None, :]
            row = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
            ptrs = v_ptr + batch * v_strides[0] + group * v_strides[1] + row * v_strides[2] + part * v_strides[3]
            of_part = q, again, k_source, (ptrs, v_strides[2]), first_key, in_d, part < DV
            start = m_0, l_0, tl.zeros([BLOCK_M, PART], tl.float32)
            found = _attend(start, of_part, 0, blocks, span, limits, scales, bias, BLOCK_N, True, True, D_CUT, True)
            full = _add_infinities(found[2], of_part, blocks, span, limits, BLOCK_N)
            _store(out_ptrs + part, full, l_i, inside[:, None] & (part < DV))
    else:
        _store(out_ptrs + dv, acc, l_i, inside[:, None] & in_dv)


@triton.jit
def _store(ptrs, acc, l_i, mask):
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # a row that sees nothing is zero
    tl.store(ptrs, acc.to(ptrs.dtype.element_ty), mask=mask)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    first_seen: int | None,
    last_seen: int | None,
    starts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write attention of q[B,H,Sq,D] to k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv] into out[B,H,Sq,Dv] and lse[B,H,Sq], contiguous.

    Query i sees the keys from i + first_seen to i + last_seen. ``starts`` are those of sequences end to end, in q and
    in k, int32, and the end of the last: then B is one, out [Sq,H,Dv], and last_seen counted back from the ends.
    """
    (batch, heads, queries, width), (_, groups, keys, value_width) = q.shape, v.shape
    group = heads // groups
    sequences = 1 if starts is None else starts[0].shape[0] - 1
    length, seen = triton.cdiv(queries, sequences), triton.cdiv(keys, sequences)  # of one sequence, on average
    if first_seen is not None and last_seen is not None:
        seen = min(seen, last_seen - first_seen + 1)
    unit = 1.0 if slopes is not None else LOG2_E.value  # with ALiBi the unit changes after the bias
    sign = None if scale >= _LEAST_SCALE else -1.0 if scale <= -_LEAST_SCALE else 0.0  # the greatest score stays so
    scale = scale if sign is None else -scale if sign else 1.0
    masked = starts is not None or first_seen is not None or last_seen is not None
    by_descriptor = can_use_tma(k, v)
    vectors = slopes, sinks, *(starts or (None, None))

    def grid(meta: Mapping[str, int]) -> tuple[int]:
        rows, height = queries * group, meta["BLOCK_M"]
        tiles = triton.cdiv(rows, height) if starts is None else rows // height + sequences
        return (tiles * groups * batch,)

    _attention_kernel[grid](
        *(q, make_descriptor(k) if by_descriptor else k, k if k.element_size() == 4 else None),
        *(v, make_descriptor(v) if by_descriptor else None, *vectors, out, lse),
        *(q.stride(), k.stride(), v.stride()),
        *(0 if vector is None else vector.stride(0) for vector in vectors),
        *(queries, keys, sequences, group, groups, size_bucket(length), size_bucket(seen)),
        *(first_seen, last_seen, sign, scale * unit),
        *((None, None) if softcap is None else (2.0 * LOG2_E.value * scale / softcap, softcap * unit)),
        *(masked, width, value_width),
        *(max(16, triton.next_power_of_2(size)) for size in (width, value_width)),
    )
