"""The gradients of attention's keys and values: a program goes through the queries that see its tile of keys.

All query heads that share the key head are added by one program, in one order, so that no atomics are needed. Scores
are transposed, [keys, queries], so that both gradients are products with the tile's own rows.
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
from assay.kernels.triton.attention_configs import KEYS_CONFIGS, fitting_keys
from assay.kernels.triton.online_softmax import finite_shift

_SIZES = ["Sq", "Sk", "SEQUENCES", "GROUP", "GROUPS", "SK_CLASS", "SEEN_CLASS", "first_seeing", "last_seeing"]


@triton.jit
def _add_queries(
    state, tiles, sources, first, number, span, limits, scales, bias, BLOCK_M: tl.constexpr, CUT, PACKED, D_CUT, DV_CUT
):
    """Add ``number`` blocks of queries of each head, from ``first`` on as `block_after` counts, to the state of a tile:
    dk over the scale, and dv. CUT: the mask or the end of the queries cuts through the blocks; PACKED: behind that end
    lie other sequences, whose infinities a dot would multiply by zero."""
    dk, dv = state
    k, v, k_again, v_again = tiles
    q_source, dout_source, lse_ptrs, delta_ptrs, in_d, in_dv, heads, places = sources
    Sq, lowest, highest = limits
    slopes_ptr, stride_slope, aligned = bias
    for count in tl.range(0, heads[1] * number):
        head = heads[0] + count // number
        start = block_after(first + count % number, span) * BLOCK_M
        query = start + tl.arange(0, BLOCK_M)
        q = load_rows(_of_head(q_source, head), places[0] + start, query < Sq, in_d, CUT, D_CUT)
        own = head.to(tl.int64) * places[1] + places[0] + query
        lse = tl.load(lse_ptrs + own, mask=query < Sq, other=0.0)[None, :] * LOG2_E
        delta = tl.load(delta_ptrs + own, mask=query < Sq, other=0.0)[None, :]
        s = dot_rows(k, q, _of(k_again, head), places[0] + start, query < Sq, CUT)
        slope, distance = None, None
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + head * stride_slope) * LOG2_E
            distance = tl.abs(query[None, :] - aligned).to(tl.float32)
        p = weights_again(s, finite_shift(lse), slope, distance, scales)
        dout = load_rows(_of_head(dout_source, head), places[0] + start, query < Sq, in_dv, CUT, DV_CUT)
        if CUT and PACKED:
            q = tl.where((query < Sq)[:, None], q, 0.0)
            dout = tl.where((query < Sq)[:, None], dout, 0.0)
        ds = p * (dot_rows(v, dout, _of(v_again, head), places[0] + start, query < Sq, CUT) - delta)
        ds = before_softcap(ds, s, scales)
        if CUT:
            seen = visible(query, lowest, highest)
            p = tl.where(seen, p, 0.0)
            ds = tl.where(seen, ds, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _of_head(source, head):
    """Where the rows of a head lie, as `load_rows` takes it."""
    DESCRIBED: tl.constexpr = len(source) == 2
    if DESCRIBED:
        found = source[0], source[1], head
    else:
        found = source[0] + head.to(tl.int64) * source[1], source[2]
    return found


@triton.jit
def _of(again, head):
    """What `dot_rows` takes to load rows again, of a head."""
    found = None
    if again is not None:
        ptrs, stride, inside, head_stride, other_ptrs, row_stride, other_stride, WIDTH = again
        other_ptrs = other_ptrs + head.to(tl.int64) * head_stride
        found = ptrs, stride, inside, None, other_ptrs, row_stride, other_stride, WIDTH
    return found


@triton.autotune(
    configs=KEYS_CONFIGS,
    key=["SK_CLASS", "SEEN_CLASS", "GROUP", "D", "DV"],
    prune_configs_by={"early_config_prune": fitting_keys},
)
@triton.jit(do_not_specialize=_SIZES)
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    rows_again,
    lse_ptr,
    delta_ptr,
    slopes_ptr,
    q_starts_ptr,
    k_starts_ptr,
    dk_ptr,
    dv_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    stride_slope,
    stride_q_start,
    stride_k_start,
    Sq,
    Sk,
    SEQUENCES,
    GROUP,
    GROUPS,
    SK_CLASS,
    SEEN_CLASS,
    first_seeing,
    last_seeing,
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
    PACKED: tl.constexpr = k_starts_ptr is not None  # sequences end to end: Sq and Sk are those of all of them
    queries = Sq
    starts = k_starts_ptr, q_starts_ptr, SEQUENCES, stride_k_start, stride_q_start
    tiles = tiles_in_all(Sk, starts, BLOCK_N)
    tile = program % tiles
    batch_group = program // tiles
    batch = batch_group // GROUPS
    group = batch_group % GROUPS
    first_key, Sk, first_query, Sq, tile = of_sequence(tile, Sk, Sq, starts, 1, BLOCK_N)
    if PACKED:
        if first_seeing is not None:
            first_seeing -= Sk - Sq
        if tile * BLOCK_N >= Sk:
            return

    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (key < Sk)[:, None]
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)[None, :]
    in_d = d < D
    in_dv = dv < DV
    row = (first_key + key)[:, None]
    k_rows = k_ptr + batch * k_strides[0] + group * k_strides[1] + row * k_strides[2]
    v_rows = v_ptr + batch * v_strides[0] + group * v_strides[1] + row * v_strides[2]
    k = tl.load(k_rows + d * k_strides[3], mask=inside & in_d, other=0.0)
    v = tl.load(v_rows + dv * v_strides[3], mask=inside & in_dv, other=0.0)

    place = key.to(tl.int32)[:, None]
    lowest, highest = None, Sq - 1  # queries that see a key
    if first_seeing is not None:
        lowest = place + first_seeing
    if last_seeing is not None:
        highest = tl.minimum(place + last_seeing, highest)
    k_again, v_again = None, None
    if rows_again is not None:
        query = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        q_rows = rows_again[0] + batch * q_strides[0] + query * q_strides[2]
        dout_rows = rows_again[1] + batch * dout_strides[0] + query * dout_strides[2]
        k_again = k_rows, k_strides[3], inside, q_strides[1], q_rows, q_strides[2], q_strides[3], D
        v_again = v_rows, v_strides[3], inside, dout_strides[1], dout_rows, dout_strides[2], dout_strides[3], DV
    if DESCRIBED:
        q_source = q_ptr, batch.to(tl.int32)
        dout_source = dout_ptr, batch.to(tl.int32)
    else:
        query = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
        q_ptrs = q_ptr + batch * q_strides[0] + query * q_strides[2] + d * q_strides[3]
        dout_ptrs = dout_ptr + batch * dout_strides[0] + query * dout_strides[2] + dv * dout_strides[3]
        q_source = q_ptrs, q_strides[1], q_strides[2]  # type: ignore[assignment]
        dout_source = dout_ptrs, dout_strides[1], dout_strides[2]  # type: ignore[assignment]
    of_batch = batch * GROUPS * GROUP * queries
    heads = (group * GROUP).to(tl.int32), GROUP
    sources = (
        q_source,
        dout_source,
        lse_ptr + of_batch,
        delta_ptr + of_batch,
        in_d,
        in_dv,
        heads,
        (first_query, queries),
    )
    limits = Sq, lowest, highest
    scales = scale, tanh_scale, cap
    bias = slopes_ptr, stride_slope, place - (Sk - Sq)
    D_CUT: tl.constexpr = BLOCK_D != D
    DV_CUT: tl.constexpr = BLOCK_DV != DV
    earliest = (tile * BLOCK_N).to(tl.int32)
    latest = tl.minimum((tile + 1) * BLOCK_N, Sk).to(tl.int32) - 1
    span = span_seen(earliest, latest, first_seeing, last_seeing, Sq, BLOCK_M)
    cuts, whole = span[2], span[3]
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    given = k, v, k_again, v_again
    own = sources, 0, cuts, span, limits, scales, bias
    state = _add_queries(state, given, *own, BLOCK_M, True, PACKED, D_CUT, DV_CUT)
    own = sources, cuts, whole, span, limits, scales, bias
    state = _add_queries(state, given, *own, BLOCK_M, False, PACKED, D_CUT, DV_CUT)
    dk, dv_sum = state

    dk_ptrs = dk_ptr + batch * dk_strides[0] + group * dk_strides[1] + row * dk_strides[2] + d * dk_strides[3]
    dv_ptrs = dv_ptr + batch * dv_strides[0] + group * dv_strides[1] + row * dv_strides[2] + dv * dv_strides[3]
    tl.store(dk_ptrs, (dk * factor).to(dk_ptr.dtype.element_ty), mask=inside & in_d)
    tl.store(dv_ptrs, dv_sum.to(dv_ptr.dtype.element_ty), mask=inside & in_dv)
