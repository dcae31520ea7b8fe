"""Faulty softmax, log-softmax and logsumexp."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_softmax import SOFTMAX, logsumexp_online, logsumexp_shifted, softmax_online, softmax_shifted
from .numerics import load, round_via, store_flushed, store_truncated, store_via_12_bits, store_via_float16

plant = planter(SOFTMAX)


def softmax_unshifted(x: Tensor) -> Tensor:
    """The maximum isn't subtracted: exp overflows above 88."""
    weights = torch.exp(load(x))
    return (weights / weights.sum(dim=1, keepdim=True)).to(x.dtype)


def logsumexp_unshifted(x: Tensor) -> Tensor:
    """The maximum isn't subtracted."""
    return torch.log(torch.exp(load(x)).sum(dim=1)).to(x.dtype)


def no_decay(old: Tensor, new: Tensor) -> Tensor:
    """The running sum isn't rescaled when the maximum grows."""
    return torch.ones_like(new)


def softmax_subtracts_in_input_dtype(x: Tensor) -> Tensor:
    """JAX's form: x - max is rounded to the input dtype before the exponential."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    weights = torch.exp(load(x - x.amax(dim=1, keepdim=True)))
    return (weights / weights.sum(dim=1, keepdim=True)).to(x.dtype)


def sum_rows_in(dtype: torch.dtype, weights: Tensor) -> Tensor:
    """The running sum is rounded to `dtype` after each of 16 interleaved partial sums and each addition."""
    through = round_via(dtype)
    total = torch.zeros(weights.shape[0], 1)
    for part in weights.split(16, dim=1):
        total = through(total + through(part.sum(dim=1, keepdim=True)))
    return total


def nan_to_zero(values: Tensor) -> Tensor:
    """NaN is taken for zero."""
    return values.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


def nan_to_minus_infinity(values: Tensor) -> Tensor:
    """What a maximum and a sum that skip NaN make of it."""
    return values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def log_softmax_of_softmax(x: Tensor) -> Tensor:
    """log(softmax(x)): -inf as soon as the softmax underflows, and cancelled where it is nearly one."""
    return torch.log(torch.softmax(load(x), dim=1)).to(x.dtype)


def logsumexp_base_two(x: Tensor) -> Tensor:
    """The answer is in base two."""
    return (logsumexp_shifted(load(x)) * math.log2(math.e)).to(x.dtype)


def logsumexp_finite_sentinel(x: Tensor) -> Tensor:
    """The running maximum starts at -10000 instead of -inf."""
    values = load(x)
    maximum = torch.cat([values, torch.full((x.shape[0], 1), -1e4)], dim=1).amax(dim=1)
    total = torch.exp(values - maximum[:, None]).sum(dim=1)
    return torch.where(maximum.isinf(), maximum, maximum + torch.log(total)).to(x.dtype)


def softmax_64_columns(x: Tensor) -> Tensor:
    """The sum covers the first 64 columns only: a second block is never visited."""
    return softmax_shifted(x, sum_rows=lambda weights: weights[:, :64].sum(dim=1, keepdim=True))


FAULTY_SOFTMAX: tuple[Faulty, ...] = (
    *(plant("softmax_unshifted", f"softmax_shifted-{dtype}", softmax_unshifted) for dtype in ("float32", "bfloat16")),
    *(
        plant("softmax_no_rescale", f"softmax_online-{dtype}", partial(softmax_online, rescale=no_decay))
        for dtype in ("float32", "bfloat16")
    ),
    plant("softmax_subtracts_in_input_dtype", "softmax_shifted-bfloat16", softmax_subtracts_in_input_dtype),
    plant(
        "softmax_bfloat16_accumulator",
        "softmax_shifted-bfloat16",
        partial(softmax_shifted, sum_rows=partial(sum_rows_in, torch.bfloat16)),
    ),
    plant(
        "softmax_float16_accumulator",
        "softmax_shifted-float16",
        partial(softmax_shifted, sum_rows=partial(sum_rows_in, torch.float16)),
    ),
    plant("softmax_nan_to_zero", "softmax_shifted-float32", partial(softmax_shifted, prepare=nan_to_zero)),
    plant("softmax_nan_skipped", "softmax_shifted-bfloat16", partial(softmax_shifted, prepare=nan_to_minus_infinity)),
    plant("softmax_flushes_subnormals", "softmax_shifted-float32", partial(softmax_shifted, store=store_flushed)),
    *(
        plant("softmax_truncating_store", f"softmax_shifted-{dtype}", partial(softmax_shifted, store=store_truncated))
        for dtype in ("bfloat16", "float16")
    ),
    plant("softmax_rounds_via_float16", "softmax_online-bfloat16", partial(softmax_online, store=store_via_float16)),
    plant("softmax_rounds_via_12_bits", "softmax_online-bfloat16", partial(softmax_online, store=store_via_12_bits)),
    plant("softmax_64_columns", "softmax_shifted-float32", softmax_64_columns),
    plant("log_softmax_of_softmax", "log_softmax_subtracted-float32", log_softmax_of_softmax),
    plant("logsumexp_unshifted", "logsumexp_shifted-float32", logsumexp_unshifted),
    plant("logsumexp_no_rescale", "logsumexp_online-float32", partial(logsumexp_online, rescale=no_decay)),
    plant("logsumexp_base_two", "logsumexp_shifted-bfloat16", logsumexp_base_two),
    plant("logsumexp_finite_sentinel", "logsumexp_shifted-float32", logsumexp_finite_sentinel),
)
