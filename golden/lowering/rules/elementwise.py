"""Arithmetic, elementary functions, steps and activations, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic import Ball
from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.rule_table import constant, elementwise, promoted, rule
from assay.golden.lowering.tensor import TracedTensor


def scaled(x: Any, factor: float) -> Any:
    """Multiply by a scalar; by one without an operation, which would widen the radius."""
    return x if factor == 1 else x * factor


def clamped(xp: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    """Clamp x between the limits that are given."""
    if min is not None:
        x = xp.larger_of(x, constant(xp, min))
    return x if max is None else xp.smaller_of(x, constant(xp, max))


def eager_at_special_values(xp: Any, eager: Callable[..., Any], y: Any, *operands: Any) -> Any:
    """Return ``y``, but PyTorch's own result where an operand is known and one is infinite or NaN."""
    ends = [xp.enclosure(constant(xp, operand)) for operand in operands]
    special, values = torch.tensor(False), [low for low, _ in ends]
    for low in values:
        special = special | ~low.isfinite()
    for low, high in ends:
        special = special & ((low == high) | (low.isnan() & high.isnan()))
    if not bool(special.any()):
        return y
    result = eager(*values)
    unit = torch.where(result.isfinite(), result.abs() * 2.0**-52, 0.0)  # PyTorch's float64 result is itself rounded
    return xp.chosen(special.expand(result.shape), xp.interval(result - unit, result + unit), y)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add.Tensor add.Scalar": lambda xp, x, y, alpha=1: x + scaled(y, alpha),
    "sub.Tensor sub.Scalar": lambda xp, x, y, alpha=1: x - scaled(y, alpha),
    "rsub.Tensor rsub.Scalar": lambda xp, x, y, alpha=1: y - scaled(x, alpha),
    "mul.Tensor mul.Scalar": lambda xp, x, y: x * y,
    "neg": lambda xp, x: -x,
    "abs": lambda xp, x: xp.larger_of(x, -x),
    "square": lambda xp, x: x * x,
    "maximum": lambda xp, x, y: xp.larger_of(x, y),
    "minimum": lambda xp, x, y: xp.smaller_of(x, y),
    "fmax": lambda xp, x, y: _unless_nan(xp, x, y, xp.larger_of(x, y)),
    "fmin": lambda xp, x, y: _unless_nan(xp, x, y, xp.smaller_of(x, y)),
    "clamp clamp.Tensor clip clip.Tensor clamp_min clamp_min.Tensor": clamped,
    "clamp_max clamp_max.Tensor": lambda xp, x, max: clamped(xp, x, None, max),
    "relu": lambda xp, x: xp.larger_of(x, constant(xp, 0.0)),
    "addcmul": lambda xp, x, a, b, value=1: x + scaled(a * b, value),
    "addcdiv": lambda xp, x, a, b, value=1: x + scaled(a / b, value),
    "hardsigmoid": lambda xp, x: eager_at_special_values(
        xp, torch.nn.functional.hardsigmoid, clamped(xp, x + 3.0, 0.0, 6.0) / 6.0, x
    ),
    "pow.Tensor_Scalar pow.Tensor_Tensor": lambda xp, x, y: eager_at_special_values(
        xp, torch.pow, xp.power(x, y), x, y
    ),
    "pow.Scalar": lambda xp, x, y: xp.function("exp2", y) if x == 2 else xp.power(constant(xp, x), y),
    "silu": lambda xp, x: gated(xp, x, xp.sigmoid(x)),
    "mish": lambda xp, x: gated(xp, x, xp.tanh(xp.function("softplus", x))),
    "hypot": lambda xp, x, y: eager_at_special_values(xp, torch.hypot, xp.root(x * x + y * y), x, y),
    "lerp.Scalar lerp.Tensor": lambda xp, x, y, weight: xp.any_formula(
        lambda: x + (y - x) * weight, lambda: y - (y - x) * (1.0 - weight)
    ),
}
_DECIDING: dict[str, Callable[..., Any]] = {
    "sign sgn": lambda ctx, x: ctx.step(torch.sign, x),
    "round.decimals": lambda ctx, x, decimals=0: ctx.step(torch.round, x * 10.0**decimals) / 10.0**decimals,
    "remainder.Tensor remainder.Scalar": lambda ctx, x, y: eager_at_special_values(
        ctx.xp, torch.remainder, x - ctx.step(torch.floor, quotient(ctx.xp, x, y)) * y, x, y
    ),
    "fmod.Tensor fmod.Scalar": lambda ctx, x, y: eager_at_special_values(
        ctx.xp, torch.fmod, x - ctx.step(torch.trunc, quotient(ctx.xp, x, y)) * y, x, y
    ),
}
_FLOATING: dict[str, Callable[..., Any]] = {
    "rad2deg": lambda xp, x: x * xp.constant(lambda sqrt, pi: 180 / pi),
    "deg2rad": lambda xp, x: x * xp.constant(lambda sqrt, pi: pi / 180),
}
for _names, _function in _ARITHMETIC.items():
    elementwise(_names)(_function)
for _names, _function in _DECIDING.items():
    elementwise(_names, deciding=True)(_function)
for _names, _function in _FLOATING.items():
    elementwise(_names, floating=True)(_function)


def _unless_nan(xp: Any, x: Any, y: Any, extreme: Any) -> Any:
    """Return the other operand where one is NaN."""
    return xp.chosen(xp.compare(x, x).unordered, y, xp.chosen(xp.compare(y, y).unordered, x, extreme))


def quotient(xp: Any, x: Any, y: Any) -> Any:
    """Return x / y, exact where a known x is divided by a known power of two, as by every way of dividing."""
    if not (isinstance(x, Ball) and isinstance(y, (Ball, int, float))):
        return x / y
    result, divisor = x / y, torch.as_tensor(y.mid if isinstance(y, Ball) else float(y), dtype=torch.float64)
    exact = (divisor.frexp().mantissa.abs() == 0.5) & (x.radius == 0) & (result.mid * divisor == x.mid)
    exact &= (y.radius == 0) if isinstance(y, Ball) else True
    exact &= result.radius.isfinite() & x.model.represents(result.mid)
    exact &= (result.mid.abs() >= x.model.compute.smallest_normal) | (result.mid == 0)
    exact, known = exact.expand(result.mid.shape), xp.exact(result.mid)
    return known if bool(exact.all()) else xp.chosen(exact, known, result) if bool(exact.any()) else result


_DIVISIONS = "div.Tensor div.Scalar true_divide.Tensor"


@rule(_DIVISIONS)
def _div(ctx: Lowering, x: Any, y: Any) -> torch.Tensor:
    """Return the quotient; of a sum by one number also with the terms divided first, as means are computed in parts."""
    numbers = [ctx.number(arg) if isinstance(arg, torch.Tensor) else arg for arg in (x, y)]
    result = ctx.xp.in_blocks(lambda a, b: quotient(ctx.xp, a, b), *numbers)
    divided = x.memory.divided if isinstance(x, TracedTensor) else None
    if divided is not None and tuple(x.shape) == tuple(x.memory.number.shape):
        divisor = numbers[1] if isinstance(numbers[1], (int, float)) else numbers[1].reshape(-1)
        if isinstance(divisor, (int, float)) or divisor.shape[0] == 1:
            result = ctx.xp.any_formula(lambda: result, lambda: divided(divisor))
    ctx.observe(_DIVISIONS, numbers, result)
    return ctx.wrap(result, promoted((x, y), True))


@elementwise("div.Tensor_mode div.Scalar_mode", deciding=True)
def _div_mode(ctx: Lowering, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    ratio = quotient(ctx.xp, x, y)
    if rounding_mode is None:
        return ratio
    rounded = ctx.step(getattr(torch, rounding_mode), ratio)
    return eager_at_special_values(ctx.xp, lambda a, b: torch.div(a, b, rounding_mode=rounding_mode), rounded, x, y)


def _register_overflowing(name: str) -> None:
    @rule(name)
    def compute(ctx: Lowering, x: torch.Tensor) -> torch.Tensor:
        xp, number = ctx.xp, ctx.number(x)
        y = xp.in_blocks(lambda part: xp.function(name, part), number)
        ctx.observe(name, [number], y)
        result: Any = ctx.wrap(y, promoted([x], floating=True))

        def as_operand(y: Any) -> Any:
            operand, overflows = xp.held(y, number)
            ctx.overflowed |= overflows
            return operand

        result.memory.as_operand = as_operand
        return result


_FUNCTIONS = """log log2 log10 log1p tanh erf erfc erfinv sigmoid sqrt rsqrt reciprocal
sin cos tan asin acos atan asinh acosh atanh lgamma digamma"""
for _name in _FUNCTIONS.split():
    elementwise(_name, floating=True)(lambda xp, x, name=_name: xp.function(name, x))
for _name in ("exp", "exp2", "expm1", "sinh", "cosh"):
    _register_overflowing(_name)
for _name in ("floor", "ceil", "trunc", "round"):
    elementwise(_name, deciding=True)(lambda ctx, x, name=_name: ctx.step(getattr(torch, name), x))


@elementwise("atan2", floating=True)
def _atan2(xp: Any, y: Any, x: Any) -> Any:
    """atan(y / x), shifted by pi or -pi on the left side, and pi/2, -pi/2 or 0 where x is zero."""
    zero, pi = constant(xp, 0.0), xp.constant(lambda sqrt, pi: pi)
    x_sign, y_sign = xp.compare(x, zero), xp.compare(y, zero)
    right = xp.function("atan", y / xp.chosen(x_sign.same, x * 0.0 + 1.0, x))
    maybe_below = ~(y_sign.more | y_sign.same)
    left = xp.select(y_sign.less, maybe_below, right - pi, right + pi)
    upright = xp.select(y_sign.less, maybe_below, -(pi / 2.0), pi / 2.0)
    upright = xp.chosen(y_sign.same, zero, upright)
    angle = xp.chosen(x_sign.same, upright, xp.select(x_sign.less, ~(x_sign.more | x_sign.same), left, right))
    return eager_at_special_values(xp, torch.atan2, angle, y, x)


@elementwise("xlogy.Tensor xlogy.Scalar_Other special_xlogy", floating=True)
def _xlogy(xp: Any, x: Any, y: Any) -> Any:
    zero = xp.compare(x, constant(xp, 0.0)).same
    log = xp.function("log", xp.chosen(zero, constant(xp, 1.0), constant(xp, y)))
    return eager_at_special_values(xp, torch.xlogy, xp.chosen(zero, constant(xp, 0.0), x * log), x, y)


@elementwise("logit special_logit", floating=True)
def _logit(xp: Any, x: Any, eps: float | None = None) -> Any:
    x = x if eps is None else clamped(xp, x, eps, 1 - eps)
    return xp.function("log", x) - xp.function("log1p", -x)


@elementwise("sinc special_sinc", floating=True)
def _sinc(xp: Any, x: Any) -> Any:
    origin, one = xp.compare(x, constant(xp, 0.0)).same, constant(xp, 1.0)
    angle = xp.chosen(origin, one, x) * xp.constant(lambda sqrt, pi: pi)
    return eager_at_special_values(xp, torch.sinc, xp.chosen(origin, one, xp.function("sin", angle) / angle), x)


@elementwise("leaky_relu")
def _leaky_relu(xp: Any, x: Any, negative_slope: float = 0.01) -> Any:
    return _where_positive(xp, x, x, x * negative_slope)


@elementwise("elu")
def _elu(xp: Any, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """Below zero by expm1, or by exp(x) - 1 as kernels without expm1."""

    def exponent() -> Any:
        return scaled(xp.smaller_of(x, constant(xp, 0.0)), input_scale)

    negative = xp.any_formula(
        lambda: scaled(xp.function("expm1", exponent()), alpha * scale),
        lambda: scaled(xp.exp(exponent()) - 1.0, alpha * scale),
    )
    return _where_positive(xp, x, scaled(x, scale), negative)


def _where_positive(xp: Any, x: Any, positive: Any, negative: Any) -> Any:
    """Select by the sign of x; NaN counts as positive."""
    order = xp.compare(x, constant(xp, 0.0))
    return xp.select(order.more | order.unordered, ~(order.less | order.same), positive, negative)


def gated(xp: Any, x: Any, gate: Any) -> Any:
    """Return x times a gate that closes at -inf, where PyTorch gives NaN and other kernels the limit, zero."""

    def closed() -> Any:
        low, high = xp.enclosure(x)
        return (low == high) & (low == -math.inf)

    return xp.unspecified(closed, xp.gate_mul(x, gate))


@elementwise("gelu")
def _gelu(xp: Any, x: Any, approximate: str = "none") -> Any:
    """x (1 + erf(x / sqrt 2)) / 2, or by tanh; halved first or last, which overflows beyond half of the largest number.

    erf is added to one, so its error counts relative to two: PyTorch's vectorised 1 + erf is accurate to 12 u.
    """
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * xp.constant(lambda sqrt, pi: sqrt(2 / pi))
        gate = xp.tanh(inner, absolute=True) + 1.0
    else:
        gate = xp.erf(x * xp.constant(lambda sqrt, pi: sqrt(0.5)), absolute=2.0) + 1.0
    return xp.any_formula(lambda: gated(xp, x, gate * 0.5), lambda: gated(xp, x, gate) * 0.5)


@elementwise("softplus")
def _softplus(xp: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """log(1 + exp(beta x)) / beta; x above the threshold, where PyTorch drops terms below exp(-20), or there too."""
    product = x * beta
    soft = xp.function("softplus", product) / beta
    order = xp.compare(product, constant(xp, threshold))
    above = order.more | order.unordered
    return xp.any_formula(lambda: xp.select(above, ~(order.less | order.same), x, soft), lambda: soft)


@rule("log_sigmoid_forward")
def _log_sigmoid(ctx: Lowering, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = -ctx.xp.function("softplus", -ctx.number(x))
    return ctx.wrap(y, x.dtype), torch.empty(0)  # the second result is a buffer of the backward pass
