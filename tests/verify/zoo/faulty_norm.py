"""Faulty normalisations."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_norm import NORM, add_rmsnorm, layernorm, rmsnorm, two_pass
from .numerics import round_via

plant = planter(NORM)
to_bfloat16 = round_via(torch.bfloat16)


def one_pass(values: Tensor) -> tuple[Tensor, Tensor]:
    """E[x^2] - E[x]^2, which cancels when the mean is large."""
    mean = values.mean(dim=1, keepdim=True)
    return mean, values.square().mean(dim=1, keepdim=True) - mean.square()


def unbiased(values: Tensor) -> tuple[Tensor, Tensor]:
    """The variance is divided by N - 1."""
    mean, variance = two_pass(values)
    return mean, variance * (values.shape[1] / max(values.shape[1] - 1, 1))


def padded_to_eight(values: Tensor) -> tuple[Tensor, Tensor]:
    """Columns are padded with zeros to a multiple of eight, and the padding's deviations from the mean are counted."""
    mean, variance = two_pass(values)
    padding = -values.shape[1] % 8
    return mean, variance + mean.square() * (padding / values.shape[1])


def eps_outside_root(variance: Tensor, eps: float) -> Tensor:
    """1 / (sqrt(variance) + eps)."""
    return 1.0 / (torch.sqrt(variance) + eps)


def layernorm_bias_ignored(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """The bias isn't added."""
    return layernorm(x, weight, torch.zeros_like(bias), eps=eps)


def layernorm_default_eps(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """The option `eps` isn't passed on."""
    return layernorm(x, weight, bias)


def rmsnorm_offset_ignored(x: Tensor, weight: Tensor, *, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """The weight is taken without its offset."""
    return rmsnorm(x, weight, eps=eps)


def square_in_bfloat16(values: Tensor) -> Tensor:
    """Squares are rounded to bfloat16."""
    return to_bfloat16(values.square())


def square_in_float16(values: Tensor) -> Tensor:
    """Squares are rounded to float16, where they overflow from 256 on."""
    return values.square().to(torch.float16).to(torch.float32)


FAULTY_NORM: tuple[Faulty, ...] = (
    *(
        plant("layernorm_one_pass", f"layernorm-{dtype}", partial(layernorm, statistics=one_pass))
        for dtype in ("float32", "bfloat16")
    ),
    plant("layernorm_unbiased_variance", "layernorm-float32", partial(layernorm, statistics=unbiased)),
    plant("layernorm_padding_counted", "layernorm-bfloat16", partial(layernorm, statistics=padded_to_eight)),
    *(
        plant("layernorm_eps_outside_root", f"layernorm-{dtype}", partial(layernorm, root=eps_outside_root))
        for dtype in ("float32", "bfloat16")
    ),
    plant("layernorm_bias_ignored", "layernorm-bfloat16", layernorm_bias_ignored),
    plant("layernorm_default_eps", "layernorm-float32", layernorm_default_eps),
    *(
        plant("rmsnorm_eps_outside_root", f"rmsnorm-{dtype}", partial(rmsnorm, root=eps_outside_root))
        for dtype in ("float32", "bfloat16")
    ),
    plant("rmsnorm_cast_before_weight", "rmsnorm-bfloat16", partial(rmsnorm, normalised_stage=to_bfloat16)),
    plant("rmsnorm_squares_in_bfloat16", "rmsnorm-bfloat16", partial(rmsnorm, square=square_in_bfloat16)),
    plant("rmsnorm_squares_in_float16", "rmsnorm-float16", partial(rmsnorm, square=square_in_float16)),
    plant("rmsnorm_offset_ignored", "rmsnorm-float32", rmsnorm_offset_ignored),
    plant(
        "add_rmsnorm_normalises_the_rounded_sum",
        "add_rmsnorm-bfloat16",
        partial(add_rmsnorm, sum_stage=to_bfloat16),
    ),
)
