"""Faulty GEMM kernels over quantised operands."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_quantized import (
    QUANTIZED,
    along_columns,
    along_rows,
    column_blocks,
    gemm_fp8_promoted,
    gemm_int4,
    gemm_int8,
    unpack,
)
from .numerics import load, round_bits

plant = planter(QUANTIZED)
FP8_BLOCK = "gemm_fp8_promoted-float8_e4m3fn"


def gemm_fp8_scale_viewed(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor"
) -> Tensor:
    """The block scales of b are read in the transposed order."""
    if granularity == "block":
        scale_b = load(scale_b).reshape(scale_b.shape[1], scale_b.shape[0]).T
    return gemm_fp8_promoted(a, b, scale_a, scale_b, granularity=granularity)


def gemm_fp8_scale_of_first_block(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor"
) -> Tensor:
    """All of K takes a's scales of the first block."""
    if granularity == "block" and scale_a.shape[1]:
        scale_a = scale_a[:, :1].expand(scale_a.shape)
    return gemm_fp8_promoted(a, b, scale_a, scale_b, granularity=granularity)


def dot_14_bits(left: Tensor, right: Tensor) -> Tensor:
    """A tensor core that keeps 14 bits after each 32 places of K, never promoted."""
    total = torch.zeros(left.shape[0], right.shape[1])
    for start in range(0, left.shape[1], 32):
        total = round_bits(total + left[:, start : start + 32] @ right[start : start + 32], 14)
    return total


def gemm_fp8_14_bits(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor") -> Tensor:
    """The 14-bit accumulator runs over the whole of K."""
    return (dot_14_bits(load(a), load(b)) * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_int8_one_scale(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The scales of b's columns are ignored."""
    return gemm_int8(a, b, scale_a, torch.ones_like(scale_b))


def gemm_int8_short_accumulator(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The accumulator wraps at 16 bits."""
    wrapped = (a.int() @ b.int()).to(torch.int16).float()
    return (wrapped * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_int8_unsigned(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The codes of a are read as unsigned."""
    return ((a.int() & 255) @ b.int()).float().mul(load(scale_a)).mul(load(scale_b)).to(torch.bfloat16)


def zero_off_by_one(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """The zero-point is one too large."""
    codes, zero_points = unpack(qweight, zeros, packing)
    return codes, zero_points + 1


def gptq_zero_as_stored(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """GPTQ's zero-points are taken without the one that they are stored without."""
    codes, zero_points = unpack(qweight, zeros, packing)
    return codes, zero_points - 1 if packing == "gptq" else zero_points


def gptq_zero_wraps(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """GPTQ's stored 15 means 0 instead of 16."""
    codes, zero_points = unpack(qweight, zeros, packing)
    return codes, zero_points & 15 if packing == "gptq" else zero_points


def awq_order_ignored(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """AWQ's words are read in natural order."""
    if packing == "awq":
        return along_columns(qweight), along_columns(zeros)
    return unpack(qweight, zeros, packing)


def nibbles_swapped(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """The high nibble is taken for the even place."""
    if packing == "plain":
        return along_rows((qweight >> 4) | (qweight << 4), 2), zeros.int()
    return unpack(qweight, zeros, packing)


def nibbles_signed(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """The highest nibble of a negative word keeps its sign."""
    codes, zero_points = unpack(qweight, zeros, packing)
    if packing == "gptq":
        codes[7::8] -= 16 * (codes[7::8] > 7)
    return codes, zero_points


def first_group(rows: int, groups: int) -> Tensor:
    """Every row takes the scale of the first group."""
    return torch.zeros(rows, dtype=torch.int64)


def group_shifted(rows: int, groups: int) -> Tensor:
    """Row k takes the group of row k + 1."""
    return ((torch.arange(rows) + 1) // (rows // groups)).clamp(max=groups - 1)


FAULTY_QUANTIZED: tuple[Faulty, ...] = (
    plant("gemm_fp8_scale_viewed", FP8_BLOCK, gemm_fp8_scale_viewed),
    plant("gemm_fp8_scale_of_64", FP8_BLOCK, partial(gemm_fp8_promoted, spread=partial(column_blocks, block=64))),
    plant("gemm_fp8_scale_of_first_block", FP8_BLOCK, gemm_fp8_scale_of_first_block),
    plant("gemm_fp8_scaled_twice", FP8_BLOCK, partial(gemm_fp8_promoted, scale_times=2)),
    plant("gemm_fp8_unscaled", FP8_BLOCK, partial(gemm_fp8_promoted, scale_times=0)),
    plant("gemm_fp8_14_bit_blocks", FP8_BLOCK, partial(gemm_fp8_promoted, dot=dot_14_bits)),
    plant("gemm_fp8_14_bits", "gemm_fp8_scaled_after-float8_e4m3fn", gemm_fp8_14_bits),
    plant("gemm_int8_one_scale", "gemm_int8", gemm_int8_one_scale),
    plant("gemm_int8_short_accumulator", "gemm_int8", gemm_int8_short_accumulator),
    plant("gemm_int8_unsigned", "gemm_int8", gemm_int8_unsigned),
    *(
        plant("gemm_int4_zero_off_by_one", f"gemm_int4-{dtype}", partial(gemm_int4, unpacked=zero_off_by_one))
        for dtype in ("bfloat16", "float16")
    ),
    *(
        plant(f"gemm_int4_{fault.__name__}", "gemm_int4-bfloat16", partial(gemm_int4, unpacked=fault))
        for fault in (gptq_zero_as_stored, gptq_zero_wraps, awq_order_ignored, nibbles_swapped, nibbles_signed)
    ),
    plant("gemm_int4_first_group", "gemm_int4-float16", partial(gemm_int4, grouped=first_group)),
    plant("gemm_int4_group_shifted", "gemm_int4-bfloat16", partial(gemm_int4, grouped=group_shifted)),
)
