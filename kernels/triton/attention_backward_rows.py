"""The gradient of attention's queries, and of its ALiBi slopes: a program goes through the keys that its rows see.

As the forward pass does: the query heads that share a key head are packed into a tile of rows. On the way delta is
stored, what the gradients of a row's weights have in common, which the gradients of keys and values need as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from assay.kernels.triton.attention_blocks import (
    LOG2_E,
    before_softcap,
    block_after,
    dot_rows,
    load_rows,
    of_sequence,
    span_seen,
    tiles_in_all,
    visible,
    weights_again,
)
from assay.kernels.triton.attention_configs import ROWS_CONFIGS, fitting_rows
from assay.kernels.triton.online_softmax import finite_shift

_SIZES = ["Sq", "Sk", "SEQUENCES", "GROUP", "GROUPS", "SQ_CLASS", "SEEN_CLASS", "first_seen", "last_seen"]


@triton.jit
def _add_keys(state, rows, sources, first, last, span, limits, scales, bias, BLOCK_N: tl.constexpr, CUT, D_CUT, DV_CUT):
    """Add blocks first..last-1 of keys, counted as by `block_after`, to the state of a tile: dq over the scale, and the
    sum of scores' gradients times distances. CUT: the mask or the end of the keys cuts through the blocks."""
    dq, turned = state
    q, dout, lse, delta = rows
    k_source, v_source, k_again, v_again, first_key, in_d, in_dv = sources
    Sk, lowest, highest = limits
    slope, aligned = bias
    for count in tl.range(first, last):
        start = block_after(count, span) * BLOCK_N
        key = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_source, first_key + start, key < Sk, in_d, CUT, D_CUT)
        s = dot_rows(q, k, k_again, first_key + start, key < Sk, CUT)
        distance = None
        if slope is not None:
            distance = tl.abs(aligned - key[None, :]).to(tl.float32)
        p = weights_again(s, lse, slope, distance, scales)
        v = load_rows(v_source, first_key + start, key < Sk, in_dv, CUT, DV_CUT)
        ds = p * (dot_rows(dout, v, v_again, first_key + start, key < Sk, CUT) - delta)
        if slope is not None:
            turned += tl.sum(_seen(ds, key, lowest, highest, CUT) * distance, axis=1)
        ds = before_softcap(ds, s, scales)
        ds = _seen(ds, key, lowest, highest, CUT)
        if CUT:
            k = tl.where(k - k == 0.0, k, 0.0)  # a dot makes NaN of 0 * infinity
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq, turned


@triton.jit
def _seen(ds, key, lowest, highest, CUT: tl.constexpr):
    if CUT:
        ds = tl.where(visible(key, lowest, highest), ds, 0.0)
    return ds


@triton.autotune(
    configs=ROWS_CONFIGS,
    key=["SQ_CLASS", "SEEN_CLASS", "GROUP", "D", "DV"],
    prune_configs_by={"early_config_prune": fitting_rows},
)
@triton.jit(do_not_specialize=_SIZES)
def rows_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    rows_again,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    slopes_ptr,
    q_starts_ptr,
    k_starts_ptr,
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
    scale,
    tanh_scale,
    cap,
    factor,
    DESCRIBED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    queries = Sq  # of all sequences, where they lie end to end
    starts = q_starts_ptr, k_starts_ptr, SEQUENCES, stride_q_start, stride_k_start
    tiles = tiles_in_all(Sq.to(tl.int64) * GROUP, starts, BLOCK_M)
    tile = tiles - 1 - program % tiles  # the last first: under a causal mask it has the most to do
    batch_group = program // tiles
    batch = batch_group // GROUPS
    group = batch_group % GROUPS
    first_query, Sq, first_key, Sk, tile = of_sequence(tile, Sq, Sk, starts, GROUP, BLOCK_M)
    if q_starts_ptr is not None:
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
    place = first_query + query
    q_rows = q_ptr + batch * q_strides[0] + (head * q_strides[1] + place * q_strides[2])[:, None]
    q = tl.load(q_rows + d * q_strides[3], mask=inside[:, None] & in_d, other=0.0)
    dout_rows = dout_ptr + batch * dout_strides[0] + (head * dout_strides[1] + place * dout_strides[2])[:, None]
    dout = tl.load(dout_rows + dv * dout_strides[3], mask=inside[:, None] & in_dv, other=0.0)
    of_row = batch * out_strides[0] + (head * out_strides[1] + place * out_strides[2])[:, None]
    out = tl.load(out_ptr + of_row + dv * out_strides[3], mask=inside[:, None] & in_dv, other=0.0)
    own = batch * dlse_strides[0] + head * dlse_strides[1] + place * dlse_strides[2]
    dlse = tl.load(dlse_ptr + own, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1) - dlse
    row = (batch * GROUPS * GROUP + head) * queries + place
    tl.store(delta_ptr + row, delta, mask=inside)
    own = batch * lse_strides[0] + head * lse_strides[1] + place * lse_strides[2]
    lse = finite_shift(tl.load(lse_ptr + own, mask=inside, other=0.0)) * LOG2_E
    dq_ptrs = dq_ptr + batch * dq_strides[0] + (head * dq_strides[1] + place * dq_strides[2])[:, None]

    query = query.to(tl.int32)[:, None]
    lowest, highest = None, Sk - 1  # keys that a row sees
    if first_seen is not None:
        lowest = query + first_seen
    if last_seen is not None:
        highest = tl.minimum(query + last_seen, highest)
    slope, aligned = None, None
    if slopes_ptr is not None:
        slope = (tl.load(slopes_ptr + head * stride_slope, mask=inside, other=0.0) * LOG2_E)[:, None]
        aligned = query + (Sk - Sq)
    k_again, v_again = None, None
    if rows_again is not None:
        key = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_rows = rows_again[0] + batch * k_strides[0] + group * k_strides[1] + key * k_strides[2]
        v_rows = rows_again[1] + batch * v_strides[0] + group * v_strides[1] + key * v_strides[2]
        k_again = q_rows, q_strides[3], inside[:, None], None, k_rows, k_strides[2], k_strides[3], D
        v_again = dout_rows, dout_strides[3], inside[:, None], None, v_rows, v_strides[2], v_strides[3], DV
    if DESCRIBED:
        k_source = k_ptr, batch.to(tl.int32), group.to(tl.int32)
        v_source = v_ptr, batch.to(tl.int32), group.to(tl.int32)
    else:
        key = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        k_ptrs = k_ptr + batch * k_strides[0] + group * k_strides[1] + key * k_strides[2] + d * k_strides[3]
        v_ptrs = v_ptr + batch * v_strides[0] + group * v_strides[1] + key * v_strides[2] + dv * v_strides[3]
        k_source, v_source = (k_ptrs, k_strides[2]), (v_ptrs, v_strides[2])  # type: ignore[assignment]
    given = q, dout, lse[:, None], delta[:, None]
    sources = k_source, v_source, k_again, v_again, first_key, in_d, in_dv
    limits = Sk, lowest, highest
    scales = scale, tanh_scale, cap
    bias = slope, aligned
    D_CUT: tl.constexpr = BLOCK_D != D
    DV_CUT: tl.constexpr = BLOCK_DV != DV
    earliest = (tile * BLOCK_M // GROUP).to(tl.int32)
    latest = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, Sq - 1).to(tl.int32)
    span = span_seen(earliest, latest, first_seen, last_seen, Sk, BLOCK_N)
    cuts, blocks = span[2], span[2] + span[3]
    state = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    state = _add_keys(state, given, sources, 0, cuts, span, limits, scales, bias, BLOCK_N, True, D_CUT, DV_CUT)
    state = _add_keys(state, given, sources, cuts, blocks, span, limits, scales, bias, BLOCK_N, False, D_CUT, DV_CUT)
    dq, turned = state

    dq = dq * factor
    tl.store(dq_ptrs + d * dq_strides[3], dq.to(dq_ptr.dtype.element_ty), mask=inside[:, None] & in_d)
    if slopes_ptr is not None:
        tl.store(dslopes_ptr + row, -turned, mask=inside)
