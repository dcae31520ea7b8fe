"""Element by element: arithmetic, elementary functions, steps, and activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.reference.table import constant, elementwise, row


@elementwise("add.Tensor add.Scalar")
def _add(xp: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    return x + (y if alpha == 1 else y * alpha)


@elementwise("sub.Tensor sub.Scalar")
def _sub(xp: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    return x - (y if alpha == 1 else y * alpha)


@elementwise("rsub.Tensor rsub.Scalar")
def _rsub(xp: Any, x: Any, y: Any, alpha: float = 1) -> Any:
    return y - (x if alpha == 1 else x * alpha)


@elementwise("mul.Tensor mul.Scalar")
def _mul(xp: Any, x: Any, y: Any) -> Any:
    return x * y


@elementwise("div.Tensor div.Scalar true_divide.Tensor", floating=True)
def _div(xp: Any, x: Any, y: Any) -> Any:
    return x / y


@elementwise("div.Tensor_mode div.Scalar_mode")
def _div_mode(xp: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    quotient = x / y
    if rounding_mode is None:
        return quotient
    rounded = xp.step(getattr(torch, rounding_mode), quotient)
    return beyond_numbers(xp, lambda a, b: torch.div(a, b, rounding_mode=rounding_mode), rounded, x, y)


@elementwise("floor_divide floor_divide.Scalar")
def _floor_divide(xp: Any, x: Any, y: Any) -> Any:
    return _div_mode(xp, x, y, "floor")


@elementwise("remainder.Tensor remainder.Scalar")
def _remainder(xp: Any, x: Any, y: Any) -> Any:
    return beyond_numbers(xp, torch.remainder, x - xp.step(torch.floor, x / y) * y, x, y)


@elementwise("fmod.Tensor fmod.Scalar")
def _fmod(xp: Any, x: Any, y: Any) -> Any:
    return beyond_numbers(xp, torch.fmod, x - xp.step(torch.trunc, x / y) * y, x, y)


@elementwise("neg")
def _neg(xp: Any, x: Any) -> Any:
    return -x


@elementwise("abs")
def _abs(xp: Any, x: Any) -> Any:
    return xp.larger_of(x, -x)


@elementwise("square")
def _square(xp: Any, x: Any) -> Any:
    return x * x


def beyond_numbers(xp: Any, eager: Callable[..., Any], y: Any, *operands: Any) -> Any:
    """``y``, and where an operand is an infinity or NaN what PyTorch's function says of it: rules, not arithmetic."""
    known, special, values = True, False, []
    for operand in operands:
        least, most = xp.enclosure(constant(xp, operand))
        known = known & ((least == most) | (least.isnan() & most.isnan()))
        special = special | ~least.isfinite()
        values.append(least)
    special = torch.as_tensor(known & special)
    if not bool(special.any()):
        return y
    found = eager(*values)
    unit = torch.where(found.isfinite(), found.abs() * 2.0**-52, 0.0)
    return xp.chosen(special.expand(found.shape), xp.interval(found - unit, found + unit), y)


@elementwise("fmax")
def _fmax(xp: Any, x: Any, y: Any) -> Any:
    return _but_for_nan(xp, x, y, xp.larger_of(x, y))


@elementwise("fmin")
def _fmin(xp: Any, x: Any, y: Any) -> Any:
    return _but_for_nan(xp, x, y, xp.smaller_of(x, y))


def _but_for_nan(xp: Any, x: Any, y: Any, found: Any) -> Any:
    """The other number where one is NaN."""
    return xp.chosen(xp.compare(x, x).unordered, y, xp.chosen(xp.compare(y, y).unordered, x, found))


@elementwise("maximum")
def _maximum(xp: Any, x: Any, y: Any) -> Any:
    return xp.larger_of(x, y)


@elementwise("minimum")
def _minimum(xp: Any, x: Any, y: Any) -> Any:
    return xp.smaller_of(x, y)


@elementwise("clamp clamp.Tensor clip clip.Tensor")
def _clamp(xp: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = xp.larger_of(x, constant(xp, min))
    return x if max is None else xp.smaller_of(x, constant(xp, max))


@elementwise("clamp_min clamp_min.Tensor")
def _clamp_min(xp: Any, x: Any, min: Any) -> Any:
    return _clamp_number(xp, x, min, None)


@elementwise("clamp_max clamp_max.Tensor")
def _clamp_max(xp: Any, x: Any, max: Any) -> Any:
    return _clamp_number(xp, x, None, max)


def _clamp_number(xp: Any, x: Any, least: Any, most: Any) -> Any:
    if least is not None:
        x = xp.larger_of(x, constant(xp, least))
    return x if most is None else xp.smaller_of(x, constant(xp, most))


@elementwise("pow.Tensor_Scalar pow.Tensor_Tensor")
def _pow(xp: Any, x: Any, y: Any) -> Any:
    return beyond_numbers(xp, torch.pow, xp.power(x, y), x, y)


@elementwise("pow.Scalar", floating=False)
def _pow_scalar(xp: Any, x: float, y: Any) -> Any:
    if x == 2:
        return xp.function("exp2", y)
    return xp.power(constant(xp, x), y)


def _register_function(name: str) -> None:
    @elementwise(name, floating=True)
    def computed(xp: Any, x: Any) -> Any:
        return xp.function(name, x)


_FUNCTIONS = """exp exp2 expm1 log log2 log10 log1p tanh erf erfc erfinv sigmoid sqrt rsqrt reciprocal
sin cos tan asin acos atan sinh cosh asinh acosh atanh lgamma digamma"""
for _name in _FUNCTIONS.split():
    _register_function(_name)


def _register_step(name: str) -> None:
    @elementwise(name)
    def computed(xp: Any, x: Any) -> Any:
        return xp.step(getattr(torch, name), x)


for _name in ("floor", "ceil", "trunc", "round"):
    _register_step(_name)


@elementwise("round.decimals")
def _round_decimals(xp: Any, x: Any, decimals: int = 0) -> Any:
    factor = 10.0**decimals
    return xp.step(torch.round, x * factor) / factor


@elementwise("frac")
def _frac(xp: Any, x: Any) -> Any:
    return x - xp.step(torch.trunc, x)


@elementwise("sign sgn")
def _sign(xp: Any, x: Any) -> Any:
    return xp.step(torch.sign, x)


@elementwise("atan2", floating=True)
def _atan2(xp: Any, y: Any, x: Any) -> Any:
    """2 atan(y / (r + x)), or on the left side pi or -pi and atan(y / x)."""
    zero = constant(xp, 0.0)
    pi = xp.constant(lambda sqrt, pi: pi)
    side, below = xp.compare(x, zero), xp.compare(y, zero)
    straight = xp.function("atan", y / xp.chosen(side.same, x * 0.0 + 1.0, x))
    turned = xp.select(below.less, ~(below.more | below.same), straight - pi, straight + pi)
    upright = xp.select(below.less, ~(below.more | below.same), -(pi / 2.0), pi / 2.0)
    upright = xp.chosen(below.same, zero, upright)
    angle = xp.chosen(side.same, upright, xp.select(side.less, ~(side.more | side.same), turned, straight))
    return beyond_numbers(xp, torch.atan2, angle, y, x)


@elementwise("xlogy.Tensor xlogy.Scalar_Other special_xlogy", floating=True)
def _xlogy(xp: Any, x: Any, y: Any) -> Any:
    zero = xp.compare(x, constant(xp, 0.0)).same
    log = xp.function("log", xp.chosen(zero, constant(xp, 1.0), constant(xp, y)))
    return beyond_numbers(xp, torch.xlogy, xp.chosen(zero, constant(xp, 0.0), x * log), x, y)


@elementwise("logit special_logit", floating=True)
def _logit(xp: Any, x: Any, eps: float | None = None) -> Any:
    x = x if eps is None else _clamp_number(xp, x, eps, 1 - eps)
    return xp.function("log", x) - xp.function("log1p", -x)


@elementwise("sinc special_sinc", floating=True)
def _sinc(xp: Any, x: Any) -> Any:
    origin, one = xp.compare(x, constant(xp, 0.0)).same, constant(xp, 1.0)
    turned = xp.chosen(origin, one, x) * xp.constant(lambda sqrt, pi: pi)
    y = xp.chosen(origin, one, xp.function("sin", turned) / turned)
    return beyond_numbers(xp, torch.sinc, y, x)


@elementwise("relu")
def _relu(xp: Any, x: Any) -> Any:
    return xp.larger_of(x, constant(xp, 0.0))


@elementwise("hardtanh")
def _hardtanh(xp: Any, x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    return _clamp_number(xp, x, min_val, max_val)


@elementwise("leaky_relu")
def _leaky_relu(xp: Any, x: Any, negative_slope: float = 0.01) -> Any:
    return _by_side(xp, x, x, lambda: x * negative_slope)


@elementwise("elu")
def _elu(xp: Any, x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    def below() -> Any:
        least = xp.smaller_of(x, constant(xp, 0.0))
        return _times(xp.function("expm1", _times(least, input_scale)), alpha * scale)

    either = xp.any_formula(below, lambda: _times(_exp_less_one(xp, x, input_scale), alpha * scale))
    return _by_side(xp, x, _times(x, scale), lambda: either)


def _exp_less_one(xp: Any, x: Any, scale: float) -> Any:
    """exp(x) - 1 as kernels without expm1 have it."""
    return xp.exp(_times(xp.smaller_of(x, constant(xp, 0.0)), scale)) - 1.0


def _times(x: Any, factor: float) -> Any:
    return x if factor == 1.0 else x * factor


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
    """x (1 + erf(x / sqrt 2)) / 2, or by tanh.

    erf is added to one, and its error counts relative to two: PyTorch's vectors have 1 + erf to 12 u.
    """
    if approximate == "tanh":
        cube = x * x * x
        inner = (x + cube * 0.044715) * xp.constant(lambda sqrt, pi: sqrt(2 / pi))
        return gated(xp, x, (xp.tanh(inner, absolute=True) + 1.0) * 0.5)
    root = xp.constant(lambda sqrt, pi: sqrt(0.5))
    return gated(xp, x, (xp.erf(x * root, absolute=2.0) + 1.0) * 0.5)


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
    return beyond_numbers(xp, torch.nn.functional.hardsigmoid, _clamp_number(xp, x + 3.0, 0.0, 6.0) / 6.0, x)


@elementwise("hardswish")
def _hardswish(xp: Any, x: Any) -> Any:
    return x * _clamp_number(xp, x + 3.0, 0.0, 6.0) / 6.0


@row("log_sigmoid_forward")
def _log_sigmoid(evaluation: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    number = evaluation.number(x)
    return evaluation.made(-evaluation.xp.function("softplus", -number), x.dtype), torch.empty(0)


@elementwise("lerp.Scalar lerp.Tensor")
def _lerp(xp: Any, x: Any, y: Any, weight: Any) -> Any:
    return xp.any_formula(lambda: x + (y - x) * weight, lambda: y - (y - x) * (1.0 - weight))


@elementwise("addcmul")
def _addcmul(xp: Any, x: Any, a: Any, b: Any, value: float = 1) -> Any:
    return x + _times(a * b, value)


@elementwise("addcdiv")
def _addcdiv(xp: Any, x: Any, a: Any, b: Any, value: float = 1) -> Any:
    return x + _times(a / b, value)


@elementwise("hypot")
def _hypot(xp: Any, x: Any, y: Any) -> Any:
    return beyond_numbers(xp, torch.hypot, xp.root(x * x + y * y), x, y)


@elementwise("rad2deg", floating=True)
def _rad2deg(xp: Any, x: Any) -> Any:
    return x * xp.constant(lambda sqrt, pi: 180 / pi)


@elementwise("deg2rad", floating=True)
def _deg2rad(xp: Any, x: Any) -> Any:
    return x * xp.constant(lambda sqrt, pi: pi / 180)
