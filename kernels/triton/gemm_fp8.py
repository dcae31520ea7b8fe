"""GEMM of FP8 matrices with scales per tensor, per row and column, or per 128 x 128 block.

The accumulator of Hopper's FP8 tensor cores keeps 13 fraction bits. The kernel therefore sums only BLOCK_K <= 128 terms
in it, adds that sum to a float32 register (DeepSeek-V3 technical report, section 3.3), and applies scales there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FP8, check, check_choice, check_shape
from assay.kernels.triton.layouts import k_major
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.tiles import pid_to_mn, prune_configs, size_bucket, tile_configs, tile_grid, tile_offsets

_GRANULARITIES = ("tensor", "row", "block")
_SCALE_BLOCK = tl.constexpr(128)  # elements along K, and columns of b, that share a scale by block

_CONFIGS = tile_configs(
    *((128, 128, 128, 8, 3), (128, 64, 128, 4, 3), (64, 128, 128, 4, 3), (128, 64, 64, 4, 4)),
    *((256, 32, 128, 8, 3), (256, 32, 64, 8, 4), (32, 128, 128, 4, 3), (32, 128, 64, 4, 4)),
)


@triton.autotune(
    configs=_CONFIGS, key=["M_BUCKET", "N", "K", "BY_BLOCK"], prune_configs_by={"early_config_prune": prune_configs}
)
@triton.jit(do_not_specialize=["M"])
def _gemm_fp8_kernel(
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
    scale_a_strides,
    scale_b_strides,
    c_strides,
    BY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """c[M,N] = (a[M,K] scale_a) (b[K,N] scale_b).

    Scales are [M,K/128] and [K/128,N/128] where BY_BLOCK, else [M,1] and [1,N].
    """
    tl.static_assert(_SCALE_BLOCK % BLOCK_K == 0 and _SCALE_BLOCK % BLOCK_N == 0)  # a tile has one scale of b
    pid_m, pid_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n, mask_m, mask_n = tile_offsets(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + offs_m * a_strides[0] + offs_k[None, :] * a_strides[1]
    b_ptrs = b_ptr + offs_k[:, None] * b_strides[0] + offs_n * b_strides[1]
    scale_a_ptrs = scale_a_ptr + offs_m * scale_a_strides[0]
    step_a = tl.full([], BLOCK_K, tl.int64) * a_strides[1]
    step_b = tl.full([], BLOCK_K, tl.int64) * b_strides[0]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask_k = offs_k < K - start
        a = tl.load(a_ptrs, mask=mask_m & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n, other=0.0)
        partial = tl.dot(a, b)  # no acc: added in float32 below, as the module says
        if BY_BLOCK:
            block_k = tl.cast(start, tl.int64) // _SCALE_BLOCK
            scale_a = tl.load(scale_a_ptrs + block_k * scale_a_strides[1], mask=mask_m, other=0.0)
            offset_n = pid_n * BLOCK_N // _SCALE_BLOCK * scale_b_strides[1]
            scale_b = tl.load(scale_b_ptr + block_k * scale_b_strides[0] + offset_n)
            acc += partial * (scale_a * scale_b)
        else:
            acc += partial
        a_ptrs += step_a
        b_ptrs += step_b

    if not BY_BLOCK:
        scale_a = tl.load(scale_a_ptrs, mask=mask_m, other=0.0)
        scale_b = tl.load(scale_b_ptr + offs_n * scale_b_strides[1], mask=mask_n, other=0.0)
        acc = acc * scale_a * scale_b
    c_ptrs = c_ptr + offs_m * c_strides[0] + offs_n * c_strides[1]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


@custom_op("assay::gemm_fp8", lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16))
def _gemm_fp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, granularity: str) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        a, b = k_major(a, b)
        if granularity == "tensor":  # the scale of every row and column
            scale_a, scale_b = scale_a.expand(m, 1), scale_b.expand(1, n)
        _gemm_fp8_kernel[tile_grid(m, n)](
            *(a, b, scale_a, scale_b, c),
            *(m, n, k, size_bucket(m)),
            *(tensor.stride() for tensor in (a, b, scale_a, scale_b, c)),
            BY_BLOCK=granularity == "block",
        )
    return c


@replayed
def gemm_fp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor") -> Tensor:
    """Return (a scale_a) (b scale_b) as bfloat16 [M,N], of a[M,K] and b[K,N], each float8_e4m3fn or float8_e5m2.

    Scales are float32: scale_a[] and scale_b[] by "tensor", [M,1] and [1,N] by "row", [M,ceil(K/128)] and
    [ceil(K/128),ceil(N/128)] by "block". Raises TypeError or ValueError, naming the argument, for another granularity,
    dtype, shape or device.
    """
    check_choice("granularity", granularity, _GRANULARITIES)
    shapes = {"tensor": ("", ""), "row": ("M 1", "1 N"), "block": ("M blocks_a", "blocks_b N/128")}[granularity]
    scales = {"scale_a": (scale_a, FLOAT32, shapes[0]), "scale_b": (scale_b, FLOAT32, shapes[1])}
    check(a=(a, FP8, "M K"), b=(b, FP8, "K N"), **scales)
    if granularity == "block":
        blocks_k, blocks_n = (triton.cdiv(size, _SCALE_BLOCK.value) for size in b.shape)
        check_shape("scale_a", scale_a, (a.shape[0], blocks_k))
        check_shape("scale_b", scale_b, (blocks_k, blocks_n))
    return _gemm_fp8(a, b, scale_a, scale_b, granularity)
