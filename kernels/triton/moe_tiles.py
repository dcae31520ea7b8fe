"""Grouped products of a mixture of experts: each block of sorted rows is multiplied by the weights of its expert.

A tile of a product lies the other way round, [columns, rows]: the columns of weights are on the tall side of the tensor
cores, which is filled however few rows an expert has. Tiles of weights are copied by descriptors where they lie well;
rows of tokens are gathered, which Hopper's descriptors can't.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.kernels.triton.descriptors import describable, described
from assay.kernels.triton.tiles import tile_of_program

_SHORT = 16
_MOST_SUMS = {2: 96, 4: 64}  # float32 sums of a thread, by the bytes of what is multiplied
_MOST_DESCRIBED_SUMS = 128  # where descriptors copy the weights: operands of products don't lie in registers there
_MOST_PRODUCTS = {2: 4096, 4: 1024}  # by a thread and tile; float32's run on no tensor core


def grouped_configs(
    products: int, descriptors: Mapping[str, bool], *tiles: tuple[int, int, int, int]
) -> dict[str, Any]:
    """What an autotuner takes: configurations of (BLOCK_N, BLOCK_K, num_warps, num_stages), and their pruning.

    ``products``: how many sums a kernel holds of each element of a tile. ``descriptors`` names the arguments that may
    be descriptors: of weights (True), or of sorted rows.
    """

    def sets_tiles(arguments: Mapping[str, Any]) -> None:
        for name, of_weights in descriptors.items():
            if isinstance(arguments[name], TensorDescriptor):
                rows, inner = arguments["BLOCK_N" if of_weights else "BLOCK_M"], arguments["BLOCK_K"]
                along_k = not of_weights or arguments[f"{name.upper()}_ALONG_K"]
                tile = [rows, inner] if along_k else [inner, rows]
                arguments[name].block_shape = [1, *tile] if of_weights else tile

    def fitting(configs: list[triton.Config], arguments: Mapping[str, Any], **keywords: Any) -> list[triton.Config]:
        first = next(arguments[name] for name, of_weights in descriptors.items() if of_weights)
        if isinstance(first, TensorDescriptor):
            most_sums, most_products = _MOST_DESCRIBED_SUMS, math.inf
        else:
            most_sums, most_products = _MOST_SUMS[first.element_size()], _MOST_PRODUCTS[first.element_size()]
        kept = []
        for config in configs:
            sums = keywords["BLOCK_M"] * config.kwargs["BLOCK_N"] / (32 * config.num_warps)
            fits = sums * products <= most_sums and sums * config.kwargs["BLOCK_K"] <= most_products
            if fits and fits_dtype(config, first):
                kept.append(config)
        return kept

    configs = [
        triton.Config(
            {"BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8},
            num_warps=warps,
            num_stages=stages,
            pre_hook=sets_tiles,
        )
        for block_n, block_k, warps, stages in tiles
    ]
    return {"configs": configs, "prune_configs_by": {"early_config_prune": fitting}}


def fits_dtype(config: triton.Config, operand: Any) -> bool:
    """Blocks of 16 along K are float32's."""
    single = isinstance(operand, Tensor) and operand.dtype == torch.float32
    return single == bool(config.kwargs["BLOCK_K"] == _SHORT)


@triton.jit
def tile_of_expert(blocks_ptr, BLOCKS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """This program's expert (E or more of a block without rows), first sorted row, the row past the last, and the
    number of its tile of columns."""
    tile_m, tile_n = tile_of_program(BLOCKS * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M)
    block_ptr = blocks_ptr + tile_m * 3
    return tl.load(block_ptr), tl.load(block_ptr + 1), tl.load(block_ptr + 2), tile_n


@triton.jit
def weights_from(
    w, expert, column, columns, strides, DESCRIBED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Where `weights_tile` finds the weights of an expert from a column on, so many columns being left."""
    if DESCRIBED:
        source = w, expert.to(tl.int32), column.to(tl.int32)
    else:
        own, inner = tl.arange(0, BLOCK_N).to(tl.int64), tl.arange(0, BLOCK_K).to(tl.int64)
        pointers = w + expert * strides[0] + (column + own)[:, None] * strides[2] + inner[None, :] * strides[1]
        source = pointers, strides[1], (own < columns)[:, None]
    return source


@triton.jit
def weights_tile(source, start, K, DESCRIBED: tl.constexpr, ALONG_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights [BLOCK_N, BLOCK_K], each row a column of an expert, from ``start`` on of K; zero beyond."""
    if DESCRIBED:
        if ALONG_K:
            tile = source[0].load([source[1], source[2], start])
            tile = tl.reshape(tile, [tile.shape[1], tile.shape[2]])
        else:
            tile = source[0].load([source[1], start, source[2]])
            tile = tl.reshape(tile, [tile.shape[1], tile.shape[2]]).T
    else:
        left = tl.arange(0, BLOCK_K)[None, :] < K - start
        tile = tl.load(source[0] + start.to(tl.int64) * source[1], mask=source[2] & left, other=0.0)
    return tile


@triton.jit
def rows_tile(pointers, start, stride, in_rows, K, BLOCK_K: tl.constexpr):
    """Rows [BLOCK_K, BLOCK_M], turned round, from ``start`` on of K; zero beyond."""
    left = tl.arange(0, BLOCK_K)[None, :] < K - start
    return tl.load(pointers + start.to(tl.int64) * stride, mask=in_rows[:, None] & left, other=0.0).T


def weights_as(w: Tensor) -> tuple[Any, tuple[int, ...], bool, bool]:
    """w[E,K,N] as a kernel takes it: a descriptor or a tensor, strides, which it is, and whether it lies along K."""
    if w.element_size() == 2:
        for along_k, lying in ((True, w.transpose(1, 2)), (False, w)):
            if describable(lying):
                return described(lying), w.stride(), True, along_k
    return w, w.stride(), False, False


def rows_as(rows: Tensor) -> tuple[Any, bool]:
    """rows[P,K] as a kernel takes them: a descriptor or a tensor, and which it is."""
    by_descriptor = rows.element_size() == 2 and describable(rows)
    return (described(rows) if by_descriptor else rows), by_descriptor


def grouped_grid(blocks: int, columns: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """A program for each block and tile of columns."""
    return lambda meta: (blocks * triton.cdiv(columns, meta["BLOCK_N"]),)
