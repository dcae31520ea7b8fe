"""What the GEMM kernels share: the order of tiles, their offsets and masks, and autotuning configurations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Outputs of at most so many columns (or else rows) get tiles of so many: tall or flat ones. Tiles of so few rows run on
# mma.sync, since Hopper's wgmma multiplies 64 rows at a time.
NARROW = 32
# The BLOCK_K of a configuration for float32, and of no other, in kernels with separate tiles for float32: gemm_int4,
# gemm_2to4 and the MoE. Products of float32 run on no tensor cores; there a longer block spills registers.
FP32_BLOCK_K = 16
_MAX_FP32_MACS = 4096  # of a thread and tile, in all kernels pruned by `prune_configs`: more spill registers
GROUP_M = 8  # of every configuration, see `tile_id_to_mn`: it is not tuned


@triton.jit
def pid_to_mn(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return pid_m and pid_n (int64), the row and column of this program's tile, counted in tiles."""
    return tile_id_to_mn(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)


@triton.jit
def tile_id_to_mn(tile_id, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return pid_m and pid_n (int64), the row and column of a tile of an [M,N] output, counted in tiles.

    Tiles are in grouped order: GROUP_M tiles down a column, then the same rows of the next column. Programs that run at
    the same time so read few rows of A and few columns of B, which stay in the L2 cache.
    """
    tile_id = tile_id.to(tl.int64)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    group_id = tile_id // (GROUP_M * num_pid_n)
    pid_in_group = tile_id % (GROUP_M * num_pid_n)
    group_size_m = tl.minimum(tl.cdiv(M, BLOCK_M) - group_id * GROUP_M, GROUP_M)  # the last group may be smaller
    return group_id * GROUP_M + pid_in_group % group_size_m, pid_in_group // group_size_m


@triton.jit
def tile_offsets(pid_m, pid_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return offs_m [BLOCK_M,1], offs_n [1,BLOCK_N] (int64) of a tile of an [M,N] output, and their masks."""
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    return offs_m, offs_n, offs_m < M, offs_n < N


@triton.constexpr_function
def k_per_scale(group_size: int, block_k: int) -> int:
    """Return the longest run along K that has one scale in every block: the largest power of two that divides both
    ``group_size`` and ``block_k``, itself a power of two."""
    return block_k if group_size % block_k == 0 else group_size & -group_size  # its lowest set bit


def tile_configs(
    *tiles: tuple[int, int, int, int, int], pre_hook: Callable[[Mapping[str, Any]], None] | None = None
) -> list[triton.Config]:
    """Return the configurations of (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages)."""
    return [
        triton.Config(
            {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": GROUP_M},
            num_warps=num_warps,
            num_stages=num_stages,
            pre_hook=pre_hook,
        )
        for block_m, block_n, block_k, num_warps, num_stages in tiles
    ]


def tile_grid(m: int, n: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """Return a launch grid of one program for each tile of an [m, n] output."""
    return lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)


def prune_configs(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """Return an autotuner's configurations whose tiles suit M and N: tall, flat or square.

    For float32, the dtype of the kernel's first argument, only those whose threads have enough registers.
    """
    few_columns = arguments["N"] <= NARROW
    few_rows = arguments["M"] <= NARROW and not few_columns
    max_macs = _MAX_FP32_MACS if next(iter(arguments.values())).dtype == torch.float32 else math.inf
    return [
        config
        for config in configs
        if (config.kwargs["BLOCK_N"] <= NARROW) == few_columns
        and (config.kwargs["BLOCK_M"] <= NARROW) == few_rows
        and macs_per_thread(config) <= max_macs
    ]


def prune_configs_by_dtype(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """`prune_configs` for a kernel that has separate tiles for float32 (`matches_dtype`)."""
    dtype = next(iter(arguments.values())).dtype
    return [config for config in prune_configs(configs, arguments) if matches_dtype(config, dtype)]


def matches_dtype(config: triton.Config, dtype: torch.dtype) -> bool:
    """Return whether a configuration is for ``dtype``, where float32 has separate tiles (`FP32_BLOCK_K`)."""
    is_for_float32 = config.kwargs["BLOCK_K"] == FP32_BLOCK_K
    return bool(is_for_float32 == (dtype == torch.float32))


def macs_per_thread(config: triton.Config) -> float:
    """Return the multiply-accumulates of a thread for one tile and block of K."""
    tile = math.prod(config.kwargs[size] for size in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return tile / (32 * config.num_warps)


def size_bucket(size: int) -> int:
    """Return the next power of two, by which kernels are tuned for a size that varies from call to call."""
    return int(triton.next_power_of_2(size))


_saved_c: list[Tensor] = []


def _save_c(arguments: Mapping[str, Any], reset_only: bool = False) -> None:
    # Triton passes reset_only=True once after tuning, for hooks that reset arguments: no post_hook follows that call.
    if arguments["ACCUMULATE"] and not reset_only:
        _saved_c.append(arguments["c_ptr"].clone())


def _restore_c(arguments: Mapping[str, Any], exception: Exception | None) -> None:
    if arguments["ACCUMULATE"]:
        arguments["c_ptr"].copy_(_saved_c.pop())


RESTORE_C: dict[str, Any] = {"pre_hook": _save_c, "post_hook": _restore_c}
"""Autotuner hooks that restore c after each launch that is timed, where the kernel accumulates into it.

``restore_value=["c_ptr"]`` would copy c even where it is overwritten.
"""
