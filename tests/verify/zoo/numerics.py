"""Loads, stores and roundings that the zoo's kernels share."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Store = Callable[[Tensor, torch.dtype], Tensor]


def load(x: Tensor) -> Tensor:
    """A fresh contiguous float32 copy, as a kernel holds it after its loads."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def nearest(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The honest store: one rounding to nearest even."""
    return y.to(dtype)


def keep(x: Tensor) -> Tensor:
    """A stage that rounds nothing."""
    return x


def nonzero(divisor: Tensor) -> Tensor:
    """What to divide by: one where there is zero."""
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def round_bits(x: Tensor, bits: int) -> Tensor:
    """Float32 values rounded to `bits` significant bits, the leading one counted."""
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits)
    return torch.where(x.isfinite(), rounded, x)


def rounded_to(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Float32 values that have passed through `dtype`."""
    return x.to(dtype).to(torch.float32)


def round_via(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A stage whose values pass through `dtype`; one that can be pickled."""
    return partial(rounded_to, dtype)


def store_truncated(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A store that cuts the low bits off."""
    stored = y.to(dtype)
    beyond = stored.to(torch.float32).abs() > y.abs()
    return torch.where(beyond & y.isfinite(), torch.nextafter(stored, torch.zeros_like(stored)), stored)


def store_via_12_bits(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A store that rounds to 12 significant bits on its way."""
    return round_bits(y, 12).to(dtype)


def store_saturated(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A store that clamps to the largest finite value instead of overflowing."""
    limit = torch.finfo(dtype).max
    return y.clamp(-limit, limit).to(dtype)


def store_flushed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A store that flushes subnormals to zero."""
    stored = y.to(dtype)
    return torch.where(stored.abs() < torch.finfo(dtype).tiny, torch.zeros_like(stored), stored)


def nan_to_zero(values: Tensor) -> Tensor:
    """NaN is taken for zero."""
    return values.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
