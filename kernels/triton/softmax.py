"""Softmax and log-softmax over the rows of a matrix.

Rows that fit into one block are read once; longer ones twice, the first time for the running maximum and the sum of
exponentials, which is rescaled whenever the maximum grows (Milakov & Gimelshein, *Online normalizer calculation for
softmax*, 2018).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check_dtype, check_shape
from assay.kernels.triton.rows import BLOCKS, CONFIGS, grid


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.heuristics(BLOCKS)
@triton.jit(do_not_specialize=["R"])
def _softmax_kernel(
    x_ptr,
    y_ptr,
    R,
    N,
    stride_xr,
    stride_xn,
    stride_yr,
    stride_yn,
    LOG: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_N).to(tl.int64)
    x_rows = x_ptr + rows[:, None] * stride_xr
    y_rows = y_ptr + rows[:, None] * stride_yr
    inside = rows[:, None] < R

    if ONE_BLOCK:
        kept = inside & (columns[None, :] < N)
        x = tl.load(x_rows + columns[None, :] * stride_xn, mask=kept, other=-float("inf")).to(tl.float32)
        shifted = x - tl.max(x, axis=1)[:, None]
        weights = tl.exp(shifted)
        total = tl.sum(weights, axis=1)[:, None]
        y = shifted - tl.log(total) if LOG else weights / total
        tl.store(y_rows + columns[None, :] * stride_yn, y.to(y_ptr.dtype.element_ty), mask=kept)
    else:
        highest = tl.full([BLOCK_R], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_R], tl.float32)
        for start in range(0, N, BLOCK_N):
            kept = inside & (start + columns[None, :] < N)
            x = tl.load(x_rows + (start + columns[None, :]) * stride_xn, mask=kept, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(x, axis=1))
            origin = tl.where(higher == -float("inf"), 0.0, higher)  # nothing yet: exp(-inf - 0) is zero, not NaN
            total = total * tl.exp(highest - origin) + tl.sum(tl.exp(x - origin[:, None]), axis=1)
            highest = higher
        for start in range(0, N, BLOCK_N):
            kept = inside & (start + columns[None, :] < N)
            x = tl.load(x_rows + (start + columns[None, :]) * stride_xn, mask=kept, other=-float("inf")).to(tl.float32)
            shifted = x - highest[:, None]
            y = shifted - tl.log(total)[:, None] if LOG else tl.exp(shifted) / total[:, None]
            tl.store(y_rows + (start + columns[None, :]) * stride_yn, y.to(y_ptr.dtype.element_ty), mask=kept)


def _launch(x: Tensor, log: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _softmax_kernel[grid](x, y, *x.shape, *x.stride(), *y.stride(), LOG=log)
    return y


@torch.library.custom_op("assay::softmax", mutates_args=())
def _softmax(x: Tensor) -> Tensor:
    return _launch(x, log=False)


@torch.library.custom_op("assay::log_softmax", mutates_args=())
def _log_softmax(x: Tensor) -> Tensor:
    return _launch(x, log=True)


@_softmax.register_fake
@_log_softmax.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def softmax(x: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or another number of dimensions.
    """
    _check(x)
    return _softmax(x)


def log_softmax(x: Tensor) -> Tensor:
    """x - log(sum(exp(x))) of each row of x[R,N] (float32, bfloat16 or float16), computed in float32.

    Raises TypeError or ValueError, naming the argument, for another dtype or another number of dimensions.
    """
    _check(x)
    return _log_softmax(x)


def _check(x: Tensor) -> None:
    check_dtype("x", x, FLOATING)
    check_shape("x", x, ("R", "N"))
