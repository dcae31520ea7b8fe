"""GEMM with 4-bit weights, dequantised in registers as the kernel loads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import check_int4
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.tiles import (
    FP32_BLOCK_K,
    k_per_scale,
    pid_to_mn,
    prune_configs_by_dtype,
    size_bucket,
    tile_configs,
    tile_grid,
    tile_offsets,
)

_PLAIN, _AWQ, _GPTQ = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_PACKINGS = {"plain": _PLAIN, "awq": _AWQ, "gptq": _GPTQ}

_CONFIGS = tile_configs(
    *((128, 128, 64, 8, 3), (128, 64, 128, 8, 2), (64, 128, 64, 4, 3), (64, 64, FP32_BLOCK_K, 4, 2)),
    *((256, 32, 64, 8, 2), (256, 32, 128, 8, 2), (64, 32, FP32_BLOCK_K, 4, 2)),
    *((32, 128, 128, 8, 3), (32, 128, 64, 4, 2), (32, 64, FP32_BLOCK_K, 4, 2)),
)


@triton.jit
def _unpack_columns(words, AWQ: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the nibbles [ROWS, COLUMNS] of words that each pack eight columns."""
    column = tl.arange(0, 8)
    nibble = column % 2 * 4 + column // 2 if AWQ else column  # AWQ's nibbles hold the columns 0 2 4 6 1 3 5 7
    return tl.reshape(words[:, :, None] >> (nibble * 4)[None, None, :] & 15, [ROWS, COLUMNS])


@triton.jit
def _unpack_rows(words, ROWS_PER_WORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the nibbles [ROWS, COLUMNS] of words that each pack ROWS_PER_WORD rows."""
    return tl.reshape(words[:, None, :] >> (tl.arange(0, ROWS_PER_WORD) * 4)[None, :, None] & 15, [ROWS, COLUMNS])


@triton.autotune(
    configs=_CONFIGS,
    key=["M_BUCKET", "N", "K", "GROUP_SIZE", "PACKING"],
    prune_configs_by={"early_config_prune": prune_configs_by_dtype},
)
@triton.jit(do_not_specialize=["M"])
def _gemm_int4_kernel(
    x_ptr,
    q_ptr,
    scales_ptr,
    zeros_ptr,
    y_ptr,
    M,
    N,
    K,
    WORDS_PER_ROW,
    M_BUCKET,
    x_strides,
    q_strides,
    scales_strides,
    zeros_strides,
    y_strides,
    GROUP_SIZE: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """y[M,N] = x[M,K] ((q - zero) scale)[K,N]; GROUP_SIZE rows of q share a scale and a zero-point.

    WORDS_PER_ROW = N / 8: int32 words that pack eight columns each, in AWQ's codes and in AWQ's and GPTQ's zero-points.
    """
    K_PER_SCALE: tl.constexpr = k_per_scale(GROUP_SIZE, BLOCK_K)
    NUM_SCALES: tl.constexpr = BLOCK_K // K_PER_SCALE
    ROWS_PER_WORD: tl.constexpr = 2 if PACKING == _PLAIN else 8

    pid_m, pid_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n, mask_m, mask_n = tile_offsets(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
    offs_word = pid_n * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_word = offs_word[None, :] < WORDS_PER_ROW
    x_ptrs = x_ptr + offs_m * x_strides[0] + offs_k[None, :] * x_strides[1]
    step = tl.full([], BLOCK_K, tl.int64) * x_strides[1]
    offs_scale = tl.arange(0, NUM_SCALES).to(tl.int64) * K_PER_SCALE

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k_left = K - start
        x = tl.load(x_ptrs, mask=mask_m & (offs_k < k_left)[None, :], other=0.0)
        x_ptrs += step

        if PACKING == _AWQ:
            k = start + offs_k[:, None]
            q_ptrs = q_ptr + k * q_strides[0] + offs_word[None, :] * q_strides[1]
            packed = tl.load(q_ptrs, mask=(k < K) & mask_word, other=0)
            q = _unpack_columns(packed, True, BLOCK_K, BLOCK_N)
        else:
            k = start // ROWS_PER_WORD + tl.arange(0, BLOCK_K // ROWS_PER_WORD).to(tl.int64)[:, None]
            mask_q = (k * ROWS_PER_WORD < K) & mask_n
            packed = tl.load(q_ptr + k * q_strides[0] + offs_n * q_strides[1], mask=mask_q, other=0)
            q = _unpack_rows(packed.to(tl.int32), ROWS_PER_WORD, BLOCK_K, BLOCK_N)

        group = ((start + offs_scale) // GROUP_SIZE)[:, None]
        mask_group = (offs_scale < k_left)[:, None]
        scale = tl.load(
            scales_ptr + group * scales_strides[0] + offs_n * scales_strides[1], mask=mask_group & mask_n, other=0.0
        )
        if PACKING == _PLAIN:
            zero_ptrs = zeros_ptr + group * zeros_strides[0] + offs_n * zeros_strides[1]
            zero = tl.load(zero_ptrs, mask=mask_group & mask_n, other=0).to(tl.int32)
        else:
            zero_ptrs = zeros_ptr + group * zeros_strides[0] + offs_word[None, :] * zeros_strides[1]
            packed_zero = tl.load(zero_ptrs, mask=mask_group & mask_word, other=0)
            zero = _unpack_columns(packed_zero, PACKING == _AWQ, NUM_SCALES, BLOCK_N)
            if PACKING == _GPTQ:
                zero += 1  # zero-points are stored minus one: 15 means 16

        shifted = (tl.reshape(q, [NUM_SCALES, K_PER_SCALE, BLOCK_N]) - zero[:, None, :]).to(tl.float32)
        weights = tl.reshape(shifted * scale.to(tl.float32)[:, None, :], [BLOCK_K, BLOCK_N]).to(x.dtype)
        acc = tl.dot(x, weights, acc, input_precision="ieee")

    y_ptrs = y_ptr + offs_m * y_strides[0] + offs_n * y_strides[1]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_m & mask_n)


@custom_op("assay::gemm_int4", lambda x, qweight, scales, *rest: x.new_empty((x.shape[0], scales.shape[1])))
def _gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, packing: str) -> Tensor:
    (m, k), (groups, n) = x.shape, scales.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if y.numel():
        _gemm_int4_kernel[tile_grid(m, n)](
            *(x, qweight, scales, zeros, y),
            *(m, n, k, n // 8, size_bucket(m)),
            *(tensor.stride() for tensor in (x, qweight, scales, zeros, y)),
            GROUP_SIZE=max(k // max(groups, 1), 1),
            PACKING=_PACKINGS[packing].value,
        )
    return y


@replayed
def gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain") -> Tensor:
    """Return x ((q - zero) scale) [M,N] of x[M,K], 4-bit codes q[K,N], and a scale and zero-point for g codes along K.

    x and scales[K/g,N] are both float32, bfloat16 or float16. The codes are packed as

    - "plain": qweight uint8[K/2,N] (low nibble = even k), zeros uint8[K/g,N], not packed;
    - "awq": qweight int32[K,N/8] and zeros int32[K/g,N/8], nibbles in the order 0 2 4 6 1 3 5 7;
    - "gptq": qweight int32[K/8,N] and zeros int32[K/g,N/8], nibbles in order, zero-points stored minus one.

    A weight is rounded to x's dtype before it is multiplied. Raises TypeError or ValueError, naming the argument, for
    another packing, dtype, shape or device, and if the rows of scales don't divide K.
    """
    check_int4(x, qweight, scales, zeros, packing)
    return _gemm_int4(x, qweight, scales, zeros, packing)
