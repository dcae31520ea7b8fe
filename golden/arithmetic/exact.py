"""Double-double arithmetic with certified radii: 25 to 30 digits at the speed of float64 vectors and BLAS."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic.arbitrary_precision import Arb
from assay.golden.arithmetic.base import Arithmetic, Formula
from assay.golden.arithmetic.double_double import DoubleDouble, as_pair, full_where, scattered, where
from assay.golden.arithmetic.double_double_functions import FUNCTIONS, exp
from assay.golden.arithmetic.ozaki import exact_matmul, exact_sum
from assay.golden.arithmetic.real import Real, torch_function, weighted_values

Tensor = torch.Tensor


_REAL = Real()


class Exact(Arithmetic[DoubleDouble, Tensor]):
    """Pairs of float64 with a radius; operations without a fast algorithm go through Arb, element by element.

    Numbers near the ends of float64's range (products below 2^-900, factors above 2^996) get a large or infinite
    radius.
    """

    def exact(self, values: object) -> DoubleDouble:
        return DoubleDouble(torch.as_tensor(values).to(torch.float64))

    def constant(self, formula: Formula) -> DoubleDouble:
        return through_arb("constant", formula)

    def apply(self, name: str, x: DoubleDouble) -> DoubleDouble:
        return FUNCTIONS[name](x) if name in FUNCTIONS else through_arb("apply", name, x)

    def function(self, name: str, x: DoubleDouble) -> DoubleDouble:
        """Return the function, with limits at the infinities as in `Arb`, poles and undefined values as in IEEE 754.

        Such a value of an exact number has radius zero.
        """
        special = ~torch.isfinite(x.high)
        if not x.high.numel():
            return through_arb("function", name, x)
        y = self.apply(name, self.where(special, as_pair(1.0), x))
        special |= ~torch.isfinite(y.high)
        if not bool(special.any()):
            return y
        exceptions, plain = through_arb("function", name, x[special]), torch_function(name, x.high[special])
        known = exceptions.high.isnan() & (x[special].radius == 0) & ~torch.isfinite(plain)
        high = torch.where(known, plain, exceptions.high)
        return scattered(y, special, DoubleDouble(high, exceptions.low, exceptions.radius.masked_fill(known, 0.0)))

    def maximum(self, x: DoubleDouble, y: DoubleDouble) -> DoubleDouble:
        """Return the larger; if the balls overlap the other may be larger, but no farther away than their radii."""
        larger = (x.high > y.high) | ((x.high == y.high) & (x.rest >= y.rest)) | x.high.isnan()
        chosen = self.where(larger, x, y)
        if x.rad is None and y.rad is None:
            return chosen
        return DoubleDouble(chosen.high, chosen.low, torch.maximum(x.radius, y.radius).expand(chosen.shape))

    def where(self, mask: Tensor, x: DoubleDouble, y: DoubleDouble | float) -> DoubleDouble:
        return where(mask, x, as_pair(y))

    def above(self, x: DoubleDouble, bound: float) -> Tensor:
        return (x.high > bound) | ((x.high == bound) & (x.rest > 0))

    def power_of_two(self, x: DoubleDouble, *, above: bool) -> DoubleDouble:
        return through_arb("power_of_two", x, above=above)

    def quantize(
        self,
        x: DoubleDouble,
        scale: DoubleDouble,
        format: str,
        zero: DoubleDouble | Tensor | None = None,
        stored: DoubleDouble | None = None,
    ) -> DoubleDouble:
        return through_arb("quantize", x, scale, format, zero, stored)

    def sum(self, x: DoubleDouble, axis: int = -1, *, rescaled: bool = False) -> DoubleDouble:
        finite, special = _finite(x)
        if special is None:
            return exact_sum(x, axis)
        return _propagate_nonfinite(
            exact_sum(finite, axis), x.high.sum(axis, keepdim=True), special.any(axis, keepdim=True)
        )

    def max(self, x: DoubleDouble) -> DoubleDouble:
        if x.shape[-1] == 0:
            return DoubleDouble(x.high.new_full((*x.shape[:-1], 1), -math.inf))
        high = x.high.amax(-1, keepdim=True)
        low = None
        if x.low is not None:
            low = torch.where(x.high == high, x.rest, -math.inf).amax(-1, keepdim=True)
            low = torch.where(torch.isfinite(low), low, 0.0)
        return DoubleDouble(high, low, None if x.rad is None else x.radius.amax(-1, keepdim=True))

    def matmul(self, a: DoubleDouble, b: DoubleDouble, plus: DoubleDouble | None = None) -> DoubleDouble:
        (left, bad_rows), (right, bad_columns) = _finite(a), _finite(b)
        added, bad = (None, None) if plus is None else _finite(plus)
        product = exact_matmul(left, right, added)
        if bad_rows is None and bad_columns is None and bad is None:
            return product
        lost = torch.zeros(product.shape, dtype=torch.bool)
        if bad_rows is not None:
            lost |= bad_rows.any(-1, keepdim=True)
        if bad_columns is not None:
            lost |= bad_columns.any(-2, keepdim=True)
        if bad is not None:
            lost |= bad
        return _propagate_nonfinite(product, _REAL.matmul(a.high, b.high, None if plus is None else plus.high), lost)

    def rearranged(self, change: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[DoubleDouble]) -> DoubleDouble:
        low = None if all(part.low is None for part in parts) else change([part.rest for part in parts])
        rad = None if all(part.rad is None for part in parts) else change([part.radius for part in parts])
        return DoubleDouble(change([part.high for part in parts]), low, rad)

    def enclosure(self, x: DoubleDouble) -> tuple[Tensor, Tensor]:
        if x.low is None and x.rad is None:
            return x.high, x.high
        off = x.rest.abs() + x.radius
        off = torch.where(off == 0, 0.0, off * (1 + 2.0**-30) + x.high.abs() * 2.0**-52)
        return x.high - off, x.high + off

    def interval(self, least: Tensor, most: Tensor) -> DoubleDouble:
        if torch.equal(least, most):
            return DoubleDouble(least)
        open_end = (least.isinf() | most.isinf()) & (least != most)
        mid = torch.where(least == most, least, torch.where(open_end, 0.0, least / 2 + most / 2))
        radius = torch.maximum(most - mid, mid - least) * (1 + 2.0**-30)
        return DoubleDouble(mid, None, torch.where(least == most, 0.0, torch.where(open_end, math.inf, radius)))

    def hull(self, x: DoubleDouble, y: DoubleDouble) -> DoubleDouble:
        (a, b), (c, d) = self.enclosure(x), self.enclosure(y)
        return self.interval(torch.minimum(a, c), torch.maximum(b, d))

    def special(self, function: Callable[..., Any], *numbers: DoubleDouble) -> DoubleDouble:
        result: DoubleDouble = through_arb("special", function, *numbers)
        return result

    def topk_index(self, x: DoubleDouble, k: int) -> Tensor:
        order = torch.argsort(x.rest, dim=-1, descending=True, stable=True)
        by_high = torch.argsort(torch.gather(x.high, -1, order), dim=-1, descending=True, stable=True)
        return torch.gather(order, -1, by_high)[..., :k]

    def exp_shifted(self, x: DoubleDouble, shift: DoubleDouble) -> DoubleDouble:
        if not x.high.numel() or x.high.amin().item() > -math.inf:
            return exp(x - shift)
        hidden = (x.high == -math.inf) & torch.isfinite(shift.high)
        return self.where(~hidden, exp(self.where(hidden, shift, x) - shift), 0.0)

    def logsumexp(self, x: DoubleDouble) -> DoubleDouble:
        largest = self.max(x)
        infinite = torch.isinf(largest.high)
        shift = self.where(infinite, as_pair(0.0), largest)
        total = self.where(infinite, as_pair(1.0), self.sum(self.exp_shifted(x, shift)))
        return self.where(infinite, largest, shift + self.log(total))

    def gate_mul(self, x: DoubleDouble, gate: DoubleDouble) -> DoubleDouble:
        infinite = torch.isinf(x.high)
        if not bool(infinite.any()):
            return x * gate
        return self.where(infinite, DoubleDouble(x.high.clamp(min=0)), x * gate)

    def attend(
        self, scores: DoubleDouble, visible: Tensor, values: DoubleDouble, sinks: DoubleDouble | None
    ) -> tuple[DoubleDouble, DoubleDouble]:
        """Divide by the sum of weights once, after the product with the values."""
        visible = torch.broadcast_to(torch.as_tensor(visible), scores.shape)
        largest = self.max(self.where(visible, scores, -math.inf))
        if sinks is not None:
            largest = self.maximum(largest, sinks)
        shift = self.where(largest.high == -math.inf, as_pair(0.0), largest)
        weights = self.where(visible, exp(self.where(visible, scores, shift) - shift), 0.0)
        total = self.sum(weights)
        if sinks is not None:
            total = total + exp(sinks - shift)
        empty = ~visible.any(-1, keepdim=True) if sinks is None else torch.zeros((1,) * len(scores.shape)).bool()
        safe = self.where(empty, as_pair(1.0), total)
        lse = self.where(~empty, shift + self.log(safe), -math.inf)
        finite, special = _finite(values)
        out = self.matmul(weights, finite) / safe
        if special is not None:
            reached = weighted_values((weights / safe).high, visible, values.high)
            out = _propagate_nonfinite(out, reached, (visible.double() @ special.double()) > 0)
        return out, lse


def _finite(x: DoubleDouble) -> tuple[DoubleDouble, Tensor | None]:
    """Return x with zeros in place of infinities and NaN, and a mask of those (None: there are none)."""
    if math.isfinite(x.high.sum().item()):
        return x, None
    special = ~torch.isfinite(x.high)
    return DoubleDouble(torch.where(special, 0.0, x.high), x.low, x.rad), special


def _propagate_nonfinite(x: DoubleDouble, high: Tensor, lost: Tensor) -> DoubleDouble:
    """Return x, with float64's ``high`` and an infinite radius where ``lost``: an operand was infinite or NaN."""
    lost = torch.broadcast_to(lost, x.high.shape)
    return DoubleDouble(
        torch.where(lost, high, x.high), torch.where(lost, 0.0, x.rest), x.radius + full_where(lost, math.inf)
    )


_DIGITS = 80  # holds a pair of float64 with room for a function's error; Arb's radius covers wider gaps


def through_arb(method: str, *arguments: Any, **keywords: Any) -> Any:
    """Return the results of a method of `Arb` as double-double numbers with proven radii."""
    arithmetic = Arb(_DIGITS)
    with arithmetic.precision():
        result = getattr(arithmetic, method)(
            *(_to_arb(arithmetic, value) for value in arguments),
            **{name: _to_arb(arithmetic, value) for name, value in keywords.items()},
        )
        return _from_arb(result)


def enclosures(arithmetic: Arb, x: DoubleDouble) -> Any:
    """Return an object array of Arb balls that enclose the numbers."""
    ball = arithmetic.flint.arb
    balls = np.empty(x.shape, dtype=object)
    parts = (part.contiguous().numpy().ravel() for part in (x.high, x.rest, x.radius))
    flat = balls.reshape(-1)
    for index, (high, low, radius) in enumerate(zip(*(part.tolist() for part in parts), strict=True)):
        number = ball(high) + low if low else ball(high)
        if radius:
            number = number + ball(0, radius if radius == radius else math.inf)
        flat[index] = number
    return balls


def parts_of(result: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the high and low words and the radii of an object array of balls.

    A ball that is infinite, or beyond float64's range, has radius zero; one that is NaN, or contains an end of that
    range, an infinite one.
    """
    value, low, radius = (np.zeros(result.shape) for _ in range(3))
    for index in np.ndindex(result.shape):
        number = result[index]
        high = float(number.mid())
        value[index] = high
        if math.isfinite(high):
            rest = number - high
            low[index] = float(rest.mid())
            radius[index] = _largest_magnitude(rest - float(low[index]))
        elif number.is_finite():
            if not math.isinf(float(number.abs_lower())):
                value[index], radius[index] = math.copysign(sys.float_info.max, high), math.inf
        elif high != high or number.rad() != 0:
            radius[index] = math.inf
    return torch.from_numpy(value), torch.from_numpy(low), torch.from_numpy(radius)


def nearest_to(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float64 nearest to each ball of an object array, and the radius about it that encloses the ball.

    The radius is infinite unless all of the ball rounds to that float64, and zero if that is an infinity.
    """
    value, radius = (np.zeros(result.shape) for _ in range(2))
    for index in np.ndindex(result.shape):
        number = result[index]
        value[index] = high = float(number.mid())
        if not (float(number.lower()) == high == float(number.upper())):
            value[index], radius[index] = np.clip(high, -sys.float_info.max, sys.float_info.max), math.inf
        elif math.isfinite(high):
            radius[index] = _largest_magnitude(number - high)
    return torch.from_numpy(value), torch.from_numpy(radius)


def _largest_magnitude(number: Any) -> float:
    """Return a float64 at or above all magnitudes in a ball; zero only for zero."""
    bound = number.abs_upper()
    return math.nextafter(float(bound) * (1 + 2.0**-50), math.inf) if bound > 0 else 0.0


def _to_arb(arithmetic: Arb, value: Any) -> Any:
    if isinstance(value, DoubleDouble):
        return enclosures(arithmetic, value)
    if isinstance(value, torch.Tensor):
        return value.numpy()
    return [_to_arb(arithmetic, part) for part in value] if isinstance(value, (list, tuple)) else value


def _from_arb(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_from_arb, result))
    if not isinstance(result, np.ndarray) or result.dtype != object:
        return torch.as_tensor(result)
    return DoubleDouble(*parts_of(result))
