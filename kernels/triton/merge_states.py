"""Merge of attention over two disjoint sets of keys, for cascade attention and split sequences.

The greater log-sum-exp is subtracted from both, so that no weight exceeds 1. An empty state, with a log-sum-exp of
-inf, has weight zero, and its output, which may be anything, is not loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, check
from assay.kernels.triton.online_softmax import finite_shift
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.rows import CONFIGS, HEURISTICS, grid


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(HEURISTICS)
@triton.jit(do_not_specialize=["R"])
def _merge_states_kernel(
    o_a_ptr,
    lse_a_ptr,
    o_b_ptr,
    lse_b_ptr,
    o_ptr,
    lse_ptr,
    R,
    N,
    H,
    o_a_strides,
    lse_a_strides,
    o_b_strides,
    lse_b_strides,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SINGLE_PASS: tl.constexpr,
):
    """Compute o[T,H,D] and lse[T,H], contiguous; a row is one head of one token, R = T * H and N = D."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM))[:, None]
    token, head = rows // H, rows % H
    mask_m = rows < R
    empty: tl.constexpr = -float("inf")
    lse_a = tl.load(lse_a_ptr + token * lse_a_strides[0] + head * lse_a_strides[1], mask=mask_m, other=empty)
    lse_b = tl.load(lse_b_ptr + token * lse_b_strides[0] + head * lse_b_strides[1], mask=mask_m, other=empty)
    lse_max = tl.maximum(lse_a, lse_b, propagate_nan=tl.PropagateNan.ALL)
    shift = finite_shift(lse_max)
    weight_a = tl.exp(lse_a - shift)
    weight_b = tl.exp(lse_b - shift)
    total = weight_a + weight_b
    tl.store(lse_ptr + rows, lse_max + tl.log(total), mask=mask_m)

    inv_total = tl.where(total == 0.0, 0.0, 1.0 / total)  # of two empty states the output is zero
    o_a_rows = o_a_ptr + token * o_a_strides[0] + head * o_a_strides[1]
    o_b_rows = o_b_ptr + token * o_b_strides[0] + head * o_b_strides[1]
    for start in range(0, BLOCK_N if SINGLE_PASS else N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N).to(tl.int64)[None, :]
        mask = mask_m & (offs_n < N)
        mask_a, mask_b = mask & (lse_a != empty), mask & (lse_b != empty)
        o_a = tl.load(o_a_rows + offs_n * o_a_strides[2], mask=mask_a, other=0.0).to(tl.float32)
        o_b = tl.load(o_b_rows + offs_n * o_b_strides[2], mask=mask_b, other=0.0).to(tl.float32)
        o = (o_a * weight_a + o_b * weight_b) * inv_total
        tl.store(o_ptr + rows * N + offs_n, o.to(o_ptr.dtype.element_ty), mask=mask)


def _empty_results(o_a: Tensor, lse_a: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


@custom_op("assay::merge_states", _empty_results)
def _merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = _empty_results(o_a, lse_a)
    tokens, heads, head_dim = o_a.shape
    if lse.numel():
        _merge_states_kernel[grid](
            *(o_a, lse_a, o_b, lse_b, o, lse, tokens * heads, head_dim, heads),
            *(tensor.stride() for tensor in (o_a, lse_a, o_b, lse_b)),
        )
    return o, lse


@replayed
def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return o = (e^lse_a o_a + e^lse_b o_b) / (e^lse_a + e^lse_b) [T,H,D] in o_a's dtype, and its log-sum-exp [T,H].

    o_a[T,H,D] and o_b[T,H,D] are both float32, bfloat16 or float16; lse_a[T,H], lse_b[T,H] and the second result are
    float32. The output of a state whose log-sum-exp is -inf is ignored; two such states give zero and -inf. Raises
    TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(
        o_a=(o_a, FLOATING, "T H D"),
        lse_a=(lse_a, FLOAT32, "T H"),
        o_b=(o_b, ("o_a",), "T H D"),
        lse_b=(lse_b, FLOAT32, "T H"),
    )
    return _merge_states(o_a, lse_a, o_b, lse_b)
