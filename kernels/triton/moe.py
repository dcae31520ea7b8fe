"""A mixture of experts by grouped matrix products.

Pairs of a token and one of its experts are sorted by expert. One product makes silu(gate) * up of each pair, the next
its weighted share, and a last kernel adds up the shares of each token in the order of its ids. Every kernel writes each
element once: there are no atomics, and nothing depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_experts
from assay.kernels.triton.moe_backward import expert_gradients
from assay.kernels.triton.moe_shares import mixed
from assay.kernels.triton.moe_sort import sort_by_expert
from assay.kernels.triton.moe_tiles import (
    grouped_configs,
    grouped_grid,
    rows_tile,
    tile_of_expert,
    weights_as,
    weights_from,
    weights_tile,
)
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.swiglu import silu
from assay.kernels.triton.tiles import size_class

_TUNING = grouped_configs(
    2,
    {"w": True},
    *(
        (64, 64, 4, 3),
        (64, 128, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 4, 4),
        (64, 64, 8, 3),
        (64, 16, 8, 2),
        (64, 16, 16, 2),
    ),
)


@triton.autotune(key=["P_CLASS", "E", "D", "F", "BLOCK_M"], **_TUNING)
@triton.jit
def _gate_up_kernel(
    x_ptr,
    w,
    order_ptr,
    blocks_ptr,
    hidden_ptr,
    BLOCKS,
    E,
    D,
    F,
    CHOICES,
    P_CLASS,
    x_strides,
    w_strides,
    W_DESCRIBED: tl.constexpr,
    W_ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """hidden[row] = silu(gate x) * (up x), a row for each sorted pair."""
    expert, first, end, tile_n = tile_of_expert(blocks_ptr, BLOCKS, F, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    column = tile_n * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    in_rows = rows < end
    tokens = tl.load(order_ptr + rows, mask=in_rows, other=0) // CHOICES
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + tokens[:, None] * x_strides[0] + inner[None, :] * x_strides[1]
    gate_from = weights_from(w, expert, column, F - column, w_strides, W_DESCRIBED, BLOCK_N, BLOCK_K)
    up_from = weights_from(w, expert, column + F, F - column, w_strides, W_DESCRIBED, BLOCK_N, BLOCK_K)

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        x = rows_tile(x_ptrs, start, x_strides[1], in_rows, D, BLOCK_K)
        w_gate = weights_tile(gate_from, start, D, W_DESCRIBED, W_ALONG_K, BLOCK_K)
        gate = tl.dot(w_gate, x, gate, input_precision="ieee")
        w_up = weights_tile(up_from, start, D, W_DESCRIBED, W_ALONG_K, BLOCK_K)
        up = tl.dot(w_up, x, up, input_precision="ieee")

    hidden = (silu(gate) * up).to(hidden_ptr.dtype.element_ty)
    columns = (column + tl.arange(0, BLOCK_N))[:, None]
    tl.store(hidden_ptr + rows[None, :] * F + columns, hidden, mask=in_rows[None, :] & (columns < F))


@custom_op("assay::moe", lambda x, *rest: x.new_empty(x.shape))
def _moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    (tokens, choices), (experts, d, f) = ids.shape, w_down.shape
    if not (tokens and choices and experts and d):
        return x.new_zeros(x.shape)
    ids = ids.contiguous()
    pairs = sort_by_expert(ids, experts)
    hidden = torch.empty((tokens * choices, f), dtype=x.dtype, device=x.device)
    if f:
        w, strides, *lying = weights_as(w_gate_up.transpose(1, 2))
        blocks = len(pairs.blocks)
        _gate_up_kernel[grouped_grid(blocks, f)](
            *(x, w, pairs.order, pairs.blocks, hidden),
            *(blocks, experts, d, f, choices, size_class(tokens * choices), x.stride(), strides, *lying),
            BLOCK_M=pairs.height,
        )
    return mixed(hidden, w_down.transpose(1, 2), pairs, ids, weights.contiguous())


differentiate(
    "assay::moe",
    lambda saved, dy: (
        *expert_gradients(saved.x, saved.w_gate_up, saved.w_down, saved.weights, saved.ids, dy),
        None,
    ),
    saves="x w_gate_up w_down weights ids",
)


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """y[T,D], each row the sum over its k choices of weight * down(silu(gate x) * (up x)) of the expert chosen.

    x[T,D], w_gate_up[E,2F,D] (gate rows first) and w_down[E,D,F] are all float32, bfloat16 or float16; weights[T,k] is
    float32 and ids[T,k] int32. Sums are float32, and only silu * up is rounded to x's dtype on the way. An expert that
    comes twice counts twice; an id outside of 0 .. E-1 adds nothing. Raises TypeError or ValueError, naming the
    argument, for another dtype, shape or device.
    """
    check_experts(x, w_gate_up, w_down, weights, ids)
    return _moe(x, w_gate_up, w_down, weights, ids)
