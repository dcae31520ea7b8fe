"""Activations, element by element."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.golden.lowering.rules.elementwise import beyond_numbers, clamped, times
from assay.golden.lowering.table import constant, elementwise, rule


@elementwise("relu")
def _relu(xp: Any, x: Any) -> Any:
    return xp.larger_of(x, constant(xp, 0.0))


@elementwise("hardtanh")
def _hardtanh(xp: Any, x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    return clamped(xp, x, min_val, max_val)


@elementwise("leaky_relu")
def _leaky_relu(xp: Any, x: Any, negative_slope: float = 0.01) -> Any:
    return _by_side(xp, x, x, lambda: x * negative_slope)


@elementwise("elu")
def _elu(xp: Any, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    def below() -> Any:
        least = xp.smaller_of(x, constant(xp, 0.0))
        return times(xp.function("expm1", times(least, input_scale)), alpha * scale)

    either = xp.any_formula(below, lambda: times(_exp_less_one(xp, x, input_scale), alpha * scale))
    return _by_side(xp, x, times(x, scale), lambda: either)


def _exp_less_one(xp: Any, x: Any, scale: float) -> Any:
    """exp(x) - 1 as kernels without expm1 have it."""
    return xp.exp(times(xp.smaller_of(x, constant(xp, 0.0)), scale)) - 1.0


def _by_side(xp: Any, x: Any, above: Any, below: Any) -> Any:
    """``above`` where x > 0, else ``below()``; NaN of NaN."""
    order = xp.compare(x, constant(xp, 0.0))
    return xp.select(order.more | order.unordered, ~(order.less | order.same), above, below())


def gated(xp: Any, x: Any, gate: Any) -> Any:
    """x times a gate that closes at -inf, where PyTorch gives NaN and others the limit, zero."""
    y = xp.gate_mul(x, gate)

    def closed() -> Any:
        least, most = xp.enclosure(x)
        return (least == most) & (least == -math.inf)

    return xp.unspecified(closed, y)


@elementwise("gelu")
def _gelu(xp: Any, x: Any, approximate: str = "none") -> Any:
    """x (1 + erf(x / sqrt 2)) / 2, or by tanh; halved first or last, which overflows beyond half of the largest number.

    erf is added to one, and its error counts relative to two: PyTorch's vectors have 1 + erf to 12 u.
    """
    if approximate == "tanh":
        cube = x * x * x
        inner = (x + cube * 0.044715) * xp.constant(lambda sqrt, pi: sqrt(2 / pi))
        opened = xp.tanh(inner, absolute=True) + 1.0
    else:
        opened = xp.erf(x * xp.constant(lambda sqrt, pi: sqrt(0.5)), absolute=2.0) + 1.0
    return xp.any_formula(lambda: gated(xp, x, opened * 0.5), lambda: gated(xp, x, opened) * 0.5)


@elementwise("silu")
def _silu(xp: Any, x: Any) -> Any:
    return gated(xp, x, xp.sigmoid(x))


@elementwise("softplus")
def _softplus(xp: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + exp(beta x)) / beta, or x itself above the threshold, where PyTorch leaves out what is below exp(-20)."""
    scaled = x * beta
    soft = xp.function("softplus", scaled) / beta
    order = xp.compare(scaled, constant(xp, threshold))
    above = order.more | order.unordered
    return xp.any_formula(lambda: xp.select(above, ~(order.less | order.same), x, soft), lambda: soft)


@elementwise("mish")
def _mish(xp: Any, x: Any) -> Any:
    return gated(xp, x, xp.tanh(xp.function("softplus", x)))


@elementwise("hardsigmoid")
def _hardsigmoid(xp: Any, x: Any) -> Any:
    return beyond_numbers(xp, torch.nn.functional.hardsigmoid, clamped(xp, x + 3.0, 0.0, 6.0) / 6.0, x)


@elementwise("hardswish")
def _hardswish(xp: Any, x: Any) -> Any:
    return x * clamped(xp, x + 3.0, 0.0, 6.0) / 6.0


@rule("log_sigmoid_forward")
def _log_sigmoid(evaluation: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    number = evaluation.number(x)
    return evaluation.made(-evaluation.xp.function("softplus", -number), x.dtype), torch.empty(0)
