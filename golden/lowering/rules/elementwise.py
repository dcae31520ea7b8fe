"""Element by element: arithmetic, elementary functions, and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from assay.golden.lowering.table import constant, elementwise, promoted, rule


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
    ends = [xp.enclosure(constant(xp, operand)) for operand in operands]
    special, values = torch.tensor(False), [least for least, _ in ends]
    for least in values:
        special = special | ~least.isfinite()
    for least, most in ends:
        special = special & ((least == most) | (least.isnan() & most.isnan()))
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
    return clamped(xp, x, min, None)


@elementwise("clamp_max clamp_max.Tensor")
def _clamp_max(xp: Any, x: Any, max: Any) -> Any:
    return clamped(xp, x, None, max)


def clamped(xp: Any, x: Any, least: Any, most: Any) -> Any:
    """x between the ends that there are."""
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


def _register_growing(name: str) -> None:
    @rule(name)
    def computed(evaluation: Any, x: torch.Tensor) -> torch.Tensor:
        xp, number = evaluation.xp, evaluation.number(x)
        result = xp.in_blocks(lambda part: xp.function(name, part), number)
        evaluation.computed(name, [number], result)
        found = evaluation.made(result, promoted([x], floating=True))

        def as_operand(y: Any) -> Any:
            held, overflows = xp.held(y, number)
            evaluation.overflowed |= overflows
            return held

        found.box.as_operand = as_operand
        return found


_FUNCTIONS = """log log2 log10 log1p tanh erf erfc erfinv sigmoid sqrt rsqrt reciprocal
sin cos tan asin acos atan asinh acosh atanh lgamma digamma"""
for _name in _FUNCTIONS.split():
    _register_function(_name)
for _name in ("exp", "exp2", "expm1", "sinh", "cosh"):
    _register_growing(_name)


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
    x = x if eps is None else clamped(xp, x, eps, 1 - eps)
    return xp.function("log", x) - xp.function("log1p", -x)


@elementwise("sinc special_sinc", floating=True)
def _sinc(xp: Any, x: Any) -> Any:
    origin, one = xp.compare(x, constant(xp, 0.0)).same, constant(xp, 1.0)
    turned = xp.chosen(origin, one, x) * xp.constant(lambda sqrt, pi: pi)
    y = xp.chosen(origin, one, xp.function("sin", turned) / turned)
    return beyond_numbers(xp, torch.sinc, y, x)


@elementwise("lerp.Scalar lerp.Tensor")
def _lerp(xp: Any, x: Any, y: Any, weight: Any) -> Any:
    return xp.any_formula(lambda: x + (y - x) * weight, lambda: y - (y - x) * (1.0 - weight))


def times(x: Any, factor: float) -> Any:
    """A product by a number, which is none where that is one."""
    return x if factor == 1.0 else x * factor


@elementwise("addcmul")
def _addcmul(xp: Any, x: Any, a: Any, b: Any, value: float = 1) -> Any:
    return x + times(a * b, value)


@elementwise("addcdiv")
def _addcdiv(xp: Any, x: Any, a: Any, b: Any, value: float = 1) -> Any:
    return x + times(a / b, value)


@elementwise("hypot")
def _hypot(xp: Any, x: Any, y: Any) -> Any:
    return beyond_numbers(xp, torch.hypot, xp.root(x * x + y * y), x, y)


@elementwise("rad2deg", floating=True)
def _rad2deg(xp: Any, x: Any) -> Any:
    return x * xp.constant(lambda sqrt, pi: 180 / pi)


@elementwise("deg2rad", floating=True)
def _deg2rad(xp: Any, x: Any) -> Any:
    return x * xp.constant(lambda sqrt, pi: pi / 180)
