"""Block-scaled GEMM by `tl.dot_scaled`: MXFP8 (OCP MX 1.0) and NVFP4.

`tl.dot_scaled` is one instruction of Blackwell's tensor cores in tiles of 128 rows. In other tiles, and on earlier
GPUs, the compiler multiplies codes by their scales in bfloat16, in registers: the product of the few bits of a code and
a scale is exact there unless it is subnormal or overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, check, check_shape
from assay.kernels.triton.layouts import can_use_tma, k_major, make_descriptor
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.replay import replayed
from assay.kernels.triton.tiles import pid_to_mn, prune_configs, size_bucket, tile_configs, tile_grid, tile_offsets

_E4M3, _E8M0, _UINT8 = (torch.float8_e4m3fn,), (torch.float8_e8m0fnu,), (torch.uint8,)
_MXFP8_GROUP, _NVFP4_GROUP = 32, 16  # elements along K that share a scale
_CODES_PER_SCALE_LOAD = 256  # along K; the scales of fewer codes are too few bytes to be copied asynchronously


@triton.jit
def _scales_of_step(scales, step: tl.constexpr, STEPS: tl.constexpr):
    """Return columns step * n to (step + 1) * n of scales [rows, STEPS * n]; STEPS is a power of two."""
    # Triton can't slice a tensor in registers, but it can split one in two.
    if STEPS == 1:
        result = scales
    else:
        halves = tl.reshape(scales, [scales.shape[0], 2, scales.shape[1] // 2])
        first, second = tl.split(tl.permute(halves, (0, 2, 1)))
        if step < STEPS // 2:
            result = _scales_of_step(first, step, STEPS // 2)
        else:
            result = _scales_of_step(second, step - STEPS // 2, STEPS // 2)
    return result


@triton.jit(do_not_specialize=["M"])
def _gemm_scaled_kernel(
    a_ptr,
    a_desc,
    b_ptr,
    scale_a_ptr,
    scale_b_ptr,
    global_a_ptr,
    global_b_ptr,
    c_ptr,
    M,
    N,
    K,
    K_SCALES,
    M_BUCKET,
    a_strides,
    b_strides,
    scale_a_strides,
    scale_b_strides,
    c_strides,
    FORMAT: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    CODES_PER_SCALE_LOAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """c[M,N] = (a[M,K] scale_a[M,K_SCALES]) (b[K,N] scale_b[K_SCALES,N]) global_a[] global_b[].

    K and SCALE_GROUP count bytes, of which one holds two codes of "e2m1"; BLOCK_K counts codes. Global scales may be
    None. ``a_desc`` is a descriptor of a, or None where TMA can't load it: without TMA the order in which codes go to
    registers leaves loads of 4 or 8 bytes.
    """
    BLOCK_BYTES: tl.constexpr = BLOCK_K // 2 if FORMAT == "e2m1" else BLOCK_K
    BLOCK_SCALES: tl.constexpr = BLOCK_BYTES // SCALE_GROUP
    STEPS: tl.constexpr = max(1, CODES_PER_SCALE_LOAD // BLOCK_K)  # for which scales are loaded at once

    pid_m, pid_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m, offs_n, mask_m, mask_n = tile_offsets(pid_m, pid_n, M, N, BLOCK_M, BLOCK_N)
    start_m = (pid_m * BLOCK_M).to(tl.int32)
    offs_k = tl.arange(0, BLOCK_BYTES).to(tl.int64)
    offs_scale = tl.arange(0, STEPS * BLOCK_SCALES).to(tl.int64)[None, :]
    a_ptrs = a_ptr + offs_m * a_strides[0] + offs_k[None, :] * a_strides[1]
    b_ptrs = b_ptr + offs_k[:, None] * b_strides[0] + offs_n * b_strides[1]
    scale_a_ptrs = scale_a_ptr + offs_m * scale_a_strides[0] + offs_scale * scale_a_strides[1]
    offs_bn = tl.trans(offs_n)  # tl.dot_scaled takes the scales of b as [N,K_SCALES]
    scale_b_ptrs = scale_b_ptr + offs_bn * scale_b_strides[1] + offs_scale * scale_b_strides[0]
    step_a = tl.full([], BLOCK_BYTES, tl.int64) * a_strides[1]
    step_b = tl.full([], BLOCK_BYTES, tl.int64) * b_strides[0]
    step_scale_a = tl.full([], STEPS * BLOCK_SCALES, tl.int64) * scale_a_strides[1]
    step_scale_b = tl.full([], STEPS * BLOCK_SCALES, tl.int64) * scale_b_strides[0]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, STEPS * BLOCK_BYTES):
        mask_scale = offs_scale < K_SCALES - start // SCALE_GROUP
        scales_a = tl.load(scale_a_ptrs, mask=mask_m & mask_scale, other=0.0)
        scales_b = tl.load(scale_b_ptrs, mask=(offs_bn < N) & mask_scale, other=0.0)
        for step in tl.static_range(STEPS):
            start_k = start + step * BLOCK_BYTES
            mask_k = offs_k < K - start_k
            if a_desc is not None:
                a = a_desc.load([start_m, start_k])
            else:
                a = tl.load(a_ptrs, mask=mask_m & mask_k[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n, other=0.0)
            scale_a, scale_b = _scales_of_step(scales_a, step, STEPS), _scales_of_step(scales_b, step, STEPS)
            acc = tl.dot_scaled(a, scale_a, FORMAT, b, scale_b, FORMAT, acc)
            a_ptrs += step_a
            b_ptrs += step_b
        scale_a_ptrs += step_scale_a
        scale_b_ptrs += step_scale_b

    if global_a_ptr is not None:
        acc = acc * tl.load(global_a_ptr) * tl.load(global_b_ptr)
    c_ptrs = c_ptr + offs_m * c_strides[0] + offs_n * c_strides[1]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=mask_m & mask_n)


def _set_block_shape(arguments: Mapping[str, Any]) -> None:
    if arguments["a_desc"] is not None:
        block_bytes = arguments["BLOCK_K"] // _codes_per_byte(arguments["FORMAT"])
        arguments["a_desc"].block_shape = [arguments["BLOCK_M"], block_bytes]


def _codes_per_byte(format: str) -> int:
    return 2 if format == "e2m1" else 1


def _autotuned(*tiles: tuple[int, int, int, int, int]) -> Any:
    autotune = triton.autotune(
        configs=tile_configs(*tiles, pre_hook=_set_block_shape),
        key=["M_BUCKET", "N", "K"],
        prune_configs_by={"early_config_prune": prune_configs},
    )
    return autotune(_gemm_scaled_kernel)


_gemm_mxfp8_kernel = _autotuned(
    *((128, 128, 128, 8, 2), (128, 128, 64, 8, 3), (128, 64, 128, 8, 3), (64, 64, 128, 8, 3)),
    *((128, 32, 128, 4, 3), (128, 32, 64, 4, 4), (32, 64, 128, 4, 3), (32, 64, 64, 4, 4)),
)
_gemm_nvfp4_kernel = _autotuned(
    *((128, 128, 128, 8, 3), (128, 128, 64, 8, 3), (128, 64, 128, 8, 3), (64, 64, 128, 8, 3)),
    *((128, 32, 128, 4, 3), (128, 32, 64, 4, 4), (32, 64, 128, 4, 3), (32, 64, 64, 4, 4)),
)


def _launch(
    kernel: Any,
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    global_scales: tuple[Tensor | None, Tensor | None],
    *,
    format: str,
    scale_group: int,
) -> Tensor:
    """Return bfloat16 [M,N] of a[M,bytes], b[bytes,N] and scales [M,bytes/scale_group], [bytes/scale_group,N]."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        a, b = k_major(a, b)
        kernel[tile_grid(m, n)](
            *(a, make_descriptor(a) if can_use_tma(a) else None, b, *scales, *global_scales, c),
            *(m, n, k, k // scale_group, size_bucket(m)),
            *(tensor.stride() for tensor in (a, b, *scales, c)),
            FORMAT=format,
            SCALE_GROUP=scale_group,
            CODES_PER_SCALE_LOAD=min(_CODES_PER_SCALE_LOAD, triton.next_power_of_2(k * _codes_per_byte(format))),
        )
    return c


@custom_op("assay::gemm_mxfp8", lambda a, b, *scales: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16))
def _gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    scales = scale_a.view(torch.uint8), scale_b.view(torch.uint8)
    return _launch(_gemm_mxfp8_kernel, a, b, scales, (None, None), format="e4m3", scale_group=_MXFP8_GROUP)


@replayed
def gemm_mxfp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return (a scale_a) (b scale_b) as bfloat16 [M,N], of float8_e4m3fn a[M,K] and b[K,N].

    Scales are float8_e8m0fnu, scale_a[M,K/32] and scale_b[K/32,N]; sums are float32. Raises TypeError or ValueError,
    naming the argument, for another dtype, shape or device, and if 32 doesn't divide K.
    """
    scales = {"scale_a": (scale_a, _E8M0, "M blocks_a"), "scale_b": (scale_b, _E8M0, "blocks_b N")}
    check(a=(a, _E4M3, "M K"), b=(b, _E4M3, "K N"), **scales)
    groups = _check_groups(a.shape[1], _MXFP8_GROUP)
    check_shape("scale_a", scale_a, (a.shape[0], groups))
    check_shape("scale_b", scale_b, (groups, b.shape[1]))
    return _gemm_mxfp8(a, b, scale_a, scale_b)


@custom_op("assay::gemm_nvfp4", lambda a, b, *rest: a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16))
def _gemm_nvfp4(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor) -> Tensor:
    scales, global_scales = (scale_a, scale_b.t()), (global_a, global_b)
    return _launch(_gemm_nvfp4_kernel, a, b.t(), scales, global_scales, format="e2m1", scale_group=_NVFP4_GROUP // 2)


@replayed
def gemm_nvfp4(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, global_a: Tensor, global_b: Tensor) -> Tensor:
    """Return (a scale_a global_a) (b scale_b global_b)^T as bfloat16 [M,N], of two e2m1 codes in each byte of a and b.

    a is uint8[M,K/2] and b uint8[N,K/2], even k's in the low nibbles; scale_a[M,K/16] and scale_b[N,K/16] are
    float8_e4m3fn, global_a[] and global_b[] float32. Sums are float32, and take both global scales at the end. Raises
    TypeError or ValueError, naming the argument, for another dtype, shape or device, and if 16 doesn't divide K.
    """
    check(
        a=(a, _UINT8, "M K/2"),
        b=(b, _UINT8, "N K/2"),
        scale_a=(scale_a, _E4M3, "M blocks_a"),
        scale_b=(scale_b, _E4M3, "N blocks_b"),
        global_a=(global_a, FLOAT32, ""),
        global_b=(global_b, FLOAT32, ""),
    )
    groups = _check_groups(2 * a.shape[1], _NVFP4_GROUP)
    check_shape("scale_a", scale_a, (a.shape[0], groups))
    check_shape("scale_b", scale_b, (b.shape[0], groups))
    return _gemm_nvfp4(a, b, scale_a, scale_b, global_a, global_b)


def _check_groups(k: int, group: int) -> int:
    if k % group:
        raise ValueError(f"a: expected K to be a multiple of {group}, got K={k}")
    return k // group
