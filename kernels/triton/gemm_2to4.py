"""GEMM whose first operand is 2:4 sparse along K: of each group of four elements two are stored, with their indices.

Triton has no instruction for sparse tensor cores. The kernel expands each block to a dense one in registers and
multiplies that on dense tensor cores: of the sparse operand half of the bytes are read, and a quarter again for the
indices, but the multiplications are those of the dense product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_shape
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.tiles import (
    FP32_BLOCK_K,
    pid_to_mn,
    prune_configs_by_dtype,
    size_bucket,
    tile_configs,
    tile_grid,
    tile_offsets,
)

_CONFIGS = tile_configs(
    *((128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 128, 64, 8, 3), (64, 64, FP32_BLOCK_K, 4, 2)),
    *((128, 32, 64, 8, 3), (64, 32, 128, 8, 3), (128, 32, FP32_BLOCK_K, 4, 3)),
    *((32, 128, 64, 4, 3), (32, 64, 128, 4, 3), (32, 128, FP32_BLOCK_K, 4, 3)),
)


@triton.jit
def _load_pairs(ptrs, mask):
    """Return the first and the second element [BLOCK_M, BLOCK_K/4] of each group, zero where masked."""
    stored = tl.load(ptrs, mask=mask, other=0.0)
    return tl.split(tl.reshape(stored, [stored.shape[0], stored.shape[1] // 2, 2]))


@triton.jit
def _accumulate(acc, repeats, values, indices, b_blocks, masks, K, REPEATED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return acc + values b, and the groups [BLOCK_M, BLOCK_K/4] that in any block have two values at one index.

    Of such a pair the first pass leaves the second value out; a second pass with REPEATED adds these values alone.
    ``values``, ``indices`` and ``b_blocks`` are (pointers to the first block, stride along K); ``masks`` is
    (mask_m, mask_n).
    """
    value_ptrs, value_stride = values
    index_ptrs, index_stride = indices
    b_ptrs, b_stride = b_blocks
    mask_m, mask_n = masks
    offs_stored = tl.arange(0, BLOCK_K // 2)[None, :]
    offs_k = tl.arange(0, BLOCK_K)[:, None]
    step = tl.full([], BLOCK_K // 2, tl.int64)
    for start in range(0, K, BLOCK_K):
        mask = mask_m & (offs_stored < (K - start) // 2)
        first, second = _load_pairs(value_ptrs, mask)
        first_index, second_index = _load_pairs(index_ptrs, mask)
        b = tl.load(b_ptrs, mask=(offs_k < K - start) & mask_n, other=0.0)
        index = tl.arange(0, 4)[None, None, :]
        repeated = (first_index == second_index) & mask_m & (tl.arange(0, BLOCK_K // 4)[None, :] < (K - start) // 4)
        is_second = second_index[:, :, None] == index
        if REPEATED:
            dense = tl.where(is_second & repeated[:, :, None], second[:, :, None], 0.0)
        else:
            dense = tl.where(is_second, second[:, :, None], 0.0)
            dense = tl.where(first_index[:, :, None] == index, first[:, :, None], dense)
            repeats |= repeated
        a = tl.reshape(dense, [dense.shape[0], BLOCK_K]).to(b.dtype)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        value_ptrs += step * value_stride
        index_ptrs += step * index_stride
        b_ptrs += 2 * step * b_stride
    return acc, repeats


@triton.autotune(
    configs=_CONFIGS, key=["M_BUCKET", "N", "K"], prune_configs_by={"early_config_prune": prune_configs_by_dtype}
)
@triton.jit(do_not_specialize=["M"])
def _gemm_2to4_kernel(
    values_ptr,
    index_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    M_BUCKET,
    values_strides,
    index_strides,
    b_strides,
    c_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """c[M,N] = a[M,K] b[K,N], of a's values[M,K/2] and their index[M,K/2] in groups of four."""
    pid_m, pid_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n, mask_m, mask_n = tile_offsets(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
    offs_stored = tl.arange(0, BLOCK_K // 2).to(tl.int64)[None, :]
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)[:, None]
    values = values_ptr + offs_m * values_strides[0] + offs_stored * values_strides[1], values_strides[1]
    indices = index_ptr + offs_m * index_strides[0] + offs_stored * index_strides[1], index_strides[1]
    b = b_ptr + offs_k * b_strides[0] + offs_n * b_strides[1], b_strides[0]
    masks = mask_m, mask_n

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    repeats = tl.zeros([BLOCK_M, BLOCK_K // 4], tl.int1)
    acc, repeats = _accumulate(acc, repeats, values, indices, b, masks, K, False, BLOCK_K)
    if tl.max(tl.max(repeats.to(tl.int32), 1), 0):
        acc, repeats = _accumulate(acc, repeats, values, indices, b, masks, K, True, BLOCK_K)

    c_ptrs = c_ptr + offs_m * c_strides[0] + offs_n * c_strides[1]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


@custom_op("assay::gemm_2to4", lambda values, index, b: values.new_empty((values.shape[0], b.shape[1])))
def _gemm_2to4(values: Tensor, index: Tensor, b: Tensor) -> Tensor:
    m, (k, n) = values.shape[0], b.shape
    c = torch.empty((m, n), dtype=values.dtype, device=values.device)
    if c.numel():
        _gemm_2to4_kernel[tile_grid(m, n)](
            *(values, index, b, c),
            *(m, n, k, size_bucket(m)),
            *(tensor.stride() for tensor in (values, index, b, c)),
        )
    return c


@replayed
def gemm_2to4(values: Tensor, index: Tensor, b: Tensor) -> Tensor:
    """Return c[M,N], the sums over j of values[m,j] b[4 (j // 2) + index[m,j], n], of values[M,K/2] and b[K,N].

    values and b are both float32, bfloat16 or float16, and c is rounded once from a float32 accumulator; index[M,K/2]
    is uint8, 0 to 3. Two values at one index both count, at the cost of a second product of their tile, where an
    infinity in b then becomes NaN. Raises TypeError or ValueError, naming the argument, for another dtype, shape or
    device, and if 4 doesn't divide K.
    """
    check(values=(values, FLOATING, "M K/2"), index=(index, (torch.uint8,), "M K/2"), b=(b, ("values",), "K N"))
    if b.shape[0] % 4:
        raise ValueError(f"b: expected K to be a multiple of 4, got K={b.shape[0]}")
    check_shape("values", values, ("M", b.shape[0] // 2))
    return _gemm_2to4(values, index, b)
