"""Rotary position embedding (RoPE); its gradient is the rotation by the opposite angle."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed

_TILE = 2048  # pairs of a program


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
    BACKWARD: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rotate the pairs of x[B,S,H,D] into y, contiguous, by cos and sin[S,HALF]; R = B * S * H rows, HALF = D / 2."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
    mask = (rows < R) & (offs_n < HALF)
    head = rows % H
    position = rows // H % S
    batch = rows // H // S
    if INTERLEAVED:
        offs_a = 2 * offs_n
        offs_b = offs_a + 1
    else:
        offs_a = offs_n
        offs_b = offs_n + HALF
    x_rows = x_ptr + batch * x_strides[0] + position * x_strides[1] + head * x_strides[2]
    a = tl.load(x_rows + offs_a * x_strides[3], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_rows + offs_b * x_strides[3], mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + position * cos_strides[0] + offs_n * cos_strides[1], mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * sin_strides[0] + offs_n * sin_strides[1], mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    y_rows = y_ptr + rows * HALF * 2
    tl.store(y_rows + offs_a, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_rows + offs_b, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if y.numel():
        (batch, positions, heads, _), half = x.shape, x.shape[3] // 2
        block_n = triton.next_power_of_2(half)
        rows_per_program = max(1, _TILE // block_n)
        rows = batch * positions * heads
        strides = x.stride(), cos.stride(), sin.stride()
        _rope_kernel[(triton.cdiv(rows, rows_per_program),)](
            *(x, cos, sin, y, rows, positions, heads, half, *strides, interleaved, backward, rows_per_program, block_n)
        )
    return y


@custom_op("assay::rope", lambda x, *_: x.new_empty(x.shape))
def _rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _launch(x, cos, sin, interleaved, backward=False)


@custom_op("assay::rope_backward", lambda cos, sin, dy, *_: dy.new_empty(dy.shape))
def _rope_backward(cos: Tensor, sin: Tensor, dy: Tensor, interleaved: bool) -> Tensor:
    return _launch(dy, cos, sin, interleaved, backward=True)


differentiate(
    "assay::rope",
    lambda saved, dy: rope_backward(saved.cos, saved.sin, dy, interleaved=saved.interleaved),
    saves="cos sin",
)


@replayed
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return y[B,S,H,D]: the pairs (i, i + D/2) of x[B,S,H,D], or (2i, 2i + 1), rotated by cos, sin[S,D/2].

    Computed in float32. Each tensor is float32, bfloat16 or float16, not necessarily the same; y has x's dtype. Only x
    has a gradient. Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    _check("x", x=x, cos=cos, sin=sin)
    return _rope(x, cos, sin, interleaved)


@replayed
def rope_backward(cos: Tensor, sin: Tensor, dy: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return dx[B,S,H,D] of `rope`, in dy's dtype, from cos, sin[S,D/2] and the gradient dy[B,S,H,D] of its result.

    Dtypes and errors are as in `rope`.
    """
    _check("dy", cos=cos, sin=sin, dy=dy)
    return _rope_backward(cos, sin, dy, interleaved)


def _check(name: str, **tensors: Tensor) -> None:
    x = tensors[name]
    check(**{name: (x, FLOATING, "B S H D")})
    if x.shape[3] % 2:
        raise ValueError(f"{name}: expected an even number of columns, got {x.shape[3]}")
    angles = f"{x.shape[1]} {x.shape[3] // 2}"
    check(**{other: (tensor, FLOATING, "B S H D" if other == name else angles) for other, tensor in tensors.items()})
