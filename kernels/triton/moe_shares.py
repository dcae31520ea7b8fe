"""The second half of a mixture of experts: sorted rows times the weights of their experts, added up by token.

The gradient of the tokens takes the same way as the tokens themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.moe_sort import Sorted
from assay.kernels.triton.moe_tiles import (
    add_product,
    group_of,
    grouped_configs,
    grouped_grid,
    numbers_tile,
    rows_as,
    rows_tile,
    scales_at,
    strides_of,
    tile_of_expert,
    weights_as,
    weights_from,
    weights_tile,
)
from assay.kernels.triton.tiles import size_bucket

_TILE = 4096  # elements that a program of the last kernel adds up
_TUNING = grouped_configs(
    1,
    "rows_of",
    {"w": True, "rows_of": False},
    *(
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (128, 64, 8, 4),
        (128, 64, 4, 4),
        (128, 128, 8, 3),
        (64, 16, 8, 2),
        (128, 16, 8, 2),
    ),
)


@triton.autotune(key=["P_CLASS", "E", "N", "K", "BLOCK_M"], **_TUNING)
@triton.jit(do_not_specialize=["BLOCKS"])
def _share_kernel(
    rows_of,
    w,
    scales_ptr,
    zeros_ptr,
    weights_ptr,
    order_ptr,
    blocks_ptr,
    shares_ptr,
    BLOCKS,
    E,
    N,
    K,
    P_CLASS,
    w_strides,
    scales_strides,
    zeros_strides,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS_DESCRIBED: tl.constexpr,
    W_DESCRIBED: tl.constexpr,
    W_ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """shares[pair] = weight * (row w), float32, of the row's pair; without weights just the product.

    A scale goes with each column of w (SIDE 1), or with each block of SIDE columns and as many places along K; or w is
    bytes of two codes, of which each GROUP have a scale and a zero-point.
    """
    expert, first, end, tile_n = tile_of_expert(blocks_ptr, BLOCKS, N, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    column = tile_n * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    in_rows = rows < end
    EACH: tl.constexpr = 2 if GROUP else 1
    w_from = weights_from(w, expert, column, N - column, w_strides, W_DESCRIBED, BLOCK_N, BLOCK_K // EACH)

    columns = column + tl.arange(0, BLOCK_N)
    scales = scales_ptr, scales_strides, expert, columns, columns < N
    zeros = zeros_ptr, zeros_strides, expert, columns, columns < N

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if ROWS_DESCRIBED:  # rows of the next expert may be among them: they become columns that aren't stored
            tile = rows_of.load([first.to(tl.int32), start]).T
        else:
            inner = tl.arange(0, BLOCK_K).to(tl.int64)
            tile = rows_tile(rows_of + rows[:, None] * K + inner[None, :], start, 1, in_rows, K, BLOCK_K)
        own = weights_tile(w_from, start // EACH, K // EACH, W_DESCRIBED, W_ALONG_K, BLOCK_K // EACH)
        if GROUP:
            own = numbers_tile(own, scales, zeros, start, K, GROUP)
        acc = add_product(acc, own, tile, scales, start, SIDE)

    if SIDE == 1:
        acc *= scales_at(scales, 0, SIDE)
    pairs = tl.load(order_ptr + rows, mask=in_rows, other=0)
    if weights_ptr is not None:
        acc *= tl.load(weights_ptr + pairs, mask=in_rows, other=0.0)[None, :]
    to = shares_ptr + pairs[None, :] * N + columns[:, None]
    tl.store(to, acc, mask=in_rows[None, :] & (columns < N)[:, None])


@triton.jit(do_not_specialize=["T"])
def _sum_kernel(shares_ptr, ids_ptr, y_ptr, T, E, N, CHOICES, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[token] = the sum of its shares in the order of its ids; a share whose id is no expert's was not written."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(N, BLOCK_N)
    tokens = program // across * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = program % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (tokens[:, None] < T) & (columns[None, :] < N)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for choice in range(CHOICES):
        pairs = tokens * CHOICES + choice
        ids = tl.load(ids_ptr + pairs, mask=tokens < T, other=-1)
        written = ((ids >= 0) & (ids < E))[:, None]
        acc += tl.load(shares_ptr + pairs[:, None] * N + columns[None, :], mask=inside & written, other=0.0)
    tl.store(y_ptr + tokens[:, None] * N + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside)


def mixed(
    rows: Tensor,
    w: Tensor,
    pairs: Sorted,
    ids: Tensor,
    weights: Tensor | None,
    scales: Tensor | None = None,
    side: int = 0,
    zeros: Tensor | None = None,
) -> Tensor:
    """y[T,N]: of each token's pairs the sum of weight * (row w), of sorted rows[P,K] and w[E,K,N].

    ``ids`` and ``weights`` are [T,k], contiguous; all weights are one where there are none. ``scales``
    [E,ceil(N/side),ceil(K/side)] multiply w, or [E,N,1] where ``side`` is 1; there are none where it is 0. With
    ``zeros`` [E,N,K/g], w is bytes [E,K/2,N] of codes, and scales are of their shape.
    """
    (tokens, choices), (experts, _, n), k = ids.shape, w.shape, rows.shape[1]
    shares = torch.empty((tokens * choices, n), dtype=torch.float32, device=rows.device)
    given, by_descriptor = rows_as(rows)
    own, strides, *lying = weights_as(w, copied=zeros is None or rows.element_size() == 2)
    blocks = len(pairs.blocks)
    _share_kernel[grouped_grid(blocks, n)](
        *(given, own, scales, zeros, weights, pairs.order, pairs.blocks, shares),
        *(blocks, experts, n, k, size_bucket(tokens * choices), strides, strides_of(scales), strides_of(zeros)),
        *(side, group_of(zeros, k), by_descriptor, *lying),
        BLOCK_M=pairs.height,
    )
    y = torch.empty((tokens, n), dtype=rows.dtype, device=rows.device)
    block_n = min(triton.next_power_of_2(n), _TILE // 4)
    block_t = _TILE // block_n
    _sum_kernel[(triton.cdiv(tokens, block_t) * triton.cdiv(n, block_n),)](
        shares, ids, y, tokens, experts, n, choices, BLOCK_T=block_t, BLOCK_N=block_n
    )
    return y
