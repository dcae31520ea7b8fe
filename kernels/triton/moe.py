"""Mixture of experts (top-k routing given), of weights in floats, FP8 or int4, by grouped GEMMs.

    1. `sort_by_expert`: token-expert pairs are sorted by expert, and cut into blocks of rows with one expert each.
    2. `_gate_up_kernel`: hidden = silu(gate) * up for each pair, two products that share the gathered tokens.
    3. `gemm_and_combine`: the down projection of each pair times its routing weight, then the sum over each token's
       pairs in the order of its ids.

Every kernel writes each element once: there are no atomics, and nothing depends on the order in which programs run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, INT32, check, check_moe, check_moe_fp8, check_shape
from assay.kernels.triton.moe_backward import moe_backward_op, moe_fp8_backward_op
from assay.kernels.triton.moe_gemm import (
    gemm_and_combine,
    group_size_of,
    grouped_configs,
    grouped_grid,
    load_block,
    load_scales,
    load_w,
    load_x,
    scaled_dot,
    strides_of,
    w_operand,
    w_source,
)
from assay.kernels.triton.moe_sort import sort_by_expert
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.swiglu import silu
from assay.kernels.triton.tiles import FP32_BLOCK_K, size_bucket

_UINT8 = (torch.uint8,)
_MAX_BLOCK_M_FP32 = 16  # for FP8 or int4 weights under float32 tokens: registers hold the weights as float32, too


@triton.autotune(
    key=["P_BUCKET", "E", "D", "F", "BLOCK_M"],
    **grouped_configs(
        *(2, "x_ptr", {"w": True}),
        *((64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3), (64, 64, 8, 3)),
        *((64, FP32_BLOCK_K, 8, 2), (64, FP32_BLOCK_K, 16, 2)),
    ),
)
@triton.jit(do_not_specialize=["NUM_BLOCKS"])
def _gate_up_kernel(
    x_ptr,
    w,
    scales_ptr,
    zeros_ptr,
    sorted_pairs_ptr,
    block_schedule_ptr,
    hidden_ptr,
    NUM_BLOCKS,
    E,
    D,
    F,
    TOP_K,
    P_BUCKET,
    x_strides,
    w_strides,
    scales_strides,
    zeros_strides,
    SCALE_BLOCK: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    W_TMA: tl.constexpr,
    W_K_CONTIGUOUS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """hidden[row] = silu(gate x) * (up x), for each sorted pair; gate and up are the halves of w[E,D,2F]."""
    expert, row_start, row_end, pid_n = load_block(block_schedule_ptr, NUM_BLOCKS, F, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    rows = row_start + tl.arange(0, BLOCK_M)
    mask_m = rows < row_end
    tokens = tl.load(sorted_pairs_ptr + rows, mask=mask_m, other=0) // TOP_K
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + tokens[:, None] * x_strides[0] + offs_k[None, :] * x_strides[1]
    column = pid_n * BLOCK_N
    # Gate and up are columns 0 .. F-1 and F .. 2F-1 of w; the tile has F - column columns left in both.
    gate_source = w_source(w, expert, column, F - column, w_strides, W_TMA, GROUP_SIZE, BLOCK_N, BLOCK_K)
    up_source = w_source(w, expert, column + F, F - column, w_strides, W_TMA, GROUP_SIZE, BLOCK_N, BLOCK_K)
    columns = column + tl.arange(0, BLOCK_N)
    mask_n = columns < F
    gate_scales = scales_ptr, scales_strides, expert, columns, mask_n
    up_scales = scales_ptr, scales_strides, expert, columns + F, mask_n
    gate_zeros = zeros_ptr, zeros_strides, expert, columns, mask_n
    up_zeros = zeros_ptr, zeros_strides, expert, columns + F, mask_n

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        x = load_x(x_ptrs, start, x_strides[1], mask_m, D, BLOCK_K)
        w_gate = load_w(gate_source, gate_scales, gate_zeros, start, D, W_TMA, W_K_CONTIGUOUS, GROUP_SIZE, BLOCK_K)
        gate = scaled_dot(gate, w_gate, x, gate_scales, start, SCALE_BLOCK)
        w_up = load_w(up_source, up_scales, up_zeros, start, D, W_TMA, W_K_CONTIGUOUS, GROUP_SIZE, BLOCK_K)
        up = scaled_dot(up, w_up, x, up_scales, start, SCALE_BLOCK)

    if SCALE_BLOCK == 1:
        gate *= load_scales(gate_scales, 0, SCALE_BLOCK)
        up *= load_scales(up_scales, 0, SCALE_BLOCK)
    hidden = (silu(gate) * up).to(hidden_ptr.dtype.element_ty)
    hidden_ptrs = hidden_ptr + rows[None, :] * F + columns[:, None]
    tl.store(hidden_ptrs, hidden, mask=mask_m[None, :] & mask_n[:, None])


@custom_op("assay::moe", lambda x, *rest: x.new_empty(x.shape))
def _moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return _forward(x, w_gate_up, w_down, weights, ids)


@custom_op("assay::moe_fp8", lambda x, *rest: x.new_empty(x.shape))
def _moe_fp8(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    scale_block: int,
) -> Tensor:
    return _forward(x, w_gate_up, w_down, weights, ids, (scale_gate_up, scale_down), scale_block)


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
    return _forward(x, w_gate_up, w_down, weights, ids, scales, zeros=zeros)


def _forward(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    scale_block: int = 0,
    zeros: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the mixture; ``scales``, ``scale_block`` and ``zeros`` are as in `moe_gemm`, for w_gate_up and w_down."""
    (tokens, top_k), (experts, d, _), f = ids.shape, w_down.shape, w_gate_up.shape[1] // 2
    if not (tokens and top_k and experts and d):
        return x.new_zeros(x.shape)
    ids = ids.contiguous()
    dequantizes_to_float32 = x.dtype == torch.float32 and w_down.dtype != torch.float32
    routing = sort_by_expert(ids, experts, *([_MAX_BLOCK_M_FP32] if dequantizes_to_float32 else []))
    hidden = torch.empty((tokens * top_k, f), dtype=x.dtype, device=x.device)
    if f:
        allow_tma = zeros[0] is None or x.element_size() == 2
        w, w_strides, *w_layout = w_operand(w_gate_up.transpose(1, 2), f, allow_tma=allow_tma)
        num_blocks = len(routing.block_schedule)
        _gate_up_kernel[grouped_grid(num_blocks, f)](
            *(x, w, scales[0], zeros[0], routing.sorted_pairs, routing.block_schedule, hidden),
            *(num_blocks, experts, d, f, top_k, size_bucket(tokens * top_k)),
            *(x.stride(), w_strides, strides_of(scales[0]), strides_of(zeros[0])),
            *(scale_block, group_size_of(zeros[0], d), *w_layout),
            BLOCK_M=routing.block_m,
        )
    w = w_down.transpose(1, 2)
    return gemm_and_combine(hidden, w, routing, ids, weights.contiguous(), scales[1], scale_block, zeros[1])


def _differentiate_fp8(saved: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    tensors = saved.x, saved.w_gate_up, saved.w_down, saved.scale_gate_up, saved.scale_down, saved.weights, saved.ids
    dx, dweights = moe_fp8_backward_op(*tensors, dy, saved.scale_block)
    return dx, None, None, None, None, dweights


differentiate(
    "assay::moe",
    lambda saved, dy: moe_backward_op(
        *(saved.x, saved.w_gate_up, saved.w_down, saved.weights, saved.ids, dy),
        *(saved.needs.w_gate_up, saved.needs.w_down),
    ),
    saves="x w_gate_up w_down weights ids",
)
differentiate("assay::moe_fp8", _differentiate_fp8, saves="x w_gate_up w_down scale_gate_up scale_down weights ids")


@replayed
def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return y[T,D]: for each token the sum over its k experts of weight * down(silu(gate x) * (up x)).

    x[T,D], w_gate_up[E,2F,D] (gate rows first) and w_down[E,D,F] are all float32, bfloat16 or float16; weights[T,k] is
    float32 and ids[T,k] int32. Sums are float32; only silu(gate) * up is rounded to x's dtype in between. An expert
    that occurs twice counts twice; an id outside of 0 .. E-1 adds nothing. Raises TypeError or ValueError, naming the
    argument, for another dtype, shape or device.
    """
    check_moe(x, w_gate_up, w_down, weights, ids)
    return _moe(x, w_gate_up, w_down, weights, ids)


@replayed
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
    """Return `moe` with weights that are float8_e4m3fn times float32 scales, and are cast to x's dtype in registers.

    There is a scale for each row of an expert's weights, scale_gate_up[E,2F,1] and scale_down[E,D,1] (granularity
    "channel"), or for each block of 128 x 128, [E,ceil(2F/128),ceil(D/128)] and [E,ceil(D/128),ceil(F/128)] ("block").
    Scales multiply float32 sums. Tokens and routing weights have gradients, weights and scales have none
    (`moe_fp8_backward`). Raises TypeError or ValueError, naming the argument, for another dtype, shape, granularity or
    device.
    """
    scale_block = check_moe_fp8(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, granularity)
    return _moe_fp8(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, scale_block)


@replayed
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
    """Return `moe` with weights (code - zero) * scale, which are dequantised to x's dtype in registers.

    w_gate_up[E,2F,D/2] and w_down[E,D,F/2] are uint8: two codes along a row, the even position in the low nibble; D and
    F are even. A scale of x's dtype and a zero-point, uint8, go with each g codes of a row: scale_gate_up and
    zero_gate_up[E,2F,D/g], scale_down and zero_down[E,D,F/g]. Raises TypeError or ValueError, naming the argument, for
    another dtype, shape or device.
    """
    check(
        x=(x, FLOATING, "T D"),
        w_down=(w_down, _UINT8, "E D F/2"),
        w_gate_up=(w_gate_up, _UINT8, "E 2F D/2"),
        scale_gate_up=(scale_gate_up, ("x",), "E N D/g"),
        scale_down=(scale_down, ("x",), "E M F/g"),
        zero_gate_up=(zero_gate_up, _UINT8, "E P zeros"),
        zero_down=(zero_down, _UINT8, "E Q others"),
        ids=(ids, INT32, "T k"),
        weights=(weights, FLOAT32, "T k"),
    )
    d, f = x.shape[1], 2 * w_down.shape[2]
    if d % 2:
        raise ValueError(f"x: expected D to be even, got D={d}")
    check_shape("w_gate_up", w_gate_up, ("E", 2 * f, d // 2))
    for name, scale, zero, n, k in (
        ("gate_up", scale_gate_up, zero_gate_up, 2 * f, d),
        ("down", scale_down, zero_down, d, f),
    ):
        groups = scale.shape[2]
        check_shape(f"scale_{name}", scale, ("E", n, groups))
        if k % groups if groups else k:
            raise ValueError(f"scale_{name}: expected a number of groups that divides {k}, got {groups}")
        check_shape(f"zero_{name}", zero, ("E", n, groups))
    return _moe_int4(x, w_gate_up, w_down, scale_gate_up, scale_down, zero_gate_up, zero_down, weights, ids)
