"""Honest GEMM kernels over quantised operands."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import load

BLOCK = 128
AWQ_NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]  # the inverse of the stored order 0 2 4 6 1 3 5 7


def column_blocks(scale: Tensor, columns: int, block: int = BLOCK) -> Tensor:
    """A scale per block of columns repeated for each of `columns`."""
    index = (torch.arange(columns) // block).clamp(max=max(scale.shape[-1] - 1, 0))
    return scale[..., index]


def row_blocks(scale: Tensor, rows: int) -> Tensor:
    """A scale per block of rows repeated for each of `rows`."""
    return scale[torch.arange(rows) // BLOCK]


def gemm_fp8_scaled_after(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor"
) -> Tensor:
    """One float32 product of the codes, then the scales; for scales that don't change along K."""
    if granularity == "block":
        raise ValueError("scales per block change along K: use gemm_fp8_promoted")
    return (load(a) @ load(b) * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_fp8_dequantised(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    granularity: str = "tensor",
) -> Tensor:
    """Both operands are multiplied by their scales in float32 first."""
    left_scale, right_scale = load(scale_a), load(scale_b)
    if granularity == "block":
        left_scale = column_blocks(left_scale, a.shape[1])
        right_scale = column_blocks(row_blocks(right_scale, b.shape[0]), b.shape[1])
    return ((load(a) * left_scale) @ (load(b) * right_scale)).to(torch.bfloat16)


def gemm_fp8_promoted(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    granularity: str = "tensor",
    spread: Callable[[Tensor, int], Tensor] = column_blocks,
    dot: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """A product for each 128 places of K, added to a float32 accumulator; block scales are applied on the way."""
    left, right, left_scale, right_scale = load(a), load(b), load(scale_a), load(scale_b)
    total = torch.zeros(a.shape[0], b.shape[1])
    for number, start in enumerate(range(0, a.shape[1], BLOCK)):
        part = dot(left[:, start : start + BLOCK], right[start : start + BLOCK])
        if granularity == "block":
            part = part * left_scale[:, number, None] * spread(right_scale[number], b.shape[1])
        total = total + part
    return (total if granularity == "block" else total * left_scale * right_scale).to(torch.bfloat16)


def gemm_int8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Exact int32 accumulation, then the scales."""
    return ((a.int() @ b.int()).float() * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_int8_in_float32(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Float32 accumulation, which rounds beyond 2^24."""
    return (load(a) @ load(b) * load(scale_a) * load(scale_b)).to(torch.bfloat16)


def gemm_int8_dequantised(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Scales first."""
    return ((load(a) * load(scale_a)) @ (load(b) * load(scale_b))).to(torch.bfloat16)


def nibbles(packed: Tensor, count: int) -> Tensor:
    """Each word's nibbles from the lowest up, along a new last dimension; the mask undoes the sign's extension."""
    return (packed.int().unsqueeze(-1) >> (4 * torch.arange(count, dtype=torch.int32))) & 15


def along_rows(packed: Tensor, count: int) -> Tensor:
    """Words that hold neighbours of one column."""
    return nibbles(packed, count).transpose(1, 2).reshape(-1, packed.shape[1])


def along_columns(packed: Tensor) -> Tensor:
    """Words that hold eight neighbours of one row."""
    return nibbles(packed, 8).reshape(packed.shape[0], -1)


def along_columns_awq(packed: Tensor) -> Tensor:
    """Words that hold eight neighbours of one row, in AWQ's order."""
    return nibbles(packed, 8)[..., AWQ_NIBBLE_OF_COLUMN].reshape(packed.shape[0], -1)


def unpack(qweight: Tensor, zeros: Tensor, packing: str) -> tuple[Tensor, Tensor]:
    """Codes [K,N] and zero-points [K/g,N]."""
    if packing == "awq":
        return along_columns_awq(qweight), along_columns_awq(zeros)
    if packing == "gptq":
        return along_rows(qweight, 8), along_columns(zeros) + 1
    return along_rows(qweight, 2), zeros.int()


def group_of(rows: int, groups: int) -> Tensor:
    """The group of each of K rows."""
    return torch.arange(rows) // (rows // groups)


def gemm_int4(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    packing: str = "plain",
    weight_stage: Callable[[Tensor, torch.dtype], Tensor] = lambda weight, _: weight,
    grouped: Callable[[int, int], Tensor] = group_of,
) -> Tensor:
    """x @ ((q - z) * s), the weights unpacked to float32."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], scales.shape[1], dtype=x.dtype)
    codes, zero_points = unpack(qweight, zeros, packing)
    group = grouped(x.shape[1], scales.shape[0])
    weight = (codes - zero_points[group]) * load(scales)[group]
    return (load(x) @ weight_stage(weight, x.dtype)).to(x.dtype)


def round_weights(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The stage that the default contract allows: weights in x's dtype, for its tensor cores."""
    return weight.to(dtype).to(torch.float32)


gemm_int4_rounded_weights = partial(gemm_int4, weight_stage=round_weights)


def gemm_int4_grouped(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str = "plain") -> Tensor:
    """One product of codes for each group, scaled after; only for float16, where x * 15 can't overflow float32."""
    total = torch.zeros(x.shape[0], scales.shape[1])
    if x.shape[1]:
        codes, zero_points = unpack(qweight, zeros, packing)
        width = x.shape[1] // scales.shape[0]
        for group, start in enumerate(range(0, x.shape[1], width)):
            places = slice(start, start + width)
            centred = (codes[places] - zero_points[group]).float()
            total = total + load(x[:, places]) @ centred * load(scales[group])
    return total.to(x.dtype)


FP8 = ("float8_e4m3fn",)
ROWS = {"granularity": ["tensor", "row"]}
BLOCKS = {"granularity": ["tensor", "row", "block"]}
PACKINGS = {"packing": ["plain", "awq", "gptq"]}
ALL = ("float32", "bfloat16", "float16")

QUANTIZED: tuple[Entry, ...] = (
    *family("gemm_fp8_scaled_after", "gemm_fp8", gemm_fp8_scaled_after, (*FP8, "float8_e5m2"), options=ROWS),
    *family("gemm_fp8_dequantised", "gemm_fp8", gemm_fp8_dequantised, FP8, options=BLOCKS),
    *family("gemm_fp8_promoted", "gemm_fp8", gemm_fp8_promoted, FP8, options=BLOCKS),
    Entry("gemm_int8", "gemm_int8", gemm_int8, {}),
    Entry("gemm_int8_in_float32", "gemm_int8", gemm_int8_in_float32, {}),
    Entry("gemm_int8_dequantised", "gemm_int8", gemm_int8_dequantised, {}),
    *family("gemm_int4", "gemm_int4", gemm_int4, ALL, options=PACKINGS),
    *family("gemm_int4_rounded_weights", "gemm_int4", gemm_int4_rounded_weights, ALL, options=PACKINGS),
    *family("gemm_int4_grouped", "gemm_int4", gemm_int4_grouped, ("float16",), options=PACKINGS),
)
