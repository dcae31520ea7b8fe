"""Faulty gradients along rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .entry import Faulty, planter
from .faulty_norm import one_pass, unbiased
from .honest_backward import (
    BACKWARD,
    layernorm_backward,
    rmsnorm_backward,
    slope,
    softmax_backward,
    swiglu_backward,
)
from .honest_elementwise import sigmoid
from .numerics import load, round_via

plant = planter(BACKWARD)
to_bfloat16, to_float16 = round_via(torch.bfloat16), round_via(torch.float16)


def zeros_of(terms: Tensor) -> Tensor:
    """No sum at all."""
    return torch.zeros(terms.shape[0], 1)


def mean_for_sum(terms: Tensor) -> Tensor:
    """The sum is divided by the number of columns."""
    return terms.mean(dim=1, keepdim=True)


def first_block_only(terms: Tensor) -> Tensor:
    """Columns from 128 on are left out."""
    return terms[:, :128].sum(dim=1, keepdim=True)


def last_column_left_out(terms: Tensor) -> Tensor:
    """A loop that ends one too early."""
    return terms[:, :-1].sum(dim=1, keepdim=True)


def sum_in_bfloat16(terms: Tensor) -> Tensor:
    """The sum is kept in bfloat16."""
    return to_bfloat16(terms.sum(dim=1, keepdim=True))


def products_in_bfloat16(terms: Tensor) -> Tensor:
    """Products are rounded before they are added up."""
    return to_bfloat16(terms).sum(dim=1, keepdim=True)


def softmax_backward_squared(y: Tensor, dy: Tensor) -> Tensor:
    """y dy - y^2 sum: the diagonal of the Jacobian only."""
    weights, gradient = load(y), load(dy)
    return (weights * (1.0 - weights) * gradient).to(y.dtype)


def swapped_weights(y: Tensor, dy: Tensor) -> Tensor:
    """The roles of y and dy are exchanged."""
    return softmax_backward(dy, y)


def nothing(term: Tensor) -> Tensor:
    """The term is left out."""
    return torch.zeros_like(term)


def doubled(term: Tensor) -> Tensor:
    """The term is subtracted twice."""
    return 2.0 * term


def layernorm_backward_weight_forgotten(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    """dx lacks the weight."""
    dx = layernorm_backward(x, torch.ones_like(weight), dy, eps=eps)[0]
    return dx, *layernorm_backward(x, weight, dy, eps=eps)[1:]


def layernorm_backward_weighted_dweight(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    """dweight has the weight in it."""
    dx, dweight, dbias = layernorm_backward(x, weight, dy, eps=eps)
    return dx, (load(dweight) * load(weight)).to(x.dtype), dbias


def layernorm_backward_default_eps(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """The option `eps` isn't passed on."""
    return layernorm_backward(x, weight, dy)


def layernorm_backward_last_rows_dropped(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, ...]:
    """dweight and dbias leave out rows behind the last whole block of eight."""
    whole = x.shape[0] // 8 * 8
    dx = layernorm_backward(x, weight, dy, eps=eps)[0]
    return dx, *layernorm_backward(x[:whole], weight, dy[:whole], eps=eps)[1:]


def rmsnorm_backward_weight_forgotten(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """dx lacks the weight."""
    dx = rmsnorm_backward(x, torch.ones_like(weight), dy, eps=eps)[0]
    return dx, rmsnorm_backward(x, weight, dy, eps=eps)[1]


def rmsnorm_backward_unnormalised_dweight(
    x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """dweight sums dy x without the root."""
    return rmsnorm_backward(x, weight, dy, eps=eps)[0], (load(dy) * load(x)).sum(dim=0).to(x.dtype)


def rmsnorm_backward_default_eps(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The option `eps` isn't passed on."""
    return rmsnorm_backward(x, weight, dy)


def slope_without_second_term(gate: Tensor) -> Tensor:
    """silu' taken for the sigmoid."""
    return sigmoid(gate)


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


def swiglu_backward_swapped(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The two gradients are returned in the wrong order."""
    dgate, dup = swiglu_backward(gate, up, dy)
    return dup, dgate


def swiglu_backward_up_forgotten(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dgate lacks up."""
    return swiglu_backward(gate, torch.ones_like(up), dy)


def swiglu_backward_rounds_activation(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) is rounded to the input dtype first."""
    return swiglu_backward(gate, up, dy, activation=round_via(gate.dtype))


def swiglu_backward_rounds_product(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """dy up is rounded to the input dtype before silu'."""
    product = load((load(dy) * load(up)).to(gate.dtype))
    dup = swiglu_backward(gate, up, dy)[1]
    return (product * slope(load(gate))).to(gate.dtype), dup


FAULTY_BACKWARD: tuple[Faulty, ...] = (
    *(
        plant(name, f"softmax_backward-{dtype}", partial(softmax_backward, total=total))
        for name, dtype, total in (
            ("softmax_backward_without_sum", "float32", zeros_of),
            ("softmax_backward_without_sum", "bfloat16", zeros_of),
            ("softmax_backward_mean_for_sum", "float32", mean_for_sum),
            ("softmax_backward_first_block", "bfloat16", first_block_only),
            ("softmax_backward_last_column", "float32", last_column_left_out),
            ("softmax_backward_sum_in_bfloat16", "bfloat16", sum_in_bfloat16),
            ("softmax_backward_products_in_bfloat16", "float16", products_in_bfloat16),
        )
    ),
    plant("softmax_backward_diagonal", "softmax_backward-float16", softmax_backward_squared),
    plant("softmax_backward_swapped", "softmax_backward-float32", swapped_weights),
    *(
        plant(name, f"layernorm_backward-{dtype}", partial(layernorm_backward, **{part: change}))
        for name, dtype, part, change in (
            ("layernorm_backward_without_mean", "float32", "centre", nothing),
            ("layernorm_backward_without_mean", "bfloat16", "centre", nothing),
            ("layernorm_backward_mean_twice", "float16", "centre", doubled),
            ("layernorm_backward_without_correlation", "float32", "correlate", nothing),
            ("layernorm_backward_one_pass", "float32", "statistics", one_pass),
            ("layernorm_backward_unbiased", "bfloat16", "statistics", unbiased),
            ("layernorm_backward_dweight_in_bfloat16", "bfloat16", "rows", to_bfloat16),
            ("layernorm_backward_dweight_in_float16", "float16", "rows", to_float16),
        )
    ),
    plant("layernorm_backward_weight_forgotten", "layernorm_backward-float32", layernorm_backward_weight_forgotten),
    plant("layernorm_backward_weighted_dweight", "layernorm_backward-bfloat16", layernorm_backward_weighted_dweight),
    plant("layernorm_backward_default_eps", "layernorm_backward-float32", layernorm_backward_default_eps),
    plant("layernorm_backward_last_rows", "layernorm_backward-bfloat16", layernorm_backward_last_rows_dropped),
    *(
        plant(name, f"rmsnorm_backward-{dtype}", partial(rmsnorm_backward, **{part: change}))
        for name, dtype, part, change in (
            ("rmsnorm_backward_without_correlation", "float32", "correlate", nothing),
            ("rmsnorm_backward_without_correlation", "bfloat16", "correlate", nothing),
            ("rmsnorm_backward_correlation_twice", "float16", "correlate", doubled),
            ("rmsnorm_backward_normalised_in_bfloat16", "bfloat16", "normalised_stage", to_bfloat16),
            ("rmsnorm_backward_dweight_in_bfloat16", "bfloat16", "rows", to_bfloat16),
        )
    ),
    plant("rmsnorm_backward_weight_forgotten", "rmsnorm_backward-float32", rmsnorm_backward_weight_forgotten),
    plant("rmsnorm_backward_dweight_unscaled", "rmsnorm_backward-float16", rmsnorm_backward_unnormalised_dweight),
    plant("rmsnorm_backward_default_eps", "rmsnorm_backward-float32", rmsnorm_backward_default_eps),
    *(
        plant(name, f"swiglu_backward-{dtype}", partial(swiglu_backward, derivative=derivative))
        for name, dtype, derivative in (
            ("swiglu_backward_slope_is_sigmoid", "float32", slope_without_second_term),
            ("swiglu_backward_nan_at_infinity", "float32", slope_nan_at_infinity),
            ("swiglu_backward_rounded_sigmoid", "bfloat16", slope_of_rounded_sigmoid),
            ("swiglu_backward_with_a_plus", "float16", slope_with_a_plus),
        )
    ),
    plant("swiglu_backward_swapped", "swiglu_backward-bfloat16", swiglu_backward_swapped),
    plant("swiglu_backward_up_forgotten", "swiglu_backward-float32", swiglu_backward_up_forgotten),
    plant("swiglu_backward_rounds_activation", "swiglu_backward-bfloat16", swiglu_backward_rounds_activation),
    plant("swiglu_backward_rounds_product", "swiglu_backward-float16", swiglu_backward_rounds_product),
)
