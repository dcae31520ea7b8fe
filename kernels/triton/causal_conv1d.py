"""Depthwise causal convolution along a sequence, a few taps a channel, and its gradients.

A program takes a tile of rows, the channels of all sequences, and places: wide enough either way for whole sectors of
memory, whichever of the two lies side by side. Each tap reads the tile at places further back: from the L1 cache, after
the first.

The gradient of x is the convolution of g, the gradient before the activation, the other way along the sequence. Those
of the taps and the bias are sums over the places of all sequences: each tile leaves its own, and they are added up in
one order, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_choice
from assay.kernels.triton.columns import add_parts
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.swiglu import silu
from assay.kernels.triton.swiglu_backward import silu_and_slope

_TILE = 2048
_LONGEST = 64
_WARPS = 8


@triton.jit
def _tile(B, D, L, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr):
    """Sequences and channels [BLOCK_R, 1], places [1, BLOCK_L] (int64), rows that there are, and the tile's number
    among those of its sequence's places."""
    program = tl.program_id(0).to(tl.int64)
    along = tl.cdiv(L, BLOCK_L)
    rows = (program // along * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    places = (program % along * BLOCK_L + tl.arange(0, BLOCK_L))[None, :]
    batch = rows // D
    return batch, rows % D, places, batch < B, program % along


@triton.jit
def _shifted(x_ptrs, stride, there, places, L):
    """The elements of rows at ``places``, zero where there are none."""
    kept = there & (places >= 0) & (places < L)
    return tl.load(x_ptrs + places * stride, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _convolved(
    x_ptrs,
    stride,
    weight_ptrs,
    stride_tap,
    there,
    places,
    L,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,  # the other way: the last tap meets the place itself, each before it a place further on
):
    y = tl.zeros([there.shape[0], places.shape[1]], tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        seen = places + back if AHEAD else places - back
        weight = tl.load(weight_ptrs + tap * stride_tap, mask=there, other=0.0).to(tl.float32)
        x = _shifted(x_ptrs, stride, there, seen, L)
        y += tl.where((seen >= 0) & (seen < L), x * weight, 0.0)  # an infinite tap meets nothing outside
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
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    batch, channels, places, there, _ = _tile(B, D, L, BLOCK_R, BLOCK_L)
    x_ptrs = x_ptr + batch * x_strides[0] + channels * x_strides[1]
    weight_ptrs = weight_ptr + channels * weight_strides[0]
    y = _convolved(x_ptrs, x_strides[2], weight_ptrs, weight_strides[1], there, places, L, WIDTH, AHEAD)
    if BIAS:
        y += tl.load(bias_ptr + channels * stride_bias, mask=there, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    into = y_ptr + batch * y_strides[0] + channels * y_strides[1] + places * y_strides[2]
    tl.store(into, y.to(y_ptr.dtype.element_ty), mask=there & (places < L))


@triton.jit(do_not_specialize=["B"])
def _gradient_kernel(
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
    """g where an activation makes it another than dy, and this tile's sums of g and of g times x, tap by tap, if there
    is room for them."""
    batch, channels, places, there, part = _tile(B, D, L, BLOCK_R, BLOCK_L)
    part += batch * tl.cdiv(L, BLOCK_L)
    x_ptrs = x_ptr + batch * x_strides[0] + channels * x_strides[1]
    g = _shifted(dy_ptr + batch * dy_strides[0] + channels * dy_strides[1], dy_strides[2], there, places, L)
    if SILU:
        weight_ptrs = weight_ptr + channels * weight_strides[0]
        y = _convolved(x_ptrs, x_strides[2], weight_ptrs, weight_strides[1], there, places, L, WIDTH, False)
        y += tl.load(bias_ptr + channels * stride_bias, mask=there, other=0.0).to(tl.float32)
        _, slope = silu_and_slope(y)
        g *= slope
        into = g_ptr + batch * g_strides[0] + channels * g_strides[1] + places * g_strides[2]
        tl.store(into, g, mask=there & (places < L))
    if dweight_ptr is not None:
        for tap in tl.static_range(WIDTH):
            x = _shifted(x_ptrs, x_strides[2], there, places - (WIDTH - 1 - tap), L)
            into = dweight_ptr + (part * D + channels) * WIDTH + tap
            tl.store(into, tl.sum(g * x, axis=1, keep_dims=True), mask=there)
        tl.store(dbias_ptr + part * D + channels, tl.sum(g, axis=1, keep_dims=True), mask=there)


def _blocks(places: int) -> tuple[int, int]:
    """Rows and places of a tile, which the length of a sequence decides alone."""
    block_l = min(triton.next_power_of_2(places), _LONGEST)
    return _TILE // block_l, block_l


def _grid(x: Tensor) -> tuple[int]:
    (batch, channels, places), (block_r, block_l) = x.shape, _blocks(x.shape[2])
    return (triton.cdiv(batch * channels, block_r) * triton.cdiv(places, block_l),)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor, ahead: bool, silu: bool) -> None:
    if into.numel():
        strides = (x.stride(), weight.stride(), 0 if bias is None else bias.stride(0), into.stride())
        _causal_conv1d_kernel[_grid(x)](
            *(x, weight, weight if bias is None else bias, into, *x.shape, *strides),
            *(weight.shape[1], ahead, bias is not None, silu, *_blocks(x.shape[2])),
            num_warps=_WARPS,
        )


@custom_op("assay::causal_conv1d", lambda x, *rest: x.new_empty(x.shape))
def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    y = x.new_empty(x.shape)
    _launch(x, weight, bias, y, ahead=False, silu=silu)
    return y


def _gradients(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, silu: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (each.new_empty(each.shape if of_weight else 0) for each in (weight, bias))
    return x.new_empty(x.shape), dweight, dbias


@custom_op("assay::causal_conv1d_backward", _gradients)
def _causal_conv1d_backward(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, silu: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx and, if those are asked for, dweight and dbias."""
    dx, dweight, dbias = _gradients(x, weight, bias, dy, silu, of_weight)
    (batch, channels, places), width = x.shape, weight.shape[1]
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device) if silu else dy
    parts = batch * triton.cdiv(places, _LONGEST)
    sums = [x.new_empty((parts, size), dtype=torch.float32) for size in (channels * width, channels) if of_weight]
    if x.numel() and (silu or of_weight):
        strides = (x.stride(), weight.stride(), bias.stride(0), dy.stride(), g.stride())
        _gradient_kernel[_grid(x)](
            *(x, weight, bias, dy, g, *(sums or (None, None)), *x.shape, *strides, width, silu, *_blocks(places)),
            num_warps=_WARPS,
        )
    _launch(g, weight, None, dx, ahead=True, silu=False)
    for part, total in zip(sums, (dweight, dbias), strict=False):
        add_parts(part, total)
    return dx, dweight, dbias


def _backward(saved, dy):
    of_weight = saved.needs.weight or saved.needs.bias
    return _causal_conv1d_backward(saved.x, saved.weight, saved.bias, dy, saved.silu, of_weight)


differentiate("assay::causal_conv1d", _backward, saves="x weight bias")


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor, *, activation: str = "none") -> Tensor:
    """y[B,D,L]: bias[d] + sum_w weight[d,w] x[b,d,l-W+1+w] of x[B,D,L], weight[D,W] and bias[D], zero before its
    beginning; silu of it with ``activation="silu"``.

    Computed in float32, and compiled for each W, a few taps. Each is float32, bfloat16 or float16, not necessarily the
    same; the result has x's dtype. Raises TypeError or ValueError, naming the argument, for another dtype, shape,
    device or activation.
    """
    _check(activation, x=x, weight=weight, bias=bias)
    return _causal_conv1d(x, weight, bias, activation == "silu")


def causal_conv1d_backward(
    x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, *, activation: str = "none"
) -> tuple[Tensor, Tensor, Tensor]:
    """dx[B,D,L], dweight[D,W] and dbias[D] of `causal_conv1d`'s tensors, from the gradient dy[B,D,L] of its result.

    Computed in float32 from x. Each has the dtype of what it is the gradient of. Dtypes and errors as there.
    """
    _check(activation, x=x, weight=weight, bias=bias, dy=dy)
    found: tuple[Tensor, Tensor, Tensor] = _causal_conv1d_backward(x, weight, bias, dy, activation == "silu", True)
    return found


def _check(activation: str, **tensors: Tensor) -> None:
    check_choice("activation", activation, ("none", "silu"))
    shapes = {"x": "B D L", "weight": "D W", "bias": "D", "dy": "B D L"}
    check(**{name: (tensor, FLOATING, shapes[name]) for name, tensor in tensors.items()})
