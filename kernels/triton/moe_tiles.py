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

from assay.kernels.triton.layouts import ALIGNMENT, can_use_tma, make_descriptor
from assay.kernels.triton.tiles import k_per_scale, matches_dtype, pid_to_mn

_MOST_SUMS = {2: 96, 4: 64}  # float32 sums of a thread, by the bytes of what is multiplied
_MOST_DESCRIBED_SUMS = 128  # where descriptors copy the weights: operands of products don't lie in registers there
_MOST_PRODUCTS = {2: 4096, 4: 1024}  # by a thread and tile; float32's run on no tensor core


def grouped_configs(
    products: int, rows: str, descriptors: Mapping[str, bool], *tiles: tuple[int, int, int, int]
) -> dict[str, Any]:
    """What an autotuner takes: configurations of (BLOCK_N, BLOCK_K, num_warps, num_stages), and their pruning.

    ``products``: how many sums a kernel holds of each element of a tile. ``rows`` names the argument whose dtype the
    products have, ``descriptors`` those that may be descriptors: of weights (True), or of sorted rows.
    """

    def set_block_shapes(arguments: Mapping[str, Any]) -> None:
        for name, of_weights in descriptors.items():
            if isinstance(arguments[name], TensorDescriptor):
                outer, inner = arguments["BLOCK_N" if of_weights else "BLOCK_M"], arguments["BLOCK_K"]
                inner //= 2 if of_weights and arguments.get("GROUP") else 1  # bytes of two codes
                along_k = not of_weights or arguments[f"{name.upper()}_ALONG_K"]
                tile = [outer, inner] if along_k else [inner, outer]
                arguments[name].block_shape = [1, *tile] if of_weights else tile

    def fitting(configs: list[triton.Config], arguments: Mapping[str, Any], **keywords: Any) -> list[triton.Config]:
        w = next(arguments[name] for name, of_weights in descriptors.items() if of_weights)
        dtype, width = _tensor(arguments[rows]).dtype, _tensor(arguments[rows]).element_size()
        if isinstance(w, TensorDescriptor) and _tensor(w).dtype == dtype != torch.float32:
            most_sums, most_products = _MOST_DESCRIBED_SUMS, math.inf
        else:
            most_sums, most_products = _MOST_SUMS[width], _MOST_PRODUCTS[width]
        held = products + (products > 2 and arguments["SIDE"] > 1)  # one's sums, before its scales multiply them
        kept = []
        for config in configs:
            sums = keywords["BLOCK_M"] * config.kwargs["BLOCK_N"] / (32 * config.num_warps)
            fits = sums * held <= most_sums and sums * config.kwargs["BLOCK_K"] <= most_products
            if fits and matches_dtype(config, dtype):
                kept.append(config)
        return kept

    configs = [
        triton.Config(
            {"BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8},
            num_warps=warps,
            num_stages=stages,
            pre_hook=set_block_shapes,
        )
        for block_n, block_k, warps, stages in tiles
    ]
    return {"configs": configs, "prune_configs_by": {"early_config_prune": fitting}}


def _tensor(argument: Any) -> Tensor:
    tensor: Tensor = argument.base if isinstance(argument, TensorDescriptor) else argument
    return tensor


@triton.jit
def tile_of_expert(blocks_ptr, BLOCKS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """This program's expert (E or more of a block without rows), first sorted row, the row past the last, and the
    number of its tile of columns."""
    tile_m, tile_n = pid_to_mn(BLOCKS * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M)
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
def numbers_tile(packed, scales, zeros, start, K, GROUP: tl.constexpr):
    """The weights [BLOCK_N, BLOCK_K], float32, of two codes in each byte [BLOCK_N, BLOCK_K/2] from ``start`` on of K.

    A scale and a zero-point, which are as `scales_at` takes them, go with each GROUP codes; zero beyond K.
    """
    BLOCK_K: tl.constexpr = packed.shape[1] * 2
    RUN: tl.constexpr = k_per_scale(GROUP, BLOCK_K)
    places = start + tl.arange(0, BLOCK_K // RUN) * RUN
    scale = _of_groups(scales, places, K, GROUP).to(tl.float32)
    zero = _of_groups(zeros, places, K, GROUP).to(tl.float32)
    codes = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
    codes = tl.reshape(codes, [packed.shape[0], BLOCK_K // RUN, RUN])
    return tl.reshape((codes - zero[:, :, None]) * scale[:, :, None], [packed.shape[0], BLOCK_K])


@triton.jit
def _of_groups(table, places, K, GROUP: tl.constexpr):
    """What a table [columns, groups] says of columns at places along K."""
    pointer, strides, expert, columns, there = table
    groups = (places // GROUP).to(tl.int64)
    pointers = pointer + expert * strides[0] + columns[:, None] * strides[1] + groups[None, :] * strides[2]
    return tl.load(pointers, mask=there[:, None] & (places < K)[None, :], other=0.0)


@triton.jit
def add_product(acc, own, rows, scales, start, SIDE: tl.constexpr):
    """acc + own rows, of weights [BLOCK_N, BLOCK_K] from ``start`` on, scaled in blocks of SIDE by `scales_at`."""
    own = own.to(rows.dtype)
    if SIDE > 1:
        acc += tl.dot(own, rows, input_precision="ieee") * scales_at(scales, start, SIDE)
    else:
        acc = tl.dot(own, rows, acc, input_precision="ieee")
    return acc


@triton.jit
def scales_at(scales, start, SIDE: tl.constexpr):
    """The scales [BLOCK_N,1] of columns at a place along K, one for SIDE of each.

    ``scales`` are a pointer, strides, the expert, columns, and which of these there are.
    """
    scales_ptr, strides, expert, columns, there = scales
    places = expert * strides[0] + columns // SIDE * strides[1] + start // SIDE * strides[2]
    return tl.load(scales_ptr + places, mask=there, other=0.0)[:, None]


@triton.jit
def scaled_along(own, scales, start, K):
    """Weights [BLOCK_N, BLOCK_K] from ``start`` on of K, float32, times the scale that each place along K has.

    ``scales`` are as `scales_at` takes them; columns have none.
    """
    scales_ptr, strides, expert, _, _ = scales
    places = start + tl.arange(0, own.shape[1])
    scale = tl.load(scales_ptr + expert * strides[0] + places.to(tl.int64) * strides[2], mask=places < K, other=0.0)
    return own.to(tl.float32) * scale[None, :]


@triton.jit
def rows_tile(pointers, start, stride, in_rows, K, BLOCK_K: tl.constexpr):
    """Rows [BLOCK_K, BLOCK_M], turned round, from ``start`` on of K; zero beyond."""
    left = tl.arange(0, BLOCK_K)[None, :] < K - start
    return tl.load(pointers + start.to(tl.int64) * stride, mask=in_rows[:, None] & left, other=0.0).T


def weights_as(w: Tensor, part: int = 0, *, copied: bool = True) -> tuple[Any, tuple[int, ...], bool, bool]:
    """w[E,K,N] as a kernel takes it: a descriptor or a tensor, strides, which it is, and whether it lies along K.

    Tiles of columns begin at 0 and at ``part``, where a copy must be able to begin. ``copied``: a descriptor may copy
    tiles; False where they may be narrower than the least that it copies.
    """
    if copied and w.element_size() <= 2:
        for along_k, lying in ((True, w.transpose(1, 2)), (False, w)):
            if can_use_tma(lying) and (along_k or part * w.element_size() % ALIGNMENT == 0):
                return make_descriptor(lying), w.stride(), True, along_k
    return w, w.stride(), False, False


def rows_as(rows: Tensor) -> tuple[Any, bool]:
    """rows[P,K] as a kernel takes them: a descriptor or a tensor, and which it is."""
    by_descriptor = rows.element_size() == 2 and can_use_tma(rows)
    return (make_descriptor(rows) if by_descriptor else rows), by_descriptor


def strides_of(scales: Tensor | None) -> tuple[int, ...]:
    """Those of scales [E,N,K], zeros where there are none."""
    return (0, 0, 0) if scales is None else scales.stride()


def group_of(zeros: Tensor | None, k: int) -> int:
    """How many codes of k have one of the zero-points [E,N,groups]; 0 where there are none."""
    return 0 if zeros is None else max(k // max(zeros.shape[2], 1), 1)


def grouped_grid(blocks: int, columns: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """A program for each block and tile of columns."""
    return lambda meta: (blocks * triton.cdiv(columns, meta["BLOCK_N"]),)
