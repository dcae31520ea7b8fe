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
from assay.kernels.triton.tiles import size_class, tile_configs, tile_of_program

_TILE = 4096  # elements that a program of the sort or of the sum holds at once
_LONGEST_BLOCK = 2048  # ids that a program of the sort reads at once
_GATE_UP_CONFIGS = tile_configs((128, 64, 64, 8, 3), (64, 64, 64, 4, 4), (64, 128, 64, 8, 3), (32, 64, 128, 4, 3))
_DOWN_CONFIGS = tile_configs((128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (64, 64, 128, 4, 3), (32, 128, 64, 4, 4))


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
def _tile_of_program(N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Block of sorted rows and block of columns; there are as many blocks of rows as the grid was made for."""
    blocks = (tl.num_programs(0) // tl.cdiv(N, BLOCK_N)).to(tl.int64)
    return tile_of_program(blocks * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M)


@triton.jit
def _rows_of_block(ends_ptr, E, block, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert of a block, the sorted rows in it and that expert's end; an expert >= E past the last block."""
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    blocks = tl.cdiv(ends - starts, BLOCK_M)
    blocks_to = tl.cumsum(blocks)
    expert = tl.sum((blocks_to <= block).to(tl.int64))
    own = experts == expert
    start = tl.sum(tl.where(own, starts + (block - (blocks_to - blocks)) * BLOCK_M, 0))
    return expert, start + tl.arange(0, BLOCK_M), tl.sum(tl.where(own, ends, 0))


@triton.jit
def _silu(x):
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid = tl.where(x < 0, small, 1.0) / (1.0 + small)
    return tl.where(x == -float("inf"), 0.0, x * sigmoid)


@triton.autotune(configs=_GATE_UP_CONFIGS, key=["P_CLASS", "E", "D", "F"])
@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    order_ptr,
    ends_ptr,
    hidden_ptr,
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
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """hidden[row] = silu(gate x) * (up x), a row for each sorted pair."""
    tile_m, tile_n = _tile_of_program(F, BLOCK_M, BLOCK_N, GROUP_M)
    expert, rows, end = _rows_of_block(ends_ptr, E, tile_m, BLOCK_M, BLOCK_E)
    if expert >= E:
        return
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


@triton.autotune(configs=_DOWN_CONFIGS, key=["P_CLASS", "E", "D", "F"])
@triton.jit
def _down_kernel(
    hidden_ptr,
    w_ptr,
    weights_ptr,
    order_ptr,
    ends_ptr,
    shares_ptr,
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
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """shares[pair] = weight * (down hidden[row]), float32, of the row's pair."""
    tile_m, tile_n = _tile_of_program(D, BLOCK_M, BLOCK_N, GROUP_M)
    expert, rows, end = _rows_of_block(ends_ptr, E, tile_m, BLOCK_M, BLOCK_E)
    if expert >= E:
        return
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
        sizes = (experts, d, f, choices, size_class(pairs))
        block_e = max(triton.next_power_of_2(experts), 16)
        if f:
            _gate_up_kernel[_grid(pairs, experts, f)](
                x, w_gate_up, order, ends, hidden, *sizes, *x.stride(), *w_gate_up.stride(), BLOCK_E=block_e
            )
        _down_kernel[_grid(pairs, experts, d)](
            hidden, w_down, weights, order, ends, shares, *sizes, *w_down.stride(), *weights.stride(), BLOCK_E=block_e
        )
    block_d = min(triton.next_power_of_2(d), _TILE // 4)
    block_t = _TILE // block_d
    _sum_kernel[(triton.cdiv(tokens, block_t) * triton.cdiv(d, block_d),)](
        shares, ids, y, tokens, experts, d, choices, *ids.stride(), BLOCK_T=block_t, BLOCK_D=block_d
    )
    return y


def _grid(pairs: int, experts: int, columns: int):  # type: ignore[no-untyped-def]  # Triton's metadata has no type
    """A program for each tile that there may be: an expert begins a block of its own, and may not fill its last."""

    def grid(meta):  # type: ignore[no-untyped-def]
        blocks = (pairs + min(pairs, experts) * (meta["BLOCK_M"] - 1)) // meta["BLOCK_M"]
        return (blocks * triton.cdiv(columns, meta["BLOCK_N"]),)

    return grid


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
