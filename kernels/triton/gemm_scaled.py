"""Matrix products of microscaled codes, float32 inside: what those of MXFP8 and of NVFP4 share.

`tl.dot_scaled` is one instruction of Blackwell's tensor cores in tiles of 128 rows. In others, and on a GPU before it,
the compiler multiplies codes by their scales in bfloat16, in registers: a product of a code's and a scale's few bits is
exact there unless it is subnormal or overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.layouts import can_use_tma, k_major, make_descriptor
from assay.kernels.triton.tiles import (
    pid_to_mn,
    prune_configs,
    size_bucket,
    tile_configs,
    tile_grid,
    tile_offsets,
)

_RUN = 256  # codes along K whose scales are loaded at once


@triton.jit
def _of_step(scales, step: tl.constexpr, STEPS: tl.constexpr):
    """Columns step * n to (step + 1) * n of scales [rows, STEPS * n]; STEPS is a power of two."""
    if STEPS == 1:
        found = scales
    else:
        halves = tl.reshape(scales, [scales.shape[0], 2, scales.shape[1] // 2])
        first, second = tl.split(tl.permute(halves, (0, 2, 1)))
        if step < STEPS // 2:
            found = _of_step(first, step, STEPS // 2)
        else:
            found = _of_step(second, step - STEPS // 2, STEPS // 2)
    return found


@triton.jit(do_not_specialize=["M"])
def _gemm_scaled_kernel(
    a_ptr,
    a_tiles,
    b_ptr,
    scale_a_ptr,
    scale_b_ptr,
    global_a_ptr,
    global_b_ptr,
    c_ptr,
    M,
    N,
    K,
    BLOCKS,
    M_CLASS,
    a_strides,
    b_strides,
    scale_a_strides,
    scale_b_strides,
    c_strides,
    FORMAT: tl.constexpr,
    SHARE: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """SHARE bytes along K have one scale. K counts bytes, in which codes of "e2m1" lie two; BLOCK_K counts codes.

    Scales of RUN codes are loaded at once, for several steps: of one step so few lie side by side that a GPU couldn't
    copy them asynchronously. BLOCKS are the scales along K.

    ``a_tiles``: a descriptor of a, if it can have one. Its codes go to registers in an order that else leaves loads of
    4 or 8 bytes.
    """
    BYTES: tl.constexpr = BLOCK_K // 2 if FORMAT == "e2m1" else BLOCK_K
    SCALES: tl.constexpr = BYTES // SHARE
    STEPS: tl.constexpr = max(1, RUN // BLOCK_K)

    tile_m, tile_n = pid_to_mn(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, columns, in_rows, in_columns = tile_offsets(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
    row = (tile_m * BLOCK_M).to(tl.int32)
    inner = tl.arange(0, BYTES).to(tl.int64)
    blocks = tl.arange(0, STEPS * SCALES).to(tl.int64)[None, :]
    a_ptrs = a_ptr + rows * a_strides[0] + inner[None, :] * a_strides[1]
    b_ptrs = b_ptr + inner[:, None] * b_strides[0] + columns * b_strides[1]
    scale_a_ptrs = scale_a_ptr + rows * scale_a_strides[0] + blocks * scale_a_strides[1]
    b_rows = tl.trans(columns)  # the scales of b are taken as [N,K/SHARE]
    scale_b_ptrs = scale_b_ptr + b_rows * scale_b_strides[1] + blocks * scale_b_strides[0]
    step_a = tl.full([], BYTES, tl.int64) * a_strides[1]
    step_b = tl.full([], BYTES, tl.int64) * b_strides[0]
    step_scale_a = tl.full([], STEPS * SCALES, tl.int64) * scale_a_strides[1]
    step_scale_b = tl.full([], STEPS * SCALES, tl.int64) * scale_b_strides[0]

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, STEPS * BYTES):
        blocks_left = blocks < BLOCKS - start // SHARE
        scales_a = tl.load(scale_a_ptrs, mask=in_rows & blocks_left, other=0.0)
        scales_b = tl.load(scale_b_ptrs, mask=(b_rows < N) & blocks_left, other=0.0)
        for step in tl.static_range(STEPS):
            at = start + step * BYTES
            left = inner < K - at
            if a_tiles is not None:
                a = a_tiles.load([row, at])
            else:
                a = tl.load(a_ptrs, mask=in_rows & left[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=left[:, None] & in_columns, other=0.0)
            scale_a, scale_b = _of_step(scales_a, step, STEPS), _of_step(scales_b, step, STEPS)
            acc = tl.dot_scaled(a, scale_a, FORMAT, b, scale_b, FORMAT, acc)
            a_ptrs += step_a
            b_ptrs += step_b
        scale_a_ptrs += step_scale_a
        scale_b_ptrs += step_scale_b

    if global_a_ptr is not None:
        acc = acc * tl.load(global_a_ptr) * tl.load(global_b_ptr)
    c_ptrs = c_ptr + rows * c_strides[0] + columns * c_strides[1]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


def _sets_tiles(arguments: Mapping[str, Any]) -> None:
    """A configuration's hook: the sizes of a's tiles, in bytes."""
    if arguments["a_tiles"] is not None:
        arguments["a_tiles"].block_shape = [arguments["BLOCK_M"], arguments["BLOCK_K"] // _codes(arguments["FORMAT"])]


def _codes(format: str) -> int:
    """In a byte."""
    return 2 if format == "e2m1" else 1


def tuned(*tiles: tuple[int, int, int, int, int]) -> Any:
    """The kernel, tuned among a format's tiles, which are as `tile_configs` takes them."""
    configs = tile_configs(*tiles, pre_hook=_sets_tiles)
    tuning = triton.autotune(
        configs=configs, key=["M_CLASS", "N", "K"], prune_configs_by={"early_config_prune": prune_configs}
    )
    return tuning(_gemm_scaled_kernel)


def scaled_product(
    kernel: Any,
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    multipliers: tuple[Tensor | None, Tensor | None],
    *,
    format: str,
    share: int,
) -> Tensor:
    """bfloat16 [M,N] of codes a[M,bytes] and b[bytes,N], scales [M,bytes/share] and [bytes/share,N], and multipliers of
    the sums, if any."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    if c.numel():
        a, b = k_major(a, b)
        kernel[tile_grid(m, n)](
            *(a, make_descriptor(a) if can_use_tma(a) else None, b, *scales, *multipliers, c),
            *(m, n, k, k // share, size_bucket(m)),
            *(tensor.stride() for tensor in (a, b, *scales, c)),
            FORMAT=format,
            SHARE=share,
            RUN=min(_RUN, triton.next_power_of_2(k * _codes(format))),
        )
    return c
