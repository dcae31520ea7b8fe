"""Faults of what works along rows: softmax, normalisation, activations, rotation, loss, and gradients of them."""

import math

import torch
from torch import Tensor

from .entry import Faulty, planter
from .honest import HONEST
from .honest_backward import layernorm_backward
from .honest_elementwise import rope, sigmoid, silu_values
from .honest_loss import cross_entropy, reduced
from .honest_norm import layernorm, two_pass
from .honest_softmax import softmax_shifted
from .numerics import load, round_via, store_via_12_bits

plant = planter(HONEST)
to_bfloat16, to_float16 = round_via(torch.bfloat16), round_via(torch.float16)


def softmax_unshifted(x: Tensor) -> Tensor:
    """The maximum isn't subtracted: exp overflows above 88."""
    weights = torch.exp(load(x))
    return (weights / weights.sum(dim=1, keepdim=True)).to(x.dtype)


def no_decay(old: Tensor, new: Tensor) -> Tensor:
    """The running sum isn't rescaled when the maximum grows."""
    return torch.ones_like(new)


def nan_to_minus_infinity(values: Tensor) -> Tensor:
    """What a maximum and a sum that skip NaN make of it."""
    return values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def softmax_64_columns(x: Tensor) -> Tensor:
    """The sum covers the first 64 columns only: a second block is never visited."""
    return softmax_shifted(x, sum_rows=lambda weights: weights[:, :64].sum(dim=1, keepdim=True))


def mean_for_sum(terms: Tensor) -> Tensor:
    """The sum is divided by the number of columns."""
    return terms.mean(dim=1, keepdim=True)


def first_block_only(terms: Tensor) -> Tensor:
    """Columns from 128 on are left out."""
    return terms[:, :128].sum(dim=1, keepdim=True)


def sum_in_bfloat16(terms: Tensor) -> Tensor:
    """The sum is kept in bfloat16."""
    return to_bfloat16(terms.sum(dim=1, keepdim=True))


def softmax_backward_squared(y: Tensor, dy: Tensor) -> Tensor:
    """y dy - y^2 sum: the diagonal of the Jacobian only."""
    weights, gradient = load(y), load(dy)
    return (weights * (1.0 - weights) * gradient).to(y.dtype)


def one_pass(values: Tensor) -> tuple[Tensor, Tensor]:
    """E[x^2] - E[x]^2, which cancels when the mean is large."""
    mean = values.mean(dim=1, keepdim=True)
    return mean, values.square().mean(dim=1, keepdim=True) - mean.square()


def padded_to_eight(values: Tensor) -> tuple[Tensor, Tensor]:
    """Columns are padded with zeros to a multiple of eight, and the padding's deviations from the mean are counted."""
    mean, variance = two_pass(values)
    padding = -values.shape[1] % 8
    return mean, variance + mean.square() * (padding / values.shape[1])


def layernorm_default_eps(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """The option `eps` isn't passed on."""
    return layernorm(x, weight, bias)


def doubled(term: Tensor) -> Tensor:
    """The term is subtracted twice."""
    return 2.0 * term


def weighted_dweight(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """dweight has the weight in it."""
    dx, dweight, dbias = layernorm_backward(x, weight, dy, eps=eps)
    return dx, (load(dweight) * load(weight)).to(x.dtype), dbias


def slope_nan_at_infinity(gate: Tensor) -> Tensor:
    """0 times infinity at either end."""
    s = sigmoid(gate)
    return s * (1.0 + gate * (1.0 - s))


def slope_of_rounded_sigmoid(gate: Tensor) -> Tensor:
    """The sigmoid passes through bfloat16."""
    s = to_bfloat16(sigmoid(gate))
    return torch.where(gate.isinf(), s, s * (1.0 + gate * (1.0 - s)))


def slope_with_a_plus(gate: Tensor) -> Tensor:
    """s (1 + x (1 + s))."""
    s = sigmoid(gate)
    return torch.where(gate.isinf(), s, s * (1.0 + gate * (1.0 + s)))


def swiglu_rounds_activation(gate: Tensor, up: Tensor, *, limit: float | None = None) -> Tensor:
    """silu(gate) is rounded to the input dtype before the product."""
    gate_values, up_values = load(gate), load(up)
    if limit is not None:
        gate_values, up_values = gate_values.clamp(max=limit), up_values.clamp(-limit, limit)
    return (load(silu_values(gate_values).to(gate.dtype)) * up_values).to(gate.dtype)


def rope_angle_of_place(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Interleaved pairs take the angle of index i instead of i / 2."""
    if interleaved:
        place = (2 * torch.arange(cos.shape[1])).clamp(max=max(cos.shape[1] - 1, 0))
        return rope(x, cos[:, place], sin[:, place], interleaved=True)
    return rope(x, cos, sin)


def zero_for_none(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """A mean over nothing is zero."""
    return reduced(losses, counted, reduction).nan_to_num(nan=0.0)


def masked_by_product(losses: Tensor, counted: Tensor, reduction: str) -> Tensor:
    """Ignored tokens are multiplied by zero, which NaN survives."""
    losses = losses * counted
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def fixed_ignore_index(logits: Tensor, target: Tensor, *, ignore_index: int = -100, **options: object) -> Tensor:
    """Only -100 is ignored."""
    return cross_entropy(logits, target.clamp(min=-100), **options)  # type: ignore[arg-type]


FAULTY_ROWS: tuple[Faulty, ...] = (
    plant("softmax_unshifted", "softmax_shifted-float32", softmax_unshifted),
    plant("softmax_no_rescale", "softmax_online-float32", rescale=no_decay),
    plant("softmax_nan_skipped", "softmax_shifted-bfloat16", prepare=nan_to_minus_infinity),
    plant("softmax_rounds_via_12_bits", "softmax_online-bfloat16", store=store_via_12_bits),
    plant("softmax_64_columns", "softmax_shifted-float32", softmax_64_columns),
    plant("softmax_backward_mean_for_sum", "softmax_backward-float32", total=mean_for_sum),
    plant("softmax_backward_first_block", "softmax_backward-bfloat16", total=first_block_only),
    plant("softmax_backward_sum_in_bfloat16", "softmax_backward-bfloat16", total=sum_in_bfloat16),
    plant("softmax_backward_diagonal", "softmax_backward-float16", softmax_backward_squared),
    plant("layernorm_padding_counted", "layernorm-bfloat16", statistics=padded_to_eight),
    plant("layernorm_default_eps", "layernorm-float32", layernorm_default_eps),
    plant("layernorm_backward_one_pass", "layernorm_backward-float32", statistics=one_pass),
    plant("layernorm_backward_correlation_twice", "layernorm_backward-float16", correlate=doubled),
    plant("layernorm_backward_dweight_in_bfloat16", "layernorm_backward-bfloat16", rows=to_bfloat16),
    plant("layernorm_backward_dweight_in_float16", "layernorm_backward-float16", rows=to_float16),
    plant("layernorm_backward_weighted_dweight", "layernorm_backward-bfloat16", weighted_dweight),
    plant("rmsnorm_backward_correlation_twice", "rmsnorm_backward-float16", correlate=doubled),
    plant("rmsnorm_backward_normalised_in_bfloat16", "rmsnorm_backward-bfloat16", normalised_stage=to_bfloat16),
    plant("rmsnorm_backward_dweight_in_bfloat16", "rmsnorm_backward-bfloat16", rows=to_bfloat16),
    plant("silu_rounds_via_12_bits", "silu-bfloat16", store=store_via_12_bits),
    plant("swiglu_rounds_activation", "swiglu-bfloat16", swiglu_rounds_activation),
    plant("swiglu_backward_nan_at_infinity", "swiglu_backward-float32", derivative=slope_nan_at_infinity),
    plant("swiglu_backward_rounded_sigmoid", "swiglu_backward-bfloat16", derivative=slope_of_rounded_sigmoid),
    plant("swiglu_backward_with_a_plus", "swiglu_backward-float16", derivative=slope_with_a_plus),
    plant("swiglu_backward_rounds_activation", "swiglu_backward-bfloat16", activation=to_bfloat16),
    plant("rope_angle_of_place", "rope-float16", rope_angle_of_place),
    plant("cross_entropy_zero_for_none", "cross_entropy-float32", reduce=zero_for_none),
    plant("cross_entropy_nan_of_ignored", "cross_entropy-float32", reduce=masked_by_product),
    plant("cross_entropy_lse_in_bfloat16", "cross_entropy-bfloat16", lse_stage=to_bfloat16),
    plant("cross_entropy_fixed_ignore_index", "cross_entropy-float32", fixed_ignore_index),
    plant("cross_entropy_backward_ignored_kept", "cross_entropy_backward-float32", blank=False),
    plant("cross_entropy_backward_shares_in_bfloat16", "cross_entropy_backward-bfloat16", share_stage=to_bfloat16),
)
