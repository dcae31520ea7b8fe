"""Depthwise causal 1D convolution with a few taps, and its gradients.

A program computes a tile of BLOCK_R rows (the channels of all sequences) by BLOCK_L time steps. The tile is wide enough
both ways for whole memory sectors, whichever dimension of x is contiguous. Each tap loads the tile shifted by one step:
from the L1 cache, after the first.

With g the gradient before the activation, dx is the convolution of g in the other direction. dweight and dbias are sums
over the steps of all sequences: each tile leaves its partial sums, which `sum_partials` adds, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_choice
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.reduction import sum_partials
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.swiglu import silu, silu_and_derivative

_TILE = 2048  # BLOCK_R * BLOCK_L
_MAX_BLOCK_L = 64
_NUM_WARPS = 8


@triton.jit
def _tile_indices(B, D, L, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr):
    """Sequences and channels [BLOCK_R,1], steps [1,BLOCK_L] (int64), the mask of rows, and the tile's index along L."""
    pid = tl.program_id(0).to(tl.int64)
    num_pid_l = tl.cdiv(L, BLOCK_L)
    rows = (pid // num_pid_l * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    steps = (pid % num_pid_l * BLOCK_L + tl.arange(0, BLOCK_L))[None, :]
    batch = rows // D
    return batch, rows % D, steps, batch < B, pid % num_pid_l


@triton.jit
def _load_steps(x_ptrs, stride, mask_r, steps, L):
    """Rows of x at ``steps``, zero before the first and beyond the last."""
    mask = mask_r & (steps >= 0) & (steps < L)
    return tl.load(x_ptrs + steps * stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolve(
    x_ptrs,
    stride,
    weight_ptrs,
    stride_tap,
    mask_r,
    steps,
    L,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,  # tap w meets step l + W-1-w, not l - (W-1-w)
):
    y = tl.zeros([mask_r.shape[0], steps.shape[1]], tl.float32)
    for tap in tl.static_range(WIDTH):
        shift = WIDTH - 1 - tap
        shifted = steps + shift if REVERSE else steps - shift
        weight = tl.load(weight_ptrs + tap * stride_tap, mask=mask_r, other=0.0).to(tl.float32)
        x = _load_steps(x_ptrs, stride, mask_r, shifted, L)
        y += tl.where((shifted >= 0) & (shifted < L), x * weight, 0.0)  # an infinite tap times the padding would be NaN
    return y


@triton.jit(do_not_specialize=["B"])
def _causal_conv1d_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    B,
    D,
    L,
    x_strides,
    weight_strides,
    stride_bias,
    y_strides,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    batch, channels, steps, mask_r, _ = _tile_indices(B, D, L, BLOCK_R, BLOCK_L)
    x_ptrs = x_ptr + batch * x_strides[0] + channels * x_strides[1]
    weight_ptrs = weight_ptr + channels * weight_strides[0]
    y = _convolve(x_ptrs, x_strides[2], weight_ptrs, weight_strides[1], mask_r, steps, L, WIDTH, REVERSE)
    if BIAS:
        y += tl.load(bias_ptr + channels * stride_bias, mask=mask_r, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    y_ptrs = y_ptr + batch * y_strides[0] + channels * y_strides[1] + steps * y_strides[2]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_r & (steps < L))


@triton.jit(do_not_specialize=["B"])
def _conv1d_gradient_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    dy_ptr,
    g_ptr,
    dweight_ptr,
    dbias_ptr,
    B,
    D,
    L,
    x_strides,
    weight_strides,
    stride_bias,
    dy_strides,
    g_strides,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """g[B,D,L] if an activation makes it differ from dy, and the tile's partial sums dweight[P,D,W] and dbias[P,D] if
    given, one for each sequence and tile along L."""
    batch, channels, steps, mask_r, part = _tile_indices(B, D, L, BLOCK_R, BLOCK_L)
    part += batch * tl.cdiv(L, BLOCK_L)
    x_ptrs = x_ptr + batch * x_strides[0] + channels * x_strides[1]
    g = _load_steps(dy_ptr + batch * dy_strides[0] + channels * dy_strides[1], dy_strides[2], mask_r, steps, L)
    if SILU:
        weight_ptrs = weight_ptr + channels * weight_strides[0]
        y = _convolve(x_ptrs, x_strides[2], weight_ptrs, weight_strides[1], mask_r, steps, L, WIDTH, False)
        y += tl.load(bias_ptr + channels * stride_bias, mask=mask_r, other=0.0).to(tl.float32)
        _, derivative = silu_and_derivative(y)
        g *= derivative
        g_ptrs = g_ptr + batch * g_strides[0] + channels * g_strides[1] + steps * g_strides[2]
        tl.store(g_ptrs, g, mask=mask_r & (steps < L))
    if dweight_ptr is not None:
        for tap in tl.static_range(WIDTH):
            x = _load_steps(x_ptrs, x_strides[2], mask_r, steps - (WIDTH - 1 - tap), L)
            dweight_ptrs = dweight_ptr + (part * D + channels) * WIDTH + tap
            tl.store(dweight_ptrs, tl.sum(g * x, axis=1, keep_dims=True), mask=mask_r)
        tl.store(dbias_ptr + part * D + channels, tl.sum(g, axis=1, keep_dims=True), mask=mask_r)


def _block_sizes(steps: int) -> tuple[int, int]:
    """Return BLOCK_R and BLOCK_L, which depend on the length of a sequence alone."""
    block_l = min(triton.next_power_of_2(steps), _MAX_BLOCK_L)
    return _TILE // block_l, block_l


def _grid(x: Tensor) -> tuple[int]:
    (batch, channels, steps), (block_r, block_l) = x.shape, _block_sizes(x.shape[2])
    return (triton.cdiv(batch * channels, block_r) * triton.cdiv(steps, block_l),)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, *, reverse: bool, silu: bool) -> None:
    if y.numel():
        strides = (x.stride(), weight.stride(), 0 if bias is None else bias.stride(0), y.stride())
        _causal_conv1d_kernel[_grid(x)](
            *(x, weight, weight if bias is None else bias, y, *x.shape, *strides),
            *(weight.shape[1], reverse, bias is not None, silu, *_block_sizes(x.shape[2])),
            num_warps=_NUM_WARPS,
        )


@custom_op("assay::causal_conv1d", lambda x, *rest: x.new_empty(x.shape))
def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    y = x.new_empty(x.shape)
    _launch(x, weight, bias, y, reverse=False, silu=silu)
    return y


def _empty_gradients(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, silu: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (tensor.new_empty(tensor.shape if needs_weight else 0) for tensor in (weight, bias))
    return x.new_empty(x.shape), dweight, dbias


@custom_op("assay::causal_conv1d_backward", _empty_gradients)
def _causal_conv1d_backward(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, silu: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _empty_gradients(x, weight, bias, dy, silu, needs_weight)
    (batch, channels, steps), width = x.shape, weight.shape[1]
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device) if silu else dy
    count = batch * triton.cdiv(steps, _MAX_BLOCK_L)
    partials = [x.new_empty((count, n), dtype=torch.float32) for n in (channels * width, channels) if needs_weight]
    if x.numel() and (silu or needs_weight):
        strides = (x.stride(), weight.stride(), bias.stride(0), dy.stride(), g.stride())
        _conv1d_gradient_kernel[_grid(x)](
            *(x, weight, bias, dy, g, *(partials or (None, None)), *x.shape, *strides),
            *(width, silu, *_block_sizes(steps)),
            num_warps=_NUM_WARPS,
        )
    _launch(g, weight, None, dx, reverse=True, silu=False)
    for partial, total in zip(partials, (dweight, dbias), strict=False):
        sum_partials(partial, total)
    return dx, dweight, dbias


differentiate(
    "assay::causal_conv1d",
    lambda saved, dy: _causal_conv1d_backward(
        *(saved.x, saved.weight, saved.bias, dy, saved.silu), saved.needs.weight or saved.needs.bias
    ),
    saves="x weight bias",
)


@replayed
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, *, activation: str = "none") -> Tensor:
    """Return y[B,D,L]: bias[d] + sum_w weight[d,w] x[b,d,l-W+1+w] of x[B,D,L], weight[D,W] and bias[D].

    x is zero before its first step; ``activation="silu"`` applies silu to the sum. Computed in float32, and compiled
    for each W, a few taps. The tensors are float32, bfloat16 or float16, not necessarily the same; the result has x's
    dtype. Raises TypeError or ValueError, naming the argument, for another dtype, shape, device or activation.
    """
    _check(activation, x=x, weight=weight, bias=bias)
    return _causal_conv1d(x, weight, bias, activation == "silu")


@replayed
def causal_conv1d_backward(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, *, activation: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx[B,D,L], dweight[D,W] and dbias[D] of `causal_conv1d`, from its tensors and the gradient dy[B,D,L].

    Computed in float32. Each gradient has the dtype of its tensor. Dtypes and errors as in `causal_conv1d`.
    """
    _check(activation, x=x, weight=weight, bias=bias, dy=dy)
    gradients: tuple[Tensor, Tensor, Tensor] = _causal_conv1d_backward(x, weight, bias, dy, activation == "silu", True)
    return gradients


def _check(activation: str, **tensors: Tensor) -> None:
    check_choice("activation", activation, ("none", "silu"))
    shapes = {"x": "B D L", "weight": "D W", "bias": "D", "dy": "B D L"}
    check(**{name: (tensor, FLOATING, shapes[name]) for name, tensor in tensors.items()})
