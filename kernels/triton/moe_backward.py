"""The gradients of a mixture of experts, by grouped GEMMs over token-expert pairs sorted by expert.

    1. `_hidden_gradient_kernel` recomputes gate and up, and computes dhidden = w_down^T dy: three products in one loop.
       It writes the gradients of gate and up, partial sums of the routing weights' gradients, and the weighted hidden
       activations.
    2. `gemm_and_combine` takes the gradients of gate and up back to the tokens, like the down projection.
    3. `_weight_gradient_kernel`: for each expert one product over all of its rows.

There are no atomics: the same call gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_moe, check_moe_fp8
from assay.kernels.triton.moe_gemm import (
    gemm_and_combine,
    grouped_configs,
    grouped_grid,
    load_block,
    load_scales,
    load_w,
    load_x,
    scale_k,
    scaled_dot,
    strides_of,
    w_operand,
    w_source,
)
from assay.kernels.triton.moe_sort import RoutingData, sort_by_expert
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.swiglu import silu_and_derivative
from assay.kernels.triton.tiles import (
    FP32_BLOCK_K,
    macs_per_thread,
    matches_dtype,
    size_bucket,
    tile_configs,
    tile_id_to_mn,
)

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
# The most rows of a block that a thread's registers have room for, by the bytes of an element of x.
_MAX_BLOCK_M = {2: 128, 4: 64}
_MAX_BLOCK_M_FP8 = {2: 64, 4: 16}  # registers hold the weights in x's dtype, too
_BLOCK_N = 64  # in all configurations: partial sums of dweights are allocated before one is chosen
_MAX_FP32_MACS = 1024  # of a thread and tile: without tensor cores each becomes an instruction


@triton.autotune(
    key=["P_BUCKET", "E", "D", "F", "BLOCK_M"],
    **grouped_configs(
        *(3, "x_ptr", {"w_up": True, "w_down": True}),
        *((_BLOCK_N, 64, 4, 2), (_BLOCK_N, 64, 8, 3), (_BLOCK_N, 32, 8, 3)),
        *((_BLOCK_N, FP32_BLOCK_K, 8, 2), (_BLOCK_N, FP32_BLOCK_K, 16, 2)),
    ),
)
@triton.jit
def _hidden_gradient_kernel(
    x_ptr,
    dy_ptr,
    w_up,
    w_down,
    up_scales_ptr,
    down_scales_ptr,
    weights_ptr,
    sorted_pairs_ptr,
    block_schedule_ptr,
    dgate_up_ptr,
    hidden_ptr,
    partials_ptr,
    NUM_BLOCKS,
    E,
    D,
    F,
    TOP_K,
    NUM_PARTIALS,
    P_BUCKET,
    x_strides,
    dy_strides,
    w_up_strides,
    w_down_strides,
    up_scales_strides,
    down_scales_strides,
    SCALE_BLOCK: tl.constexpr,
    W_UP_TMA: tl.constexpr,
    W_UP_K_CONTIGUOUS: tl.constexpr,
    W_DOWN_TMA: tl.constexpr,
    W_DOWN_K_CONTIGUOUS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """dgate_up[row, 2F], hidden[row, F] = routing weight * silu(gate) * up, and partials[pair, pid_n], the tile's part
    of the routing weight's gradient.

    w_up is w_gate_up as [E,D,2F], w_down [E,D,F]. With scales of rows (SCALE_BLOCK 1), dgate and dup are multiplied by
    theirs here: the product with the transposed weights, along whose K the scales then vary, needs none.
    """
    expert, row_start, row_end, pid_n = load_block(block_schedule_ptr, NUM_BLOCKS, F, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    rows = row_start + tl.arange(0, BLOCK_M)
    mask_m = rows < row_end
    pairs = tl.load(sorted_pairs_ptr + rows, mask=mask_m, other=0)
    tokens = (pairs // TOP_K)[:, None]
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
    x_ptrs = x_ptr + tokens * x_strides[0] + offs_k * x_strides[1]
    dy_ptrs = dy_ptr + tokens * dy_strides[0] + offs_k * dy_strides[1]
    column = pid_n * BLOCK_N
    gate_source = w_source(w_up, expert, column, F - column, w_up_strides, W_UP_TMA, 0, BLOCK_N, BLOCK_K)
    up_source = w_source(w_up, expert, column + F, F - column, w_up_strides, W_UP_TMA, 0, BLOCK_N, BLOCK_K)
    down_source = w_source(w_down, expert, column, F - column, w_down_strides, W_DOWN_TMA, 0, BLOCK_N, BLOCK_K)
    columns = column + tl.arange(0, BLOCK_N)
    mask_n = columns < F
    gate_scales = up_scales_ptr, up_scales_strides, expert, columns, mask_n
    up_scales = up_scales_ptr, up_scales_strides, expert, columns + F, mask_n
    down_scales = down_scales_ptr, down_scales_strides, expert, columns, mask_n

    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    dhidden = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, D, BLOCK_K):
        x = load_x(x_ptrs, start, x_strides[1], mask_m, D, BLOCK_K)
        w = load_w(gate_source, None, None, start, D, W_UP_TMA, W_UP_K_CONTIGUOUS, 0, BLOCK_K)
        gate = scaled_dot(gate, w, x, gate_scales, start, SCALE_BLOCK)
        w = load_w(up_source, None, None, start, D, W_UP_TMA, W_UP_K_CONTIGUOUS, 0, BLOCK_K)
        up = scaled_dot(up, w, x, up_scales, start, SCALE_BLOCK)
        dy = load_x(dy_ptrs, start, dy_strides[1], mask_m, D, BLOCK_K)
        w = load_w(down_source, None, None, start, D, W_DOWN_TMA, W_DOWN_K_CONTIGUOUS, 0, BLOCK_K)
        if SCALE_BLOCK == 1:
            w = scale_k(w, down_scales, start, D)
        dhidden = scaled_dot(dhidden, w, dy, down_scales, start, SCALE_BLOCK)

    if SCALE_BLOCK == 1:
        gate *= load_scales(gate_scales, 0, SCALE_BLOCK)
        up *= load_scales(up_scales, 0, SCALE_BLOCK)
    activated, derivative = silu_and_derivative(gate)
    weights = tl.load(weights_ptr + pairs, mask=mask_m, other=0.0)[None, :]
    offsets = rows[None, :] * F + columns[:, None]
    mask = mask_m[None, :] & mask_n[:, None]
    hidden = activated * up
    partial = tl.sum(tl.where(mask_n[:, None], hidden * dhidden, 0.0), axis=0)
    tl.store(partials_ptr + pairs * NUM_PARTIALS + pid_n, partial, mask=mask_m)
    if hidden_ptr is not None:
        tl.store(hidden_ptr + offsets, (hidden * weights).to(hidden_ptr.dtype.element_ty), mask=mask)
    dhidden *= weights
    dgate, dup = dhidden * up * derivative, dhidden * activated
    if SCALE_BLOCK == 1:
        dgate *= load_scales(gate_scales, 0, SCALE_BLOCK)
        dup *= load_scales(up_scales, 0, SCALE_BLOCK)
    dgate_ptrs = dgate_up_ptr + offsets + rows[None, :] * F
    tl.store(dgate_ptrs, dgate.to(dgate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_ptrs + F, dup.to(dgate_up_ptr.dtype.element_ty), mask=mask)


def _hidden_gradient(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    dy: Tensor,
    routing: RoutingData,
    hidden: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    scale_block: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, [T*k,2F] of sorted rows, and dweights[T,k]; write hidden[T*k,F] if given.

    ``scales`` are those of w_gate_up[E,2F,D] and w_down[E,F,D], as in `moe_gemm`.
    """
    (tokens, top_k), (experts, d, f) = weights.shape, w_down.shape
    pairs, num_blocks = tokens * top_k, len(routing.block_schedule)
    dgate_up = torch.empty((pairs, 2 * f), dtype=x.dtype, device=x.device)
    partials = torch.zeros((pairs, triton.cdiv(f, _BLOCK_N)), dtype=torch.float32, device=x.device)
    w_up, w_up_strides, *w_up_layout = w_operand(w_gate_up.transpose(1, 2), f)
    down, w_down_strides, *w_down_layout = w_operand(w_down)
    _hidden_gradient_kernel[grouped_grid(num_blocks, f)](
        *(x, dy, w_up, down, *scales, weights.contiguous(), routing.sorted_pairs, routing.block_schedule),
        *(dgate_up, hidden, partials),
        *(num_blocks, experts, d, f, top_k, partials.shape[1], size_bucket(pairs), x.stride(), dy.stride()),
        *(w_up_strides, w_down_strides, *map(strides_of, scales), scale_block, *w_up_layout, *w_down_layout),
        BLOCK_M=routing.block_m,
    )
    return dgate_up, partials.sum(1).view(weights.shape)


def _prune_weight_gradient(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    dtype = arguments["rows_ptr"].dtype
    max_macs = _MAX_FP32_MACS if dtype == torch.float32 else math.inf
    return [config for config in configs if macs_per_thread(config) <= max_macs and matches_dtype(config, dtype)]


@triton.autotune(
    configs=tile_configs(
        *((128, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 3)),
        *((64, 64, FP32_BLOCK_K, 8, 2), (128, 64, FP32_BLOCK_K, 8, 2)),
    ),
    key=["P_BUCKET", "E", "M", "N"],
    prune_configs_by={"early_config_prune": _prune_weight_gradient},
)
@triton.jit
def _weight_gradient_kernel(
    rows_ptr,
    tokens_ptr,
    sorted_pairs_ptr,
    expert_ends_ptr,
    dw_ptr,
    E,
    M,
    N,
    TOP_K,
    P_BUCKET,
    tokens_strides,
    dw_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """dw[expert] = rows^T tokens over the expert's rows[P,M] and their tokens [T,N], gathered."""
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0).to(tl.int64)
    expert = pid // num_tiles
    pid_m, pid_n = tile_id_to_mn(pid % num_tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n = pid_m * BLOCK_M + tl.arange(0, BLOCK_M), pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_start = tl.load(expert_ends_ptr + expert - 1, mask=expert > 0, other=0)
    row_end = tl.load(expert_ends_ptr + expert)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(row_start, row_end, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < row_end
        tokens = tl.load(sorted_pairs_ptr + offs_k, mask=mask_k, other=0) // TOP_K
        a_ptrs = rows_ptr + offs_k[:, None] * M + offs_m[None, :]
        a = tl.load(a_ptrs, mask=mask_k[:, None] & (offs_m < M)[None, :], other=0.0)
        b_ptrs = tokens_ptr + tokens[:, None] * tokens_strides[0] + offs_n[None, :] * tokens_strides[1]
        b = tl.load(b_ptrs, mask=mask_k[:, None] & (offs_n < N)[None, :], other=0.0)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")

    dw_ptrs = dw_ptr + expert * dw_strides[0] + offs_m[:, None] * dw_strides[1] + offs_n[None, :] * dw_strides[2]
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def write_weight_gradient(rows: Tensor, tokens: Tensor, routing: RoutingData, top_k: int, dw: Tensor) -> None:
    """Write dw[E,M,N]: for each expert, sorted rows[P,M]^T times their tokens[T,N]."""
    experts, m, n = dw.shape
    _weight_gradient_kernel[
        lambda meta: (experts * triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)
    ](
        *(rows, tokens, routing.sorted_pairs, routing.expert_ends, dw),
        *(experts, m, n, top_k, size_bucket(len(rows)), tokens.stride(), dw.stride()),
    )


def _empty_gradients(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, *rest: Any) -> Gradients:
    *_, needs_up, needs_down = rest
    dw_gate_up = w_gate_up.new_empty(w_gate_up.shape if needs_up else 0)
    dw_down = w_down.new_empty(w_down.shape if needs_down else 0)
    return x.new_empty(x.shape), dw_gate_up, dw_down, weights.new_empty(weights.shape)


@custom_op("assay::moe_backward", _empty_gradients)
def moe_backward_op(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    dy: Tensor,
    needs_up: bool,
    needs_down: bool,
) -> Gradients:
    """Return dx, dw_gate_up and dw_down, if needed, and dweights of `moe`."""
    dw_gate_up = w_gate_up.new_empty(w_gate_up.shape if needs_up else 0)
    dw_down = w_down.new_empty(w_down.shape if needs_down else 0)
    if not (ids.numel() and w_down.numel()):
        return x.new_zeros(x.shape), dw_gate_up.zero_(), dw_down.zero_(), weights.new_zeros(weights.shape)
    ids, top_k = ids.contiguous(), ids.shape[1]
    routing = sort_by_expert(ids, len(w_down), _MAX_BLOCK_M[x.element_size()])
    hidden = torch.empty((ids.numel(), w_down.shape[2]), dtype=x.dtype, device=x.device) if needs_down else None
    dgate_up, dweights = _hidden_gradient(x, w_gate_up, w_down, weights, dy, routing, hidden)
    dx = gemm_and_combine(dgate_up, w_gate_up, routing, ids, None)
    if needs_up:
        write_weight_gradient(dgate_up, x, routing, top_k, dw_gate_up)
    if hidden is not None:
        write_weight_gradient(hidden, dy, routing, top_k, dw_down.transpose(1, 2))
    return dx, dw_gate_up, dw_down, dweights


@custom_op("assay::moe_fp8_backward", lambda x, *rest: (x.new_empty(x.shape), rest[4].new_empty(rest[4].shape)))
def moe_fp8_backward_op(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    scale_gate_up: Tensor,
    scale_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    dy: Tensor,
    scale_block: int,
) -> tuple[Tensor, Tensor]:
    """Return dx and dweights of `moe_fp8`."""
    if not (ids.numel() and w_down.numel()):
        return x.new_zeros(x.shape), weights.new_zeros(weights.shape)
    ids = ids.contiguous()
    routing = sort_by_expert(ids, len(w_down), _MAX_BLOCK_M_FP8[x.element_size()])
    scales = scale_gate_up, scale_down.transpose(1, 2)
    dgate_up, dweights = _hidden_gradient(x, w_gate_up, w_down, weights, dy, routing, None, scales, scale_block)
    if scale_block == 1:  # the gradients are scaled already
        return gemm_and_combine(dgate_up, w_gate_up, routing, ids, None), dweights
    scales_t = scale_gate_up.transpose(1, 2)
    return gemm_and_combine(dgate_up, w_gate_up, routing, ids, None, scales_t, scale_block), dweights


@replayed
def moe_backward(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor, dy: Tensor) -> Gradients:
    """Return dx[T,D], dw_gate_up[E,2F,D], dw_down[E,D,F] and dweights[T,k] of `moe`, from the gradient dy[T,D].

    dy has x's dtype; the other arguments are those of `moe`, and each gradient has its argument's dtype. Sums are
    float32; the gradients of gate and up, and weight * silu(gate) * up, are rounded to x's dtype before they are
    multiplied. An id outside of 0 .. E-1 has a weight's gradient of zero. Raises TypeError or ValueError, naming the
    argument, for another dtype, shape or device.
    """
    check_moe(x, w_gate_up, w_down, weights, ids, dy=(dy, ("x",), "T D"))
    return moe_backward_op(x, w_gate_up, w_down, weights, ids, dy, True, True)


@replayed
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
    """Return dx[T,D] and dweights[T,k] of `moe_fp8`, from the gradient dy[T,D] of its result.

    dy has x's dtype; the other arguments are those of `moe_fp8`. Weights and scales have no gradient: quantisation is
    a straight-through estimator (arXiv:1308.3432, and section 3.3 of arXiv:2412.19437). Sums are float32, which block
    scales multiply. Scales of rows multiply w_down, which is then rounded to x's dtype, and the gradients of gate and
    up before they are rounded. Raises TypeError or ValueError, naming the argument, for another dtype, shape,
    granularity or device.
    """
    scale_block = check_moe_fp8(
        *(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, granularity), dy=(dy, ("x",), "T D")
    )
    gradients: tuple[Tensor, Tensor] = moe_fp8_backward_op(
        *(x, w_gate_up, w_down, scale_gate_up, scale_down, weights, ids, dy, scale_block)
    )
    return gradients
