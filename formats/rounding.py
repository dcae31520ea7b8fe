"""Rounding of float64 tensors into a number format, once, with mode and overflow explicit.

A cast via float32 (ml_dtypes, torch on a CPU) rounds twice: 1 + 2^-8 + 2^-40 becomes 1 in bfloat16, not 1 + 2^-7. Here
one addition rounds at the format's last digit: x + 1.5·2^52·ulp is in the binade of float64 whose spacing is that ulp,
so the sum is x's integer significand rounded to nearest even, and the subtraction is exact. The other modes correct
that result by one ulp, exactly too.
"""

import math
from functools import cache
from typing import Literal, TypeAlias, get_args

import torch

from assay.formats.codes import binade
from assay.formats.errors import NotRepresentable, UnknownOption, WrongDtype
from assay.formats.format import Format, format_named

__all__ = ["Mode", "Overflow", "next_down", "next_up", "round_float32", "round_to", "ulp", "ulp_towards"]

Mode: TypeAlias = Literal["nearest", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Overflow: TypeAlias = Literal["inf", "saturate", "nan"]


def round_to(
    x: torch.Tensor,
    format: Format | str | torch.dtype,
    mode: Mode = "nearest",
    overflow: Overflow = "inf",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Round x to values of the format: a float64 tensor of x's shape, on x's device, without gradient.

    x: a tensor of any floating dtype; float64 holds them all exactly.

    mode (IEEE 754-2019, 4.3): "nearest" (ties to even; in e8m0, whose significands are all odd, to the larger; in a
    codebook to the even code), "nearest_away" (ties away from zero), "toward_zero", "up", "down", or "stochastic" (to
    either neighbour, with the probability that makes the mean x, to within 2^-53 ulp; drawn from `generator`, which
    must be on x's device, or from torch's global one).

    overflow: the result for an infinity, and for a finite x that, rounded as if the exponent had no limit, exceeds
    the finite values: "inf" makes it an infinity of its sign, in a format without infinities NaN, and in a format with
    neither the nearest finite value; "saturate" the nearest finite value; "nan" NaN. Where a mode rounds a finite x
    towards zero ("toward_zero"; "down" above the largest value; "up" below the least), it never overflows but gives
    that value.

    Zero keeps its sign where the format's zero has one. An unsigned integer format overflows below 0. e8m0 has neither
    zero nor sign: in every mode, x in [0, 2^-127] becomes 2^-127 and negative x NaN.

    Raises NotRepresentable if x holds NaN, or overflow is "nan", and the format has no NaN; UnknownFormat;
    UnknownOption; WrongDtype.
    """
    target = format_named(format)
    on_overflow = _resolve(target, mode, overflow)
    x = _as_float64(x)
    if not target.has_nan and bool(x.isnan().any()):
        raise NotRepresentable(f"expected numbers, got NaN, which {target} has not: replace it before rounding")
    if target.values:
        return _in_codebook(x, target, mode, generator)
    if target.precision == 53:
        rounded = x.clone()
    else:
        rounded = _on_grid(x, _spacing(x, target), mode, generator).copysign_(x)
    if not target.has_negative_zero:
        rounded += 0.0
    if not target.has_zero:
        rounded.clamp_(min=target.lowest).masked_fill_(x < 0, math.nan)
    return _limit(rounded, x, target, mode, on_overflow)


def ulp(x: torch.Tensor, format: Format | str | torch.dtype) -> torch.Tensor:
    """Return the spacing (float64) of the format's values from |x|'s power of two to the next; 1 for an integer format.

    In a codebook it is the distance from the value at or below |x| outwards to the next one, on x's side of zero.
    Below the smallest normal value it is the subnormal spacing, beyond the largest value that of the last binade, and
    at NaN and infinities NaN.
    """
    x = _as_float64(x)
    return _spacing(x, format_named(format)).masked_fill_(~x.isfinite(), math.nan)


def next_up(x: torch.Tensor, format: Format | str | torch.dtype) -> torch.Tensor:
    """Return the least value of the format above x (float64); x need not be a value itself (IEEE 754-2019, 5.3.1).

    Past the last value it is the overflow result of `round_to`: infinity, NaN, or in a format with neither that value.
    """
    x = _as_float64(x)
    return round_to(torch.nextafter(x, torch.full_like(x, math.inf)), format, "up")


def next_down(x: torch.Tensor, format: Format | str | torch.dtype) -> torch.Tensor:
    """Return the greatest value of the format below x (float64); the mirror of `next_up`.

    Below its least value, e8m0 gives that value for positive x and NaN for others.
    """
    x = _as_float64(x)
    return round_to(torch.nextafter(x, torch.full_like(x, -math.inf)), format, "down")


def ulp_towards(x: torch.Tensor, y: torch.Tensor, format: Format | str | torch.dtype) -> torch.Tensor:
    """Return the gap (float64) from x, values of the format, to the next value towards y; the one beyond x if equal.

    Beyond the last value it is as wide as before it; at NaN and infinities it is unspecified.
    """
    return _spacing(torch.nextafter(_as_float64(x), _as_float64(y)), format_named(format))


def _resolve(target: Format, mode: str, overflow: str) -> str:
    """Check the options; return the overflow rule, which depends on whether the format has infinities and NaN."""
    if mode not in get_args(Mode):
        raise UnknownOption(f"expected a rounding mode of {', '.join(get_args(Mode))}, got {mode!r}")
    if overflow not in get_args(Overflow):
        raise UnknownOption(f"expected overflow of {', '.join(get_args(Overflow))}, got {overflow!r}")
    if overflow == "nan" and not target.has_nan:
        raise NotRepresentable(f"expected overflow='saturate' for {target}, which has no NaN, got 'nan'")
    if overflow == "inf" and not target.infinities:
        return "nan" if target.has_nan else "saturate"
    return overflow


def _as_float64(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        raise WrongDtype(f"expected a floating-point tensor, got {x.dtype}: convert it, x.to(torch.float64)")
    return x.detach().to(torch.float64)


def _spacing(x: torch.Tensor, target: Format) -> torch.Tensor:
    if target.values:
        values, _ = _sorted(target, x.device)
        above = torch.where(x < 0, torch.searchsorted(values, x), torch.searchsorted(values, x, right=True))
        above.clamp_(1, len(values) - 1)
        return values[above] - values[above - 1]
    return binade(x, target).mul_(2.0 ** (1 - target.precision))


def _sorted(codebook: Format, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct values (float64) of a codebook, ascending, and whether each one's first code is odd."""
    first = {value: code for code, value in reversed(list(enumerate(codebook.values)))}
    values = sorted(first)
    odd = [first[value] % 2 == 1 for value in values]
    return torch.tensor(values, dtype=torch.float64, device=device), torch.tensor(odd, device=device)


def _in_codebook(x: torch.Tensor, target: Format, mode: str, generator: torch.Generator | None) -> torch.Tensor:
    """Round x to one of the two neighbouring values of a codebook; beyond the ends, to the end."""
    values, odd = _sorted(target, x.device)
    lower = torch.searchsorted(values, x.contiguous(), right=True).sub_(1).clamp_(min=0)
    upper = torch.searchsorted(values, x.contiguous()).clamp_(max=len(values) - 1)
    below, above = values[lower], values[upper]
    if mode in ("up", "down"):
        upward = torch.full_like(x, mode == "up", dtype=torch.bool)
    elif mode == "toward_zero":
        upward = x < 0
    elif mode == "stochastic":
        draw = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator)
        upward = draw * (above - below) < x - below
    else:
        middle, lost = _midpoint(below, above)
        tied = (lost == 0) & (x > 0 if mode == "nearest_away" else odd[lower])
        upward = (x > middle) | (x == middle) & ((lost < 0) | tied)
    rounded = torch.where(upward, above, below)
    return torch.where(rounded == 0, rounded.copysign(x), rounded) if target.has_negative_zero else rounded


def _midpoint(below: torch.Tensor, above: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (below + above) / 2 in float64 and twice its rounding error (TwoSum: Knuth, TAOCP 2, 4.2.2, theorem B)."""
    total = below + above
    other = total - below
    return total / 2, (below - (total - other)) + (above - other)


def _on_grid(x: torch.Tensor, step: torch.Tensor, mode: str, generator: torch.Generator | None) -> torch.Tensor:
    """Round x (|x| in modes other than the first three) to a multiple of step; the caller sets the sign.

    Needs |x| < 2^51·step, or that the result overflows anyway.
    """
    if mode not in ("nearest", "up", "down"):
        x = x.abs()
    magic = step * (1.5 * 2.0**52)
    near = (x + magic).sub_(magic)  # ties to even
    if mode == "nearest":
        return near
    if mode == "up":
        return near.add_(step * (near < x))
    below = near.sub_(step * (near > x))
    if mode == "nearest_away":
        return below.add_(step * (x - below >= step / 2))
    if mode == "stochastic":
        draw = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator).mul_(step)
        return below.add_(step * (draw < x - below))
    return below


def _limit(rounded: torch.Tensor, x: torch.Tensor, target: Format, mode: str, on_overflow: str) -> torch.Tensor:
    """Apply the overflow rule beyond the finite values; `rounded` is overwritten."""
    lowest, largest = target.lowest, target.largest
    if on_overflow == "saturate":
        return rounded.clamp_(lowest, largest)
    if mode in ("toward_zero", "down"):
        rounded = torch.where(x < math.inf, rounded.clamp(max=largest), rounded)
    if mode in ("toward_zero", "up"):
        rounded = torch.where(x > -math.inf, rounded.clamp(min=lowest), rounded)
    if on_overflow == "nan":
        return rounded.masked_fill_(rounded.abs() > largest, math.nan)
    return rounded.masked_fill_(rounded > largest, math.inf).masked_fill_(rounded < lowest, -math.inf)


_SINGLE_ROUNDING_CASTS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}
"""Formats whose casts from float32 round once and are fast; e4m3's cast is slow on a CPU."""


def round_float32(x: torch.Tensor, target: Format, *, inplace: bool = False) -> torch.Tensor:
    """Round float32 to the nearest value of a format (ties to even), as float32: `round_to` in float32, and faster.

    x: float32, any shape, within the format's range; 16-bit formats and e5m2 overflow to infinity as their casts do.
    inplace: x may be overwritten.
    """
    if target.kind == "integer":
        return x.round_() if inplace else x.round()
    if target.name in _SINGLE_ROUNDING_CASTS:
        narrow = x.to(_SINGLE_ROUNDING_CASTS[target.name])
        return x.copy_(narrow) if inplace else narrow.to(torch.float32)
    if target.name == "float32":
        return x
    if target.name == "tf32":
        return _round_to_tf32(x)
    if target.values:
        limits, values = _codebook32(target, x.device)
        return torch.where(x.isnan(), x, values[torch.bucketize(x.contiguous(), limits)])
    # As in `_on_grid`, with float32's 24 digits: one addition rounds where the format ends.
    exponent = x.contiguous().view(torch.int32) & 0x7F800000
    exponent.clamp_((target.min_exponent + 127) << 23, (target.max_exponent + 127) << 23)
    magic = exponent.view(torch.float32).mul_(1.5 * 2.0 ** (24 - target.precision))
    return (x + magic).sub_(magic).copysign_(x)


@cache
def _codebook32(target: Format, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values (float32), ascending, and for each two the largest float32 that rounds to the lower one."""
    values = torch.tensor(sorted(target.values), dtype=torch.float64)
    limits = ((values[:-1] + values[1:]) / 2).float()
    below = torch.nextafter(limits, torch.full_like(limits, -torch.inf))
    limits = torch.where(round_to(limits, target) > values[:-1], below, limits)
    return limits.to(device), values.float().to(device)


def _round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to 10 stored significand bits, in integers: add half of the last place less one, and that place's bit."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits >> 13).bitwise_and_(1).add_(0x0FFF).add_(bits).bitwise_and_(~0x1FFF)
    return rounded.view(torch.float32).add_(x.clamp(0.0, 0.0)).copysign_(x)  # adds zero, or NaN to a NaN
