"""The gradients of a mixture of experts, without atomics: everything is in the order of pairs sorted by expert.

A first kernel forms gate and up again and, beside them, what comes back through the second product: of each pair the
gradients of gate and up, and the parts of its weight's. They go to the tokens as hidden activations do in the forward
pass (`moe_shares`), and to the weights of each expert by one product over all its rows (`moe_weight_gradient`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_experts
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
from assay.kernels.triton.moe_weight_gradient import weight_gradient
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.swiglu_backward import silu_and_slope
from assay.kernels.triton.tiles import size_class

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
_TALLEST = {2: 128, 4: 64}  # rows of a block that a thread's registers have room for, by an element's bytes
_NARROWEST = 64  # columns of a tile, in all configurations
_TUNING = grouped_configs(
    3,
    "x_ptr",
    {"w_up": True, "w_down": True},
    *((64, 64, 4, 2), (64, 64, 8, 3), (64, 32, 8, 3), (64, 16, 8, 2), (64, 16, 16, 2)),
)


@triton.autotune(key=["P_CLASS", "E", "D", "F", "BLOCK_M"], **_TUNING)
@triton.jit
def _pair_gradient_kernel(
    x_ptr,
    dy_ptr,
    w_up,
    w_down,
    weights_ptr,
    order_ptr,
    blocks_ptr,
    grown_ptr,
    hidden_ptr,
    parts_ptr,
    BLOCKS,
    E,
    D,
    F,
    CHOICES,
    PARTS,
    P_CLASS,
    x_strides,
    dy_strides,
    w_up_strides,
    w_down_strides,
    W_UP_DESCRIBED: tl.constexpr,
    W_UP_ALONG_K: tl.constexpr,
    W_DOWN_DESCRIBED: tl.constexpr,
    W_DOWN_ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Of each sorted row: the gradients of gate and up, its weight times silu(gate) * up, and a part of the weight's
    gradient, the sum over a tile's columns, at the row's pair."""
    expert, first, end, tile_n = tile_of_expert(blocks_ptr, BLOCKS, F, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    column = tile_n * BLOCK_N
    left = F - column
    rows = first + tl.arange(0, BLOCK_M)
    in_rows = rows < end
    pairs = tl.load(order_ptr + rows, mask=in_rows, other=0)
    tokens = (pairs // CHOICES)[:, None]
    inner = tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
    x_ptrs = x_ptr + tokens * x_strides[0] + inner * x_strides[1]
    dy_ptrs = dy_ptr + tokens * dy_strides[0] + inner * dy_strides[1]
    gate_from = weights_from(w_up, expert, column, left, w_up_strides, W_UP_DESCRIBED, BLOCK_N, BLOCK_K)
    up_from = weights_from(w_up, expert, column + F, left, w_up_strides, W_UP_DESCRIBED, BLOCK_N, BLOCK_K)
    down_from = weights_from(w_down, expert, column, left, w_down_strides, W_DOWN_DESCRIBED, BLOCK_N, BLOCK_K)

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    back = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        x = rows_tile(x_ptrs, start, x_strides[1], in_rows, D, BLOCK_K)
        own = weights_tile(gate_from, start, D, W_UP_DESCRIBED, W_UP_ALONG_K, BLOCK_K)
        gate = tl.dot(own, x, gate, input_precision="ieee")
        own = weights_tile(up_from, start, D, W_UP_DESCRIBED, W_UP_ALONG_K, BLOCK_K)
        up = tl.dot(own, x, up, input_precision="ieee")
        dy = rows_tile(dy_ptrs, start, dy_strides[1], in_rows, D, BLOCK_K)
        own = weights_tile(down_from, start, D, W_DOWN_DESCRIBED, W_DOWN_ALONG_K, BLOCK_K)
        back = tl.dot(own, dy, back, input_precision="ieee")

    opened, slope = silu_and_slope(gate)
    weights = tl.load(weights_ptr + pairs, mask=in_rows, other=0.0)[None, :]
    columns = (column + tl.arange(0, BLOCK_N))[:, None]
    inside = in_rows[None, :] & (columns < F)
    hidden = opened * up
    part = tl.sum(tl.where(columns < F, hidden * back, 0.0), axis=0)
    tl.store(parts_ptr + pairs * PARTS + tile_n, part, mask=in_rows)
    tl.store(hidden_ptr + rows[None, :] * F + columns, (hidden * weights).to(hidden_ptr.dtype.element_ty), mask=inside)
    back *= weights
    grown_ptrs = grown_ptr + rows[None, :] * F * 2 + columns
    tl.store(grown_ptrs, (back * up * slope).to(grown_ptr.dtype.element_ty), mask=inside)
    tl.store(grown_ptrs + F, (back * opened).to(grown_ptr.dtype.element_ty), mask=inside)


def _results(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, *_: object) -> Gradients:
    return (
        x.new_empty(x.shape),
        w_gate_up.new_empty(w_gate_up.shape),
        w_down.new_empty(w_down.shape),
        weights.new_empty(weights.shape),
    )


@custom_op("assay::moe_backward", _results)
def expert_gradients(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, dy: Tensor
) -> Gradients:
    """dx, dw_gate_up, dw_down and dweights of `assay::moe`, from the gradient of its result."""
    (tokens, choices), (experts, d, f) = ids.shape, w_down.shape
    results = _results(x, w_gate_up, w_down, weights)
    if not (tokens and choices and experts and d and f):
        for gradient in results:
            gradient.zero_()
        return results
    dx, dw_gate_up, dw_down, dweights = results
    ids, weights = ids.contiguous(), weights.contiguous()
    pairs = sort_by_expert(ids, experts, _TALLEST[x.element_size()])
    count, blocks = tokens * choices, len(pairs.blocks)
    grown = torch.empty((count, 2 * f), dtype=x.dtype, device=x.device)
    hidden = torch.empty((count, f), dtype=x.dtype, device=x.device)
    parts = torch.zeros((count, triton.cdiv(f, _NARROWEST)), dtype=torch.float32, device=x.device)
    up, up_strides, *up_lies = weights_as(w_gate_up.transpose(1, 2), f)
    down, down_strides, *down_lies = weights_as(w_down)
    _pair_gradient_kernel[grouped_grid(blocks, f)](
        *(x, dy, up, down, weights, pairs.order, pairs.blocks, grown, hidden, parts),
        *(blocks, experts, d, f, choices, parts.shape[1], size_class(count)),
        *(x.stride(), dy.stride(), up_strides, down_strides, *up_lies, *down_lies),
        BLOCK_M=pairs.height,
    )
    dx.copy_(mixed(grown, w_gate_up, pairs, ids, None))
    weight_gradient(grown, x, pairs, choices, dw_gate_up)
    weight_gradient(hidden, dy, pairs, choices, dw_down.transpose(1, 2))
    dweights.copy_(parts.sum(1).view(dweights.shape))
    return results


def moe_backward(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, dy: Tensor) -> Gradients:
    """dx[T,D], dw_gate_up[E,2F,D], dw_down[E,D,F] and dweights[T,k] of `moe`, from the gradient dy[T,D] of its result.

    dy has x's dtype; the other arguments are those of `moe`, and each gradient has its argument's dtype. Sums are
    float32; the gradients of gate and up, and weight * silu * up, are rounded to x's dtype before they are multiplied.
    An id outside of 0 .. E-1 has a weight's gradient of zero. Raises TypeError or ValueError, naming the argument, for
    another dtype, shape or device.
    """
    check_experts(x, w_gate_up, w_down, weights, ids, dy=(dy, ("x",), "T D"))
    return expert_gradients(x, w_gate_up, w_down, weights, ids, dy)
