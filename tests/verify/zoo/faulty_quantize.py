"""Faulty quantisers: each is an honest one with one of its steps replaced."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_quantize import (
    FP8,
    GROUP,
    INT8,
    QUANTIZE,
    Int4Steps,
    divided,
    magnitude,
    nonzero,
    quantize,
    quantize_int4,
    rounded_zero,
    split,
    to_fp8,
)

plant = planter(QUANTIZE)


def fp8_truncated(quotient: Tensor) -> Tensor:
    """The low bits of the quotient are cut off."""
    bits = quotient.clamp(-448, 448).view(torch.int32) & ~((1 << 20) - 1)
    normal = bits.view(torch.float32)
    small = torch.trunc(quotient * 512) / 512
    return torch.where(quotient.abs() < 2.0**-6, small, normal).to(torch.float8_e4m3fn)


def fp8_half_away(quotient: Tensor) -> Tensor:
    """Ties go away from zero: half of the last place is added to the magnitude, then the rest cut off."""
    held = quotient.clamp(-448, 448)
    normal = ((held.view(torch.int32) + (1 << 19)) & ~((1 << 20) - 1)).view(torch.float32)
    small = torch.trunc(held * 512 + torch.copysign(torch.full_like(held, 0.5), held)) / 512
    return torch.where(held.abs() < 2.0**-6, small, normal).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_via_bfloat16(quotient: Tensor) -> Tensor:
    """The quotient is rounded to bfloat16 on its way."""
    return to_fp8(quotient.to(torch.bfloat16).to(torch.float32))


def fp8_three_bits(quotient: Tensor) -> Tensor:
    """The codes are those of e5m2, which has a bit less."""
    return to_fp8(quotient.clamp(-448, 448).to(torch.float8_e5m2).to(torch.float32))


def fp8_unsigned(quotient: Tensor) -> Tensor:
    """The sign is lost."""
    return to_fp8(quotient.abs())


def int8_truncated(quotient: Tensor) -> Tensor:
    """Codes are cut off towards zero."""
    return quotient.clamp(-128, 127).to(torch.int8)


def int8_half_away(quotient: Tensor) -> Tensor:
    """Ties go away from zero."""
    return torch.trunc(quotient + 0.5 * quotient.sign()).clamp(-128, 127).to(torch.int8)


def int8_half_up(quotient: Tensor) -> Tensor:
    """Ties go up."""
    return torch.floor(quotient + 0.5).clamp(-128, 127).to(torch.int8)


def int8_wrapping(quotient: Tensor) -> Tensor:
    """A code of 128 becomes -128."""
    return torch.round(quotient).nan_to_num().clamp(-1e6, 1e6).to(torch.int32).to(torch.int8)


def largest_not_magnitude(parts: Tensor) -> Tensor:
    """The span is that of the largest number, not of the largest magnitude."""
    return parts.amax(dim=-1, keepdim=True).clamp(min=0)


def without_last(parts: Tensor) -> Tensor:
    """The last number of a group doesn't count."""
    return magnitude(parts[..., :-1]) if parts.shape[-1] > 1 else magnitude(parts)


def over_one_more(span: Tensor, largest: float) -> Tensor:
    """The scale is over the number of codes."""
    return span / (largest + 1)


def inverse(span: Tensor, largest: float) -> Tensor:
    """What is told as the scale is its reciprocal."""
    return largest / nonzero(span)


def times_inverse(parts: Tensor, span: Tensor, scale: Tensor, largest: float) -> Tensor:
    """x times what is told as the scale."""
    return parts * scale


def in_bfloat16(span: Tensor, largest: float) -> Tensor:
    """The scale is rounded to bfloat16."""
    return (span / largest).to(torch.bfloat16).to(torch.float32)


def shifted(x: Tensor, size: int) -> Tensor:
    """Groups begin one place late; what lies before belongs to the last."""
    return split(x.roll(-1, dims=1), size) if x.shape[1] > size else split(x, size)


def _unshifted(steps: Any, x: Tensor) -> tuple[Tensor, ...]:
    outs: tuple[Tensor, ...] = steps(x)
    return (outs[0].roll(1, dims=1), *outs[1:]) if x.shape[1] > GROUP else outs


def fp8_group_shifted(x: Tensor, *, granularity: str = "row") -> tuple[Tensor, ...]:
    """Group g holds the columns from 128 g + 1 on."""
    if granularity != "group128":
        return quantize(x, granularity=granularity)
    return _unshifted(partial(quantize, granularity=granularity, steps=replace(FP8, split=shifted)), x)


def tail_of_neighbour(span: Tensor, largest: float) -> Tensor:
    """The last group takes the scale of the one before."""
    scale = divided(span, largest)
    return torch.cat([scale[:, :-1], scale[:, -2:-1]], dim=1) if scale.shape[1] > 1 else scale


def first_of_rows(span: Tensor, largest: float) -> Tensor:
    """Every row takes the scale of the first."""
    return divided(span, largest)[:1].expand(span.shape)


def range_without_zero(parts: Tensor) -> tuple[Tensor, Tensor]:
    """The range of a group of one sign doesn't reach zero."""
    return -parts.amin(dim=-1, keepdim=True), parts.amax(dim=-1, keepdim=True)


def zero_above(below: Tensor, scale: Tensor) -> Tensor:
    """The zero-point is one too large."""
    return (rounded_zero(below, scale) + 1).clamp(max=15)


def zero_truncated(below: Tensor, scale: Tensor) -> Tensor:
    """The zero-point is cut off, not rounded."""
    return torch.trunc(below / nonzero(scale))


def zero_unrounded(quotient: Tensor, zero: Tensor) -> Tensor:
    """Codes are made with another zero-point than is told: one less wherever there is one."""
    return torch.round(quotient) + (zero - 1).clamp(min=0)


def code_floor(quotient: Tensor, zero: Tensor) -> Tensor:
    """Quotients are rounded down."""
    return torch.floor(quotient) + zero


def code_half_away(quotient: Tensor, zero: Tensor) -> Tensor:
    """Ties go away from zero."""
    return torch.trunc(quotient + 0.5 * quotient.sign()) + zero


def wrapped(codes: Tensor) -> Tensor:
    """Codes beyond 0 to 15 wrap."""
    return (codes.nan_to_num().clamp(-1e6, 1e6).to(torch.int32) & 15).to(torch.uint8)


def int4_group_shifted(x: Tensor, *, group: int = GROUP, symmetric: bool = False) -> tuple[Tensor, ...]:
    """Group g holds the columns from g + 1 on."""
    kernel = partial(quantize_int4, group=group, symmetric=symmetric, steps=Int4Steps(split=shifted))
    outs = kernel(x)
    return (outs[0].roll(1, dims=1), *outs[1:]) if x.shape[1] > group else outs


def int4_never_symmetric(x: Tensor, *, group: int = GROUP, symmetric: bool = False) -> tuple[Tensor, ...]:
    """The option is ignored."""
    return quantize_int4(x, group=group)


FP8_FAULTS: dict[str, dict[str, Any]] = {
    "truncated": {"code": fp8_truncated},
    "half_away": {"code": fp8_half_away},
    "via_bfloat16": {"code": fp8_via_bfloat16},
    "three_bits": {"code": fp8_three_bits},
    "unsigned": {"code": fp8_unsigned},
    "largest_not_magnitude": {"span": largest_not_magnitude},
    "without_last": {"span": without_last},
    "of_fnuz": {"largest": 240.0},
    "inverse": {"scale": inverse, "quotient": times_inverse},
    "scale_in_bfloat16": {"scale": in_bfloat16},
    "tail_of_neighbour": {"scale": tail_of_neighbour},
}
INT8_FAULTS: dict[str, dict[str, Any]] = {
    "truncated": {"code": int8_truncated},
    "half_away": {"code": int8_half_away},
    "half_up": {"code": int8_half_up},
    "largest_not_magnitude": {"span": largest_not_magnitude},
    "without_last": {"span": without_last},
    "over_128": {"scale": over_one_more},
    "wrapping": {"scale": lambda span, largest: span / 127.6, "code": int8_wrapping},
    "inverse": {"scale": inverse, "quotient": times_inverse},
    "first_row": {"scale": first_of_rows},
}
INT4_FAULTS: dict[str, dict[str, Any]] = {
    "zero_above": {"zero": zero_above},
    "zero_truncated": {"zero": zero_truncated},
    "zero_told_otherwise": {"code": zero_unrounded},
    "half_away": {"code": code_half_away},
    "floor": {"code": code_floor},
    "wrapped": {"store": wrapped},
    "range_without_zero": {"ends": range_without_zero},
    "over_16": {"levels": 16.0},
    "symmetric_over_8": {"symmetric_levels": 8.0},
    "tail_of_neighbour": {"scale": tail_of_neighbour},
}

FAULTY_QUANTIZE: tuple[Faulty, ...] = (
    *(
        plant(f"quantize_fp8_{name}", f"quantize_fp8-{dtype}", partial(quantize, steps=replace(FP8, **step)))
        for name, step in FP8_FAULTS.items()
        for dtype in (("bfloat16", "float32") if name in ("half_away", "via_bfloat16") else ("bfloat16",))
    ),
    plant("quantize_fp8_group_shifted", "quantize_fp8-float16", fp8_group_shifted),
    *(
        plant(f"quantize_int8_{name}", f"quantize_int8-{dtype}", partial(quantize, steps=replace(INT8, **step)))
        for name, step in INT8_FAULTS.items()
        for dtype in (("bfloat16", "float16") if name == "half_away" else ("float32",))
    ),
    *(
        plant(f"quantize_int4_{name}", "quantize_int4-bfloat16", partial(quantize_int4, steps=Int4Steps(**step)))
        for name, step in INT4_FAULTS.items()
    ),
    plant("quantize_int4_group_shifted", "quantize_int4-float32", int4_group_shifted),
    plant("quantize_int4_never_symmetric", "quantize_int4-float16", int4_never_symmetric),
)
