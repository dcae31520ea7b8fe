"""Ends and order of balls, and functions that depend on them: maxima, powers, roots, products and elementary ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic.ball import Ball, ElementaryBalls, overflowing
from assay.golden.arithmetic.base import Order
from assay.golden.arithmetic.double_double import DoubleDouble
from assay.golden.arithmetic.model import (
    RADIUS_ROUNDING,
    all_finite,
    expm1_upper,
    outward,
    spread_of_erf,
    spread_of_log,
    spread_of_tanh,
)
from assay.golden.arithmetic.real import torch_function, two_to

Tensor = torch.Tensor


_LOG_LARGEST = math.log(torch.finfo(torch.float64).max)


def _product(x: Tensor) -> Tensor:
    """Return the product along the last axis, of fractions and of powers of two separately, so that none overflows."""
    fraction, exponent = torch.frexp(x)
    total = exponent.to(torch.int64).sum(-1, keepdim=True)
    while fraction.shape[-1] > 1:
        if fraction.shape[-1] % 2:
            fraction = torch.cat([fraction, torch.ones_like(fraction[..., :1])], -1)
        fraction, exponent = torch.frexp(fraction[..., 0::2] * fraction[..., 1::2])
        total = total + exponent.to(torch.int64).sum(-1, keepdim=True)
    if not fraction.shape[-1]:
        return x.prod(-1, keepdim=True)
    half = total.clamp(-3000, 3000) // 2  # in two steps, neither of which overflows unless the product does
    return fraction * two_to(half) * two_to(total.clamp(-3000, 3000) - half)


class OrderBalls(ElementaryBalls):
    """Ball arithmetic with ends and order."""

    def enclosure(self, x: Ball) -> tuple[Tensor, Tensor]:
        """Return the ends; a midpoint that is NaN or infinite is the number itself, as in `Golden`."""
        if x.rad is None:
            return x.mid, x.mid
        rad = torch.broadcast_to(x.rad, x.mid.shape)
        wide = (rad * RADIUS_ROUNDING).nan_to_num(nan=math.inf, posinf=math.inf)
        moved = x.mid.abs() * 2.0**-52 + wide  # the ends are rounded themselves
        lost = wide.isinf() & x.mid.isfinite()
        spread = torch.where(rad == 0, 0.0, moved)
        spread = torch.where(x.mid.isinf(), 0.0, spread)
        mid = torch.where(lost, 0.0, x.mid)
        return mid - spread, mid + spread

    def interval(self, least: Tensor, most: Tensor) -> Ball:
        """Return the ball between two ends; exact if they are equal."""
        if torch.equal(least, most):
            return Ball(least, None, self.model)
        mid = torch.where(least == most, least, least / 2 + most / 2)
        rad = torch.where(least == most, 0.0, torch.maximum(most - mid, mid - least) * RADIUS_ROUNDING)
        open_end = (least.isinf() | most.isinf()) & (least != most)
        mid, rad = torch.where(open_end, 0.0, mid), torch.where(open_end, math.inf, rad)
        return Ball(mid, torch.where(least.isnan() & most.isnan(), 0.0, rad), self.model)

    def held(self, y: Ball, x: Ball) -> tuple[Ball, bool]:
        overflows = not y.is_finite and bool((x.mid.isfinite() & y.mid.isinf()).any())
        return (y if y.rad is None else overflowing(self.model, y.mid, y.rad)), overflows

    def open_beyond(self, x: Ball) -> Ball:
        beyond = ~x.mid.isfinite()
        return Ball(torch.where(beyond, 0.0, x.mid), torch.where(beyond, math.inf, x.radius), self.model)

    def hull(self, x: Ball, y: Ball) -> Ball:
        """Return the hull; unspecified where one may be NaN, or infinite and the other not."""
        (a, b), (c, d) = self.enclosure(x), self.enclosure(y)
        a, b, c, d = torch.broadcast_tensors(a, b, c, d)  # type: ignore[no-untyped-call]
        least, most = torch.minimum(a, c), torch.maximum(b, d)
        equal = (a == c) & (b == d)
        lost = (least.isnan() | least.isinf() | most.isinf()) & ~equal
        return self.interval(torch.where(lost, -math.inf, least), torch.where(lost, math.inf, most))

    def compare(self, x: Ball, y: Ball) -> Order:
        """Compare the difference of midpoints, whose sign is exact in float64, with the radii of finite numbers."""
        difference = x.mid - y.mid
        x_radius, y_radius = (torch.where(ball.mid.isfinite(), ball.radius, 0.0) for ball in (x, y))
        wide = (x_radius + y_radius) * RADIUS_ROUNDING
        known = wide == 0
        less, more = (
            torch.where(known, x.mid < y.mid, -difference > wide),
            torch.where(known, x.mid > y.mid, difference > wide),
        )
        return Order(less, more, known & (x.mid == y.mid), known & (x.mid.isnan() | y.mid.isnan()))

    def power(self, x: Ball, y: Ball | float) -> Ball:
        """Return x^y, as products or as exp2(y log2 x); its spread is |x^y| expm1(|y| r_log + r_y |log x|).

        exp2(y log2 x) has |y log x| times the errors of a logarithm and a product, and its own error.
        """
        if isinstance(y, (int, float)):
            if y == 2:
                return x * x
            if y in (1, 0):
                return x if y == 1 else Ball(torch.ones_like(x.mid), None, self.model)
            if y == 0.5:
                return self.function("sqrt", x)
            if y == -1:
                return self.function("reciprocal", x)
            exponent = Ball(torch.tensor(float(y), dtype=torch.float64), None, self.model)
        else:
            exponent = y
        mid = torch.pow(x.mid, exponent.mid)
        size = x.mid.abs()
        log = torch.where(size == 0, 0.0, torch.log(size).abs())
        spread_log = torch.where(x.radius == 0, 0.0, spread_of_log(size, x.radius))
        spread_log = torch.where(size == 0, 0.0, spread_log)
        error = (exponent.magnitude * spread_log + exponent.radius * (log + spread_log)) * RADIUS_ROUNDING
        steps = self.model.function_error("log") + 2 * self.u
        own = self.model.function_error("pow") + exponent.magnitude * log * steps
        own = torch.where((size == 1) & (x.radius == 0), self.model.function_error("pow"), own)
        rad = mid.abs() * (expm1_upper(error) + own * (1 + expm1_upper(error))) + self.model.function_underflow("exp")
        near = (size <= x.radius) & (x.radius > 0)  # x may be zero: the result is at most that of the magnitude
        at_zero = torch.pow(x.magnitude, exponent.mid - exponent.radius) * (1 + own)
        at_zero = torch.where((exponent.mid > exponent.radius) & (x.magnitude <= 1), 2 * at_zero, math.inf)
        rad = torch.where(near, at_zero, rad)
        odd = near & (exponent.mid != exponent.mid.round())  # undefined for negative numbers
        rad = torch.where(odd & (x.mid - x.radius < 0), math.inf, rad)
        mid = torch.where(near & ~mid.isfinite(), 0.0, mid)
        operands = (x,) if isinstance(y, (int, float)) else (x, exponent)
        return Ball(mid, None, self.model).limited(mid, torch.where(mid.isfinite(), rad, 0.0), operands)

    def root(self, x: Ball) -> Ball:
        """Return the square root; near zero an interval from zero to sqrt(x + r)."""
        y = self.function("sqrt", x)
        if x.rad is None:
            return y
        near = (x.mid >= 0) & (x.mid <= x.radius) & x.radius.isfinite()
        if not bool(near.any()):
            return y
        most = torch.sqrt(x.mid + x.radius) * (1 + self.model.function_error("sqrt")) * RADIUS_ROUNDING
        return Ball(torch.where(near, torch.sqrt(x.mid), y.mid), torch.where(near, most, y.radius), self.model)

    def special(self, function: Callable[..., Any], *numbers: Ball) -> Ball:
        """Return Arb's enclosure over the balls; a kernel's error, of four functions, is relative to 1 + |f|."""
        from assay.golden.arithmetic.exact import through_arb

        given = [DoubleDouble(n.mid, None, torch.broadcast_to(n.radius, n.mid.shape)) for n in numbers]
        enclosed = through_arb("special", function, *given)
        mid = enclosed.high
        own = (
            4 * self.model.function_error("special") * (1 + mid.abs())
            if not self.model.certifies
            else self.u * mid.abs()
        )
        rad = enclosed.radius + enclosed.rest.abs() + own
        lost = ~enclosed.radius.isfinite() & ~mid.isinf()
        return Ball(torch.where(lost, 0.0, mid), torch.where(mid.isinf(), 0.0, rad), self.model)

    def prod(self, x: Ball) -> Ball:
        """Return the product, with n - 1 roundings in any order: |prod| (prod(1 + r/|x|) (1 + u)^(n-1) - 1), or the
        product of magnitudes."""
        count = x.shape[-1]
        if count <= 1 and x.rad is None:
            return Ball(x.mid.prod(-1, keepdim=True), None, self.model)
        mid = _product(x.mid)
        size = x.mid.abs()
        log_factors = torch.where(size == 0, 0.0, torch.log1p(x.radius / torch.where(size == 0, 1.0, size)))
        error = (log_factors.sum(-1, keepdim=True) + max(count - 1, 0) * self.u) * RADIUS_ROUNDING
        rad = mid.abs() * expm1_upper(error) + self._lost_below(x)
        largest = x.magnitude.prod(-1, keepdim=True) * (1 + 2 * count * self.u)
        rad = torch.where(mid == 0, torch.where(largest == 0, 0.0, largest + count * self.model.tiny), rad)
        partial = torch.cumsum(torch.log(x.magnitude).clamp(min=0), -1)[
            ..., -1:
        ]  # log of the largest product of some of them
        largest_of_any = math.log(self.model.largest) if self.model.largest < math.inf else _LOG_LARGEST
        overflow = (partial > largest_of_any) & x.mid.isfinite().all(-1, keepdim=True)
        return overflowing(self.model, torch.where(overflow & ~mid.isfinite(), 0.0, mid), rad, overflow)

    def _lost_below(self, x: Ball) -> Tensor:
        """Return the underflow errors of products of some factors, times the product of the other factors.

        A product of some factors is at least that of those below one: if that is normal, only the end may underflow.
        """
        once = x.shape[-1] * self.model.tiny
        size = (x.mid.abs() - x.radius).clamp(min=0)
        least = torch.log(torch.where(x.mid == 0, 1.0, size)).clamp(max=0).sum(-1, keepdim=True)
        others = torch.exp(torch.log(x.magnitude).clamp(min=0).sum(-1, keepdim=True) * (1 + 1e-12))
        below = math.log(2 * self.model.compute.smallest_normal)
        lost = torch.where(least < below, once * others, torch.full_like(others, once))
        return lost.nan_to_num(nan=math.inf, posinf=math.inf)

    def settled(self, x: Ball) -> Ball:
        """Set the radius of an infinite midpoint to zero, and a NaN radius to infinity."""
        if x.rad is None:
            return x
        if x.is_finite and not bool(x.rad.isnan().any()):
            return x
        infinite, lost = x.mid.isinf(), x.rad.isnan()
        rad = torch.where(lost, math.inf, x.rad)
        return Ball(x.mid, torch.where(infinite, 0.0, rad), self.model)

    def largest_of(self, x: Ball) -> Ball:
        if x.rad is None or not x.shape[-1]:
            return self.max(x)
        mid = x.mid.amax(-1, keepdim=True)
        rad = torch.where(x.mid.isfinite(), x.rad, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        up, down = (x.mid + rad).amax(-1, keepdim=True) - mid, mid - (x.mid - rad).amax(-1, keepdim=True)
        return Ball(mid, torch.where(mid.isfinite(), torch.maximum(up, down) + mid.abs() * 2.0**-52, 0.0), self.model)

    def ordered(self, x: Ball) -> Ball:
        if x.rad is None:
            return Ball(x.mid.sort(-1).values, None, self.model)
        least, most = self.enclosure(x)
        return self.interval(least.sort(-1).values, most.sort(-1).values)

    def function(self, name: str, x: Ball) -> Ball:
        mid = torch_function(name, x.mid)
        if name in _EXPONENTIAL:
            spread = _EXPONENTIAL[name](self, x, mid)
        elif x.rad is None:
            spread = x.radius
        else:
            spread = torch.where(x.radius == 0, 0.0, _SPREADS[name](x.mid, mid, x.radius))
            mid, spread = self._at_the_edge(name, x, mid, spread)
        size = mid.abs() + spread
        if name in _RELATIVE_TO_ONE:
            size = (_RELATIVE_TO_ONE[name] if self.model.certifies else 1.0) * (size + 1)
        elif name == "erfc" and self.model.certifies:
            size = 4.0 * size  # PyTorch's erfc has two ulps, in the tail too
        own = self.model.function_error(name) * size + self.model.function_underflow(name)
        rad = spread + own
        if all_finite(mid) and x.is_finite:
            return Ball(mid, rad, self.model)
        if not self.model.certifies:
            rad = torch.where(x.mid.isinf() & (mid == 0), 0.0, rad)
        rad = torch.where(mid.isfinite(), torch.where(spread.isinf(), math.inf, rad), 0.0)
        nearest = torch_function(name, x.mid - torch.copysign(outward(x.radius), x.mid))
        unsure = (x.radius > 0) & ~nearest.isinf()
        return overflowing(self.model, mid, rad, None, mid.isinf() & x.mid.isfinite() & unsure)

    def _at_the_edge(self, name: str, x: Ball, mid: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Return midpoints and spreads, unspecified where the ball contains a pole or the end of the domain."""
        if name == "reciprocal":
            unsure = x.mid.abs() <= x.radius
        elif name in _LEAST:
            unsure = (x.mid - _LEAST[name]).abs() <= x.radius
        else:
            return mid, spread
        unsure &= (x.radius > 0) & x.mid.isfinite()  # at infinity the function has its limit
        return torch.where(unsure, 0.0, mid), torch.where(unsure, math.inf, spread)

    def _argument_error(self, x: Ball) -> Tensor:
        """Return the error of an exponential's argument, rounded once more: kernels fold log2 e into it."""
        return torch.where(x.mid.isinf(), 0.0, x.radius + 2 * self.u * x.mid.abs())

    def _of_exponential(self, x: Ball, mid: Tensor) -> Tensor:
        """Return exp(x) (exp(e) - 1); the derivative of expm1 is the same."""
        value, error = torch.exp(x.mid), self._argument_error(x) + self.prefix_error(x.mid)
        return torch.where(value == 0, torch.exp(x.mid + error), value * expm1_upper(error))

    def _of_exp2(self, x: Ball, mid: Tensor) -> Tensor:
        error = self._argument_error(x) + self.prefix_error(x.mid)
        return torch.where(mid == 0, torch.exp2(x.mid + error), mid * expm1_upper(error))

    def _of_sigmoid(self, x: Ball, mid: Tensor) -> Tensor:
        return self.sigmoid(x).radius

    def _of_softplus(self, x: Ball, mid: Tensor) -> Tensor:
        """softplus' = sigmoid <= min(1, exp); max(x, 0) + log1p(exp(-|x|)) has the errors of three functions."""
        error = self._argument_error(x)
        spread = torch.minimum(error, torch.sigmoid(x.mid) * expm1_upper(error))
        spread = torch.where(mid == 0, torch.exp(x.mid + error), spread)
        own = self.model.function_error("exp") + self.model.function_error("log1p") + self.u
        own = max(0.0, own - self.model.function_error("softplus"))
        absolute = self.model.function_underflow("exp")
        return torch.where(x.mid.isinf(), 0.0, spread + own * (mid + spread) + absolute)


Spread = Callable[[Tensor, Tensor, Tensor], Tensor]
_LEAST = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "sqrt": 0.0, "rsqrt": 0.0, "acosh": 1.0}
"""The lower end of a function's domain."""


def _inverse_sine(x: Tensor, r: Tensor) -> Tensor:
    """Return r / sqrt(1 - (|x| + r)^2), for arcsine and arccosine; infinite where the ball leaves the domain."""
    most = x.abs() + outward(r)
    return torch.where(most < 1, r / torch.sqrt((1 - most) * (1 + most)), math.inf)


def _inverse_error_function(x: Tensor, r: Tensor) -> Tensor:
    """Return sqrt(pi) / 2 exp(erfinv(z)^2) r, at the largest |z| of the ball."""
    most = x.abs() + outward(r)
    return torch.where(most < 1, r * (0.5 * math.sqrt(math.pi)) * torch.exp(torch.erfinv(most) ** 2 * 1.01), math.inf)


def _of_gamma(x: Tensor, r: Tensor) -> Tensor:
    """Return |digamma| r; digamma ascends for positive numbers, so at the ball's ends. Infinite for others."""
    least, most = x - outward(r), x + outward(r)
    slope = torch.maximum(torch_function("digamma", least).abs(), torch_function("digamma", most).abs())
    return torch.where(least > 0, r * slope * (1 + 1e-9), math.inf)


def _of_digamma(x: Tensor, r: Tensor) -> Tensor:
    """Return trigamma r at the least number of the ball, at most 1/z^2 + 1/z; infinite for negative ones."""
    least = x - outward(r)
    return torch.where(least > 0, r * (1 / (least * least) + 1 / least), math.inf)


_RELATIVE_TO_ONE = {"lgamma": 16.0, "digamma": 16.0, "erfinv": 8.0}
"""Functions whose errors are relative to 1 + |f|, since their value may be zero when the terms that it is computed from
are
not; and how many times the usual ulps PyTorch's float64 versions need."""
_SPREADS: dict[str, Spread] = {
    "log": lambda x, y, r: spread_of_log(x, r),
    "log2": lambda x, y, r: spread_of_log(x, r) / math.log(2),
    "log1p": lambda x, y, r: spread_of_log(1 + x, r),
    "tanh": lambda x, y, r: spread_of_tanh(x, r),
    "erf": lambda x, y, r: spread_of_erf(x, r),
    "sqrt": lambda x, y, r: r / y,
    "rsqrt": lambda x, y, r: 0.5 * r / ((x - outward(r)) * torch.sqrt(x - outward(r))),
    "reciprocal": lambda x, y, r: y.abs() * r / (x.abs() - outward(r)),
    "sin": lambda x, y, r: r.clamp(max=2.0),
    "cos": lambda x, y, r: r.clamp(max=2.0),
    "log10": lambda x, y, r: spread_of_log(x, r) / math.log(10),
    "tan": lambda x, y, r: (r / (x.cos().abs() - outward(r)).clamp(min=0) ** 2).nan_to_num(
        nan=math.inf, posinf=math.inf
    ),
    "atan": lambda x, y, r: r / (1 + (x.abs() - outward(r)).clamp(min=0) ** 2),
    "asinh": lambda x, y, r: r / torch.sqrt(1 + (x.abs() - outward(r)).clamp(min=0) ** 2),
    "sinh": lambda x, y, r: r * torch.cosh(x.abs() + r),
    "cosh": lambda x, y, r: r * torch.sinh(x.abs() + r),
    "asin": lambda x, y, r: _inverse_sine(x, r),
    "acos": lambda x, y, r: _inverse_sine(x, r),
    "acosh": lambda x, y, r: r / torch.sqrt((x - outward(r)).clamp(min=1) ** 2 - 1),
    "atanh": lambda x, y, r: r / (1 - (x.abs() + outward(r)).clamp(max=1) ** 2),
    "erfc": lambda x, y, r: spread_of_erf(x, r),
    "erfinv": lambda x, y, r: _inverse_error_function(x, r),
    "lgamma": lambda x, y, r: _of_gamma(x, r),
    "digamma": lambda x, y, r: _of_digamma(x, r),
}
"""Bounds on |f(z) - f(x)| for |z - x| <= r: of x, y = f(x) and r > 0.

|sqrt z - sqrt x| <= |z - x| / sqrt x.
"""
_EXPONENTIAL: dict[str, Callable[[OrderBalls, Ball, Tensor], Tensor]] = {
    "exp": OrderBalls._of_exponential,
    "expm1": OrderBalls._of_exponential,
    "exp2": OrderBalls._of_exp2,
    "sigmoid": OrderBalls._of_sigmoid,
    "softplus": OrderBalls._of_softplus,
}
