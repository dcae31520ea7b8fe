"""Rotary position embedding, each pair of a head by its position's angle; and its gradient, by the opposite angle."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.operators import custom_op, differentiate

_TILE = 2048


@triton.jit(do_not_specialize=["R", "S", "H"])
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    R,
    S,
    H,
    HALF,
    x_strides,
    cos_strides,
    sin_strides,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    pairs = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    kept = (rows < R) & (pairs < HALF)
    head = rows % H
    place = rows // H % S
    batch = rows // H // S
    if INTERLEAVED:
        first = 2 * pairs
        second = first + 1
    else:
        first = pairs
        second = pairs + HALF
    x_rows = x_ptr + batch * x_strides[0] + place * x_strides[1] + head * x_strides[2]
    a = tl.load(x_rows + first * x_strides[3], mask=kept, other=0.0).to(tl.float32)
    b = tl.load(x_rows + second * x_strides[3], mask=kept, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + place * cos_strides[0] + pairs * cos_strides[1], mask=kept, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + place * sin_strides[0] + pairs * sin_strides[1], mask=kept, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    y_rows = y_ptr + rows * HALF * 2
    tl.store(y_rows + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=kept)
    tl.store(y_rows + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=kept)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if y.numel():
        (batch, places, heads, _), half = x.shape, x.shape[3] // 2
        block_n = triton.next_power_of_2(half)
        block_r = max(1, _TILE // block_n)
        rows = batch * places * heads
        strides = (x.stride(), cos.stride(), sin.stride())
        _rope_kernel[(triton.cdiv(rows, block_r),)](
            *(x, cos, sin, y, rows, places, heads, half, *strides, interleaved, back, block_r, block_n)
        )
    return y


@custom_op("assay::rope", lambda x, *rest: x.new_empty(x.shape))
def _rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _launch(x, cos, sin, interleaved, back=False)


@custom_op("assay::rope_backward", lambda cos, sin, dy, *rest: dy.new_empty(dy.shape))
def _rope_backward(cos: Tensor, sin: Tensor, dy: Tensor, interleaved: bool) -> Tensor:
    return _launch(dy, cos, sin, interleaved, back=True)


def _turned_back(saved, dy):
    return rope_backward(saved.cos, saved.sin, dy, interleaved=saved.interleaved)


differentiate("assay::rope", _turned_back, saves="cos sin")


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """y[B,S,H,D]: the pairs (i, i + D/2) of x[B,S,H,D], or neighbours (2i, 2i + 1), turned by cos, sin[S,D/2].

    Computed in float32. Each is float32, bfloat16 or float16, not necessarily the same; the result has x's dtype. Only
    x has a gradient. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    _check("x", x=x, cos=cos, sin=sin)
    return _rope(x, cos, sin, interleaved)


def rope_backward(cos: Tensor, sin: Tensor, dy: Tensor, *, interleaved: bool = False) -> Tensor:
    """dx[B,S,H,D] of `rope`'s x, from its cos[S,D/2] and sin[S,D/2] and the gradient dy[B,S,H,D] of its result.

    dx has dy's dtype. Dtypes and errors as in `rope`.
    """
    _check("dy", cos=cos, sin=sin, dy=dy)
    return _rope_backward(cos, sin, dy, interleaved)


def _check(name: str, **tensors: Tensor) -> None:
    heads = tensors[name]
    check(**{name: (heads, FLOATING, "B S H D")})
    if heads.shape[3] % 2:
        raise ValueError(f"{name}: expected an even number of columns, got {heads.shape[3]}")
    angles = f"{heads.shape[1]} {heads.shape[3] // 2}"
    check(**{other: (tensor, FLOATING, "B S H D" if other == name else angles) for other, tensor in tensors.items()})
