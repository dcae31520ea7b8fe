"""Matrix product of 16-bit matrices whose tiles a GPU copies by descriptors: programs stay and take tile after tile.

Where the rows are few, K is split: each part has tiles of its own, whose float32 sums are added in one order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.kernels.triton.layouts import can_use_tma, make_descriptor
from assay.kernels.triton.reduction import sum_partials
from assay.kernels.triton.tiles import RESTORE_C, size_bucket, tile_id_to_mn, tile_offsets

_FEW_ROWS = 64  # as many as a tile has at least, for Hopper's tensor cores
_PROGRAMS = 128  # that a split aims at
_MOST_PARTS = 16
_LEAST_PART = 128  # of K
_NARROWEST = 33  # columns from which on tiles are wide enough
_MOST_ADDED = 64  # sums of a thread that its registers hold beside what they are added to
_AT_ONCE = 4  # programs on a CPU, where nothing but their loop is of interest


def _sets_tiles(arguments: Mapping[str, Any]) -> None:
    """A configuration's hook: the sizes of the operands' tiles, as these lie."""
    m, n, k = (arguments[f"BLOCK_{side}"] for side in "MNK")
    arguments["a"].block_shape = [k, m] if arguments["A_TURNED"] else [m, k]
    arguments["b"].block_shape = [n, k] if arguments["B_TURNED"] else [k, n]


_CONFIGS = [
    triton.Config(
        {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8},
        num_warps=warps,
        num_stages=stages,
        pre_hook=_sets_tiles,
    )
    for block_m, block_n, block_k, warps, stages in (
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 3),
        (64, 128, 64, 4, 4),
        (64, 128, 128, 4, 4),
        (64, 256, 64, 8, 4),
    )
]


def _fitting(
    configs: list[triton.Config], arguments: Mapping[str, Any], *, ACCUMULATE: bool, **_: Any
) -> list[triton.Config]:
    """Flat tiles for few rows, and only for these; where they are added, those whose threads have room for more."""
    most = _MOST_ADDED if ACCUMULATE else math.inf
    return [
        config
        for config in configs
        if (config.kwargs["BLOCK_M"] == _FEW_ROWS) == (arguments["M"] <= _FEW_ROWS)
        and config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"] / (32 * config.num_warps) <= most
    ]


@triton.autotune(
    configs=_CONFIGS,
    key=["M_CLASS", "N", "K_CLASS", "ACCUMULATE", "A_TURNED", "B_TURNED"],
    prune_configs_by={"early_config_prune": _fitting},
    **RESTORE_C,
)
@triton.jit(do_not_specialize=["M"])
def _gemm_described_kernel(
    a,
    b,
    c_ptr,
    M,
    N,
    K,
    M_CLASS,
    K_CLASS,
    parts,
    c_strides,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    ACCUMULATE: tl.constexpr,  # to what c holds
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    whole = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    length = tl.cdiv(tl.cdiv(K, BLOCK_K), parts) * BLOCK_K
    for place in tl.range(tl.program_id(0), whole * parts, tl.num_programs(0)):
        tile_m, tile_n = tile_id_to_mn(place % whole, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        first = place // whole * length
        last = tl.minimum(first + length, K)
        row, column = (tile_m * BLOCK_M).to(tl.int32), (tile_n * BLOCK_N).to(tl.int32)

        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(first, last, BLOCK_K):
            left = a.load([start, row]).T if A_TURNED else a.load([row, start])
            right = b.load([column, start]).T if B_TURNED else b.load([start, column])
            acc = tl.dot(left, right, acc)

        rows, columns, in_rows, in_columns = tile_offsets(tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
        c_ptrs = c_ptr + (place // whole).to(tl.int64) * c_strides[0] + rows * c_strides[1] + columns * c_strides[2]
        if ACCUMULATE:
            acc += tl.load(c_ptrs, mask=in_rows & in_columns, other=0.0).to(tl.float32)
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=in_rows & in_columns)


def is_described(a: Tensor, b: Tensor) -> bool:
    """Whether a[M,K] and b[K,N] are matrices of 16 bits, not narrow, that descriptors can copy, either way round."""
    lie_well = all(can_use_tma(x) or can_use_tma(x.t()) for x in (a, b))
    return a.element_size() == 2 and b.shape[1] >= _NARROWEST and lie_well


def write_described_product(a: Tensor, b: Tensor, c: Tensor, add: bool) -> None:
    """As `write_product`, of a[M,K] and b[K,N] for which `is_described`."""
    (m, k), n = a.shape, b.shape[1]
    turned = not can_use_tma(a), not can_use_tma(b)
    operands = [make_descriptor(x.t() if is_turned else x) for x, is_turned in zip((a, b), turned, strict=True)]
    parts = parts_of(m, n, k)
    into = c[None] if parts == 1 else torch.empty((parts, m, n), dtype=torch.float32, device=a.device)
    _gemm_described_kernel[lambda meta: (min(_programs(a), _tiles(meta, m, n) * parts),)](
        *(*operands, into, m, n, k, size_bucket(m), size_bucket(k), parts, into.stride(), *turned),
        ACCUMULATE=add and parts == 1,
    )
    if parts > 1:
        total = torch.empty((m, n), dtype=torch.float32, device=a.device) if add or not c.is_contiguous() else c
        sum_partials(into.view(parts, m * n), total)
        if total is not c:
            c.copy_(total + c if add else total)


def parts_of(m: int, n: int, k: int) -> int:
    """Into how many parts K is split, by sizes alone, so that the same product has the same bits on every device."""
    if m > _FEW_ROWS:
        return 1
    return max(1, min(_MOST_PARTS, _PROGRAMS // triton.cdiv(n, 128), k // _LEAST_PART))


def _tiles(meta: Mapping[str, int], m: int, n: int) -> int:
    return int(triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]))


def _programs(tensor: Tensor) -> int:
    """One for each multiprocessor."""
    if not tensor.is_cuda:
        return _AT_ONCE
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
