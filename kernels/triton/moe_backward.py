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

from assay.kernels.triton.arguments import check_moe, check_moe_fp8
from assay.kernels.triton.moe_shares import mixed
from assay.kernels.triton.moe_sort import Sorted, sort_by_expert
from assay.kernels.triton.moe_tiles import (
    add_product,
    grouped_configs,
    grouped_grid,
    rows_tile,
    scaled_along,
    scales_at,
    strides_of,
    tile_of_expert,
    weights_as,
    weights_from,
    weights_tile,
)
from assay.kernels.triton.moe_weight_gradient import weight_gradient
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.swiglu_backward import silu_and_slope
from assay.kernels.triton.tiles import size_bucket

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
_TALLEST = {2: 128, 4: 64}  # rows of a block that a thread's registers have room for, by an element's bytes
_TALLEST_OF_CODES = {2: 64, 4: 16}  # where registers hold the weights made of codes, too
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
    up_scales_ptr,
    down_scales_ptr,
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
    up_scales_strides,
    down_scales_strides,
    SIDE: tl.constexpr,
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
    gradient, the sum over a tile's columns, at the row's pair.

    Scales of weights, if any, are as in `moe_shares`. Where each row has one (SIDE 1), the gradients of gate and up are
    multiplied by theirs: the product with the transposed weights then needs none.
    """
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

    columns = column + tl.arange(0, BLOCK_N)
    gate_scales = up_scales_ptr, up_scales_strides, expert, columns, columns < F
    up_scales = up_scales_ptr, up_scales_strides, expert, columns + F, columns < F
    down_scales = down_scales_ptr, down_scales_strides, expert, columns, columns < F

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    back = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        x = rows_tile(x_ptrs, start, x_strides[1], in_rows, D, BLOCK_K)
        own = weights_tile(gate_from, start, D, W_UP_DESCRIBED, W_UP_ALONG_K, BLOCK_K)
        gate = add_product(gate, own, x, gate_scales, start, SIDE)
        own = weights_tile(up_from, start, D, W_UP_DESCRIBED, W_UP_ALONG_K, BLOCK_K)
        up = add_product(up, own, x, up_scales, start, SIDE)
        dy = rows_tile(dy_ptrs, start, dy_strides[1], in_rows, D, BLOCK_K)
        own = weights_tile(down_from, start, D, W_DOWN_DESCRIBED, W_DOWN_ALONG_K, BLOCK_K)
        if SIDE == 1:
            own = scaled_along(own, down_scales, start, D)
        back = add_product(back, own, dy, down_scales, start, SIDE)

    if SIDE == 1:
        gate *= scales_at(gate_scales, 0, SIDE)
        up *= scales_at(up_scales, 0, SIDE)
    opened, slope = silu_and_slope(gate)
    weights = tl.load(weights_ptr + pairs, mask=in_rows, other=0.0)[None, :]
    places = rows[None, :] * F + columns[:, None]
    inside = in_rows[None, :] & (columns < F)[:, None]
    hidden = opened * up
    part = tl.sum(tl.where((columns < F)[:, None], hidden * back, 0.0), axis=0)
    tl.store(parts_ptr + pairs * PARTS + tile_n, part, mask=in_rows)
    if hidden_ptr is not None:
        tl.store(hidden_ptr + places, (hidden * weights).to(hidden_ptr.dtype.element_ty), mask=inside)
    back *= weights
    of_gate, of_up = back * up * slope, back * opened
    if SIDE == 1:
        of_gate *= scales_at(gate_scales, 0, SIDE)
        of_up *= scales_at(up_scales, 0, SIDE)
    grown_ptrs = grown_ptr + places + rows[None, :] * F
    tl.store(grown_ptrs, of_gate.to(grown_ptr.dtype.element_ty), mask=inside)
    tl.store(grown_ptrs + F, of_up.to(grown_ptr.dtype.element_ty), mask=inside)


def _results(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, dy: Tensor, of_up: bool, of_down: bool
) -> Gradients:
    return (
        x.new_empty(x.shape),
        w_gate_up.new_empty(w_gate_up.shape if of_up else 0),
        w_down.new_empty(w_down.shape if of_down else 0),
        weights.new_empty(weights.shape),
    )


@custom_op("assay::moe_backward", _results)
def expert_gradients(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, dy: Tensor, of_up: bool, of_down: bool
) -> Gradients:
    """dx, dw_gate_up and dw_down, if they are asked for, and dweights of `assay::moe`, from the gradient of its
    result."""
    if not (ids.numel() and w_down.numel()):
        dx, dw_gate_up, dw_down, dweights = _results(x, w_gate_up, w_down, weights, ids, dy, of_up, of_down)
        return dx.zero_(), dw_gate_up.zero_(), dw_down.zero_(), dweights.zero_()
    choices = ids.shape[1]
    pairs = sort_by_expert(ids.contiguous(), len(w_down), _TALLEST[x.element_size()])
    hidden = torch.empty((ids.numel(), w_down.shape[2]), dtype=x.dtype, device=x.device) if of_down else None
    grown, dweights = _pair_gradients(x, w_gate_up, w_down, weights, dy, pairs, hidden)
    dx = mixed(grown, w_gate_up, pairs, ids.contiguous(), None)
    dw_gate_up = w_gate_up.new_empty(w_gate_up.shape if of_up else 0)
    dw_down = w_down.new_empty(w_down.shape if of_down else 0)
    if of_up:
        weight_gradient(grown, x, pairs, choices, dw_gate_up)
    if hidden is not None:
        weight_gradient(hidden, dy, pairs, choices, dw_down.transpose(1, 2))
    return dx, dw_gate_up, dw_down, dweights


@custom_op("assay::moe_fp8_backward", lambda x, *rest: (x.new_empty(x.shape), rest[4].new_empty(rest[4].shape)))
def fp8_expert_gradients(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    dy: Tensor,
    side: int,
) -> tuple[Tensor, Tensor]:
    """dx and dweights of `assay::moe_fp8`, from the gradient of its result."""
    if not (ids.numel() and w_down.numel()):
        return x.new_zeros(x.shape), weights.new_zeros(weights.shape)
    pairs = sort_by_expert(ids.contiguous(), len(w_down), _TALLEST_OF_CODES[x.element_size()])
    scales = scale_gate_up, scale_down.transpose(1, 2)
    grown, dweights = _pair_gradients(x, w_gate_up, w_down, weights, dy, pairs, None, scales, side)
    by_block = side > 1
    given = scale_gate_up.transpose(1, 2) if by_block else None
    return mixed(grown, w_gate_up, pairs, ids.contiguous(), None, given, side if by_block else 0), dweights


def _pair_gradients(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    dy: Tensor,
    pairs: Sorted,
    hidden: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    side: int = 0,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up [T*k,2F] of sorted rows, and dweights[T,k]. Written is, where given, hidden[T*k,F],
    weight * silu(gate) * up. ``scales``: of w_gate_up[E,2F,D] and w_down[E,F,D], for blocks of ``side`` as in `mixed`.
    """
    (tokens, choices), (experts, d, f) = weights.shape, w_down.shape
    count, blocks = tokens * choices, len(pairs.blocks)
    grown = torch.empty((count, 2 * f), dtype=x.dtype, device=x.device)
    parts = torch.zeros((count, triton.cdiv(f, _NARROWEST)), dtype=torch.float32, device=x.device)
    up, up_strides, *up_lies = weights_as(w_gate_up.transpose(1, 2), f)
    down, down_strides, *down_lies = weights_as(w_down)
    _pair_gradient_kernel[grouped_grid(blocks, f)](
        *(x, dy, up, down, *scales, weights.contiguous(), pairs.order, pairs.blocks, grown, hidden, parts),
        *(blocks, experts, d, f, choices, parts.shape[1], size_bucket(count), x.stride(), dy.stride()),
        *(up_strides, down_strides, *map(strides_of, scales), side, *up_lies, *down_lies),
        BLOCK_M=pairs.height,
    )
    return grown, parts.sum(1).view(weights.shape)


def moe_backward(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, dy: Tensor) -> Gradients:
    """dx[T,D], dw_gate_up[E,2F,D], dw_down[E,D,F] and dweights[T,k] of `moe`, from the gradient dy[T,D] of its result.

    dy has x's dtype; the other arguments are those of `moe`, and each gradient has its argument's dtype. Sums are
    float32; the gradients of gate and up, and weight * silu * up, are rounded to x's dtype before they are multiplied.
    An id outside of 0 .. E-1 has a weight's gradient of zero. Raises TypeError or ValueError, naming the argument, for
    another dtype, shape or device.
    """
    check_moe(x, w_gate_up, w_down, weights, ids, dy=(dy, ("x",), "T D"))
    return expert_gradients(x, w_gate_up, w_down, weights, ids, dy, True, True)


def moe_fp8_backward(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    dy: Tensor,
    *,
    granularity: str = "channel",
) -> tuple[Tensor, Tensor]:
    """dx[T,D] and dweights[T,k] of `moe_fp8`, from the gradient dy[T,D] of its result.

    dy has x's dtype; the other arguments are those of `moe_fp8`. Codes and scales have no gradient: what quantised the
    experts is passed straight through (arXiv:1308.3432, and section 3.3 of arXiv:2412.19437). Sums are float32, which
    scales of blocks multiply. Scales of rows multiply w_down, which is then rounded to x's dtype, and the gradients of
    gate and up before they are rounded. Raises TypeError or ValueError, naming the argument, for another dtype, shape,
    granularity or device.
    """
    side = check_moe_fp8(
        *(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, granularity), dy=(dy, ("x",), "T D")
    )
    found: tuple[Tensor, Tensor] = fp8_expert_gradients(
        *(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, dy, side)
    )
    return found
