"""Matrix product of two int8 matrices with a scale per row and per column.

Sums are exact: the tensor cores' int32, and for a K at which that may overflow an int64 over stretches of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, check
from assay.kernels.triton.layouts import k_major
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.tiles import pid_to_mn, prune_configs, size_bucket, tile_configs, tile_grid, tile_offsets

_CONFIGS = tile_configs(
    *((128, 256, 128, 8, 3), (128, 128, 128, 8, 3), (128, 64, 128, 4, 4), (64, 128, 64, 4, 4)),
    *((256, 32, 128, 8, 3), (256, 32, 64, 8, 4), (32, 256, 128, 8, 3), (32, 128, 128, 4, 3)),
)

# 2^16 products of at most 2^14 are half of what an int32 holds; a multiple of every BLOCK_K.
_STRETCH = tl.constexpr(65536)


@triton.jit
def _sum_products(
    a_rows,
    b_columns,
    in_rows,
    in_columns,
    first,
    last,
    stride_ak,
    stride_bk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of k in first..last-1, added in int32."""
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_rows + (first + inner)[None, :] * stride_ak
    b_ptrs = b_columns + (first + inner)[:, None] * stride_bk
    step_a = tl.full([], BLOCK_K, tl.int64) * stride_ak
    step_b = tl.full([], BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(first, last, BLOCK_K):
        left = inner < last - start
        a = tl.load(a_ptrs, mask=in_rows & left[None, :], other=0)
        b = tl.load(b_ptrs, mask=left[:, None] & in_columns, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_ptrs += step_a
        b_ptrs += step_b
    return acc


@triton.autotune(configs=_CONFIGS, key=["M_CLASS", "N", "K"], prune_configs_by={"early_config_prune": prune_configs})
@triton.jit(do_not_specialize=["M"])
def _gemm_int8_kernel(
    a_ptr,
    b_ptr,
    scale_a_ptr,
    scale_b_ptr,
    c_ptr,
    M,
    N,
    K,
    M_CLASS,
    a_strides,
    b_strides,
    stride_sa,
    stride_sb,
    c_strides,
    ONE_STRETCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, columns, in_rows, in_columns = tile_offsets(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    a_rows = a_ptr + rows * a_strides[0]
    b_columns = b_ptr + columns * b_strides[1]

    step_a, step_b = a_strides[1], b_strides[0]
    if ONE_STRETCH:
        acc = _sum_products(a_rows, b_columns, in_rows, in_columns, 0, K, step_a, step_b, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int64)
        for first in range(0, K, _STRETCH):
            last = tl.minimum(first + _STRETCH, K)
            acc += _sum_products(
                a_rows, b_columns, in_rows, in_columns, first, last, step_a, step_b, BLOCK_M, BLOCK_N, BLOCK_K
            ).to(tl.int64)

    scale_a = tl.load(scale_a_ptr + rows * stride_sa, mask=in_rows, other=0.0)
    scale_b = tl.load(scale_b_ptr + columns * stride_sb, mask=in_columns, other=0.0)
    c = acc.to(tl.float32) * scale_a * scale_b
    c_ptrs = c_ptr + rows * c_strides[0] + columns * c_strides[1]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


@custom_op("assay::gemm_int8", lambda a, b, *scales: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16))
def _gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        a, b = k_major(a, b)
        _gemm_int8_kernel[tile_grid(m, n)](
            *(a, b, scale_a, scale_b, c),
            *(m, n, k, size_bucket(m)),
            *(a.stride(), b.stride()),
            scale_a.stride(0),
            scale_b.stride(1),
            c.stride(),
            ONE_STRETCH=k <= _STRETCH.value,
        )
    return c


def gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """(a b) scale_a scale_b as bfloat16 [M,N], of int8 a[M,K] and b[K,N] and float32 scale_a[M,1] and scale_b[1,N].

    The integer acc are exact for any K. Raises TypeError or ValueError, naming the argument, for another dtype, shape
    or device.
    """
    matrices = {"a": (a, (torch.int8,), "M K"), "b": (b, (torch.int8,), "K N")}
    check(**matrices, scale_a=(scale_a, FLOAT32, "M 1"), scale_b=(scale_b, FLOAT32, "1 N"))
    return _gemm_int8(a, b, scale_a, scale_b)
