"""Grouped GEMM over experts: each block of sorted rows is multiplied by its expert's weights; and the combine by token.

An output tile is transposed, [BLOCK_N, BLOCK_M]: the weights' columns are the tall side of the tensor core's tile,
which is full however few rows an expert has. Tiles of weights are loaded by TMA if their layout allows it; rows of
tokens are gathered by pointers, since Hopper's TMA cannot gather.

The weights w[E,K,N] are floats; FP8, with one scale for each column (SCALE_BLOCK 1) or for each block of SCALE_BLOCK x
SCALE_BLOCK (128); or int4, two codes in a byte along K, with one scale and one zero-point for GROUP_SIZE codes.
SCALE_BLOCK and GROUP_SIZE are 0 where there are none.
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
from assay.kernels.triton.moe_sort import RoutingData
from assay.kernels.triton.tiles import FP32_BLOCK_K, GROUP_M, k_per_scale, matches_dtype, pid_to_mn, size_bucket

# Limits that keep a tile in a thread's registers, by the bytes of an element of x; others are pruned.
_MAX_ACCUMULATORS = {2: 96, 4: 64}  # float32 accumulators of a thread
_MAX_TMA_ACCUMULATORS = 128  # where wgmma reads the weights from shared memory: no operand is in registers
_MAX_MACS = {2: 4096, 4: 1024}  # of a thread in a tile; those of float32 run on no tensor core
_COMBINE_TILE = 4096  # elements of a program of the combine: at least 4 tokens, of at most 1024 columns


def grouped_configs(
    num_accumulators: int, x_name: str, descriptors: Mapping[str, bool], *tiles: tuple[int, int, int, int]
) -> dict[str, Any]:
    """Return an autotuner's configurations of (BLOCK_N, BLOCK_K, num_warps, num_stages), and their pruning.

    ``num_accumulators``: how many a kernel has for each element of a tile. ``x_name``: the argument whose dtype the
    products have. ``descriptors``: the arguments that may be TMA descriptors, True for weights, False for sorted rows.
    """

    def set_block_shapes(arguments: Mapping[str, Any]) -> None:
        for name, is_weight in descriptors.items():
            if isinstance(arguments[name], TensorDescriptor):
                outer, block_k = arguments["BLOCK_N" if is_weight else "BLOCK_M"], arguments["BLOCK_K"]
                block_k //= 2 if is_weight and arguments.get("GROUP_SIZE") else 1  # two codes in a byte
                k_contiguous = not is_weight or arguments[f"{name.upper()}_K_CONTIGUOUS"]
                tile = [outer, block_k] if k_contiguous else [block_k, outer]
                arguments[name].block_shape = [1, *tile] if is_weight else tile

    def prune(configs: list[triton.Config], arguments: Mapping[str, Any], **constants: Any) -> list[triton.Config]:
        w = next(arguments[name] for name, is_weight in descriptors.items() if is_weight)
        x = _base(arguments[x_name])
        if isinstance(w, TensorDescriptor) and w.base.dtype == x.dtype != torch.float32:
            max_accumulators, max_macs = _MAX_TMA_ACCUMULATORS, math.inf
        else:
            max_accumulators, max_macs = _MAX_ACCUMULATORS[x.element_size()], _MAX_MACS[x.element_size()]
        # Block scales multiply a product in registers of its own, which count from three accumulators on.
        live = num_accumulators + int(num_accumulators > 2 and arguments["SCALE_BLOCK"] > 1)
        pruned = []
        for config in configs:
            elements = constants["BLOCK_M"] * config.kwargs["BLOCK_N"] / (32 * config.num_warps)
            fits = elements * live <= max_accumulators and elements * config.kwargs["BLOCK_K"] <= max_macs
            if fits and matches_dtype(config, x.dtype):
                pruned.append(config)
        return pruned

    configs = [
        triton.Config(
            {"BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": GROUP_M},
            num_warps=num_warps,
            num_stages=num_stages,
            pre_hook=set_block_shapes,
        )
        for block_n, block_k, num_warps, num_stages in tiles
    ]
    return {"configs": configs, "prune_configs_by": {"early_config_prune": prune}}


def grouped_grid(num_blocks: int, n: int) -> Callable[[Mapping[str, int]], tuple[int]]:
    """Return a launch grid of one program for each block of rows and tile of columns."""
    return lambda meta: (num_blocks * triton.cdiv(n, meta["BLOCK_N"]),)


def w_operand(w: Tensor, half: int = 0, *, allow_tma: bool = True) -> tuple[Any, tuple[int, ...], bool, bool]:
    """Return a kernel's arguments for w[E,K,N]: a descriptor or the tensor, its strides, W_TMA and W_K_CONTIGUOUS.

    Tiles of columns start at 0 and at ``half``, which TMA can only read from if it is aligned. Without ``allow_tma``
    tiles may be narrower than TMA's 16 bytes.
    """
    if allow_tma and w.element_size() <= 2:
        for k_contiguous, view in ((True, w.transpose(1, 2)), (False, w)):
            if can_use_tma(view) and (k_contiguous or half * w.element_size() % ALIGNMENT == 0):
                return make_descriptor(view), w.stride(), True, k_contiguous
    return w, w.stride(), False, False


def strides_of(scales: Tensor | None) -> tuple[int, ...]:
    """Return the strides of scales[E,N,K], zeros for None."""
    return (0, 0, 0) if scales is None else scales.stride()


def group_size_of(zeros: Tensor | None, k: int) -> int:
    """Return how many of k codes share one of the zero-points[E,N,groups]; 0 for None."""
    return 0 if zeros is None else max(k // max(zeros.shape[2], 1), 1)


def _base(argument: Any) -> Tensor:
    tensor: Tensor = argument.base if isinstance(argument, TensorDescriptor) else argument
    return tensor


@triton.jit
def load_block(block_schedule_ptr, NUM_BLOCKS, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The program's expert (E if its block is unused), first sorted row, the row after the last, and pid_n."""
    # As if every block had BLOCK_M rows: pid_m is the block's number.
    pid_m, pid_n = pid_to_mn(NUM_BLOCKS * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M)
    block_ptr = block_schedule_ptr + pid_m * 3
    return tl.load(block_ptr), tl.load(block_ptr + 1), tl.load(block_ptr + 2), pid_n


@triton.jit
def load_x(x_ptrs, start, stride_k, mask_m, K, BLOCK_K: tl.constexpr):
    """Rows as [BLOCK_K, BLOCK_M] from ``start`` on along K, zero beyond K."""
    mask_k = tl.arange(0, BLOCK_K)[None, :] < K - start
    return tl.load(x_ptrs + start.to(tl.int64) * stride_k, mask=mask_m[:, None] & mask_k, other=0.0).T


@triton.jit
def w_source(
    w,
    expert,
    column,
    columns_left,
    strides,
    W_TMA: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What `load_w` reads an expert's weights from: a tile of columns that begins at ``column``."""
    if W_TMA:
        source = w, expert.to(tl.int32), column.to(tl.int32)
    else:
        PACK_FACTOR: tl.constexpr = 2 if GROUP_SIZE else 1
        offs_n, offs_k = tl.arange(0, BLOCK_N).to(tl.int64), tl.arange(0, BLOCK_K // PACK_FACTOR).to(tl.int64)
        w_ptrs = w + expert * strides[0] + (column + offs_n)[:, None] * strides[2] + offs_k[None, :] * strides[1]
        source = w_ptrs, strides[1], (offs_n < columns_left)[:, None]
    return source


@triton.jit
def load_w(
    source,
    scales,
    zeros,
    start,
    K,
    W_TMA: tl.constexpr,
    W_K_CONTIGUOUS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weights [BLOCK_N, BLOCK_K] of a `w_source` from ``start`` on along K, zero beyond K; dequantised if int4."""
    PACK_FACTOR: tl.constexpr = 2 if GROUP_SIZE else 1
    start_w = start // PACK_FACTOR
    if W_TMA:
        if W_K_CONTIGUOUS:
            w = source[0].load([source[1], source[2], start_w])
            w = tl.reshape(w, [w.shape[1], w.shape[2]])
        else:
            w = source[0].load([source[1], start_w, source[2]])
            w = tl.reshape(w, [w.shape[1], w.shape[2]]).T
    else:
        mask_k = tl.arange(0, BLOCK_K // PACK_FACTOR)[None, :] < K // PACK_FACTOR - start_w
        w = tl.load(source[0] + start_w.to(tl.int64) * source[1], mask=source[2] & mask_k, other=0.0)
    if GROUP_SIZE:
        w = _dequantize(w, scales, zeros, start, K, GROUP_SIZE)
    return w


@triton.jit
def _dequantize(packed, scales, zeros, start, K, GROUP_SIZE: tl.constexpr):
    """(code - zero) * scale, float32 [BLOCK_N, BLOCK_K], of bytes [BLOCK_N, BLOCK_K/2] from ``start`` on along K."""
    BLOCK_K: tl.constexpr = packed.shape[1] * 2
    RUN: tl.constexpr = k_per_scale(GROUP_SIZE, BLOCK_K)
    offs_k = start + tl.arange(0, BLOCK_K // RUN) * RUN
    scale = _load_groups(scales, offs_k, K, GROUP_SIZE).to(tl.float32)
    zero = _load_groups(zeros, offs_k, K, GROUP_SIZE).to(tl.float32)
    codes = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
    codes = tl.reshape(codes, [packed.shape[0], BLOCK_K // RUN, RUN])
    return tl.reshape((codes - zero[:, :, None]) * scale[:, :, None], [packed.shape[0], BLOCK_K])


@triton.jit
def _load_groups(table, offs_k, K, GROUP_SIZE: tl.constexpr):
    """The entries [BLOCK_N, offs_k] of a table of scales or zero-points (a tuple as in `load_scales`)."""
    table_ptr, strides, expert, columns, mask_n = table
    groups = (offs_k // GROUP_SIZE).to(tl.int64)
    table_ptrs = table_ptr + expert * strides[0] + columns[:, None] * strides[1] + groups[None, :] * strides[2]
    return tl.load(table_ptrs, mask=mask_n[:, None] & (offs_k < K)[None, :], other=0.0)


@triton.jit
def load_scales(scales, start, SCALE_BLOCK: tl.constexpr):
    """The scales [BLOCK_N, 1] of a tile's columns in the block of K that has ``start``.

    ``scales`` is a tuple: pointer, strides, expert, columns, and the mask of columns.
    """
    scales_ptr, strides, expert, columns, mask_n = scales
    offsets = expert * strides[0] + columns // SCALE_BLOCK * strides[1] + start // SCALE_BLOCK * strides[2]
    return tl.load(scales_ptr + offsets, mask=mask_n, other=0.0)[:, None]


@triton.jit
def scale_k(w, scales, start, K):
    """w [BLOCK_N, BLOCK_K] in float32 times a scale for each position along K, the same for all columns."""
    scales_ptr, strides, expert, _, _ = scales
    offs_k = start + tl.arange(0, w.shape[1])
    scale = tl.load(scales_ptr + expert * strides[0] + offs_k.to(tl.int64) * strides[2], mask=offs_k < K, other=0.0)
    return w.to(tl.float32) * scale[None, :]


@triton.jit
def scaled_dot(acc, w, x, scales, start, SCALE_BLOCK: tl.constexpr):
    """acc + w x, w cast to x's dtype. Block scales multiply the product; scales of columns are left to the epilogue."""
    w = w.to(x.dtype)
    if SCALE_BLOCK > 1:
        acc += tl.dot(w, x, input_precision="ieee") * load_scales(scales, start, SCALE_BLOCK)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.autotune(
    key=["P_BUCKET", "E", "N", "K", "BLOCK_M"],
    **grouped_configs(
        *(1, "x", {"w": True, "x": False}),
        *((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 4), (128, 64, 4, 4), (128, 128, 8, 3)),
        *((64, FP32_BLOCK_K, 8, 2), (128, FP32_BLOCK_K, 8, 2)),
    ),
)
@triton.jit(do_not_specialize=["NUM_BLOCKS"])
def _grouped_gemm_kernel(
    x,
    w,
    scales_ptr,
    zeros_ptr,
    weights_ptr,
    sorted_pairs_ptr,
    block_schedule_ptr,
    pair_outputs_ptr,
    NUM_BLOCKS,
    E,
    N,
    K,
    P_BUCKET,
    w_strides,
    scales_strides,
    zeros_strides,
    SCALE_BLOCK: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    W_K_CONTIGUOUS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """pair_outputs[pair] = routing weight * (x[row] w[expert]), float32; weights_ptr None: without the weight."""
    expert, row_start, row_end, pid_n = load_block(block_schedule_ptr, NUM_BLOCKS, N, BLOCK_M, BLOCK_N, GROUP_M)
    if expert >= E:
        return
    rows = row_start + tl.arange(0, BLOCK_M)
    mask_m = rows < row_end
    column = pid_n * BLOCK_N
    source = w_source(w, expert, column, N - column, w_strides, W_TMA, GROUP_SIZE, BLOCK_N, BLOCK_K)
    columns = column + tl.arange(0, BLOCK_N)
    mask_n = columns < N
    scales = scales_ptr, scales_strides, expert, columns, mask_n
    zeros = zeros_ptr, zeros_strides, expert, columns, mask_n

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if X_TMA:  # may include rows of the next expert: columns of acc that are not stored
            x_tile = x.load([row_start.to(tl.int32), start]).T
        else:
            offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
            x_tile = load_x(x + rows[:, None] * K + offs_k[None, :], start, 1, mask_m, K, BLOCK_K)
        w_tile = load_w(source, scales, zeros, start, K, W_TMA, W_K_CONTIGUOUS, GROUP_SIZE, BLOCK_K)
        acc = scaled_dot(acc, w_tile, x_tile, scales, start, SCALE_BLOCK)

    if SCALE_BLOCK == 1:
        acc *= load_scales(scales, 0, SCALE_BLOCK)
    pairs = tl.load(sorted_pairs_ptr + rows, mask=mask_m, other=0)
    if weights_ptr is not None:
        acc *= tl.load(weights_ptr + pairs, mask=mask_m, other=0.0)[None, :]
    output_ptrs = pair_outputs_ptr + pairs[None, :] * N + columns[:, None]
    tl.store(output_ptrs, acc, mask=mask_m[None, :] & mask_n[:, None])


@triton.jit(do_not_specialize=["T"])
def _combine_kernel(pair_outputs_ptr, ids_ptr, y_ptr, T, E, N, TOP_K, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    """y[token] = the sum of its pairs' outputs in the order of its ids; invalid ids are skipped."""
    pid = tl.program_id(0).to(tl.int64)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    tokens = pid // num_pid_n * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = pid % num_pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (tokens[:, None] < T) & (columns[None, :] < N)
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for k in range(TOP_K):
        pairs = tokens * TOP_K + k
        ids = tl.load(ids_ptr + pairs, mask=tokens < T, other=-1)
        written = ((ids >= 0) & (ids < E))[:, None]
        acc += tl.load(pair_outputs_ptr + pairs[:, None] * N + columns[None, :], mask=mask & written, other=0.0)
    tl.store(y_ptr + tokens[:, None] * N + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


def gemm_and_combine(
    x: Tensor,
    w: Tensor,
    routing: RoutingData,
    ids: Tensor,
    weights: Tensor | None,
    scales: Tensor | None = None,
    scale_block: int = 0,
    zeros: Tensor | None = None,
) -> Tensor:
    """Return y[T,N], for each token the sum over its pairs of weight * (x[row] w[expert]), of sorted rows x[P,K].

    w is [E,K,N]; ids and weights are [T,k], contiguous; weights None means ones. ``scales`` multiply w: [E,N,1] with
    ``scale_block`` 1, else [E,ceil(N/scale_block),ceil(K/scale_block)]. With ``zeros`` [E,N,K/g] w is int4, bytes
    [E,K/2,N], and scales have the shape of zeros.
    """
    (tokens, top_k), (experts, _, n), k = ids.shape, w.shape, x.shape[1]
    pair_outputs = torch.empty((tokens * top_k, n), dtype=torch.float32, device=x.device)
    x_tma = x.element_size() == 2 and can_use_tma(x)
    w_or_descriptor, w_strides, *w_layout = w_operand(w, allow_tma=zeros is None or x.element_size() == 2)
    num_blocks = len(routing.block_schedule)
    _grouped_gemm_kernel[grouped_grid(num_blocks, n)](
        *(make_descriptor(x) if x_tma else x, w_or_descriptor, scales, zeros, weights),
        *(routing.sorted_pairs, routing.block_schedule, pair_outputs),
        *(num_blocks, experts, n, k, size_bucket(tokens * top_k)),
        *(w_strides, strides_of(scales), strides_of(zeros)),
        *(scale_block, group_size_of(zeros, k), x_tma, *w_layout),
        BLOCK_M=routing.block_m,
    )
    y = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    block_n = min(triton.next_power_of_2(n), _COMBINE_TILE // 4)
    block_t = _COMBINE_TILE // block_n
    _combine_kernel[(triton.cdiv(tokens, block_t) * triton.cdiv(n, block_n),)](
        pair_outputs, ids, y, tokens, experts, n, top_k, BLOCK_T=block_t, BLOCK_N=block_n
    )
    return y
