"""A mixture of experts by grouped matrix products.

Pairs of a token and one of its experts are sorted by expert. One product makes silu(gate) * up of each pair, the next
its weighted share, and a last kernel adds up the shares of each token in the order of its ids. Every kernel writes each
element once: there are no atomics, and nothing depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import (
    FLOAT32,
    FLOATING,
    INT32,
    check,
    check_moe,
    check_moe_fp8,
    check_shape,
)
from assay.kernels.triton.moe_backward import expert_gradients, fp8_expert_gradients
from assay.kernels.triton.moe_shares import mixed
from assay.kernels.triton.moe_sort import sort_by_expert
from assay.kernels.triton.moe_tiles import (
    add_product,
    group_of,
    grouped_configs,
    grouped_grid,
    numbers_tile,
    rows_tile,
    scales_at,
    strides_of,
    tile_of_expert,
    weights_as,
    weights_from,
    weights_tile,
)
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.swiglu import silu
from assay.kernels.triton.tiles import size_bucket

_CODES = (torch.uint8,)
_TALLEST_OF_CODES = 16  # rows of a block where registers hold float32 weights made of codes, too
_TUNING = grouped_configs(
    2,
    "x_ptr",
    {"w": True},
    *((64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3), (64, 64, 8, 3), (64, 16, 8, 2), (64, 16, 16, 2)),
)


@triton.autotune(key=["P_CLASS", "E", "D", "F", "BLOCK_M"], **_TUNING)
@triton.jit(do_not_specialize=["BLOCKS"])
def _gate_up_kernel(
    x_ptr,
    w,
    scales_ptr,
    zeros_ptr,
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
    scales_strides,
    zeros_strides,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    W_DESCRIBED: tl.constexpr,
    W_ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """hidden[row] = silu(gate x) * (up x), a row for each sorted pair. Scales and codes are as in `moe_shares`."""
    expert, first, end, tile_n = tile_of_expert(blocks_ptr, BLOCKS, F, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    column = tile_n * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    in_rows = rows < end
    tokens = tl.load(order_ptr + rows, mask=in_rows, other=0) // CHOICES
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + tokens[:, None] * x_strides[0] + inner[None, :] * x_strides[1]
    EACH: tl.constexpr = 2 if GROUP else 1
    gate_from = weights_from(w, expert, column, F - column, w_strides, W_DESCRIBED, BLOCK_N, BLOCK_K // EACH)
    up_from = weights_from(w, expert, column + F, F - column, w_strides, W_DESCRIBED, BLOCK_N, BLOCK_K // EACH)
    columns = column + tl.arange(0, BLOCK_N)
    gate_scales = scales_ptr, scales_strides, expert, columns, columns < F
    up_scales = scales_ptr, scales_strides, expert, columns + F, columns < F
    gate_zeros = zeros_ptr, zeros_strides, expert, columns, columns < F
    up_zeros = zeros_ptr, zeros_strides, expert, columns + F, columns < F

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        x = rows_tile(x_ptrs, start, x_strides[1], in_rows, D, BLOCK_K)
        w_gate = weights_tile(gate_from, start // EACH, D // EACH, W_DESCRIBED, W_ALONG_K, BLOCK_K // EACH)
        if GROUP:
            w_gate = numbers_tile(w_gate, gate_scales, gate_zeros, start, D, GROUP)
        gate = add_product(gate, w_gate, x, gate_scales, start, SIDE)
        w_up = weights_tile(up_from, start // EACH, D // EACH, W_DESCRIBED, W_ALONG_K, BLOCK_K // EACH)
        if GROUP:
            w_up = numbers_tile(w_up, up_scales, up_zeros, start, D, GROUP)
        up = add_product(up, w_up, x, up_scales, start, SIDE)

    if SIDE == 1:
        gate *= scales_at(gate_scales, 0, SIDE)
        up *= scales_at(up_scales, 0, SIDE)
    hidden = (silu(gate) * up).to(hidden_ptr.dtype.element_ty)
    to = hidden_ptr + rows[None, :] * F + columns[:, None]
    tl.store(to, hidden, mask=in_rows[None, :] & (columns < F)[:, None])


@custom_op("assay::moe", lambda x, *rest: x.new_empty(x.shape))
def _moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return _mixture(x, w_gate_up, w_down, weights, ids)


@custom_op("assay::moe_fp8", lambda x, *rest: x.new_empty(x.shape))
def _moe_fp8(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    side: int,
) -> Tensor:
    return _mixture(x, w_gate_up, w_down, weights, ids, (scale_gate_up, scale_down), side)


@custom_op("assay::moe_int4", lambda x, *rest: x.new_empty(x.shape))
def _moe_int4(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    zero_gate_up: Tensor,
    zero_down: Tensor,
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    scales, zeros = (scale_gate_up, scale_down), (zero_gate_up, zero_down)
    return _mixture(x, w_gate_up, w_down, weights, ids, scales, zeros=zeros)


def _mixture(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    side: int = 0,
    zeros: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """``scales`` go with blocks of ``side`` x ``side`` of an expert's weights; 1: with rows, 0: there are none, or with
    ``zeros`` they go with groups of codes in a row."""
    (tokens, choices), (experts, d, _), f = ids.shape, w_down.shape, w_gate_up.shape[1] // 2
    if not (tokens and choices and experts and d):
        return x.new_zeros(x.shape)
    ids = ids.contiguous()
    in_registers = x.dtype == torch.float32 != w_down.dtype
    pairs = sort_by_expert(ids, experts, *([_TALLEST_OF_CODES] if in_registers else []))
    hidden = torch.empty((tokens * choices, f), dtype=x.dtype, device=x.device)
    if f:
        w, strides, *lying = weights_as(w_gate_up.transpose(1, 2), f, copied=zeros[0] is None or x.element_size() == 2)
        blocks = len(pairs.blocks)
        _gate_up_kernel[grouped_grid(blocks, f)](
            *(x, w, scales[0], zeros[0], pairs.order, pairs.blocks, hidden),
            *(blocks, experts, d, f, choices, size_bucket(tokens * choices), x.stride(), strides),
            *(strides_of(scales[0]), strides_of(zeros[0]), side, group_of(zeros[0], d), *lying),
            BLOCK_M=pairs.height,
        )
    return mixed(hidden, w_down.transpose(1, 2), pairs, ids, weights.contiguous(), scales[1], side, zeros[1])


differentiate(
    "assay::moe",
    lambda saved, dy: expert_gradients(
        *(saved.x, saved.w_gate_up, saved.w_down, saved.weights, saved.ids, dy),
        *(saved.needs.w_gate_up, saved.needs.w_down),
    ),
    saves="x w_gate_up w_down weights ids",
)


def _fp8_gradients(saved: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    tensors = saved.x, saved.w_gate_up, saved.w_down, saved.scale_gate_up, saved.scale_down, saved.weights, saved.ids
    dx, dweights = fp8_expert_gradients(*tensors, dy, saved.side)
    return dx, None, None, None, None, dweights


differentiate("assay::moe_fp8", _fp8_gradients, saves="x w_gate_up w_down scale_gate_up scale_down weights ids")


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """y[T,D], each row the sum over its k choices of weight * down(silu(gate x) * (up x)) of the expert chosen.

    x[T,D], w_gate_up[E,2F,D] (gate rows first) and w_down[E,D,F] are all float32, bfloat16 or float16; weights[T,k] is
    float32 and ids[T,k] int32. Sums are float32, and only silu * up is rounded to x's dtype on the way. An expert that
    comes twice counts twice; an id outside of 0 .. E-1 adds nothing. Raises TypeError or ValueError, naming the
    argument, for another dtype, shape or device.
    """
    check_moe(x, w_gate_up, w_down, weights, ids)
    return _moe(x, w_gate_up, w_down, weights, ids)


def moe_fp8(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    granularity: str = "channel",
) -> Tensor:
    """`moe` of weights that are float8_e4m3fn times their scales, float32, and come to x's dtype in registers.

    Scales go with each row of an expert's weights, scale_gate_up[E,2F,1] and scale_down[E,D,1] (granularity "channel"),
    or with each block of 128 x 128, [E,ceil(2F/128),ceil(D/128)] and [E,ceil(D/128),ceil(F/128)] ("block"). They
    multiply float32 sums. Tokens and routing weights have gradients, codes and scales have none (`moe_fp8_backward`).
    Raises TypeError or ValueError, naming the argument, for another dtype, shape, granularity or device.
    """
    side = check_moe_fp8(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, granularity)
    found: Tensor = _moe_fp8(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, side)
    return found


def moe_int4(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    zero_gate_up: Tensor,
    zero_down: Tensor,
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    """`moe` of weights (code - zero) scale, which come to x's dtype in registers; D and F are even.

    w_gate_up[E,2F,D/2] and w_down[E,D,F/2] are uint8, the even place of a row in the low nibble. A scale of x's dtype
    and a zero-point, uint8, go with each g codes of a row: scale_gate_up and zero_gate_up[E,2F,D/g], scale_down and
    zero_down[E,D,F/g]. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(
        x=(x, FLOATING, "T D"),
        w_down=(w_down, _CODES, "E D F/2"),
        w_gate_up=(w_gate_up, _CODES, "E 2F D/2"),
        scale_gate_up=(scale_gate_up, ("x",), "E N D/g"),
        scale_down=(scale_down, ("x",), "E M F/g"),
        zero_gate_up=(zero_gate_up, _CODES, "E P zeros"),
        zero_down=(zero_down, _CODES, "E Q others"),
        ids=(ids, INT32, "T k"),
        weights=(weights, FLOAT32, "T k"),
    )
    d, f = x.shape[1], 2 * w_down.shape[2]
    if d % 2:
        raise ValueError(f"x: expected D to be even, got D={d}")
    check_shape("w_gate_up", w_gate_up, ("E", 2 * f, d // 2))
    for of, scale, zero, rows, inner in (
        ("gate_up", scale_gate_up, zero_gate_up, 2 * f, d),
        ("down", scale_down, zero_down, d, f),
    ):
        groups = scale.shape[2]
        check_shape(f"scale_{of}", scale, ("E", rows, groups))
        if inner % groups if groups else inner:
            raise ValueError(f"scale_{of}: expected a number of groups that divides {inner}, got {groups}")
        check_shape(f"zero_{of}", zero, ("E", rows, groups))
    found: Tensor = _moe_int4(x, w_gate_up, w_down, scale_gate_up, scale_down, zero_gate_up, zero_down, weights, ids)
    return found
