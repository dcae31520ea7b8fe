"""GEMM of floating-point matrices, accumulated in float32.

16-bit operands that TMA can load take a persistent kernel, with split-K for few rows. All others, float32 and matrices
with arbitrary strides among them, take a kernel that loads by pointers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOATING, check
from assay.kernels.triton.layouts import can_use_tma, make_descriptor
from assay.kernels.triton.operators import custom_op, differentiate
from assay.kernels.triton.reduction import sum_partials
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.tiles import (
    NARROW,
    RESTORE_C,
    pid_to_mn,
    prune_configs,
    size_bucket,
    tile_configs,
    tile_grid,
    tile_id_to_mn,
    tile_offsets,
)

_CONFIGS = tile_configs(
    *((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 3)),
    *((256, 32, 64, 8, 2), (256, 32, 128, 8, 2), (32, 256, 64, 8, 3), (32, 128, 64, 4, 3)),
)


@triton.autotune(
    configs=_CONFIGS,
    # A bucket of K, too: K counts tokens in a weight's gradient, which products of FP8 or int4 don't have.
    key=["M_BUCKET", "N", "K_BUCKET", "ACCUMULATE"],
    prune_configs_by={"early_config_prune": prune_configs},
    **RESTORE_C,
)
@triton.jit(do_not_specialize=["M"])  # M varies from call to call: it is worth no compilation of its own
def _gemm_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    M_BUCKET,
    K_BUCKET,
    a_strides,
    b_strides,
    c_strides,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """c[M,N] = a[M,K] b[K,N], or c += a b where ACCUMULATE; one program for each tile."""
    pid_m, pid_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n, mask_m, mask_n = tile_offsets(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + offs_m * a_strides[0] + offs_k[None, :] * a_strides[1]
    b_ptrs = b_ptr + offs_k[:, None] * b_strides[0] + offs_n * b_strides[1]
    step_a = tl.full([], BLOCK_K, tl.int64) * a_strides[1]  # int64: a stride of int32 times BLOCK_K may overflow
    step_b = tl.full([], BLOCK_K, tl.int64) * b_strides[0]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask_k = offs_k < K - start
        a = tl.load(a_ptrs, mask=mask_m & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += step_a
        b_ptrs += step_b

    c_ptrs = c_ptr + offs_m * c_strides[0] + offs_n * c_strides[1]
    if ACCUMULATE:
        acc += tl.load(c_ptrs, mask=mask_m & mask_n, other=0.0).to(tl.float32)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


_FEW_ROWS = 64  # of the smallest tiles: wgmma multiplies 64 rows at a time; outputs with at most so many split K
_TARGET_PROGRAMS = 128  # of split-K: about one for each of an H100's 132 multiprocessors
_SPLIT_K_BLOCK_N = 128  # columns of a tile as split-K counts them: parts don't depend on the tuned BLOCK_N
_MAX_SPLIT_K = 16  # bounds the float32 partial products in memory
_MIN_K_PER_SPLIT = 128  # at least one block of K, the longest of the configurations for few rows
_MAX_ACCUMULATORS = 64  # per thread with ACCUMULATE: with more, the loaded tile of c spills registers
_CPU_PROGRAMS = 4  # when interpreted: few, so that the persistent loop runs more than once


def _set_block_shapes(arguments: Mapping[str, Any]) -> None:
    m, n, k = (arguments[f"BLOCK_{size}"] for size in "MNK")
    arguments["a_desc"].block_shape = [k, m] if arguments["TRANS_A"] else [m, k]
    arguments["b_desc"].block_shape = [n, k] if arguments["TRANS_B"] else [k, n]


_TMA_CONFIGS = tile_configs(
    *((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3)),
    *((64, 128, 64, 4, 4), (64, 128, 128, 4, 4), (64, 256, 64, 8, 4)),
    pre_hook=_set_block_shapes,
)


def _prune_tma_configs(
    configs: list[triton.Config], arguments: Mapping[str, Any], *, ACCUMULATE: bool, **_: Any
) -> list[triton.Config]:
    max_accumulators = _MAX_ACCUMULATORS if ACCUMULATE else math.inf
    return [
        config
        for config in configs
        if (config.kwargs["BLOCK_M"] == _FEW_ROWS) == (arguments["M"] <= _FEW_ROWS)
        and config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"] / (32 * config.num_warps) <= max_accumulators
    ]


@triton.autotune(
    configs=_TMA_CONFIGS,
    key=["M_BUCKET", "N", "K_BUCKET", "ACCUMULATE", "TRANS_A", "TRANS_B"],
    prune_configs_by={"early_config_prune": _prune_tma_configs},
    **RESTORE_C,
)
@triton.jit(do_not_specialize=["M"])
def _gemm_tma_kernel(
    a_desc,
    b_desc,
    c_ptr,
    M,
    N,
    K,
    M_BUCKET,
    K_BUCKET,
    split_k,
    c_strides,
    TRANS_A: tl.constexpr,  # a_desc describes a^T [K,M]
    TRANS_B: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """c[split_k,M,N], each the sum over a part of K; persistent: each program takes tile after tile."""
    num_tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), split_k) * BLOCK_K
    for tile_id in tl.range(tl.program_id(0), num_tiles * split_k, tl.num_programs(0)):
        pid_m, pid_n = tile_id_to_mn(tile_id % num_tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        k_begin = tile_id // num_tiles * k_per_split
        k_end = tl.minimum(k_begin + k_per_split, K)
        start_m, start_n = (pid_m * BLOCK_M).to(tl.int32), (pid_n * BLOCK_N).to(tl.int32)  # TMA coordinates

        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start_k in range(k_begin, k_end, BLOCK_K):  # TMA fills with zeros beyond the tensor: no masks
            a = a_desc.load([start_k, start_m]).T if TRANS_A else a_desc.load([start_m, start_k])
            b = b_desc.load([start_n, start_k]).T if TRANS_B else b_desc.load([start_k, start_n])
            acc = tl.dot(a, b, acc)

        offs_m, offs_n, mask_m, mask_n = tile_offsets(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
        split_ptr = c_ptr + (tile_id // num_tiles).to(tl.int64) * c_strides[0]
        c_ptrs = split_ptr + offs_m * c_strides[1] + offs_n * c_strides[2]
        if ACCUMULATE:
            acc += tl.load(c_ptrs, mask=mask_m & mask_n, other=0.0).to(tl.float32)
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b in ``dtype``, of a[M,K] and b[K,N] of one dtype."""
    c = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    matmul_into(a, b, c)
    return c


def matmul_into(a: Tensor, b: Tensor, c: Tensor, accumulate: bool = False) -> None:
    """Write a b into c[M,N] of any dtype and strides; or add it to c, in float32 and rounded once."""
    (m, k), n = a.shape, b.shape[1]
    if uses_tma(a, b):
        _matmul_by_tma(a, b, c, accumulate)
    elif c.numel():
        # Here and in the other kernels arguments are positional, in the order of the signature: an autotuner hands its
        # pruning function a dictionary of these alone.
        _gemm_kernel[tile_grid(m, n)](
            *(a, b, c),
            *(m, n, k, size_bucket(m), size_bucket(k)),
            *(a.stride(), b.stride(), c.stride()),
            ACCUMULATE=accumulate,
        )


def uses_tma(a: Tensor, b: Tensor) -> bool:
    """Return whether a[M,K] b[K,N] takes the persistent kernel: 16 bits, N isn't small, TMA can load a or a^T, b or
    b^T. Its tiles have 128 columns or more; the other kernel has narrow ones."""
    loadable = all(can_use_tma(x) or can_use_tma(x.t()) for x in (a, b))
    return a.element_size() == 2 and b.shape[1] > NARROW and loadable


def _matmul_by_tma(a: Tensor, b: Tensor, c: Tensor, accumulate: bool) -> None:
    (m, k), n = a.shape, b.shape[1]
    trans = not can_use_tma(a), not can_use_tma(b)
    operands = [make_descriptor(x.t() if transpose else x) for x, transpose in zip((a, b), trans, strict=True)]
    split_k = split_k_of(m, n, k)
    partial = c[None] if split_k == 1 else torch.empty((split_k, m, n), dtype=torch.float32, device=a.device)
    max_programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else _CPU_PROGRAMS
    _gemm_tma_kernel[lambda meta: (min(max_programs, tile_grid(m, n)(meta)[0] * split_k),)](
        *(*operands, partial),
        *(m, n, k, size_bucket(m), size_bucket(k), split_k),
        partial.stride(),
        *trans,
        ACCUMULATE=accumulate and split_k == 1,
    )
    if split_k > 1:
        write_directly = c.is_contiguous() and not accumulate
        total = c if write_directly else torch.empty((m, n), dtype=torch.float32, device=a.device)
        sum_partials(partial.view(split_k, m * n), total)
        if not write_directly:
            c.copy_(total + c if accumulate else total)


def split_k_of(m: int, n: int, k: int) -> int:
    """Return the number of parts of split-K, which depends on sizes alone, not on the device.

    Bits still depend on the configuration that was tuned: a part is a whole number of blocks of BLOCK_K.
    """
    if m > _FEW_ROWS:
        return 1
    return max(1, min(_MAX_SPLIT_K, _TARGET_PROGRAMS // triton.cdiv(n, _SPLIT_K_BLOCK_N), k // _MIN_K_PER_SPLIT))


@custom_op("assay::gemm", lambda a, b: a.new_empty((a.shape[0], b.shape[1])))
def _gemm(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b, a.dtype)


differentiate(
    "assay::gemm",
    lambda saved, dc: (
        gemm(dc, saved.b.t()) if saved.needs.a else None,
        gemm(saved.a.t(), dc) if saved.needs.b else None,
    ),
    saves="a b",
)


@replayed
def gemm(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in the dtype of a[M,K] and b[K,N], rounded once from a float32 accumulator.

    Both are float32, bfloat16 or float16. Raises TypeError or ValueError, naming the argument, for another dtype, shape
    or device.
    """
    check(a=(a, FLOATING, "M K"), b=(b, ("a",), "K N"))
    return _gemm(a, b)
