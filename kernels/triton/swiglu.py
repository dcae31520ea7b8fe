"""SwiGLU, silu(gate) * up, elementwise, with the clamps of models that bound their activations; and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_positive
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.replay import replayed

_NAN = tl.constexpr(tl.PropagateNan.ALL)
_MAX_BLOCK_N = 1024  # wider rows are divided into several tiles
_CONFIGS = [triton.Config({"TILE": tile}, num_warps=warps) for tile, warps in ((4096, 4), (4096, 8), (8192, 8))]


def _block_n(arguments: Mapping[str, Any]) -> int:
    """Return the columns of a tile of TILE elements, [TILE // BLOCK_N, BLOCK_N]."""
    return min(int(triton.next_power_of_2(arguments["N"])), _MAX_BLOCK_N)


def _grid(arguments: Mapping[str, Any]) -> tuple[int]:
    """Return one program for each tile."""
    block_n = arguments["BLOCK_N"]
    return (triton.cdiv(arguments["R"], arguments["TILE"] // block_n) * triton.cdiv(arguments["N"], block_n),)


@triton.jit
def silu(x):
    """x sigmoid(x), and its limit 0 at -inf."""
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid = tl.where(x < 0, small, 1.0) / (1.0 + small)
    return tl.where(x == -float("inf"), 0.0, x * sigmoid)


@triton.jit
def silu_and_derivative(x):
    """silu and its derivative s (1 + x (1 - s)), s the sigmoid; limits: 0 and 0 at -inf, infinity and 1 at inf."""
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid = tl.where(x < 0, small, 1.0) / (1.0 + small)
    one_minus_sigmoid = tl.where(x < 0, 1.0, small) / (1.0 + small)  # 1 - sigmoid would cancel
    derivative = tl.where(tl.abs(x) == float("inf"), sigmoid, sigmoid * (1.0 + x * one_minus_sigmoid))
    return tl.where(x == -float("inf"), 0.0, x * sigmoid), derivative


@triton.jit
def _load_gate_up(
    gate_ptr,
    up_ptr,
    R,
    N,
    gate_strides,
    up_strides,
    limit,
    CLAMP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The program's rows, columns and mask, gate and up, and where each is clamped."""
    BLOCK_R: tl.constexpr = TILE // BLOCK_N
    num_pid_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rows = ((pid // num_pid_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    columns = ((pid % num_pid_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < R) & (columns < N)
    gate = tl.load(gate_ptr + rows * gate_strides[0] + columns * gate_strides[1], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_strides[0] + columns * up_strides[1], mask=mask, other=0.0).to(tl.float32)
    gate_clamped, up_clamped = gate > limit, tl.abs(up) > limit
    if CLAMP:
        gate = tl.minimum(gate, limit, propagate_nan=_NAN)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=_NAN), -limit, propagate_nan=_NAN)
    return rows, columns, mask, gate, up, gate_clamped, up_clamped


@triton.autotune(configs=_CONFIGS, key=["N"])
@triton.heuristics({"BLOCK_N": _block_n})
@triton.jit(do_not_specialize=["R"])
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    R,
    N,
    gate_strides,
    up_strides,
    y_strides,
    limit,
    CLAMP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows, columns, mask, gate, up, _, _ = _load_gate_up(
        gate_ptr, up_ptr, R, N, gate_strides, up_strides, limit, CLAMP, TILE, BLOCK_N
    )
    y = silu(gate) * up
    tl.store(y_ptr + rows * y_strides[0] + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.autotune(configs=_CONFIGS, key=["N"])
@triton.heuristics({"BLOCK_N": _block_n})
@triton.jit(do_not_specialize=["R"])
def _swiglu_backward_kernel(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    R,
    N,
    gate_strides,
    up_strides,
    dy_strides,
    dgate_strides,  # and those of dup
    limit,
    CLAMP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dgate = dy up silu'(gate) and dup = dy silu(gate), zero where gate or up is clamped."""
    rows, columns, mask, gate, up, gate_clamped, up_clamped = _load_gate_up(
        gate_ptr, up_ptr, R, N, gate_strides, up_strides, limit, CLAMP, TILE, BLOCK_N
    )
    dy = tl.load(dy_ptr + rows * dy_strides[0] + columns * dy_strides[1], mask=mask, other=0.0).to(tl.float32)
    activated, derivative = silu_and_derivative(gate)
    dgate = dy * up * derivative
    dup = dy * activated
    if CLAMP:
        dgate = tl.where(gate_clamped, 0.0, dgate)
        dup = tl.where(up_clamped, 0.0, dup)
    offsets = rows * dgate_strides[0] + columns * dgate_strides[1]
    tl.store(dgate_ptr + offsets, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + offsets, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@custom_op("assay::swiglu", lambda gate, *rest: gate.new_empty(gate.shape))
def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    y = gate.new_empty(gate.shape)
    if gate.numel():
        strides = (gate.stride(), up.stride(), y.stride())
        _swiglu_kernel[_grid](gate, up, y, *gate.shape, *strides, limit or 0.0, CLAMP=limit is not None)
    return y


@custom_op("assay::swiglu_backward", lambda gate, up, *rest: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def _swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.numel():
        strides = (gate.stride(), up.stride(), dy.stride(), dgate.stride())
        _swiglu_backward_kernel[_grid](
            *(gate, up, dy, dgate, dup, *gate.shape, *strides, limit or 0.0), CLAMP=limit is not None
        )
    return dgate, dup


differentiate(
    "assay::swiglu", lambda saved, dy: _swiglu_backward(saved.gate, saved.up, dy, saved.limit), saves="gate up"
)


@replayed
def swiglu(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """Return gate / (1 + exp(-gate)) * up of gate[R,N] and up[R,N], computed in float32.

    With a limit, gate is clamped to gate <= limit and up to abs(up) <= limit first; NaN stays NaN. Both are float32,
    bfloat16 or float16, not necessarily the same; the result has gate's dtype. Raises TypeError or ValueError, naming
    the argument, for another dtype, shape or device, or a limit that is not positive.
    """
    check(gate=(gate, FLOATING, "R N"), up=(up, FLOATING, "R N"))
    check_positive("limit", limit)
    return _swiglu(gate, up, limit)


@replayed
def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, *, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """Return dgate[R,N] and dup[R,N] of `swiglu`, from its gate[R,N] and up[R,N] and the gradient dy[R,N].

    Zero where a limit clamps: gate > limit, abs(up) > limit. Computed in float32. The tensors are float32, bfloat16 or
    float16, not necessarily the same; dgate has gate's dtype, dup that of up. Raises TypeError or ValueError, naming
    the argument, for another dtype, shape or device, or a limit that is not positive.
    """
    check(gate=(gate, FLOATING, "R N"), up=(up, FLOATING, "R N"), dy=(dy, FLOATING, "R N"))
    check_positive("limit", limit)
    return _swiglu_backward(gate, up, dy, limit)
