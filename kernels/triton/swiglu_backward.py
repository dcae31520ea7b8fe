"""The gradients of SwiGLU, element by element: dy up silu'(gate) and dy silu(gate), zero where a clamp binds."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_positive
from assay.kernels.triton.elements import CONFIGS, block_n, grid
from assay.kernels.triton.operators import custom_op

_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def silu_and_slope(x):
    """silu and its derivative s (1 + x (1 - s)), s the sigmoid; their limits 0 and 0 at -inf, infinity and 1 at inf."""
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid = tl.where(x < 0, small, 1.0) / (1.0 + small)
    rest = tl.where(x < 0, 1.0, small) / (1.0 + small)
    infinite = tl.abs(x) == float("inf")
    slope = tl.where(infinite, sigmoid, sigmoid * (1.0 + x * rest))
    return tl.where(x == -float("inf"), 0.0, x * sigmoid), slope


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics({"BLOCK_N": block_n})
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
    dgate_strides,
    limit,
    CLAMP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK_R: tl.constexpr = TILE // BLOCK_N
    across = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    rows = ((program // across).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    columns = ((program % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    kept = (rows < R) & (columns < N)
    gate = tl.load(gate_ptr + rows * gate_strides[0] + columns * gate_strides[1], mask=kept, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_strides[0] + columns * up_strides[1], mask=kept, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows * dy_strides[0] + columns * dy_strides[1], mask=kept, other=0.0).to(tl.float32)
    if CLAMP:
        gate_bound, up_bound = gate > limit, tl.abs(up) > limit
        gate = tl.minimum(gate, limit, propagate_nan=_NAN)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=_NAN), -limit, propagate_nan=_NAN)
    opened, slope = silu_and_slope(gate)
    dgate = dy * up * slope
    dup = dy * opened
    if CLAMP:
        dgate = tl.where(gate_bound, 0.0, dgate)
        dup = tl.where(up_bound, 0.0, dup)
    places = rows * dgate_strides[0] + columns * dgate_strides[1]
    tl.store(dgate_ptr + places, dgate.to(dgate_ptr.dtype.element_ty), mask=kept)
    tl.store(dup_ptr + places, dup.to(dup_ptr.dtype.element_ty), mask=kept)


@custom_op("assay::swiglu_backward", lambda gate, up, *rest: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def _swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    if gate.numel():
        strides = (gate.stride(), up.stride(), dy.stride(), dgate.stride())
        clamp = limit is not None
        _swiglu_backward_kernel[grid](
            gate, up, dy, dgate, dup, *gate.shape, *strides, limit if clamp else 0.0, CLAMP=clamp
        )
    return dgate, dup


def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor, *, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """dgate[R,N] and dup[R,N] of `swiglu`'s gate[R,N] and up[R,N], from the gradient dy[R,N] of its result.

    With a limit, zero where it binds: gate > limit, abs(up) > limit. Computed in float32. Each is float32, bfloat16 or
    float16, not necessarily the same; dgate has gate's dtype, dup that of up. Raises TypeError or ValueError, naming
    the argument, for another dtype, shape or device, or a limit that is not positive.
    """
    check(gate=(gate, FLOATING, "R N"), up=(up, FLOATING, "R N"), dy=(dy, FLOATING, "R N"))
    check_positive("limit", limit)
    return _swiglu_backward(gate, up, dy, limit)
