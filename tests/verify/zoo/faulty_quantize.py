"""Faulty quantisers: each is an honest one with one of its steps replaced."""

from dataclasses import replace

import torch
from torch import Tensor

from .entry import Faulty, planted, planter
from .honest_quantize import (
    FP8,
    GROUP,
    INT8,
    QUANTIZE,
    Int4Steps,
    Steps,
    divided,
    quantize,
    quantize_int4,
    split,
    to_fp8,
)

plant = planter(QUANTIZE)


def fp8_via_bfloat16(quotient: Tensor) -> Tensor:
    """The quotient is rounded to bfloat16 on its way."""
    return to_fp8(quotient.to(torch.bfloat16).to(torch.float32))


def fp8_three_bits(quotient: Tensor) -> Tensor:
    """The codes are those of e5m2, which has a bit less."""
    return to_fp8(quotient.clamp(-448, 448).to(torch.float8_e5m2).to(torch.float32))


def fp8_unsigned(quotient: Tensor) -> Tensor:
    """The sign is lost."""
    return to_fp8(quotient.abs())


def int8_half_up(quotient: Tensor) -> Tensor:
    """Ties go up."""
    return torch.floor(quotient + 0.5).clamp(-128, 127).to(torch.int8)


def int8_wrapping(quotient: Tensor) -> Tensor:
    """A code of 128 becomes -128."""
    return torch.round(quotient).nan_to_num().clamp(-1e6, 1e6).to(torch.int32).to(torch.int8)


def shifted(x: Tensor, size: int) -> Tensor:
    """Groups begin one place late; what lies before belongs to the last."""
    return split(x.roll(-1, dims=1), size) if x.shape[1] > size else split(x, size)


def fp8_group_shifted(x: Tensor, *, granularity: str = "row") -> tuple[Tensor, ...]:
    """Group g holds the columns from 128 g + 1 on."""
    if granularity != "group128" or x.shape[1] <= GROUP:
        return quantize(x, granularity=granularity)
    codes, scale = quantize(x, granularity=granularity, steps=replace(FP8, split=shifted))
    return codes.roll(1, dims=1), scale


def tail_of_neighbour(span: Tensor, largest: float) -> Tensor:
    """The last group takes the scale of the one before."""
    scale = divided(span, largest)
    return torch.cat([scale[:, :-1], scale[:, -2:-1]], dim=1) if scale.shape[1] > 1 else scale


def code_floor(quotient: Tensor, zero: Tensor) -> Tensor:
    """Quotients are rounded down."""
    return torch.floor(quotient) + zero


def int4_group_shifted(x: Tensor, *, group: int = GROUP, symmetric: bool = False) -> tuple[Tensor, ...]:
    """Group g holds the columns from g + 1 on."""
    outs = quantize_int4(x, group=group, symmetric=symmetric, steps=Int4Steps(split=shifted))
    return (outs[0].roll(1, dims=1), *outs[1:]) if x.shape[1] > group else outs


FP8_FAULTS: dict[str, tuple[str, Steps]] = {
    "via_bfloat16": ("-bfloat16", replace(FP8, code=fp8_via_bfloat16)),
    "three_bits": ("-bfloat16", replace(FP8, code=fp8_three_bits)),
    "unsigned": ("-bfloat16", replace(FP8, code=fp8_unsigned)),
    "tail_of_neighbour": ("-bfloat16", replace(FP8, scale=tail_of_neighbour)),
}
INT8_WRAPPING = replace(INT8, scale=lambda span, largest: span / 127.6, code=int8_wrapping)

FAULTY_QUANTIZE: tuple[Faulty, ...] = (
    *planted(plant, "quantize_fp8", "steps", FP8_FAULTS),
    plant("quantize_fp8_group_shifted", "quantize_fp8-float16", fp8_group_shifted),
    plant("quantize_int8_half_up", "quantize_int8-float32", steps=replace(INT8, code=int8_half_up)),
    plant("quantize_int8_wrapping", "quantize_int8-float32", steps=INT8_WRAPPING),
    plant("quantize_int4_floor", "quantize_int4-bfloat16", steps=Int4Steps(code=code_floor)),
    plant("quantize_int4_tail_of_neighbour", "quantize_int4-bfloat16", steps=Int4Steps(scale=tail_of_neighbour)),
    plant("quantize_int4_group_shifted", "quantize_int4-float32", int4_group_shifted),
)
