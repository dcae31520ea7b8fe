"""Matrix product of two floating-point matrices, with a float32 accumulator: the tiles of matrices that lie well are
copied by descriptors (`gemm_described`), those of others are loaded element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.gemm_described import is_described, write_described_product
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.tiles import (
    RESTORE_C,
    pid_to_mn,
    prune_configs,
    size_bucket,
    tile_configs,
    tile_grid,
    tile_offsets,
)

_CONFIGS = tile_configs(
    *((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 3)),
    *((256, 32, 64, 8, 2), (256, 32, 128, 8, 2), (32, 256, 64, 8, 3), (32, 128, 64, 4, 3)),
)


@triton.autotune(
    configs=_CONFIGS,
    key=["M_CLASS", "N", "K_CLASS", "ACCUMULATE"],
    prune_configs_by={"early_config_prune": prune_configs},
    **RESTORE_C,
)
@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    M_CLASS,
    K_CLASS,
    a_strides,
    b_strides,
    c_strides,
    ACCUMULATE: tl.constexpr,  # to what c holds
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, columns, in_rows, in_columns = tile_offsets(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + rows * a_strides[0] + inner[None, :] * a_strides[1]
    b_ptrs = b_ptr + inner[:, None] * b_strides[0] + columns * b_strides[1]
    step_a = tl.full([], BLOCK_K, tl.int64) * a_strides[1]
    step_b = tl.full([], BLOCK_K, tl.int64) * b_strides[0]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        left = inner < K - start
        a = tl.load(a_ptrs, mask=in_rows & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & in_columns, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += step_a
        b_ptrs += step_b

    c_ptrs = c_ptr + rows * c_strides[0] + columns * c_strides[1]
    if ACCUMULATE:
        acc += tl.load(c_ptrs, mask=in_rows & in_columns, other=0.0).to(tl.float32)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b of a[M,K] and b[K,N] of one dtype, stored in another from a float32 accumulator."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    write_product(a, b, c)
    return c


def write_product(a: Tensor, b: Tensor, c: Tensor, add: bool = False) -> None:
    """Write a b into c[M,N], in any dtype and strides; or add it to what is there, in float32, before it is rounded."""
    (m, k), n = a.shape, b.shape[1]
    if is_described(a, b):
        write_described_product(a, b, c, add)
    elif c.numel():
        classes = size_bucket(m), size_bucket(k)
        _gemm_kernel[tile_grid(m, n)](a, b, c, m, n, k, *classes, a.stride(), b.stride(), c.stride(), ACCUMULATE=add)


@custom_op("assay::gemm", lambda a, b: a.new_empty((a.shape[0], b.shape[1])))
def _gemm(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b, a.dtype)


differentiate(
    "assay::gemm",
    lambda saved, dc: (
        gemm(dc, saved.b.t()) if saved.needs.a else None,
        gemm(saved.a.t(), dc) if saved.needs.b else None,
    ),
    saves="a b",
)


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a b of a[M,K] and b[K,N], both float32, bfloat16 or float16, rounded once from a float32 accumulator.

    Raises TypeError or ValueError, naming the argument, for another dtype, shape or device.
    """
    check(a=(a, FLOATING, "M K"), b=(b, ("a",), "K N"))
    return _gemm(a, b)
