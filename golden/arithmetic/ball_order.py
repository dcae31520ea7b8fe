"""Ends and order of balls, and functions that depend on them: maxima, powers, roots and products."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.arithmetic.ball import Ball, ElementaryBalls, expm1_upper, spread_of_log
from assay.golden.arithmetic.base import Order
from assay.golden.arithmetic.double_double import DoubleDouble
from assay.golden.arithmetic.model import RADIUS_ROUNDING
from assay.golden.arithmetic.real import two_to

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
        return (y if y.rad is None else Ball(y.mid, y.bounded(y.mid, y.rad), self.model)), overflows

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
        return Ball(mid, torch.where(mid.isfinite(), Ball(mid, rad, self.model).bounded(mid, rad), 0.0), self.model)

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
        return self.ball(torch.where(overflow & mid.isinf(), 0.0, mid), torch.where(overflow, math.inf, rad))

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
