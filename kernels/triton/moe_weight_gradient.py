"""The gradient of experts' weights: one product for each expert, over as many rows as it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.moe_sort import Sorted
from assay.kernels.triton.tiles import macs_per_thread, matches_dtype, size_bucket, tile_configs, tile_id_to_mn

_CONFIGS = tile_configs(
    *(
        (128, 128, 64, 8, 3),
        (64, 128, 64, 4, 3),
        (64, 64, 64, 4, 3),
        (64, 64, 16, 8, 2),
        (128, 64, 16, 8, 2),
    ),
)
_MOST_PRODUCTS = 1024  # of float32 by a thread and tile: without tensor cores each becomes an instruction


def _fitting(configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any) -> list[triton.Config]:
    """Of float32 those alone that the registers of their threads have room for."""
    operand = arguments["rows_ptr"]
    most = _MOST_PRODUCTS if operand.dtype == torch.float32 else math.inf
    return [config for config in configs if macs_per_thread(config) <= most and matches_dtype(config, operand.dtype)]


@triton.autotune(configs=_CONFIGS, key=["P_CLASS", "E", "M", "N"], prune_configs_by={"early_config_prune": _fitting})
@triton.jit
def _weight_gradient_kernel(
    rows_ptr,
    tokens_ptr,
    order_ptr,
    ends_ptr,
    dw_ptr,
    E,
    M,
    N,
    CHOICES,
    P_CLASS,
    tokens_strides,
    dw_strides,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """dw[expert] = the sum over its sorted rows of row^T token."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0).to(tl.int64)
    expert = program // tiles
    tile_m, tile_n = tile_id_to_mn(program % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    m, n = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        inside = rows < end
        tokens = tl.load(order_ptr + rows, mask=inside, other=0) // CHOICES
        left = tl.load(rows_ptr + rows[:, None] * M + m[None, :], mask=inside[:, None] & (m < M)[None, :], other=0.0)
        token_ptrs = tokens_ptr + tokens[:, None] * tokens_strides[0] + n[None, :] * tokens_strides[1]
        right = tl.load(token_ptrs, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = tl.dot(left.T, right, acc, input_precision="ieee")

    dw_ptrs = dw_ptr + expert * dw_strides[0] + m[:, None] * dw_strides[1] + n[None, :] * dw_strides[2]
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def weight_gradient(rows: Tensor, tokens: Tensor, pairs: Sorted, choices: int, dw: Tensor) -> None:
    """Write dw[E,M,N]: of each expert the sum over its sorted rows[P,M] of row^T times its token of tokens[T,N]."""
    experts, m, n = dw.shape
    _weight_gradient_kernel[
        lambda meta: (experts * triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)
    ](
        *(rows, tokens, pairs.order, pairs.ends, dw),
        *(experts, m, n, choices, size_bucket(len(rows)), tokens.stride(), dw.stride()),
    )
