"""Elementary functions as the result of an op, on balls.

Each is a spread (how far the function may move while its argument moves within its ball) and its own error, in ulps,
as the rounding model allows. What lies beyond the format is left to the store: the exact number is far from it, and a
function that overflows there is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_arithmetic import (
    ElementaryBalls,
    expm1_upper,
    spread_of_erf,
    spread_of_log,
    spread_of_tanh,
)
from assay.golden.arithmetic.model import all_finite, outward
from assay.golden.arithmetic.real import torch_function

Tensor = torch.Tensor
Spread = Callable[[Tensor, Tensor, Tensor], Tensor]

_LEAST = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "sqrt": 0.0, "rsqrt": 0.0, "acosh": 1.0}
"""Where a function's domain begins."""


def _half_power(least: Tensor, radius: Tensor) -> Tensor:
    """r / 2 x^(-3/2) at the least x of the ball."""
    return 0.5 * radius / (least * torch.sqrt(least))


def _beyond_pole(spread: Tensor) -> Tensor:
    return spread.nan_to_num(nan=math.inf, posinf=math.inf)


def _inverse_sine(x: Tensor, r: Tensor) -> Tensor:
    """r / sqrt(1 - (|x| + r)^2), for arcsine and arccosine; infinite where the ball leaves the domain."""
    most = x.abs() + outward(r)
    return torch.where(most < 1, r / torch.sqrt((1 - most) * (1 + most)), math.inf)


def _inverse_error_function(x: Tensor, r: Tensor) -> Tensor:
    """sqrt(pi) / 2 exp(erfinv(z)^2) r, at the largest |z| of the ball."""
    most = x.abs() + outward(r)
    return torch.where(most < 1, r * (0.5 * math.sqrt(math.pi)) * torch.exp(torch.erfinv(most) ** 2 * 1.01), math.inf)


def _of_gamma(x: Tensor, r: Tensor) -> Tensor:
    """|digamma| r; digamma rises for positive numbers, so at the ball's ends. Nothing is said of others."""
    least, most = x - outward(r), x + outward(r)
    slope = torch.maximum(torch.digamma(least).abs(), torch.digamma(most).abs())
    return torch.where(least > 0, r * slope * (1 + 1e-9), math.inf)


def _of_digamma(x: Tensor, r: Tensor) -> Tensor:
    """trigamma r at the least number of the ball, 1/z^2 + 1/z at most; nothing is said of negative ones."""
    least = x - outward(r)
    return torch.where(least > 0, r * (1 / (least * least) + 1 / least), math.inf)


_RELATIVE_TO_ONE = {"lgamma": 16.0, "digamma": 16.0, "erfinv": 8.0}
"""Functions whose errors count relative to 1 + |f|, since their value vanishes where none of their parts does, or since
they are evaluated by such parts; and to how many ulps of the usual ones PyTorch's float64 versions keep."""

_SPREADS: dict[str, Spread] = {
    "log": lambda x, y, r: spread_of_log(x, r),
    "log2": lambda x, y, r: spread_of_log(x, r) / math.log(2),
    "log1p": lambda x, y, r: spread_of_log(1 + x, r),
    "tanh": lambda x, y, r: spread_of_tanh(x, r),
    "erf": lambda x, y, r: spread_of_erf(x, r),
    "sqrt": lambda x, y, r: r / y,
    "rsqrt": lambda x, y, r: _half_power(x - outward(r), r),
    "reciprocal": lambda x, y, r: y.abs() * r / (x.abs() - outward(r)),
    "sin": lambda x, y, r: r.clamp(max=2.0),
    "cos": lambda x, y, r: r.clamp(max=2.0),
    "log10": lambda x, y, r: spread_of_log(x, r) / math.log(10),
    "tan": lambda x, y, r: _beyond_pole(r / (x.cos().abs() - outward(r)).clamp(min=0) ** 2),
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


class FunctionBalls(ElementaryBalls):
    """Ball arithmetic with every elementary function."""

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
            size = 4.0 * size  # PyTorch's own keeps two ulps, in the tail too
        own = self.model.function_error(name) * size + self.model.function_underflow(name)
        rad = spread + own
        if not all_finite(mid):
            rad = torch.where(mid.isfinite(), torch.where(spread.isinf(), math.inf, rad), 0.0)
        return Ball(mid, rad, self.model)

    def _at_the_edge(self, name: str, x: Ball, mid: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        """Anything where the ball holds a pole or the end of the domain."""
        if name == "reciprocal":
            unsure = x.mid.abs() <= x.radius
        elif name in _LEAST:
            unsure = (x.mid - _LEAST[name]).abs() <= x.radius
        else:
            return mid, spread
        unsure &= (x.radius > 0) & x.mid.isfinite()  # of infinity the function is known, however it came about
        return torch.where(unsure, 0.0, mid), torch.where(unsure, math.inf, spread)

    def _argument_error(self, x: Ball) -> Tensor:
        """An exponential's argument may be rounded once more: kernels fold log2 e into it."""
        return torch.where(x.mid.isinf(), 0.0, x.radius + 2 * self.u * x.mid.abs())

    def _of_exponential(self, x: Ball, mid: Tensor) -> Tensor:
        """exp(x) (exp(e) - 1); the derivative of expm1 is the same."""
        value, error = torch.exp(x.mid), self._argument_error(x)
        return torch.where(value == 0, torch.exp(x.mid + error), value * expm1_upper(error))

    def _of_exp2(self, x: Ball, mid: Tensor) -> Tensor:
        error = self._argument_error(x)
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


_EXPONENTIAL: dict[str, Callable[[FunctionBalls, Ball, Tensor], Tensor]] = {
    "exp": FunctionBalls._of_exponential,
    "expm1": FunctionBalls._of_exponential,
    "exp2": FunctionBalls._of_exp2,
    "sigmoid": FunctionBalls._of_sigmoid,
    "softplus": FunctionBalls._of_softplus,
}
