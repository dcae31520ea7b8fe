"""What the matrix products share: the order in which programs take tiles, and the tiles to choose from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_NARROW = 32
_SHORT = 16
_MOST_PRODUCTS = 4096  # of float32 by a thread and tile, which run on no tensor cores: more of them spill registers


@triton.jit
def tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column (int64) of the tile that this program computes, counted in tiles."""
    return tile_numbered(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)


@triton.jit
def tile_numbered(number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column (int64) of a tile of an [M,N] output, counted in tiles.

    Programs that run at the same time take GROUP_M tiles below one another before the next column of tiles, so that
    what they read of both operands stays in the L2 cache.
    """
    program = number.to(tl.int64)
    across = tl.cdiv(N, BLOCK_N)
    band = program // (GROUP_M * across)
    within = program % (GROUP_M * across)
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - band * GROUP_M, GROUP_M)  # the last band may be lower
    return band * GROUP_M + within % height, within // height


@triton.jit
def tile_range(tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows [BLOCK_M,1] and columns [1,BLOCK_N] (int64) of a tile, and which of them an [M,N] output has."""
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    return rows, columns, rows < M, columns < N


def tile_configs(
    *tiles: tuple[int, int, int, int, int], hook: Callable[[Mapping[str, Any]], None] | None = None
) -> list[triton.Config]:
    """Configurations of (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages), and what is to run before each launch."""
    return [
        triton.Config(
            {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8},
            num_warps=warps,
            num_stages=stages,
            pre_hook=hook,
        )
        for block_m, block_n, block_k, warps, stages in tiles
    ]


def fitting_tiles(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """Of an autotuner's configurations those for an output as narrow as arguments say: tall, flat or squarish tiles.

    Of float32, the dtype of the first argument, those alone that the registers of their threads have room for.
    """
    few_columns = arguments["N"] <= _NARROW
    few_rows = arguments["M"] <= _NARROW and not few_columns
    most = _MOST_PRODUCTS if next(iter(arguments.values())).dtype == torch.float32 else math.inf
    return [
        config
        for config in configs
        if (config.kwargs["BLOCK_N"] <= _NARROW) == few_columns
        and (config.kwargs["BLOCK_M"] <= _NARROW) == few_rows
        and products_of(config) <= most
    ]


def fitting_dtype(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """`fitting_tiles` of a kernel that has tiles of their own for float32, with blocks of 16 along K."""
    dtype = next(iter(arguments.values())).dtype
    return [config for config in fitting_tiles(configs, arguments) if fits_dtype(config, dtype)]


def fits_dtype(config: triton.Config, dtype: torch.dtype) -> bool:
    """Blocks of 16 along K are float32's."""
    return (dtype == torch.float32) == bool(config.kwargs["BLOCK_K"] == _SHORT)


def products_of(config: triton.Config) -> float:
    """How many a thread computes of a tile."""
    tile = math.prod(config.kwargs[side] for side in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    return tile / (32 * config.num_warps)


def tile_grid(m: int, n: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """One program for each tile of an [m, n] output."""
    return lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)


@triton.constexpr_function
def run_length(group: int, block: int) -> int:
    """How many neighbours along K have one scale, whose groups begin at multiples of ``group`` and tiles at those of
    ``block``, a power of two: it divides both."""
    return block if group % block == 0 else group & -group


def size_class(size: int) -> int:
    """The power of two that a batch size is tuned as: one that varies from call to call is not tuned at each value."""
    return int(triton.next_power_of_2(size))


_sums: list[Tensor] = []


def _keep(arguments: Mapping[str, Any], reset_only: bool = False) -> None:
    if arguments["ADD"] and not reset_only:
        _sums.append(arguments["c_ptr"].clone())


def _put_back(arguments: Mapping[str, Any], exception: Exception | None) -> None:
    if arguments["ADD"]:
        arguments["c_ptr"].copy_(_sums.pop())


RESTORED: dict[str, Any] = {"pre_hook": _keep, "post_hook": _put_back}
"""A tuner's hooks: each configuration that it times finds c as it was, where the kernel would add to it. As its
``restore_value``, which copies c for every launch that is timed."""
