"""Faulty cross-entropies and gradients of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest_loss import LOSS, cross_entropy, cross_entropy_backward, number_of, reduced
from .numerics import round_via

plant = planter(LOSS)
to_bfloat16 = round_via(torch.bfloat16)


def mean_over_all(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Ignored tokens count in the mean."""
    total = reduced(losses, counted, "none" if reduction == "none" else "sum")
    return total / max(len(losses), 1) if reduction == "mean" else total


def zero_for_none(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """A mean over nothing is zero."""
    return reduced(losses, counted, reduction).nan_to_num(nan=0.0)


def nothing_ignored(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Ignored tokens are taken for tokens of class zero."""
    return reduced(losses, torch.ones_like(counted), reduction)


def always_summed(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """The mean isn't taken."""
    return reduced(losses, counted, "sum" if reduction == "mean" else reduction)


def masked_by_product(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Ignored tokens are multiplied by zero, which NaN survives."""
    losses = losses * counted
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def every_token(counted: Tensor, reduction: str) -> float:
    """The gradient is divided by the number of all tokens."""
    return float(max(len(counted), 1)) if reduction == "mean" else 1.0


def one(counted: Tensor, reduction: str) -> float:
    """The gradient of the mean isn't divided."""
    return 1.0


def always_divided(counted: Tensor, reduction: str) -> float:
    """Sums and single losses are divided as well."""
    return number_of(counted, "mean")


def softmax_unshifted(values: Tensor) -> Tensor:
    """exp of the logits themselves, which overflows."""
    weights = torch.exp(values)
    return weights / weights.sum(dim=1, keepdim=True)


def unsmoothed(logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, **options: object) -> Tensor:
    """Label smoothing is ignored."""
    return cross_entropy(logits, target, **options)  # type: ignore[arg-type]


def smoothed_over_others(logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, **options: object) -> Tensor:
    """The smoothed share goes to the other classes only."""
    classes = logits.shape[1]
    other = label_smoothing * classes / max(classes - 1, 1)
    return cross_entropy(logits, target, label_smoothing=min(other, 1.0), **options)  # type: ignore[arg-type]


def fixed_ignore_index(logits: Tensor, target: Tensor, *, ignore_index: int = -100, **options: object) -> Tensor:
    """Only -100 is ignored."""
    return cross_entropy(logits, target.clamp(min=-100), **options)  # type: ignore[arg-type]


def gradient_unsmoothed(logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, **options: object) -> Tensor:
    """Label smoothing is ignored."""
    return cross_entropy_backward(logits, target, **options)  # type: ignore[arg-type]


def gradient_negated(logits: Tensor, target: Tensor, **options: object) -> Tensor:
    """The sign is wrong."""
    return -cross_entropy_backward(logits, target, **options)  # type: ignore[arg-type]


FAULTY_LOSS: tuple[Faulty, ...] = (
    *(
        plant(name, f"cross_entropy-{dtype}", partial(cross_entropy, **{part: change}))
        for name, dtype, part, change in (
            ("cross_entropy_mean_over_all", "float32", "reduce", mean_over_all),
            ("cross_entropy_mean_over_all", "bfloat16", "reduce", mean_over_all),
            ("cross_entropy_zero_for_none", "float32", "reduce", zero_for_none),
            ("cross_entropy_nothing_ignored", "float16", "reduce", nothing_ignored),
            ("cross_entropy_always_summed", "float32", "reduce", always_summed),
            ("cross_entropy_nan_of_ignored", "float32", "reduce", masked_by_product),
            ("cross_entropy_logits_in_bfloat16", "float32", "prepare", to_bfloat16),
            ("cross_entropy_lse_in_bfloat16", "bfloat16", "lse_stage", to_bfloat16),
        )
    ),
    plant("cross_entropy_unsmoothed", "cross_entropy-bfloat16", unsmoothed),
    plant("cross_entropy_smoothed_over_others", "cross_entropy-float32", smoothed_over_others),
    plant("cross_entropy_fixed_ignore_index", "cross_entropy-float32", fixed_ignore_index),
    *(
        plant(name, f"cross_entropy_backward-{dtype}", partial(cross_entropy_backward, **{part: change}))
        for name, dtype, part, change in (
            ("cross_entropy_backward_mean_over_all", "float32", "divisor", every_token),
            ("cross_entropy_backward_mean_over_all", "bfloat16", "divisor", every_token),
            ("cross_entropy_backward_not_divided", "float16", "divisor", one),
            ("cross_entropy_backward_always_divided", "float32", "divisor", always_divided),
            ("cross_entropy_backward_ignored_kept", "float32", "blank", False),
            ("cross_entropy_backward_shares_in_bfloat16", "bfloat16", "share_stage", to_bfloat16),
            ("cross_entropy_backward_logits_in_bfloat16", "float32", "prepare", to_bfloat16),
            ("cross_entropy_backward_unshifted", "float32", "shares", softmax_unshifted),
        )
    ),
    plant("cross_entropy_backward_unsmoothed", "cross_entropy_backward-bfloat16", gradient_unsmoothed),
    plant("cross_entropy_backward_negated", "cross_entropy_backward-float16", gradient_negated),
)
