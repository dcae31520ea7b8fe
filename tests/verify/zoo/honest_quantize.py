"""Honest quantisers: scales, zero-points and codes, group by group."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .entry import Entry, family
from .numerics import load, nonzero

GROUP = 128


def split(x: Tensor, size: int) -> Tensor:
    """Groups of neighbours [R,G,size]; behind the end of a row there are zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    return padded.reshape(x.shape[0], padded.shape[1] // size, size)


def magnitude(parts: Tensor) -> Tensor:
    """The largest magnitude of each group."""
    return parts.abs().amax(dim=-1, keepdim=True)


def divided(span: Tensor, largest: float) -> Tensor:
    """The scale by a division."""
    return span / largest


def over_scale(parts: Tensor, span: Tensor, scale: Tensor, largest: float) -> Tensor:
    """x / scale."""
    return parts / nonzero(scale)


def to_fp8(quotient: Tensor) -> Tensor:
    """Codes of e4m3, saturated."""
    return quotient.clamp(-448, 448).to(torch.float8_e4m3fn)


def to_int8(quotient: Tensor) -> Tensor:
    """Codes of int8, saturated."""
    return torch.round(quotient).clamp(-128, 127).to(torch.int8)


@dataclass(frozen=True)
class Steps:
    """The steps of a quantiser; a fault replaces one."""

    code: Callable[[Tensor], Tensor]
    largest: float
    split: Callable[[Tensor, int], Tensor] = split
    scale: Callable[[Tensor, float], Tensor] = divided
    quotient: Callable[[Tensor, Tensor, Tensor, float], Tensor] = over_scale

    def run(self, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Codes [R,N] and scales [R,G]."""
        parts = self.split(load(x), size)
        span = magnitude(parts)
        scale = self.scale(span, self.largest)
        codes = self.code(self.quotient(parts, span, scale, self.largest))
        return flat(codes, x.shape[1]), scale[..., 0].contiguous()


def flat(parts: Tensor, columns: int) -> Tensor:
    """Groups side by side again, as far as there are columns."""
    return parts.reshape(parts.shape[0], parts.shape[1] * parts.shape[2])[:, :columns].contiguous()


FP8, INT8 = Steps(to_fp8, 448.0), Steps(to_int8, 127.0)


def quantize(x: Tensor, *, granularity: str = "row", steps: Steps = FP8) -> tuple[Tensor, Tensor]:
    """Symmetric codes and their scales."""
    if granularity == "group128":
        return steps.run(x, GROUP)
    if granularity == "tensor" and not x.numel():
        return steps.code(load(x)), torch.ones(())
    if granularity == "tensor":
        codes, scale = steps.run(x.reshape(1, x.numel()), max(x.numel(), 1))
        return codes.reshape(x.shape), scale.reshape(())
    return steps.run(x, max(x.shape[1], 1))


def by_reciprocal(span: Tensor, largest: float) -> Tensor:
    """The scale by a product with 1 / largest."""
    return span * torch.tensor(1 / largest, dtype=torch.float32)


def one_for_zeros(span: Tensor, largest: float) -> Tensor:
    """A group of zeros has the scale one."""
    return nonzero(span / largest)


def times_reciprocal(parts: Tensor, span: Tensor, scale: Tensor, largest: float) -> Tensor:
    """x (1 / scale)."""
    return parts * (1.0 / nonzero(scale))


def times_factor(parts: Tensor, span: Tensor, scale: Tensor, largest: float) -> Tensor:
    """x (largest / span)."""
    return parts * torch.where(span == 0, torch.zeros_like(span), largest / span)


MULTIPLIED = {"scale": by_reciprocal, "quotient": times_reciprocal}
FACTOR = {"scale": one_for_zeros, "quotient": times_factor}
FP8_KERNELS = {
    "quantize_fp8": quantize,
    "quantize_fp8_multiplied": partial(quantize, steps=replace(FP8, **MULTIPLIED)),  # type: ignore[arg-type]
    "quantize_fp8_factor": partial(quantize, steps=replace(FP8, **FACTOR)),  # type: ignore[arg-type]
}
INT8_KERNELS = {
    "quantize_int8": partial(quantize, steps=INT8),
    "quantize_int8_multiplied": partial(quantize, steps=replace(INT8, **MULTIPLIED)),  # type: ignore[arg-type]
    "quantize_int8_factor": partial(quantize, steps=replace(INT8, **FACTOR)),  # type: ignore[arg-type]
}


def ends(parts: Tensor) -> tuple[Tensor, Tensor]:
    """The range of each group, zero among it: how far below zero it reaches, and how far above."""
    return -parts.amin(dim=-1, keepdim=True).clamp(max=0), parts.amax(dim=-1, keepdim=True).clamp(min=0)


def zero_after(quotient: Tensor, zero: Tensor) -> Tensor:
    """The quotient is rounded, then the zero-point added."""
    return torch.round(quotient) + zero


@dataclass(frozen=True)
class Int4Steps:
    """The steps of a quantiser with zero-points; a fault replaces one."""

    split: Callable[[Tensor, int], Tensor] = split
    scale: Callable[[Tensor, float], Tensor] = divided
    quotient: Callable[[Tensor, Tensor, Tensor, float], Tensor] = over_scale
    code: Callable[[Tensor, Tensor], Tensor] = zero_after


def quantize_int4(
    x: Tensor, *, group: int = GROUP, symmetric: bool = False, steps: Int4Steps = Int4Steps()
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15, scales and zero-points of each group."""
    parts = steps.split(load(x), group)
    below, above = ends(parts)
    span, levels = (magnitude(parts), 7.0) if symmetric else (below + above, 15.0)
    scale = steps.scale(span, levels)
    zero = torch.full_like(scale, 8.0) if symmetric else torch.round(below / nonzero(scale)).clamp(0, 15)
    codes = steps.code(steps.quotient(parts, span, scale, levels), zero).clamp(0, 15).to(torch.uint8)
    return flat(codes, x.shape[1]), scale[..., 0].contiguous(), zero[..., 0].to(torch.uint8).contiguous()


ALL = ("float32", "bfloat16", "float16")
BY_128 = {"granularity": ["row", "tensor", "group128"]}
BY_ROW = {"granularity": ["row", "tensor"]}
INT4 = {"group": [128, 32], "symmetric": [False, True]}
INT4_KERNELS = {
    "quantize_int4": quantize_int4,
    "quantize_int4_multiplied": partial(quantize_int4, steps=Int4Steps(scale=by_reciprocal, quotient=times_reciprocal)),
    "quantize_int4_factor": partial(quantize_int4, steps=Int4Steps(scale=one_for_zeros, quotient=times_factor)),
}

QUANTIZE: tuple[Entry, ...] = (
    *(e for name, kernel in FP8_KERNELS.items() for e in family(name, "quantize_fp8", kernel, ALL, options=BY_128)),
    *(e for name, kernel in INT8_KERNELS.items() for e in family(name, "quantize_int8", kernel, ALL, options=BY_ROW)),
    *(e for name, kernel in INT4_KERNELS.items() for e in family(name, "quantize_int4", kernel, ALL, options=INT4)),
)
