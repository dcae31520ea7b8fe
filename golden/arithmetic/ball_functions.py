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
from assay.golden.arithmetic.model import outward
from assay.golden.arithmetic.real import torch_function

Tensor = torch.Tensor
Spread = Callable[[Tensor, Tensor, Tensor], Tensor]

_LEAST = {"log": 0.0, "log2": 0.0, "log1p": -1.0, "sqrt": 0.0, "rsqrt": 0.0}
"""Where a function's domain begins."""


def _half_power(least: Tensor, radius: Tensor) -> Tensor:
    """r / 2 x^(-3/2) at the least x of the ball."""
    return 0.5 * radius / (least * torch.sqrt(least))


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
            spread = torch.zeros_like(mid)
        else:
            spread = torch.where(x.radius == 0, 0.0, _SPREADS[name](x.mid, mid, x.radius))
            mid, spread = self._at_the_edge(name, x, mid, spread)
        own = self.model.function_error(name) * (mid.abs() + spread) + self.model.function_underflow(name)
        rad = torch.where(torch.isfinite(mid), spread + own, 0.0)
        return Ball(mid, torch.where(spread.isinf() & mid.isfinite(), math.inf, rad), self.model)

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
