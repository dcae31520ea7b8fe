"""Quantisers: scales, zero-points and codes, group by group; and with one step replaced by a faulty one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import honest, planter
from .numerics import load, nonzero, to_bfloat16

GROUP = 128
Quotient = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def split(x: Tensor, size: int) -> Tensor:
    """Groups of neighbours [R,G,size]; behind the end of a row there are zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    return padded.reshape(x.shape[0], padded.shape[1] // size, size)


def flat(parts: Tensor, columns: int) -> Tensor:
    """Groups side by side again, as far as there are columns."""
    return parts.reshape(parts.shape[0], parts.shape[1] * parts.shape[2])[:, :columns].contiguous()


def magnitude(parts: Tensor) -> Tensor:
    """The largest magnitude of each group."""
    return parts.abs().amax(dim=-1, keepdim=True)


def divided(span: Tensor, largest: float) -> Tensor:
    return span / largest


def over_scale(parts: Tensor, span: Tensor, scale: Tensor, largest: float) -> Tensor:
    return parts / nonzero(scale)


def to_fp8(quotient: Tensor) -> Tensor:
    """Codes of e4m3, saturated."""
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn)


def to_int8(quotient: Tensor) -> Tensor:
    """Codes of int8, saturated."""
    return torch.round(quotient).clamp(-128, 127).to(torch.int8)


def quantize(
    x: Tensor,
    *,
    granularity: str = "row",
    largest: float = 448.0,
    code: Callable[[Tensor], Tensor] = to_fp8,
    split: Callable[[Tensor, int], Tensor] = split,
    scale: Callable[[Tensor, float], Tensor] = divided,
    quotient: Quotient = over_scale,
) -> tuple[Tensor, Tensor]:
    """Symmetric codes and their scales."""
    if granularity == "tensor" and not x.numel():
        return code(load(x)), torch.ones(())
    rows = x.reshape(1, x.numel()) if granularity == "tensor" else x
    parts = split(load(rows), GROUP if granularity == "group128" else max(rows.shape[1], 1))
    span = magnitude(parts)
    scales = scale(span, largest)
    codes = flat(code(quotient(parts, span, scales, largest)), rows.shape[1])
    if granularity == "tensor":
        return codes.reshape(x.shape), scales.reshape(())
    return codes, scales[..., 0].contiguous()


def zero_after(quotient: Tensor, zero: Tensor) -> Tensor:
    """The quotient is rounded, then the zero-point added."""
    return torch.round(quotient) + zero


def quantize_int4(
    x: Tensor,
    *,
    group: int = GROUP,
    symmetric: bool = False,
    split: Callable[[Tensor, int], Tensor] = split,
    scale: Callable[[Tensor, float], Tensor] = divided,
    quotient: Quotient = over_scale,
    code: Callable[[Tensor, Tensor], Tensor] = zero_after,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15, scales and zero-points of each group."""
    parts = split(load(x), group)
    below, above = -parts.amin(dim=-1, keepdim=True).clamp(max=0), parts.amax(dim=-1, keepdim=True).clamp(min=0)
    span, levels = (magnitude(parts), 7.0) if symmetric else (below + above, 15.0)
    scales = scale(span, levels)
    zero = torch.full_like(scales, 8.0) if symmetric else torch.round(below / nonzero(scales)).clamp(0, 15)
    codes = code(quotient(parts, span, scales, levels), zero).clamp(0, 15).to(torch.uint8)
    return flat(codes, x.shape[1]), scales[..., 0].contiguous(), zero[..., 0].to(torch.uint8).contiguous()


quantize_int8 = partial(quantize, code=to_int8, largest=127.0)
# Both the scale and the quotient by products with reciprocals; or a scale of one for a group of zeros, and a factor.
MULTIPLIED: dict[str, Any] = {
    "scale": lambda span, largest: span * torch.tensor(1 / largest, dtype=torch.float32),
    "quotient": lambda parts, span, scale, largest: parts * (1.0 / nonzero(scale)),
}
FACTOR: dict[str, Any] = {
    "scale": lambda span, largest: nonzero(span / largest),
    "quotient": lambda parts, span, scale, largest: parts * torch.where(span == 0, 0.0, largest / span),
}
BY_128, BY_ROW = {"granularity": ["row", "tensor", "group128"]}, {"granularity": ["row", "tensor"]}
INT4 = {"group": [128, 32], "symmetric": [False, True]}

HONEST = tuple(
    entry
    for spec, kernel, options in (
        ("quantize_fp8", quantize, BY_128),
        ("quantize_int8", quantize_int8, BY_ROW),
        ("quantize_int4", quantize_int4, INT4),
    )
    for entry in honest(
        spec,
        ("", kernel),
        ("_multiplied", partial(kernel, **MULTIPLIED)),
        ("_factor", partial(kernel, **FACTOR)),
        options=options,
    )
)
plant = planter(HONEST)


def int8_wrapping(quotient: Tensor) -> Tensor:
    """A code of 128 becomes -128."""
    return torch.round(quotient).nan_to_num().clamp(-1e6, 1e6).to(torch.int32).to(torch.int8)


def shifted(x: Tensor, size: int) -> Tensor:
    """Groups begin one column late; the first column belongs to the last group."""
    return split(x.roll(-1, dims=1), size) if x.shape[1] > size else split(x, size)


def fp8_group_shifted(x: Tensor, *, granularity: str = "row") -> tuple[Tensor, ...]:
    """Group g holds the columns from 128 g + 1 on."""
    if granularity != "group128" or x.shape[1] <= GROUP:
        return quantize(x, granularity=granularity)
    codes, scale = quantize(x, granularity=granularity, split=shifted)
    return codes.roll(1, dims=1), scale


def int4_group_shifted(x: Tensor, *, group: int = GROUP, symmetric: bool = False) -> tuple[Tensor, ...]:
    """Group g holds the columns from g + 1 on."""
    outs = quantize_int4(x, group=group, symmetric=symmetric, split=shifted)
    return (outs[0].roll(1, dims=1), *outs[1:]) if x.shape[1] > group else outs


def tail_of_neighbour(span: Tensor, largest: float) -> Tensor:
    """The last group takes the scale of the one before."""
    scale = divided(span, largest)
    return torch.cat([scale[:, :-1], scale[:, -2:-1]], dim=1) if scale.shape[1] > 1 else scale


FAULTY = (
    plant("quantize_fp8_via_bfloat16", "quantize_fp8-bfloat16", code=lambda x: to_fp8(to_bfloat16(x))),
    # the codes of e5m2, which has a bit less
    plant(
        "quantize_fp8_three_bits",
        "quantize_fp8-bfloat16",
        code=lambda x: to_fp8(x.clamp(-448, 448).to(torch.float8_e5m2).to(torch.float32)),
    ),
    plant("quantize_fp8_unsigned", "quantize_fp8-bfloat16", code=lambda x: to_fp8(x.abs())),
    plant("quantize_fp8_tail_of_neighbour", "quantize_fp8-bfloat16", scale=tail_of_neighbour),
    plant("quantize_fp8_group_shifted", "quantize_fp8-float16", fp8_group_shifted),
    # ties go up
    plant(
        "quantize_int8_half_up",
        "quantize_int8-float32",
        code=lambda x: torch.floor(x + 0.5).clamp(-128, 127).to(torch.int8),
    ),
    plant("quantize_int8_wrapping", "quantize_int8-float32", scale=lambda span, most: span / 127.6, code=int8_wrapping),
    plant("quantize_int4_floor", "quantize_int4-bfloat16", code=lambda quotient, zero: torch.floor(quotient) + zero),
    plant("quantize_int4_tail_of_neighbour", "quantize_int4-bfloat16", scale=tail_of_neighbour),
    plant("quantize_int4_group_shifted", "quantize_int4-float32", int4_group_shifted),
)
