"""SwiGLU, silu(gate) * up, element by element, with the clamps of models that bound their activations."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_positive
from assay.kernels.triton.elements import CONFIGS, block_n, grid
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.swiglu_backward import swiglu_backward

_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)), and its limit 0 at -inf."""
    small = tl.exp(-tl.abs(x))  # never overflows, and the denominator is between one and two
    sigmoid = tl.where(x < 0, small, 1.0) / (1.0 + small)
    return tl.where(x == -float("inf"), 0.0, x * sigmoid)


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics({"BLOCK_N": block_n})
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
    BLOCK_R: tl.constexpr = TILE // BLOCK_N
    across = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    rows = ((program // across).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    columns = ((program % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    kept = (rows < R) & (columns < N)
    gate = tl.load(gate_ptr + rows * gate_strides[0] + columns * gate_strides[1], mask=kept, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_strides[0] + columns * up_strides[1], mask=kept, other=0.0).to(tl.float32)
    if CLAMP:
        gate = tl.minimum(gate, limit, propagate_nan=_NAN)
        up = tl.maximum(tl.minimum(up, limit, propagate_nan=_NAN), -limit, propagate_nan=_NAN)
    y = silu(gate) * up
    tl.store(y_ptr + rows * y_strides[0] + columns * y_strides[1], y.to(y_ptr.dtype.element_ty), mask=kept)


@custom_op("assay::swiglu", lambda gate, *rest: gate.new_empty(gate.shape))
def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    y = gate.new_empty(gate.shape)
    if gate.numel():
        strides = (gate.stride(), up.stride(), y.stride())
        clamp = limit is not None
        _swiglu_kernel[grid](gate, up, y, *gate.shape, *strides, limit if clamp else 0.0, CLAMP=clamp)
    return y


differentiate(
    "assay::swiglu",
    lambda saved, dy: swiglu_backward(saved.gate, saved.up, dy, limit=saved.limit),
    saves="gate up",
)


def swiglu(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """gate / (1 + exp(-gate)) * up of gate[R,N] and up[R,N], computed in float32.

    With a limit, gate <= limit and abs(up) <= limit first; NaN stays NaN. Both are float32, bfloat16 or float16, not
    necessarily the same; the result has gate's dtype. Raises TypeError or ValueError, naming the argument, for another
    dtype, shape or device, or a limit that is not positive.
    """
    check(gate=(gate, FLOATING, "R N"), up=(up, FLOATING, "R N"))
    check_positive("limit", limit)
    return _swiglu(gate, up, limit)
