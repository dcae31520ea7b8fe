"""Faulty products of microscaled and of two-to-four sparse operands: an honest one with a step replaced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_microscaling import (
    HONEST_STEPS,
    MICROSCALING,
    SparseSteps,
    by_blocks,
    filled_in,
    gathered,
    gemm_2to4,
    gemm_mxfp8,
    gemm_nvfp4,
    places_of,
    spread,
    unpack,
    value_of_e2m1,
)
from .numerics import load, rounded_to, store_truncated

plant = planter(MICROSCALING)


def bias_126(scale: Tensor) -> Tensor:
    """The exponent's bias is one too small."""
    return load(scale) * 2


def linear_code(scale: Tensor) -> Tensor:
    """The code is taken for the scale itself."""
    return scale.contiguous().view(torch.uint8).float()


def ones(scale: Tensor) -> Tensor:
    """The scales are ignored."""
    return torch.ones_like(scale)


def clamped(least: float, most: float, scale: Tensor) -> Tensor:
    """Scales beyond a range are taken for its ends."""
    return scale.clamp(least, most)


def viewed(scale: Tensor) -> Tensor:
    """The scales are read in the transposed order."""
    return scale.T.contiguous().reshape(scale.shape)


def first_block(scale: Tensor) -> Tensor:
    """All of K takes the scales of the first block."""
    return scale[:, :1].expand(scale.shape)


def next_block(scale: Tensor) -> Tensor:
    """A block takes the scales of the next."""
    return scale.roll(-1, dims=1)


def doubled_block(scale: Tensor, block: int) -> Tensor:
    """A scale is held for twice as many places."""
    return spread(scale, 2 * block)


def shifted_block(scale: Tensor, block: int) -> Tensor:
    """Blocks begin one place early."""
    return spread(scale, block).roll(-1, dims=1)


def one_less(count: int) -> int:
    """The last block is left out."""
    return count - 1


def unsigned(x: Tensor) -> Tensor:
    """The sign is lost."""
    return load(x).abs()


def swapped(packed: Tensor) -> Tensor:
    """The high nibble is taken for the even place."""
    return unpack((packed >> 4) | (packed << 4))


def split_halves(packed: Tensor) -> Tensor:
    """Low nibbles are taken for the first half of K."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def integer_codes(codes: Tensor) -> Tensor:
    """Codes are read as two's complement."""
    return (codes.int() - 16 * (codes.int() > 7)).float()


def positive_codes(codes: Tensor) -> Tensor:
    """The codes' sign is lost."""
    return value_of_e2m1(codes & 7)


def five_at_last(codes: Tensor) -> Tensor:
    """The largest code stands for five."""
    numbers = value_of_e2m1(codes)
    return torch.where(numbers.abs() == 6, numbers * 5 / 6, numbers)


def only_a(global_a: Tensor, global_b: Tensor) -> Tensor:
    """The second multiplier is forgotten."""
    return global_a.clone()


def quotient(global_a: Tensor, global_b: Tensor) -> Tensor:
    """The multipliers are divided by."""
    return 1 / (global_a * global_b)


MX_FAULTS: dict[str, dict[str, Any]] = {
    "bias_126": {"scale": bias_126},
    "linear_scale": {"scale": linear_code},
    "scale_a_ignored": {"scale_a": ones},
    "scale_b_viewed": {"scale_b": viewed},
    "first_block": {"scale_a": first_block},
    "next_block": {"scale_b": next_block},
    "blocks_of_64": {"spread": doubled_block},
    "blocks_shifted": {"spread": shifted_block},
    "unsigned": {"value": unsigned},
    "scale_a_clamped": {"scale_a": partial(clamped, 2.0**-15, 2.0**15)},
    "truncated_store": {"store": store_truncated},
}
MX_BLOCKWISE: dict[str, dict[str, Any]] = {
    "last_block_dropped": {"blocks": one_less},
    "bfloat16_accumulator": {"running": partial(rounded_to, torch.bfloat16)},
    "float16_accumulator": {"running": partial(rounded_to, torch.float16)},
}
NV_FAULTS: dict[str, dict[str, Any]] = {
    "nibbles_of_a_swapped": {"unpack_a": swapped},
    "nibbles_of_b_swapped": {"unpack_b": swapped},
    "nibbles_in_halves": {"unpack_a": split_halves, "unpack_b": split_halves},
    "integer_codes": {"number": integer_codes},
    "positive_codes": {"number": positive_codes},
    "five_at_last": {"number": five_at_last},
    "global_b_forgotten": {"outer": only_a},
    "globals_divided": {"outer": quotient},
    "scale_a_viewed": {"scale_a": viewed},
    "scale_a_at_most_240": {"scale_a": partial(clamped, -240.0, 240.0)},
    "scale_b_unsigned": {"scale_b": torch.abs},
    "blocks_of_32": {"spread": doubled_block},
    "truncated_store": {"store": store_truncated},
}


def index_swapped(index: Tensor) -> Tensor:
    """The two places of a group have changed places."""
    pairs = index.reshape(index.shape[0], -1, 2).flip(-1)
    return places_of(pairs.reshape(index.shape))


def counted_from_one(index: Tensor) -> Tensor:
    """Places are counted from one."""
    return places_of((index.int() - 1) % 4)


def from_behind(index: Tensor) -> Tensor:
    """Places are counted from a group's end."""
    return places_of(3 - index.int())


def first_row(index: Tensor) -> Tensor:
    """Every row takes the places of the first."""
    return places_of(index[:1].expand(index.shape))


def two_in_front(index: Tensor) -> Tensor:
    """The index is ignored: the first two places of each group."""
    return places_of(torch.arange(index.shape[1]).remainder(2).expand(index.shape))


def group_of_next(index: Tensor) -> Tensor:
    """Groups lie one further on, the last at the front."""
    return (places_of(index) + 4) % (2 * index.shape[1])


def first_value_only(values: Tensor) -> Tensor:
    """The second value of each group is dropped."""
    return torch.where(torch.arange(values.shape[1]) % 2 == 0, values, 0.0)


def last_group_dropped(values: Tensor, places: Tensor, b: Tensor) -> Tensor:
    """The last group isn't added."""
    return filled_in(values[:, :-2], places[:, :-2], b)


def in_bfloat16(values: Tensor, places: Tensor, b: Tensor) -> Tensor:
    """Partial sums are kept in bfloat16."""
    total = torch.zeros(values.shape[0], b.shape[1])
    for start in range(0, values.shape[1], 16):
        part = gathered(values[:, start : start + 16], places[:, start : start + 16], b)
        total = (total + part).to(torch.bfloat16).to(torch.float32)
    return total


SPARSE_FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "index_swapped": ("bfloat16", {"places": index_swapped}),
    "counted_from_one": ("float32", {"places": counted_from_one}),
    "from_behind": ("float16", {"places": from_behind}),
    "first_row": ("bfloat16", {"places": first_row}),
    "index_ignored": ("float32", {"places": two_in_front}),
    "group_of_next": ("bfloat16", {"places": group_of_next}),
    "first_value_only": ("float16", {"values": first_value_only}),
    "last_group_dropped": ("bfloat16", {"product": last_group_dropped}),
    "bfloat16_accumulator": ("bfloat16", {"product": in_bfloat16}),
    "truncated_store": ("bfloat16", {"store": store_truncated}),
}

FAULTY_MICROSCALING: tuple[Faulty, ...] = (
    *(
        plant(f"gemm_mxfp8_{name}", "gemm_mxfp8", partial(gemm_mxfp8, steps=replace(HONEST_STEPS, **step)))
        for name, step in MX_FAULTS.items()
    ),
    *(
        plant(
            f"gemm_mxfp8_{name}",
            "gemm_mxfp8_by_blocks",
            partial(gemm_mxfp8, product=by_blocks, steps=replace(HONEST_STEPS, **step)),
        )
        for name, step in MX_BLOCKWISE.items()
    ),
    *(
        plant(f"gemm_nvfp4_{name}", "gemm_nvfp4", partial(gemm_nvfp4, steps=replace(HONEST_STEPS, **step)))
        for name, step in NV_FAULTS.items()
    ),
    *(
        plant(f"gemm_2to4_{name}", f"gemm_2to4-{dtype}", partial(gemm_2to4, steps=SparseSteps(**step)))
        for name, (dtype, step) in SPARSE_FAULTS.items()
    ),
)
