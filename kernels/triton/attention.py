"""Attention with grouped heads, masks, softcap, ALiBi and sinks; the online softmax of FlashAttention-2.

A program takes a tile of rows. The query heads that share a key head are packed into it, query by query, so that keys
and values are read once for all of them. Of the key blocks only those are read that the mask lets some row see: those
that it cuts through first, then those that every row sees entirely, which need no mask.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check, check_choice
from assay.kernels.triton.online_softmax import finite_shift, online_softmax
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.tiles import size_class

_LOG2_E = tl.constexpr(math.log2(math.e))  # scores are multiplied by it, so that an exponential is one exp2
_LN_2 = tl.constexpr(math.log(2.0))
_WIDEST = 256

_CONFIGS = [
    triton.Config({"BLOCK_M": block_m, "BLOCK_N": block_n}, num_warps=warps, num_stages=stages)
    for block_m, block_n, warps, stages in (
        (256, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (256, 32, 8, 1),  # those of one stage are float32's, whose products the tensor cores don't form
        (128, 64, 8, 1),
        (128, 32, 8, 1),
        (64, 64, 8, 1),
        (64, 32, 16, 1),
    )
]
_SIZES = ["Sq", "Sk", "GROUP", "GROUPS", "SQ_CLASS", "SEEN_CLASS", "first_seen", "last_seen"]


@triton.jit
def _load_rows(ptrs, in_rows, in_columns, ROWS_CUT: tl.constexpr, COLUMNS_CUT: tl.constexpr):
    """A tile of rows, zero outside."""
    if ROWS_CUT:
        tile = tl.load(ptrs, mask=in_rows[:, None] & in_columns, other=0.0)
    elif COLUMNS_CUT:
        tile = tl.load(ptrs, mask=in_columns, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def _visible(key, lowest, highest):
    visible = key[None, :] <= highest
    if lowest is not None:
        visible = visible & (key[None, :] >= lowest)
    return visible


@triton.jit
def _attend(state, inputs, span, limits, scales, bias, BLOCK_N: tl.constexpr, CUT: tl.constexpr, D_CUT, DV_CUT):
    """Add blocks of keys to the state of a tile: running maximum, acc of weights and of weighted values, nonfinite.

    ``span``: the first key, the number of blocks, and after how many of them how many keys are left out. CUT: the mask
    or the end of the keys cuts through them; as a dot makes NaN of 0 * infinity, only finite values are added, and
    ``nonfinite`` becomes NaN where there are others.
    """
    m_i, l_i, acc, nonfinite = state
    q, k_ptrs, v_ptrs, stride_ks, stride_vs, in_d, in_dv = inputs
    first, blocks, before_gap, gap = span
    Sk, lowest, highest = limits
    scale, tanh_scale, cap = scales
    slope, aligned = bias
    for block in range(blocks):
        start = first + block * BLOCK_N
        if CUT:
            start += tl.where(block >= before_gap, gap, 0)
        key = start + tl.arange(0, BLOCK_N)
        far = start.to(tl.int64)
        k = _load_rows(k_ptrs + far * stride_ks, key < Sk, in_d, CUT, D_CUT)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if cap is None:
            s = s * scale
        else:
            s = cap - 2.0 * cap / (tl.exp2(s * tanh_scale) + 1.0)
        if slope is not None:
            s = (s - slope * tl.abs(aligned - key[None, :]).to(tl.float32)) * _LOG2_E
        if CUT:
            s = tl.where(_visible(key, lowest, highest), s, -float("inf"))

        m_i, l_i, p, rescale = online_softmax(m_i, l_i, s)
        acc = acc * rescale[:, None]
        v = _load_rows(v_ptrs + far * stride_vs, key < Sk, in_dv, CUT, DV_CUT)
        if CUT:
            wide = v.to(tl.float32)
            nonfinite += tl.sum(wide * 0.0)
            v = tl.where(tl.abs(wide) < float("inf"), v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_i, l_i, acc, nonfinite


@triton.jit
def _add_infinities(acc, inputs, span, limits, BLOCK_N: tl.constexpr, DV_CUT: tl.constexpr):
    """Infinities and NaN among the values of blocks that the mask cuts through, for the rows that see them."""
    _, _, v_ptrs, _, stride_vs, _, in_dv = inputs
    first, blocks, before_gap, gap = span
    Sk, lowest, highest = limits
    for block in tl.range(blocks, num_stages=1):  # seldom run: it is to take no registers and no memory
        start = first + block * BLOCK_N + tl.where(block >= before_gap, gap, 0)
        key = start + tl.arange(0, BLOCK_N)
        v = _load_rows(v_ptrs + start.to(tl.int64) * stride_vs, key < Sk, in_dv, True, DV_CUT)
        wide = v.to(tl.float32)
        nan = wide != wide
        seen = tl.broadcast_to(_visible(key, lowest, highest), [acc.shape[0], BLOCK_N]).to(tl.bfloat16)
        up = tl.dot(seen, ((wide == float("inf")) | nan).to(tl.bfloat16))
        acc = tl.where(up > 0, acc + float("inf"), acc)
        down = tl.dot(seen, ((wide == -float("inf")) | nan).to(tl.bfloat16))
        acc = tl.where(down > 0, acc - float("inf"), acc)
    return acc


def _fitting(configs, arguments, **_):
    """Tall tiles for narrow heads, unless the rows are few; for the widest heads also small ones."""
    heads, rows = arguments["BLOCK_D"] + arguments["BLOCK_DV"], arguments["Sq"] * arguments["GROUP"]
    single = arguments["q_ptr"].element_size() == 4
    tallest = 256 if heads <= 64 else 128 if heads <= 128 or not single else 64
    heights = {min(tallest, max(64, triton.next_power_of_2(rows)))} | ({64} if heads > 256 else set())
    return [c for c in configs if c.kwargs["BLOCK_M"] in heights and (c.num_stages == 1) == single]


@triton.autotune(
    configs=_CONFIGS,
    key=["SQ_CLASS", "SEEN_CLASS", "GROUP", "D", "DV"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=_SIZES)
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slopes_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    stride_slope,
    stride_sink,
    Sq,
    Sk,
    GROUP,
    GROUPS,
    SQ_CLASS,
    SEEN_CLASS,
    first_seen,
    last_seen,
    scale,
    tanh_scale,
    cap,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(Sq.to(tl.int64) * GROUP, BLOCK_M)
    tile = tiles - 1 - program % tiles  # the last first: under a causal mask it has the most to do
    batch_group = program // tiles
    batch = batch_group // GROUPS
    group = batch_group % GROUPS

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    head = group * GROUP + rows % GROUP
    inside = query < Sq
    key = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)[None, :]
    in_d = d < D
    in_dv = dv < DV
    q_ptrs = q_ptr + batch * q_strides[0] + (head * q_strides[1] + query * q_strides[2])[:, None] + d * q_strides[3]
    k_ptrs = k_ptr + batch * k_strides[0] + group * k_strides[1] + key * k_strides[2] + d * k_strides[3]
    v_ptrs = v_ptr + batch * v_strides[0] + group * v_strides[1] + key * v_strides[2] + dv * v_strides[3]
    q = tl.load(q_ptrs, mask=inside[:, None] & in_d, other=0.0)

    place = query.to(tl.int32)[:, None]
    earliest = (tile * BLOCK_M // GROUP).to(tl.int32)
    latest = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, Sq - 1).to(tl.int32)
    lowest, highest = None, Sk - 1  # keys that a row sees
    some_from, all_from, some_to, all_to = 0, 0, Sk, Sk  # keys that some row of the tile sees, or that all rows see
    if first_seen is not None:
        lowest = place + first_seen
        some_from = tl.maximum(earliest + first_seen, 0)
        all_from = tl.maximum(latest + first_seen, 0)
    if last_seen is not None:
        highest = tl.minimum(place + last_seen, highest)
        some_to = tl.maximum(tl.minimum(latest + last_seen + 1, Sk), 0)
        all_to = tl.maximum(tl.minimum(earliest + last_seen + 1, Sk), 0)
    begin = some_from // BLOCK_N
    end = tl.maximum(tl.cdiv(some_to, BLOCK_N), begin)
    whole_begin = tl.minimum(tl.cdiv(all_from, BLOCK_N), end)
    whole = tl.maximum(all_to // BLOCK_N - whole_begin, 0)

    slope, aligned = None, None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head * stride_slope, mask=inside, other=0.0)[:, None]
        aligned = place + (Sk - Sq)
    if sinks_ptr is None:
        m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
    else:  # a sink is a key without a value
        m_i = tl.load(sinks_ptr + head * stride_sink, mask=inside, other=0.0) * _LOG2_E
        l_i = tl.exp2(m_i - finite_shift(m_i))
    state = m_i, l_i, tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), 0.0

    inputs = q, k_ptrs, v_ptrs, k_strides[2], v_strides[2], in_d, in_dv
    limits = Sk, lowest, highest
    scales = scale, tanh_scale, cap
    bias = slope, aligned
    cut = begin * BLOCK_N, end - begin - whole, whole_begin - begin, whole * BLOCK_N
    uncut = whole_begin * BLOCK_N, whole, 0, 0
    state = _attend(state, inputs, cut, limits, scales, bias, BLOCK_N, True, BLOCK_D != D, BLOCK_DV != DV)
    state = _attend(state, inputs, uncut, limits, scales, bias, BLOCK_N, False, BLOCK_D != D, BLOCK_DV != DV)
    m_i, l_i, acc, nonfinite = state
    if nonfinite != 0.0:
        acc = _add_infinities(acc, inputs, cut, limits, BLOCK_N, BLOCK_DV != DV)

    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # a row that sees nothing is zero
    lse = m_i * _LN_2 + tl.log(l_i)
    out_row = (batch * GROUPS * GROUP + head) * Sq + query
    out_ptrs = out_ptr + out_row[:, None] * DV + dv
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_dv)
    tl.store(lse_ptr + out_row, lse, mask=inside)


def _results(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("assay::attention", _results)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    first_seen: int | None,
    last_seen: int | None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp. Query i sees the keys from i + first_seen to i + last_seen."""
    (batch, heads, queries, width), (_, groups, keys, value_width) = q.shape, v.shape
    out, lse = _results(q, k, v)
    if lse.numel() == 0:
        return out, lse
    group = heads // groups
    seen = keys if first_seen is None or last_seen is None else min(keys, last_seen - first_seen + 1)
    unit = 1.0 if slopes is not None else _LOG2_E.value  # with ALiBi the unit changes after the bias
    _attention_kernel[lambda meta: (triton.cdiv(queries * group, meta["BLOCK_M"]) * groups * batch,)](
        *(q, k, v, slopes, sinks, out, lse),
        *(q.stride(), k.stride(), v.stride()),
        *(0 if vector is None else vector.stride(0) for vector in (slopes, sinks)),
        *(queries, keys, group, groups, size_class(queries), size_class(seen)),
        *(first_seen, last_seen, scale * unit),
        *((None, None) if softcap is None else (2.0 * _LOG2_E.value * scale / softcap, softcap * unit)),
        *(width, value_width),
        *(max(16, triton.next_power_of_2(size)) for size in (width, value_width)),
    )
    return out, lse


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
    """softmax(q k^T scale) v of q[B,H,Sq,D], k[B,Hkv,Sk,D], v[B,Hkv,Sk,Dv]; H a multiple of Hkv, D and Dv up to 256.

    All three are float32, bfloat16 or float16; scores, exponentials and acc are float32, and the weights are rounded
    to the inputs' dtype before they meet v.

    causal: "none", or query i sees the keys up to i + o, with o = Sk - Sq ("bottom_right") or 0 ("top_left").
    scale: 1 / sqrt(D) where left out. window: (left, right), the keys from i + o - left to i + o + right.
    softcap: c tanh(score / c), after the scale and before bias and mask. alibi: adds -slopes[h] |i + Sk - Sq - j|,
    slopes float32[H]. sinks: float32[H], one more logit a head, without a value.

    Returns out[B,H,Sq,Dv], zero in a row that sees nothing; with return_lse also the natural log-sum-exp,
    float32[B,H,Sq], -inf in such a row without a sink. Raises TypeError or ValueError, naming the argument, for
    another dtype, shape, device or option.
    """
    if alibi and slopes is None:
        raise ValueError("slopes: expected a tensor float32[H], as alibi=True, got None")
    slopes = slopes if alibi else None
    _check(q, k, v, slopes, sinks)
    check_choice("causal", causal, ("none", "bottom_right", "top_left"))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected None or a positive number, got {softcap!r}")
    if window is not None and (len(window) != 2 or min(window) < 0):
        raise ValueError(f"window: expected None or (left, right), of at least 0, got {window!r}")
    scale = 1.0 / math.sqrt(max(q.shape[3], 1)) if scale is None else scale
    farthest = q.shape[2] + k.shape[2]  # a bound beyond this binds no row
    offset = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
    first = None if window is None else offset - min(window[0], farthest)
    last = offset if causal != "none" else None if window is None else offset + min(window[1], farthest)
    out, lse = _attention(q, k, v, slopes, sinks, scale, softcap, first, last)
    return (out, lse) if return_lse else out


def _check(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sinks: Tensor | None) -> None:
    given = {"slopes": slopes, "sinks": sinks}
    vectors = {name: (vector, FLOAT32, "H") for name, vector in given.items() if vector is not None}
    check(q=(q, FLOATING, "B H Sq D"), k=(k, ("q",), "B Hkv Sk D"), v=(v, ("q",), "B Hkv Sk Dv"), **vectors)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: expected a number of heads that divides q's {q.shape[1]}, got {k.shape[1]}")
    for name, heads in (("q", q), ("v", v)):
        if heads.shape[3] > _WIDEST:
            raise ValueError(f"{name}: expected heads of at most {_WIDEST}, got {heads.shape[3]}")
