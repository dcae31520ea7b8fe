"""Rounding of float32 values to the values of a narrow format, fast: what a model's simulation does most.

The values are those of `formats.round_to` with overflow="saturate" (formats with infinities and no scale
overflow to them), one rounding from float32, to nearest even.
"""

from functools import cache

import torch

from assay.formats.format import Format
from assay.formats.rounding import round_to

_CASTS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}
"""Formats whose casts are one rounding from float32, and fast; e4m3's is slow on a CPU."""


def round_element(x: torch.Tensor, target: Format, *, over: bool = False) -> torch.Tensor:
    """x (float32, any shape) rounded to the nearest value of ``target`` (ties to even), as float32.

    16-bit formats and e5m2 overflow to infinity as their casts do; others expect x within their range. over: x may be
    written over.
    """
    if target.kind == "integer":
        return x.round_() if over else x.round()
    if target.name in _CASTS:
        return x.copy_(x.to(_CASTS[target.name])) if over else x.to(_CASTS[target.name]).to(torch.float32)
    if target.name == "float32":
        return x
    if target.name == "tf32":
        return _tf32(x)
    if target.values:
        between, values = _codebook(target, x.device)
        return torch.where(x.isnan(), x, values[torch.bucketize(x.contiguous(), between)])
    return _by_binade(x, target)


@cache
def _codebook(target: Format, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values (float32), ascending, and between each two the largest float32 that is rounded to the lower."""
    values = torch.tensor(sorted(target.values), dtype=torch.float64)
    between = ((values[:-1] + values[1:]) / 2).float()
    below = torch.nextafter(between, torch.full_like(between, -torch.inf))
    between = torch.where(round_to(between, target) > values[:-1], below, between)
    return between.to(device), values.float().to(device)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """To 10 stored significand bits, in integers: half of the last place less one, plus that place's own bit."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits >> 13).bitwise_and_(1).add_(0x0FFF).add_(bits).bitwise_and_(~0x1FFF)
    return rounded.view(torch.float32).add_(x.clamp(0.0, 0.0)).copysign_(x)  # what is added is zero, or NaN


def _by_binade(x: torch.Tensor, target: Format) -> torch.Tensor:
    """One addition rounds where the format ends: see `formats.rounding`, here with float32's 24 digits."""
    exponent = x.contiguous().view(torch.int32) & 0x7F800000
    exponent.clamp_((target.min_exponent + 127) << 23, (target.max_exponent + 127) << 23)
    magic = exponent.view(torch.float32).mul_(1.5 * 2.0 ** (24 - target.precision))
    return (x + magic).sub_(magic).copysign_(x)
