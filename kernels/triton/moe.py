"""A mixture of experts by grouped matrix products.

Pairs of a token and one of its experts are sorted by expert. One product makes silu(gate) * up of each pair, the next
its weighted contribution, and a last kernel adds up the contributions of each token in the order of its ids. Every
kernel writes each element once: there are no atomics, and nothing depends on the order in which programs run. How many
rows an expert has is known on the device alone, so the grids are as large as any division among experts may need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check_device, check_dtype, check_shape
from assay.kernels.triton.tiles import size_class, tile_of_program

_TILE = 4096  # elements that a program of the sort or of the sum holds at once
_LONGEST_BLOCK = 2048  # ids that a program of the sort reads at once
_CONFIGS = [
    triton.Config({"BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for block_n, block_k, warps, stages in ((64, 32, 4, 4), (64, 128, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2))
]
_KEY = ["P_CLASS", "E", "D", "F"]


@triton.jit(do_not_specialize=["P"])
def _sort_kernel(
    ids_ptr,
    order_ptr,
    ends_ptr,
    P,
    E,
    CHOICES,
    stride_it,
    stride_ik,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The pairs of this program's experts, in rising order, each expert's behind those of the experts below it.

    A pair is token * CHOICES + choice. A pair whose id is that of no expert is in no expert's rows.
    """
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    offsets = tl.arange(0, BLOCK_P).to(tl.int64)
    below = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, P, BLOCK_P):
        pairs = first + offsets
        ids = tl.load(_at(ids_ptr, pairs, CHOICES, stride_it, stride_ik), mask=pairs < P, other=-1)[None, :]
        below += tl.sum(((ids >= 0) & (ids < experts[:, None])).to(tl.int32), axis=1)
    ends = below.to(tl.int64)
    for first in range(0, P, BLOCK_P):
        pairs = first + offsets
        ids = tl.load(_at(ids_ptr, pairs, CHOICES, stride_it, stride_ik), mask=pairs < P, other=-1)[None, :]
        own = (ids == experts[:, None]) & (experts[:, None] < E)
        places = ends[:, None] + tl.cumsum(own.to(tl.int32), axis=1) - 1
        tl.store(order_ptr + places, tl.broadcast_to(pairs[None, :], own.shape), mask=own)
        ends += tl.sum(own.to(tl.int32), axis=1)
    tl.store(ends_ptr + experts, ends, mask=experts < E)


@triton.jit
def _at(pointer, pairs, CHOICES, stride_t, stride_k):
    """Where [token, choice] of each pair lies."""
    return pointer + pairs // CHOICES * stride_t + pairs % CHOICES * stride_k


@triton.jit
def _blocks_kernel(
    ends_ptr,
    blocks_ptr,
    BLOCKS,
    E,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Of each block of up to BLOCK_M sorted rows of one expert: that expert, the first row, and the row past the last.

    Blocks that the experts leave over have no rows.
    """
    blocks = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    heights = tl.cdiv(ends - starts, BLOCK_M)
    below = tl.cumsum(heights)[None, :] <= blocks[:, None]
    expert = tl.sum(below.to(tl.int64), axis=1)
    inside = blocks < BLOCKS
    used = inside & (expert < E)
    start = tl.load(ends_ptr + expert - 1, mask=used & (expert > 0), other=0)
    end = tl.load(ends_ptr + expert, mask=used, other=0)
    first = start + (blocks - tl.sum(tl.where(below, heights[None, :], 0), axis=1)) * BLOCK_M
    tl.store(blocks_ptr + blocks * 3, expert, mask=inside)
    tl.store(blocks_ptr + blocks * 3 + 1, tl.where(used, first, 0), mask=inside)
    tl.store(blocks_ptr + blocks * 3 + 2, tl.minimum(end, first + BLOCK_M), mask=inside)


@triton.jit
def _silu(x):
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid = tl.where(x < 0, small, 1.0) / (1.0 + small)
    return tl.where(x == -float("inf"), 0.0, x * sigmoid)


@triton.autotune(configs=_CONFIGS, key=_KEY)
@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    order_ptr,
    blocks_ptr,
    hidden_ptr,
    BLOCKS,
    E,
    D,
    F,
    CHOICES,
    P_CLASS,
    stride_xt,
    stride_xd,
    stride_we,
    stride_wn,
    stride_wd,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """hidden[row] = silu(gate x) * (up x), a row for each sorted pair."""
    tile_m, tile_n = tile_of_program(BLOCKS * BLOCK_M, F, BLOCK_M, BLOCK_N, GROUP_M)
    first = tl.load(blocks_ptr + tile_m * 3 + 1)
    end = tl.load(blocks_ptr + tile_m * 3 + 2)
    if first >= end:
        return
    expert = tl.load(blocks_ptr + tile_m * 3)
    rows = first + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    in_rows = rows[:, None] < end
    in_columns = columns[None, :] < F
    tokens = tl.load(order_ptr + rows, mask=rows < end, other=0) // CHOICES
    x_ptrs = x_ptr + tokens[:, None] * stride_xt + inner[None, :] * stride_xd
    w_ptrs = w_ptr + expert * stride_we + inner[:, None] * stride_wd
    gate_ptrs = w_ptrs + columns[None, :] * stride_wn
    up_ptrs = w_ptrs + (columns[None, :] + F) * stride_wn
    step = tl.full([], BLOCK_K, tl.int64)

    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_K):
        left = inner < D - start
        in_weights = left[:, None] & in_columns
        x = tl.load(x_ptrs, mask=in_rows & left[None, :], other=0.0)
        gate = tl.dot(x, tl.load(gate_ptrs, mask=in_weights, other=0.0), gate, input_precision="ieee")
        up = tl.dot(x, tl.load(up_ptrs, mask=in_weights, other=0.0), up, input_precision="ieee")
        x_ptrs += step * stride_xd
        gate_ptrs += step * stride_wd
        up_ptrs += step * stride_wd

    hidden = (_silu(gate) * up).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + rows[:, None] * F + columns[None, :], hidden, mask=in_rows & in_columns)


@triton.autotune(configs=_CONFIGS, key=_KEY)
@triton.jit
def _down_kernel(
    hidden_ptr,
    w_ptr,
    weights_ptr,
    order_ptr,
    blocks_ptr,
    shares_ptr,
    BLOCKS,
    E,
    D,
    F,
    CHOICES,
    P_CLASS,
    stride_we,
    stride_wd,
    stride_wf,
    stride_wt,
    stride_wk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """shares[pair] = weight * (down hidden[row]), float32, of the row's pair."""
    tile_m, tile_n = tile_of_program(BLOCKS * BLOCK_M, D, BLOCK_M, BLOCK_N, GROUP_M)
    first = tl.load(blocks_ptr + tile_m * 3 + 1)
    end = tl.load(blocks_ptr + tile_m * 3 + 2)
    if first >= end:
        return
    expert = tl.load(blocks_ptr + tile_m * 3)
    rows = first + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    in_rows = rows[:, None] < end
    in_columns = columns[None, :] < D
    hidden_ptrs = hidden_ptr + rows[:, None] * F + inner[None, :]
    w_ptrs = w_ptr + expert * stride_we + inner[:, None] * stride_wf + columns[None, :] * stride_wd
    step = tl.full([], BLOCK_K, tl.int64)

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, F, BLOCK_K):
        left = inner < F - start
        hidden = tl.load(hidden_ptrs, mask=in_rows & left[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=left[:, None] & in_columns, other=0.0)
        sums = tl.dot(hidden, w, sums, input_precision="ieee")
        hidden_ptrs += BLOCK_K
        w_ptrs += step * stride_wf

    pairs = tl.load(order_ptr + rows, mask=rows < end, other=0)
    weights = tl.load(_at(weights_ptr, pairs, CHOICES, stride_wt, stride_wk), mask=rows < end, other=0.0)
    tl.store(shares_ptr + pairs[:, None] * D + columns[None, :], sums * weights[:, None], mask=in_rows & in_columns)


@triton.jit(do_not_specialize=["T"])
def _sum_kernel(
    shares_ptr,
    ids_ptr,
    y_ptr,
    T,
    E,
    D,
    CHOICES,
    stride_it,
    stride_ik,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y[token] = the sum of its shares in the order of its ids; a share whose id is no expert's was not written."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(D, BLOCK_D)
    tokens = program // across * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = program % across * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (tokens[:, None] < T) & (columns[None, :] < D)
    ids_ptrs = ids_ptr + tokens * stride_it
    shares_ptrs = shares_ptr + tokens[:, None] * CHOICES * D + columns[None, :]
    sums = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for _ in range(CHOICES):
        ids = tl.load(ids_ptrs, mask=tokens < T, other=-1)
        written = ((ids >= 0) & (ids < E))[:, None]
        sums += tl.load(shares_ptrs, mask=inside & written, other=0.0)
        ids_ptrs += stride_ik
        shares_ptrs += D
    tl.store(y_ptr + tokens[:, None] * D + columns[None, :], sums.to(y_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("assay::moe", mutates_args=())
def _moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    (tokens, choices), (experts, d, f) = ids.shape, w_down.shape
    pairs = tokens * choices
    order = torch.empty(pairs, dtype=torch.int64, device=x.device)
    ends = torch.empty(experts, dtype=torch.int64, device=x.device)
    hidden = torch.empty((pairs, f), dtype=x.dtype, device=x.device)
    shares = torch.empty((pairs, d), dtype=torch.float32, device=x.device)
    y = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if pairs and experts:
        block_p = min(triton.next_power_of_2(pairs), _LONGEST_BLOCK)
        sorted_at_once = _TILE // block_p
        _sort_kernel[(triton.cdiv(experts, sorted_at_once),)](
            ids, order, ends, pairs, experts, choices, *ids.stride(), BLOCK_E=sorted_at_once, BLOCK_P=block_p
        )
        block_m = _rows_of_block(size_class(pairs) // experts)
        most = (pairs + min(pairs, experts) * (block_m - 1)) // block_m  # each expert may leave a block unfilled
        blocks = torch.empty((most, 3), dtype=torch.int64, device=x.device)
        block_e = triton.next_power_of_2(experts)
        block_b = max(1, _TILE // block_e)
        _blocks_kernel[(triton.cdiv(most, block_b),)](
            ends, blocks, most, experts, BLOCK_M=block_m, BLOCK_B=block_b, BLOCK_E=block_e
        )
        sizes = (most, experts, d, f, choices, size_class(pairs))
        if f:
            _gate_up_kernel[_grid(most, f)](
                x, w_gate_up, order, blocks, hidden, *sizes, *x.stride(), *w_gate_up.stride(), BLOCK_M=block_m
            )
        _down_kernel[_grid(most, d)](
            hidden, w_down, weights, order, blocks, shares, *sizes, *w_down.stride(), *weights.stride(), BLOCK_M=block_m
        )
    block_d = min(triton.next_power_of_2(d), _TILE // 4)
    block_t = _TILE // block_d
    _sum_kernel[(triton.cdiv(tokens, block_t) * triton.cdiv(d, block_d),)](
        shares, ids, y, tokens, experts, d, choices, *ids.stride(), BLOCK_T=block_t, BLOCK_D=block_d
    )
    return y


def _rows_of_block(average: int) -> int:
    """How high blocks are, for so many rows to an expert: the weights are read once for each block."""
    return 32 if average <= 16 else 64 if average <= 64 else 128 if average <= 512 else 256


def _grid(blocks: int, columns: int):  # type: ignore[no-untyped-def]  # Triton's metadata has no type
    return lambda meta: (blocks * triton.cdiv(columns, meta["BLOCK_N"]),)


@_moe.register_fake
def _(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """y[T,D], each row the sum over its k choices of weight * down(silu(gate x) * (up x)) of the expert chosen.

    x[T,D], w_gate_up[E,2F,D] (gate rows first) and w_down[E,D,F] are all float32, bfloat16 or float16; weights[T,k] is
    float32 and ids[T,k] int32. Sums are float32, and only silu * up is rounded to x's dtype on the way. An expert that
    comes twice counts twice; an id outside of 0 .. E-1 adds nothing. Raises TypeError or ValueError, naming the
    argument, for another dtype, shape or device.
    """
    check_dtype("x", x, FLOATING)
    check_dtype("w_gate_up", w_gate_up, (x.dtype,))
    check_dtype("w_down", w_down, (x.dtype,))
    check_dtype("weights", weights, (torch.float32,))
    check_dtype("ids", ids, (torch.int32,))
    check_shape("x", x, ("T", "D"))
    check_shape("w_down", w_down, ("E", x.shape[1], "F"))
    experts, d, f = w_down.shape
    check_shape("w_gate_up", w_gate_up, (experts, 2 * f, d))
    check_shape("ids", ids, (x.shape[0], "k"))
    check_shape("weights", weights, ids.shape)
    check_device(x=x, w_gate_up=w_gate_up, w_down=w_down, weights=weights, ids=ids)
    return _moe(x, w_gate_up, w_down, weights, ids)
