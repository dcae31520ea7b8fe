"""Matrix product of a matrix that is two-to-four sparse along K: of each four neighbours two are stored, and where.

Triton has no instruction of sparse tensor cores. The stored values are put in their places in registers, zeros beside
them, and multiplied as a dense tile on dense tensor cores: half of the bytes of the matrix are read, and a quarter of
those again for places; the multiplications are those of the dense product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check, check_shape
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.tiles import (
    pid_to_mn,
    prune_configs_by_dtype,
    size_bucket,
    tile_configs,
    tile_grid,
    tile_offsets,
)

_PLACES = (torch.uint8,)

_CONFIGS = tile_configs(
    *((128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 128, 64, 8, 3), (64, 64, 16, 4, 2)),
    *((128, 32, 64, 8, 3), (64, 32, 128, 8, 3), (128, 32, 16, 4, 3)),
    *((32, 128, 64, 4, 3), (32, 64, 128, 4, 3), (32, 128, 16, 4, 3)),
)


@triton.jit
def _pairs(pointers, kept):
    """The first and the second [rows, groups] of each pair in memory, zero where they aren't kept."""
    stored = tl.load(pointers, mask=kept, other=0.0)
    return tl.split(tl.reshape(stored, [stored.shape[0], stored.shape[1] // 2, 2]))


@triton.jit
def _added(acc, repeats, values, index, b, sides, K, REPEATED: tl.constexpr, BLOCK_K: tl.constexpr):
    """acc + values b, and which groups of four have, in any block of K, two values at one place: of those the second is
    left out, and it alone is taken where REPEATED.

    ``values``, ``index`` and ``b`` are pointers to their first tiles, and strides along K; ``sides`` which rows and
    columns there are.
    """
    value_ptrs, value_stride = values
    index_ptrs, index_stride = index
    b_ptrs, b_stride = b
    in_rows, in_columns = sides
    stored = tl.arange(0, BLOCK_K // 2)[None, :]
    inner = tl.arange(0, BLOCK_K)[:, None]
    step = tl.full([], BLOCK_K // 2, tl.int64)
    for start in range(0, K, BLOCK_K):
        kept = in_rows & (stored < (K - start) // 2)
        first, second = _pairs(value_ptrs, kept)
        at_first, at_second = _pairs(index_ptrs, kept)
        right = tl.load(b_ptrs, mask=(inner < K - start) & in_columns, other=0.0)
        place = tl.arange(0, 4)[None, None, :]
        again = (at_first == at_second) & in_rows & (tl.arange(0, BLOCK_K // 4)[None, :] < (K - start) // 4)
        here = at_second[:, :, None] == place
        if REPEATED:
            dense = tl.where(here & again[:, :, None], second[:, :, None], 0.0)
        else:
            dense = tl.where(here, second[:, :, None], 0.0)
            dense = tl.where(at_first[:, :, None] == place, first[:, :, None], dense)
            repeats |= again
        left = tl.reshape(dense, [dense.shape[0], BLOCK_K]).to(right.dtype)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        value_ptrs += step * value_stride
        index_ptrs += step * index_stride
        b_ptrs += 2 * step * b_stride
    return acc, repeats


@triton.autotune(
    configs=_CONFIGS, key=["M_CLASS", "N", "K"], prune_configs_by={"early_config_prune": prune_configs_by_dtype}
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
    M_CLASS,
    values_strides,
    index_strides,
    b_strides,
    c_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, columns, in_rows, in_columns = tile_offsets(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    stored = tl.arange(0, BLOCK_K // 2).to(tl.int64)[None, :]
    inner = tl.arange(0, BLOCK_K).to(tl.int64)[:, None]
    values = values_ptr + rows * values_strides[0] + stored * values_strides[1], values_strides[1]
    index = index_ptr + rows * index_strides[0] + stored * index_strides[1], index_strides[1]
    b = b_ptr + inner * b_strides[0] + columns * b_strides[1], b_strides[0]
    sides = in_rows, in_columns

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    repeats = tl.zeros([BLOCK_M, BLOCK_K // 4], tl.int1)
    acc, repeats = _added(acc, repeats, values, index, b, sides, K, False, BLOCK_K)
    if tl.max(tl.max(repeats.to(tl.int32), 1), 0):
        acc, repeats = _added(acc, repeats, values, index, b, sides, K, True, BLOCK_K)

    c_ptrs = c_ptr + rows * c_strides[0] + columns * c_strides[1]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


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


def gemm_2to4(values: Tensor, index: Tensor, b: Tensor) -> Tensor:
    """c[M,N], each the sum over j of values[m,j] b[4 (j // 2) + index[m,j], n], of values[M,K/2] and b[K,N].

    values and b are both float32, bfloat16 or float16, and c is rounded once from a float32 accumulator; index[M,K/2]
    is uint8, 0 to 3. Two values at one place both count, at the cost of a second product of their tile, where an
    infinity in b then becomes NaN. Raises TypeError or ValueError, naming the argument, for another dtype, shape or
    device, and if 4 doesn't divide K.
    """
    check(values=(values, FLOATING, "M K/2"), index=(index, _PLACES, "M K/2"), b=(b, ("values",), "K N"))
    if b.shape[0] % 4:
        raise ValueError(f"b: expected K to be a multiple of 4, got K={b.shape[0]}")
    check_shape("values", values, ("M", b.shape[0] // 2))
    return _gemm_2to4(values, index, b)
