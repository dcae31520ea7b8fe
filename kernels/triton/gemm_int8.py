"""Matrix product of two int8 matrices with a scale per row and per column.

Sums are exact: the tensor cores' int32, and for a K at which that may overflow an int64 over stretches of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_device, check_dtype, check_shape
from assay.kernels.triton.tiles import fitting_tiles, size_class, tile_configs, tile_grid, tile_of_program

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
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(first, last, BLOCK_K):
        left = inner < last - start
        a = tl.load(a_ptrs, mask=in_rows & left[None, :], other=0)
        b = tl.load(b_ptrs, mask=left[:, None] & in_columns, other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        a_ptrs += step_a
        b_ptrs += step_b
    return sums


@triton.autotune(configs=_CONFIGS, key=["M_CLASS", "N", "K"], prune_configs_by={"early_config_prune": fitting_tiles})
@triton.jit
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
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_sa,
    stride_sb,
    stride_cm,
    stride_cn,
    ONE_STRETCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows[:, None] < M
    in_columns = columns[None, :] < N
    a_rows = a_ptr + rows[:, None] * stride_am
    b_columns = b_ptr + columns[None, :] * stride_bn

    if ONE_STRETCH:
        sums = _sum_products(
            a_rows, b_columns, in_rows, in_columns, 0, K, stride_ak, stride_bk, BLOCK_M, BLOCK_N, BLOCK_K
        )
    else:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int64)
        for first in range(0, K, _STRETCH):
            last = tl.minimum(first + _STRETCH, K)
            sums += _sum_products(
                a_rows, b_columns, in_rows, in_columns, first, last, stride_ak, stride_bk, BLOCK_M, BLOCK_N, BLOCK_K
            ).to(tl.int64)

    scale_a = tl.load(scale_a_ptr + rows[:, None] * stride_sa, mask=in_rows, other=0.0)
    scale_b = tl.load(scale_b_ptr + columns[None, :] * stride_sb, mask=in_columns, other=0.0)
    c = sums.to(tl.float32) * scale_a * scale_b
    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


@torch.library.custom_op("assay::gemm_int8", mutates_args=())
def _gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        _gemm_int8_kernel[tile_grid(m, n)](
            a,
            b,
            scale_a,
            scale_b,
            c,
            m,
            n,
            k,
            size_class(m),
            *a.stride(),
            *b.stride(),
            scale_a.stride(0),
            scale_b.stride(1),
            *c.stride(),
            ONE_STRETCH=k <= _STRETCH.value,
        )
    return c


@_gemm_int8.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)


def gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """(a b) scale_a scale_b as bfloat16 [M,N], of int8 a[M,K] and b[K,N] and float32 scale_a[M,1] and scale_b[1,N].

    The integer sums are exact for any K. Raises TypeError or ValueError, naming the argument, for another dtype, shape
    or device.
    """
    check_dtype("a", a, (torch.int8,))
    check_dtype("b", b, (torch.int8,))
    check_dtype("scale_a", scale_a, (torch.float32,))
    check_dtype("scale_b", scale_b, (torch.float32,))
    check_shape("a", a, ("M", "K"))
    check_shape("b", b, (a.shape[1], "N"))
    check_shape("scale_a", scale_a, (a.shape[0], 1))
    check_shape("scale_b", scale_b, (1, b.shape[1]))
    check_device(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    return _gemm_int8(a, b, scale_a, scale_b)
