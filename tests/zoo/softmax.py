"""Softmax, its relatives, gradient and losses: shifted, online over blocks, in base two; and with one fault each."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .entry import ALL, honest, planter
from .numerics import (
    LOG2_E,
    Stage,
    in_float32,
    keep,
    load,
    peak,
    rounded_to,
    shift_of,
    store_via_12_bits,
    to_bfloat16,
)


def sum_of_rows(weights: Tensor) -> Tensor:
    """The denominators, [R,1]."""
    return weights.sum(dim=1, keepdim=True)


def blocked_sum(terms: Tensor, block: int = 64) -> Tensor:
    """Row sums [R,1], block by block."""
    total = torch.zeros(terms.shape[0], 1)
    for part in terms.split(block, dim=1) if terms.shape[1] else ():
        total = total + part.sum(dim=1, keepdim=True)
    return total


@in_float32
def softmax_shifted(x: Tensor, *, prepare: Stage = keep, sum_rows: Stage = sum_of_rows) -> Tensor:
    """The textbook form: subtract the row's maximum, exponentiate, divide by the sum."""
    x = prepare(x)
    weights = torch.exp(x - peak(x))
    return weights / sum_rows(weights)


@in_float32
def softmax_base_two(x: Tensor) -> Tensor:
    """exp folded into exp2; the difference is taken first, since x * log2(e) - m * log2(e) overflows and cancels."""
    weights = torch.exp2((x - peak(x)) * LOG2_E)
    return weights * torch.reciprocal(sum_of_rows(weights))


def decay(old: Tensor, new: Tensor) -> Tensor:
    """The factor that turns a sum relative to the old maximum into one relative to the new."""
    return torch.exp(old - new)


def online_statistics(
    values: Tensor, block: int = 64, rescale: Callable[[Tensor, Tensor], Tensor] = decay
) -> tuple[Tensor, Tensor]:
    """Row maximum and sum of exponentials in one pass over blocks of columns."""
    maximum = torch.full((values.shape[0], 1), -math.inf)
    total = torch.zeros(values.shape[0], 1)
    for part in values.split(block, dim=1) if values.shape[1] else ():
        new = torch.maximum(maximum, part.amax(dim=1, keepdim=True))
        shift = shift_of(new)
        total = total * rescale(maximum, shift) + torch.exp(part - shift).sum(dim=1, keepdim=True)
        maximum = new
    return maximum, total


@in_float32
def softmax_online(x: Tensor, *, block: int = 64, rescale: Callable[[Tensor, Tensor], Tensor] = decay) -> Tensor:
    """Two passes: the statistics online, block by block, then the quotients."""
    maximum, total = online_statistics(x, block, rescale)
    return torch.exp(x - shift_of(maximum)) / total


@in_float32
def log_softmax_subtracted(x: Tensor) -> Tensor:
    x = x - peak(x)
    return x - torch.log(sum_of_rows(torch.exp(x)))


def lse_online(x: Tensor) -> Tensor:
    """Log-sum-exps [R,1], in one pass over blocks of columns."""
    maximum, total = online_statistics(x)
    return shift_of(maximum) + torch.log(total)


@in_float32
def logsumexp_shifted(x: Tensor) -> Tensor:
    """m + log(sum(exp(x - m))); an infinite maximum is the answer itself, and so is -inf of a row without columns."""
    maximum = peak(x)
    total = sum_of_rows(torch.exp(x - maximum))
    return torch.where(maximum.isinf(), maximum, maximum + torch.log(total)).squeeze(1)


@in_float32
def logsumexp_online(x: Tensor) -> Tensor:
    maximum, total = online_statistics(x)
    return torch.where(maximum.isinf(), maximum, maximum + torch.log(total)).squeeze(1)


@in_float32
def softmax_backward(y: Tensor, dy: Tensor, *, total: Stage = blocked_sum) -> Tensor:
    return y * (dy - total(y * dy))


def reduced(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Summed over the tokens that count; their mean is NaN where none does."""
    losses = torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    reduce: Callable[[Tensor, Tensor, str], Tensor] = reduced,
    lse_stage: Stage = keep,
) -> Tensor:
    """(1 - s) (lse - x_label) + s (lse - mean x), the log-sum-exp in one pass over blocks of the vocabulary."""
    values = load(logits)
    counted = target != ignore_index
    lse = lse_stage(lse_online(values).squeeze(1))
    losses = lse - values.gather(1, torch.where(counted, target, 0)[:, None]).squeeze(1)
    if label_smoothing:
        losses = (1.0 - label_smoothing) * losses + label_smoothing * (lse - values.mean(dim=1))
    return reduce(losses, counted, reduction)


def masked_by_product(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Ignored tokens are multiplied by zero, which NaN survives."""
    losses = losses * counted
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def cross_entropy_torch(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(load(logits), target, **options)


def cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    shares: Stage = lambda x: torch.softmax(x, dim=1),
    share_stage: Stage = keep,
    blank: bool = True,
    from_logs: bool = False,
) -> Tensor:
    """softmax less the smoothed label, times one over the number of labels; ignored rows are blanked.

    ``from_logs``: as autograd does, the gradient of log-softmax less exp(log p) times its sum.
    """
    if logits.numel() == 0:
        return torch.zeros_like(logits)
    counted = target != ignore_index
    label, values = torch.where(counted, target, 0)[:, None], load(logits)
    upstream = 1.0 / (float(max(int(counted.sum()), 1)) if reduction == "mean" else 1.0)
    if from_logs:
        gradient = torch.full(logits.shape, -label_smoothing / logits.shape[1] * upstream)
        gradient.scatter_add_(1, label, torch.full(label.shape, (label_smoothing - 1.0) * upstream))
        gradient = gradient - torch.exp(torch.log_softmax(values, dim=1)) * gradient.sum(dim=1, keepdim=True)
    else:
        gradient = share_stage(shares(values)) - label_smoothing / logits.shape[1]
        gradient = gradient.scatter_add_(1, label, torch.full(label.shape, label_smoothing - 1.0)) * upstream
    return (torch.where(counted[:, None], gradient, 0.0) if blank else gradient).to(logits.dtype)


LOSS = {"ignore_index": [-100, 0], "label_smoothing": [0.0, 0.125], "reduction": ["mean", "sum", "none"]}
# Beside a logit of +inf exp(x - lse) is zero, where a quotient is NaN.
FROM_LSE = partial(cross_entropy_backward, shares=lambda x: torch.exp(x - torch.logsumexp(x, dim=1, keepdim=True)))
FROM_LOGS = partial(cross_entropy_backward, from_logs=True)

HONEST = (
    *honest("softmax", ("_shifted", softmax_shifted), ("_online", softmax_online), ("_base_two", softmax_base_two)),
    # x - lse, where m + log(sum) is rounded once more than in `log_softmax_subtracted`.
    *honest("log_softmax", ("_subtracted", log_softmax_subtracted), ("_lse", in_float32(lambda x: x - lse_online(x)))),
    *honest("logsumexp", ("_shifted", logsumexp_shifted), ("_online", logsumexp_online, ALL[:2])),
    *honest(
        "softmax_backward",
        ("", softmax_backward),
        ("_multiplied_out", in_float32(lambda y, dy: y * dy - y * sum_of_rows(y * dy)), ALL[:2]),
        ("_torch", in_float32(lambda y, dy: torch._softmax_backward_data(dy, y, 1, torch.float32)), ALL[:2]),
    ),
    *honest("cross_entropy", ("", cross_entropy), ("_torch", cross_entropy_torch), options=LOSS),
    *honest(
        "cross_entropy_backward",
        ("", cross_entropy_backward),
        ("_from_lse", FROM_LSE, ALL[:2]),
        ("_from_logs", FROM_LOGS),
        options=LOSS,
    ),
)
plant = planter(HONEST)


@in_float32
def softmax_unshifted(x: Tensor) -> Tensor:
    """The maximum isn't subtracted: exp overflows above 88."""
    weights = torch.exp(x)
    return weights / sum_of_rows(weights)


def carried_in(dtype: torch.dtype, weights: Tensor) -> Tensor:
    """What one block of 512 columns hands to the next is rounded to ``dtype``; a row of one block is right."""
    total = torch.zeros(weights.shape[0], 1)
    for part in weights.split(512, dim=1):
        total = rounded_to(dtype, total) + part.sum(dim=1, keepdim=True)
    return total


def fixed_ignore_index(logits: Tensor, target: Tensor, *, ignore_index: int = -100, **options: Any) -> Tensor:
    return cross_entropy(logits, target.clamp(min=-100), **options)


def nan_to_minus_infinity(values: Tensor) -> Tensor:
    """As a maximum and a sum that skip NaN see them."""
    return values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def zero_for_none(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """A mean over nothing is zero."""
    return reduced(losses, counted, reduction).nan_to_num(nan=0.0)


FAULTY = (
    plant("softmax_unshifted", "softmax_shifted-float32", softmax_unshifted),
    plant("softmax_no_rescale", "softmax_online-float32", rescale=lambda old, new: torch.ones_like(new)),
    plant("softmax_nan_skipped", "softmax_shifted-bfloat16", prepare=nan_to_minus_infinity),
    plant("softmax_rounds_via_12_bits", "softmax_online-bfloat16", store=store_via_12_bits),
    plant("softmax_64_columns", "softmax_shifted-float32", sum_rows=lambda weights: sum_of_rows(weights[:, :64])),
    *(
        plant(f"softmax_carries_{str(dtype)[6:]}", f"softmax_shifted-{twin}", sum_rows=partial(carried_in, dtype))
        for dtype, twin in ((torch.float16, "bfloat16"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16"))
    ),
    plant("softmax_backward_mean_for_sum", "softmax_backward-float32", total=lambda terms: terms.mean(1, keepdim=True)),
    plant("softmax_backward_first_block", "softmax_backward-bfloat16", total=lambda terms: sum_of_rows(terms[:, :128])),
    plant("softmax_backward_sum_in_bfloat16", "softmax_backward-bfloat16", total=lambda x: to_bfloat16(sum_of_rows(x))),
    # y dy - y^2 dy: the diagonal of the Jacobian only
    plant("softmax_backward_diagonal", "softmax_backward-float16", in_float32(lambda y, dy: y * (1.0 - y) * dy)),
    plant("cross_entropy_zero_for_none", "cross_entropy-float32", reduce=zero_for_none),
    plant("cross_entropy_nan_of_ignored", "cross_entropy-float32", reduce=masked_by_product),
    plant("cross_entropy_lse_in_bfloat16", "cross_entropy-bfloat16", lse_stage=to_bfloat16),
    plant("cross_entropy_fixed_ignore_index", "cross_entropy-float32", fixed_ignore_index),
    plant("cross_entropy_backward_ignored_kept", "cross_entropy_backward-float32", blank=False),
    plant("cross_entropy_backward_shares_in_bfloat16", "cross_entropy_backward-bfloat16", share_stage=to_bfloat16),
)
