"""GEMM of int8 matrices with a scale for each row and column, and exact sums.

Sums are the tensor cores' int32; for a K at which an int32 may overflow, an int64 adds up those of chunks of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, check
from assay.kernels.triton.layouts import k_major
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.tiles import pid_to_mn, prune_configs, size_bucket, tile_configs, tile_grid, tile_offsets

_CONFIGS = tile_configs(
    *((128, 256, 128, 8, 3), (128, 128, 128, 8, 3), (128, 64, 128, 4, 4), (64, 128, 64, 4, 4)),
    *((256, 32, 128, 8, 3), (256, 32, 64, 8, 4), (32, 256, 128, 8, 3), (32, 128, 128, 4, 3)),
)

# 2^16 products of at most 2^14 are half of what an int32 holds; a multiple of every BLOCK_K.
_K_CHUNK = tl.constexpr(65536)


@triton.jit
def _sum_products(
    a_rows,
    b_columns,
    mask_m,
    mask_n,
    k_begin,
    k_end,
    stride_ak,
    stride_bk,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums over k_begin <= k < k_end, in int32."""
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_rows + (k_begin + offs_k)[None, :] * stride_ak
    b_ptrs = b_columns + (k_begin + offs_k)[:, None] * stride_bk
    step_a = tl.full([], BLOCK_K, tl.int64) * stride_ak
    step_b = tl.full([], BLOCK_K, tl.int64) * stride_bk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(k_begin, k_end, BLOCK_K):
        mask_k = offs_k < k_end - start
        a = tl.load(a_ptrs, mask=mask_m & mask_k[None, :], other=0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n, other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        a_ptrs += step_a
        b_ptrs += step_b
    return acc


@triton.autotune(configs=_CONFIGS, key=["M_BUCKET", "N", "K"], prune_configs_by={"early_config_prune": prune_configs})
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
    M_BUCKET,
    a_strides,
    b_strides,
    stride_sa,
    stride_sb,
    c_strides,
    SINGLE_CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """c[M,N] = (a[M,K] b[K,N]) scale_a[M,1] scale_b[1,N]."""
    pid_m, pid_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n, mask_m, mask_n = tile_offsets(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
    a_rows = a_ptr + offs_m * a_strides[0]
    b_columns = b_ptr + offs_n * b_strides[1]

    stride_ak, stride_bk = a_strides[1], b_strides[0]
    if SINGLE_CHUNK:
        acc = _sum_products(a_rows, b_columns, mask_m, mask_n, 0, K, stride_ak, stride_bk, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int64)
        for k_begin in range(0, K, _K_CHUNK):
            k_end = tl.minimum(k_begin + _K_CHUNK, K)
            acc += _sum_products(
                a_rows, b_columns, mask_m, mask_n, k_begin, k_end, stride_ak, stride_bk, BLOCK_M, BLOCK_N, BLOCK_K
            ).to(tl.int64)

    scale_a = tl.load(scale_a_ptr + offs_m * stride_sa, mask=mask_m, other=0.0)
    scale_b = tl.load(scale_b_ptr + offs_n * stride_sb, mask=mask_n, other=0.0)
    c = acc.to(tl.float32) * scale_a * scale_b
    c_ptrs = c_ptr + offs_m * c_strides[0] + offs_n * c_strides[1]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


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
            SINGLE_CHUNK=k <= _K_CHUNK.value,
        )
    return c


@replayed
def gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return (a b) scale_a scale_b as bfloat16 [M,N], of int8 a[M,K] and b[K,N], float32 scale_a[M,1] and scale_b[1,N].

    The integer sums are exact for any K. Raises TypeError or ValueError, naming the argument, for another dtype, shape
    or device.
    """
    matrices = {"a": (a, (torch.int8,), "M K"), "b": (b, (torch.int8,), "K N")}
    check(**matrices, scale_a=(scale_a, FLOAT32, "M 1"), scale_b=(scale_b, FLOAT32, "1 N"))
    return _gemm_int8(a, b, scale_a, scale_b)
