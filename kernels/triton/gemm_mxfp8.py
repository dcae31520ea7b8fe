"""Matrix product of two matrices in MXFP8 (OCP MX 1.0): codes of e4m3, and a power of two for each 32 along K.

`tl.dot_scaled` is one instruction of Blackwell's tensor cores in tiles of 128 rows. In others, and on a GPU before it,
the compiler multiplies codes by their scales in bfloat16, where the product of four bits and a power of two is exact
unless it is subnormal or overflows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check, check_shape
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.tiles import fitting_tiles, size_class, tile_configs, tile_grid, tile_of_program, tile_range
from assay.kernels.triton.transposing import along_k

_CODES = (torch.float8_e4m3fn,)
_SCALES = (torch.float8_e8m0fnu,)
_BLOCK = tl.constexpr(32)  # elements along K that share a scale
_ONE = tl.constexpr(127)  # of e8m0

_CONFIGS = tile_configs(
    *((128, 128, 128, 8, 2), (128, 128, 64, 8, 3), (128, 64, 128, 4, 3), (64, 64, 128, 4, 3)),
    *((128, 32, 128, 4, 3), (128, 32, 64, 4, 4), (32, 64, 128, 4, 3), (32, 64, 64, 4, 4)),
)


@triton.autotune(configs=_CONFIGS, key=["M_CLASS", "N", "K"], prune_configs_by={"early_config_prune": fitting_tiles})
@triton.jit
def _gemm_mxfp8_kernel(
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
    scale_a_strides,
    scale_b_strides,
    c_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, columns, in_rows, in_columns = tile_range(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    blocks = tl.arange(0, BLOCK_K // _BLOCK).to(tl.int64)[None, :]
    a_ptrs = a_ptr + rows * a_strides[0] + inner[None, :] * a_strides[1]
    b_ptrs = b_ptr + inner[:, None] * b_strides[0] + columns * b_strides[1]
    scale_a_ptrs = scale_a_ptr + rows * scale_a_strides[0] + blocks * scale_a_strides[1]
    b_rows = tl.trans(columns)  # the scales of b are taken as [N,K/32]
    scale_b_ptrs = scale_b_ptr + b_rows * scale_b_strides[1] + blocks * scale_b_strides[0]
    step_a = tl.full([], BLOCK_K, tl.int64) * a_strides[1]
    step_b = tl.full([], BLOCK_K, tl.int64) * b_strides[0]
    step_scale_a = tl.full([], BLOCK_K // _BLOCK, tl.int64) * scale_a_strides[1]
    step_scale_b = tl.full([], BLOCK_K // _BLOCK, tl.int64) * scale_b_strides[0]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        left = inner < K - start
        blocks_left = blocks * _BLOCK < K - start
        a = tl.load(a_ptrs, mask=in_rows & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & in_columns, other=0.0)
        scale_a = tl.load(scale_a_ptrs, mask=in_rows & blocks_left, other=_ONE)
        scale_b = tl.load(scale_b_ptrs, mask=(b_rows < N) & blocks_left, other=_ONE)
        acc = tl.dot_scaled(a, scale_a, "e4m3", b, scale_b, "e4m3", acc)
        a_ptrs += step_a
        b_ptrs += step_b
        scale_a_ptrs += step_scale_a
        scale_b_ptrs += step_scale_b

    c_ptrs = c_ptr + rows * c_strides[0] + columns * c_strides[1]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


@custom_op("assay::gemm_mxfp8", lambda a, b, *scales: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16))
def _gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        a, b = along_k(a, b)
        scale_a, scale_b = scale_a.view(torch.uint8), scale_b.view(torch.uint8)
        _gemm_mxfp8_kernel[tile_grid(m, n)](
            *(a, b, scale_a, scale_b, c),
            *(m, n, k, size_class(m)),
            *(tensor.stride() for tensor in (a, b, scale_a, scale_b, c)),
        )
    return c


def gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """(a scale_a) (b scale_b) as bfloat16 [M,N], of float8_e4m3fn a[M,K] and b[K,N].

    Scales are float8_e8m0fnu, scale_a[M,K/32] and scale_b[K/32,N]; sums are float32. Raises TypeError or ValueError,
    naming the argument, for another dtype, shape or device, and if 32 doesn't divide K.
    """
    scales = {"scale_a": (scale_a, _SCALES, "M blocks_a"), "scale_b": (scale_b, _SCALES, "blocks_b N")}
    check(a=(a, _CODES, "M K"), b=(b, _CODES, "K N"), **scales)
    blocks, rest = divmod(a.shape[1], _BLOCK.value)
    if rest:
        raise ValueError(f"a: expected K to be a multiple of {_BLOCK.value}, got K={a.shape[1]}")
    check_shape("scale_a", scale_a, (a.shape[0], blocks))
    check_shape("scale_b", scale_b, (blocks, b.shape[1]))
    return _gemm_mxfp8(a, b, scale_a, scale_b)
