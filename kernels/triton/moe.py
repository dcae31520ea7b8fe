"""A mixture of experts by grouped matrix products.

Pairs of a token and one of its experts are sorted by expert. One product makes silu(gate) * up of each pair, the next
its weighted share, and a last kernel adds up the shares of each token in the order of its ids. Every kernel writes each
element once: there are no atomics, and nothing depends on the order in which programs run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.arguments import FLOAT32, FLOATING, INT32, check, check_shape
from assay.kernels.triton.moe_sort import at, sort_by_expert
from assay.kernels.triton.operators import custom_op
from assay.kernels.triton.swiglu import silu
from assay.kernels.triton.tiles import size_class, tile_of_program

_TILE = 4096  # elements of y that a program of the last kernel adds up
_CONFIGS = [
    triton.Config({"BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for block_n, block_k, warps, stages in (
        (64, 32, 8, 4),
        (64, 64, 8, 3),
        (64, 128, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    )
]
_MOST_PRODUCTS = 2048  # of float32 by a thread and tile: without tensor cores each becomes an instruction to compile


def _compilable(
    configs: Sequence[triton.Config], arguments: Mapping[str, Any], **keywords: Any
) -> Sequence[triton.Config]:
    if arguments["w_ptr"].dtype != torch.float32:
        return configs
    return [
        config
        for config in configs
        if keywords["BLOCK_M"] * config.kwargs["BLOCK_N"] * config.kwargs["BLOCK_K"]
        <= _MOST_PRODUCTS * 32 * config.num_warps
    ]


_KEY = ["P_CLASS", "E", "D", "F", "BLOCK_M"]
_PRUNE = {"early_config_prune": _compilable}


@triton.jit
def _tile(blocks_ptr, BLOCKS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """This program's expert (E or more of a block without rows), sorted rows, the row past the last, and columns."""
    tile_m, tile_n = tile_of_program(BLOCKS * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M)
    block_ptr = blocks_ptr + tile_m * 3
    rows = tl.load(block_ptr + 1) + tl.arange(0, BLOCK_M)
    return tl.load(block_ptr), rows, tl.load(block_ptr + 2), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.autotune(configs=_CONFIGS, key=_KEY, prune_configs_by=_PRUNE)
@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    order_ptr,
    blocks_ptr,
    hidden_ptr,
    BLOCKS,
    E,
    D,
    F,
    CHOICES,
    P_CLASS,
    x_strides,
    w_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """hidden[row] = silu(gate x) * (up x), a row for each sorted pair."""
    expert, rows, end, columns = _tile(blocks_ptr, BLOCKS, F, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    in_rows = rows[:, None] < end
    in_columns = columns[None, :] < F
    tokens = tl.load(order_ptr + rows, mask=rows < end, other=0) // CHOICES
    x_ptrs = x_ptr + tokens[:, None] * x_strides[0] + inner[None, :] * x_strides[1]
    w_ptrs = w_ptr + expert * w_strides[0] + inner[:, None] * w_strides[2]
    gate_ptrs = w_ptrs + columns[None, :] * w_strides[1]
    up_ptrs = w_ptrs + (columns[None, :] + F) * w_strides[1]
    step = tl.full([], BLOCK_K, tl.int64)

    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_K):
        left = inner < D - start
        in_weights = left[:, None] & in_columns
        x = tl.load(x_ptrs, mask=in_rows & left[None, :], other=0.0)
        gate = tl.dot(x, tl.load(gate_ptrs, mask=in_weights, other=0.0), gate, input_precision="ieee")
        up = tl.dot(x, tl.load(up_ptrs, mask=in_weights, other=0.0), up, input_precision="ieee")
        x_ptrs += step * x_strides[1]
        gate_ptrs += step * w_strides[2]
        up_ptrs += step * w_strides[2]

    hidden = (silu(gate) * up).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + rows[:, None] * F + columns[None, :], hidden, mask=in_rows & in_columns)


@triton.autotune(configs=_CONFIGS, key=_KEY, prune_configs_by=_PRUNE)
@triton.jit
def _down_kernel(
    hidden_ptr,
    w_ptr,
    weights_ptr,
    order_ptr,
    blocks_ptr,
    shares_ptr,
    BLOCKS,
    E,
    D,
    F,
    CHOICES,
    P_CLASS,
    w_strides,
    weights_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """shares[pair] = weight * (down hidden[row]), float32, of the row's pair."""
    expert, rows, end, columns = _tile(blocks_ptr, BLOCKS, D, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    in_rows = rows[:, None] < end
    in_columns = columns[None, :] < D
    hidden_ptrs = hidden_ptr + rows[:, None] * F + inner[None, :]
    w_ptrs = w_ptr + expert * w_strides[0] + inner[:, None] * w_strides[2] + columns[None, :] * w_strides[1]
    step = tl.full([], BLOCK_K, tl.int64)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, F, BLOCK_K):
        left = inner < F - start
        hidden = tl.load(hidden_ptrs, mask=in_rows & left[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=left[:, None] & in_columns, other=0.0)
        acc = tl.dot(hidden, w, acc, input_precision="ieee")
        hidden_ptrs += BLOCK_K
        w_ptrs += step * w_strides[2]

    pairs = tl.load(order_ptr + rows, mask=rows < end, other=0)
    weights = tl.load(at(weights_ptr, pairs, CHOICES, weights_strides), mask=rows < end, other=0.0)
    tl.store(shares_ptr + pairs[:, None] * D + columns[None, :], acc * weights[:, None], mask=in_rows & in_columns)


@triton.jit(do_not_specialize=["T"])
def _sum_kernel(
    shares_ptr,
    ids_ptr,
    y_ptr,
    T,
    E,
    D,
    CHOICES,
    ids_strides,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """y[token] = the sum of its shares in the order of its ids; a share whose id is no expert's was not written."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(D, BLOCK_D)
    tokens = program // across * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = program % across * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (tokens[:, None] < T) & (columns[None, :] < D)
    ids_ptrs = ids_ptr + tokens * ids_strides[0]
    shares_ptrs = shares_ptr + tokens[:, None] * CHOICES * D + columns[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for _ in range(CHOICES):
        ids = tl.load(ids_ptrs, mask=tokens < T, other=-1)
        written = ((ids >= 0) & (ids < E))[:, None]
        acc += tl.load(shares_ptrs, mask=inside & written, other=0.0)
        ids_ptrs += ids_strides[1]
        shares_ptrs += D
    tl.store(y_ptr + tokens[:, None] * D + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside)


@custom_op("assay::moe", lambda x, *rest: x.new_empty(x.shape))
def _moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    (tokens, choices), (experts, d, f) = ids.shape, w_down.shape
    pairs = tokens * choices
    hidden = torch.empty((pairs, f), dtype=x.dtype, device=x.device)
    shares = torch.empty((pairs, d), dtype=torch.float32, device=x.device)
    y = torch.empty((tokens, d), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if pairs and experts:
        order, blocks, block_m = sort_by_expert(ids, experts)
        most = blocks.shape[0]
        sizes = (most, experts, d, f, choices, size_class(pairs))
        if f:
            _gate_up_kernel[_grid(most, f)](
                x, w_gate_up, order, blocks, hidden, *sizes, x.stride(), w_gate_up.stride(), BLOCK_M=block_m
            )
        _down_kernel[_grid(most, d)](
            hidden, w_down, weights, order, blocks, shares, *sizes, w_down.stride(), weights.stride(), BLOCK_M=block_m
        )
    block_d = min(triton.next_power_of_2(d), _TILE // 4)
    block_t = _TILE // block_d
    _sum_kernel[(triton.cdiv(tokens, block_t) * triton.cdiv(d, block_d),)](
        shares, ids, y, tokens, experts, d, choices, ids.stride(), BLOCK_T=block_t, BLOCK_D=block_d
    )
    return y


def _grid(blocks: int, columns: int):
    return lambda meta: (blocks * triton.cdiv(columns, meta["BLOCK_N"]),)


def moe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """y[T,D], each row the sum over its k choices of weight * down(silu(gate x) * (up x)) of the expert chosen.

    x[T,D], w_gate_up[E,2F,D] (gate rows first) and w_down[E,D,F] are all float32, bfloat16 or float16; weights[T,k] is
    float32 and ids[T,k] int32. Sums are float32, and only silu * up is rounded to x's dtype on the way. An expert that
    comes twice counts twice; an id outside of 0 .. E-1 adds nothing. Raises TypeError or ValueError, naming the
    argument, for another dtype, shape or device.
    """
    check(
        x=(x, FLOATING, "T D"),
        w_down=(w_down, ("x",), "E D F"),
        w_gate_up=(w_gate_up, ("x",), "E 2F D"),
        ids=(ids, INT32, "T k"),
        weights=(weights, FLOAT32, "T k"),
    )
    check_shape("w_gate_up", w_gate_up, ("E", 2 * w_down.shape[2], "D"))
    return _moe(x, w_gate_up, w_down, weights, ids)
