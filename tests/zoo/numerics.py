"""Loads, stores and roundings that the zoo's kernels share."""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]
Stage = Callable[[Tensor], Tensor]
Store = Callable[[Tensor, torch.dtype], Tensor]
LOG2_E, LN_2 = math.log2(math.e), math.log(2.0)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the sixteen codes of e2m1."""


def load(x: Tensor) -> Tensor:
    """A fresh contiguous float32 copy, as a kernel holds it after its loads."""
    return x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def keep(x: Tensor) -> Tensor:
    """A stage that rounds nothing."""
    return x


def peak(x: Tensor) -> Tensor:
    """The maximum along the last axis, which stays; -inf where that is empty."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -math.inf)


def shift_of(maximum: Tensor) -> Tensor:
    """The maximum where it can be subtracted: zero for a row of -inf, as -inf - (-inf) is NaN."""
    return torch.where(maximum == -math.inf, 0.0, maximum)


def nonzero(divisor: Tensor) -> Tensor:
    """The divisor, one where it is zero."""
    return torch.where(divisor == 0, 1.0, divisor)


def round_bits(x: Tensor, bits: int) -> Tensor:
    """Float32 values rounded to `bits` significant bits, the leading one counted."""
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits)
    return torch.where(x.isfinite(), rounded, x)


def rounded_to(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Float32 values that have passed through `dtype`."""
    return x.to(dtype).to(torch.float32)


def round_via(dtype: torch.dtype) -> Stage:
    """A stage whose values pass through `dtype`; one that can be pickled."""
    return partial(rounded_to, dtype)


to_bfloat16, to_float16 = round_via(torch.bfloat16), round_via(torch.float16)


def nearest(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The honest store: one rounding to nearest even."""
    return y.to(dtype)


def store_truncated(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A store that cuts the low bits off."""
    stored = y.to(dtype)
    beyond = stored.to(torch.float32).abs() > y.abs()
    return torch.where(beyond & y.isfinite(), torch.nextafter(stored, torch.zeros_like(stored)), stored)


def store_via_12_bits(y: Tensor, dtype: torch.dtype) -> Tensor:
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
    return values.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def in_float32(function: Kernel, out: torch.dtype | None = None) -> Kernel:
    """The kernel that loads what `function` takes to float32 and rounds its results to `out`, or the first's dtype."""

    @functools.wraps(function)
    def kernel(*tensors: Tensor, store: Store = nearest, **options: Any) -> Any:
        dtype = out or tensors[0].dtype
        found = function(*(load(x) if x.is_floating_point() else x for x in tensors), **options)
        return tuple(store(y, dtype) for y in found) if isinstance(found, tuple) else store(found, dtype)

    return kernel


bfloat16_out = partial(in_float32, out=torch.bfloat16)
