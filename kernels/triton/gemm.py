"""Matrix product of two floating-point matrices, with a float32 accumulator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check_device, check_dtype, check_shape
from assay.kernels.triton.tiles import fitting_tiles, size_class, tile_configs, tile_grid, tile_of_program

_CONFIGS = tile_configs(
    *((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 3)),
    *((256, 32, 64, 8, 2), (256, 32, 128, 8, 2), (32, 256, 64, 8, 3), (32, 128, 64, 4, 3)),
)


@triton.autotune(configs=_CONFIGS, key=["M_CLASS", "N", "K"], prune_configs_by={"early_config_prune": fitting_tiles})
@triton.jit
def _gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    M_CLASS,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    in_rows = rows[:, None] < M
    in_columns = columns[None, :] < N
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    step_a = tl.full([], BLOCK_K, tl.int64) * stride_ak
    step_b = tl.full([], BLOCK_K, tl.int64) * stride_bk

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        left = inner < K - start
        a = tl.load(a_ptrs, mask=in_rows & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & in_columns, other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        a_ptrs += step_a
        b_ptrs += step_b

    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    tl.store(c_ptrs, sums.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


@torch.library.custom_op("assay::gemm", mutates_args=())
def _gemm(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    if c.numel():
        _gemm_kernel[tile_grid(m, n)](a, b, c, m, n, k, size_class(m), *a.stride(), *b.stride(), *c.stride())
    return c


@_gemm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a b of a[M,K] and b[K,N], both float32, bfloat16 or float16, rounded once from a float32 accumulator.

    Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check_dtype("a", a, FLOATING)
    check_dtype("b", b, (a.dtype,))
    check_shape("a", a, ("M", "K"))
    check_shape("b", b, (a.shape[1], "N"))
    check_device(a=a, b=b)
    return _gemm(a, b)
