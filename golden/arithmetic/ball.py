"""Balls: a float64 midpoint and a radius that holds both the exact number and every value a kernel may compute.

Each operation propagates the operands' radii (with the operands' largest magnitudes, so that no second-order term is
lost) and adds the error that its `RoundingModel` allows the operation itself. An operation on exact operands whose
exact result is a number of the format has no error; error-free transforms decide that.

Notation: u is the model's unit roundoff, r a radius, k u-multiples the error allowed to an elementary function.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden.arithmetic.arbitrary_precision import working_precision
from assay.golden.arithmetic.base import Arithmetic, Formula
from assay.golden.arithmetic.double_double import add_radii, two_sum
from assay.golden.arithmetic.model import EVALUATION, RoundingModel, all_finite, outward
from assay.golden.arithmetic.real import torch_function

Tensor = torch.Tensor


_FEW = 8  # terms of a sum that are checked first for whether it may be exact


@dataclass(frozen=True, eq=False)
class Ball:
    """Midpoints ``mid`` and radii ``rad`` (None: exact; else broadcastable to them), under one rounding model."""

    mid: Tensor
    rad: Tensor | None
    model: RoundingModel

    def __post_init__(self) -> None:
        if self.model.beyond == "infinity":
            mid, over = self.mid, self.mid.abs() > self.model.range
            object.__setattr__(self, "mid", torch.where(over, torch.copysign(mid.new_full((), math.inf), mid), mid))
            if self.rad is not None:
                object.__setattr__(self, "rad", torch.where(over, 0.0, self.rad))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mid.shape)

    @property
    def radius(self) -> Tensor:
        """Return the radius as a read-only tensor."""
        return self.mid.new_zeros(()).expand(self.mid.shape) if self.rad is None else self.rad

    @property
    def magnitude(self) -> Tensor:
        """Return the largest absolute value in the ball."""
        return self.mid.abs() if self.rad is None else self.mid.abs() + self.rad

    @cached_property
    def is_finite(self) -> bool:
        """Return whether all midpoints are finite."""
        return all_finite(self.mid)

    @cached_property
    def largest(self) -> Tensor:
        """Return the largest |midpoint| of each matrix, [..., 1, 1]."""
        return self.mid.abs().amax((-1, -2), keepdim=True) if self.mid.numel() else self.mid.new_zeros(())

    @cached_property
    def beside_magnitude(self) -> Tensor:
        """Return the concatenated midpoints and magnitudes, [..., 2 n]."""
        return torch.cat([self.mid, self.mid.abs()], -1)

    def map(self, change: Callable[[Tensor], Tensor]) -> Ball:
        """Apply the same rearrangement to midpoints and radii."""
        rad = None if self.rad is None else change(torch.broadcast_to(self.rad, self.mid.shape))
        return Ball(change(self.mid), rad, self.model)

    def __getitem__(self, key: Any) -> Ball:
        return self.map(lambda part: part[key])

    def reshape(self, *shape: int | tuple[int, ...]) -> Ball:
        return self.map(lambda part: part.reshape(*shape))  # type: ignore[arg-type]  # torch takes both forms

    def __neg__(self) -> Ball:
        return Ball(-self.mid, self.rad, self.model)

    def __add__(self, other: Ball | float) -> Ball:
        other = self.as_ball(other)
        tiny = self.model.tiny if self.model.flush else 0.0  # otherwise subnormal sums are exact
        spread = add_radii(self.rad, other.rad)
        return self.rounded(self.mid + other.mid, spread, lambda: two_sum(self.mid, other.mid)[1] == 0, tiny)

    def __sub__(self, other: Ball | float) -> Ball:
        return self + (-self.as_ball(other))

    def __mul__(self, other: Ball | float) -> Ball:
        other = self.as_ball(other)
        spread = add_radii(
            None if self.rad is None else self.rad * other.magnitude,
            None if other.rad is None else self.mid.abs() * other.rad,
        )
        return self.rounded(
            self.mid * other.mid, spread, lambda: _is_float32(self.mid) & _is_float32(other.mid), self.model.tiny
        )

    def __truediv__(self, other: Ball | float) -> Ball:
        other = self.as_ball(other)
        mid = self.mid / other.mid
        least = other.mid.abs() - outward(other.radius)
        spread = (self.radius + mid.abs() * other.radius) / least.clamp(min=0)
        rad = spread + self.model.function_error("div") * (mid.abs() + spread) + self.model.function_underflow("div")
        unknown = (least <= 0) & (other.radius > 0) & torch.isfinite(self.mid)  # the divisor may be zero
        if bool(unknown.any()):
            mid, rad = torch.where(unknown, mid.nan_to_num(), mid), torch.where(unknown, math.inf, rad)
        return Ball(mid, self.bounded(mid, rad), self.model)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: float) -> Ball:
        return self.as_ball(other) - self

    def __rtruediv__(self, other: float) -> Ball:
        return self.as_ball(other) / self

    def as_ball(self, value: Ball | float) -> Ball:
        """Return a ball for ``value``; a kernel rounds a constant that is not in the compute format."""
        if isinstance(value, Ball):
            return value
        mid = self.mid.new_full((), float(value))
        exact = bool(self.model.represents(mid)) or not math.isfinite(value)
        return Ball(mid, None if exact else mid.abs() * self.model.unit_roundoff + self.model.tiny, self.model)

    def rounded(self, mid: Tensor, spread: Tensor | None, is_exact: Callable[[], Tensor], tiny: float = 0.0) -> Ball:
        """Return the result of one operation: the operands' spread, and one rounding unless ``is_exact()``."""
        if spread is not None:
            rad = spread + self.model.unit_roundoff * (mid.abs() + spread) + tiny
            return Ball(mid, self.bounded(mid, rad), self.model)
        exact = is_exact() & self.model.represents(mid)
        if self.model.flush:
            exact &= (mid == 0) | (mid.abs() >= self.model.compute.smallest_normal)
        if bool(exact.all()):
            return Ball(mid, None, self.model)
        rad = torch.where(exact, 0.0, self.model.unit_roundoff * mid.abs() + tiny)
        return Ball(mid, self.bounded(mid, rad), self.model)

    def bounded(self, mid: Tensor, rad: Tensor) -> Tensor:
        """Return ``rad``, infinite where a kernel may overflow on a finite number."""
        if math.isinf(self.model.largest * 2):  # float64: no larger format
            return rad
        fits = mid.abs() + rad <= self.model.largest
        return rad if bool(fits.all()) else torch.where(torch.isfinite(mid) & ~fits, math.inf, rad)


def _is_float32(x: Tensor) -> Tensor:
    """Return where x is a float32 number: the product of two such is exact in float64, and in range."""
    return x == x.to(torch.float32).to(torch.float64)


def is_power_of_two(x: Tensor) -> Tensor:
    """Return where |x| is a power of two."""
    return torch.frexp(x.abs())[0] == 0.5


def lowest_bit(x: Tensor) -> Tensor:
    """Return the value of the lowest set bit of each float64 (infinite for zero)."""
    bits = x.contiguous().view(torch.int64)
    mantissa = (bits & ((1 << 52) - 1)) != 0
    cleared = torch.where(mantissa, bits & (bits - 1), 0).view(torch.float64)
    return torch.where(x == 0, math.inf, (x - cleared).abs())


class ElementaryBalls(Arithmetic[Ball, Tensor]):
    """Ball arithmetic under a rounding model; the default model certifies the float64 evaluation itself.

    ``block_scale``: how many times as many numbers a block has as fit in a processor's cache, so as to fill a device.
    """

    block_scale = 1

    def __init__(self, model: RoundingModel = EVALUATION) -> None:
        self.model = model
        self.u = model.unit_roundoff

    def exact(self, values: object) -> Ball:
        mid = torch.as_tensor(values).to(torch.float64)
        if not self.model.flush:
            return Ball(mid, None, self.model)
        flushed = torch.where(mid.abs() < self.model.compute.smallest_normal, mid.abs(), 0.0)
        return Ball(mid, flushed if bool(flushed.any()) else None, self.model)

    def constant(self, formula: Formula) -> Ball:
        """Return Arb's enclosure; a kernel rounds the constant to its compute format."""
        from flint import arb  # loaded on first use

        scalar: Any = arb  # a formula is written for floats
        with working_precision(53):
            enclosure = arb(formula(lambda value: scalar(value).sqrt(), scalar.pi()))
            value = float(enclosure.mid())
            off = float((enclosure - value).abs_upper())
        mid = torch.tensor(value, dtype=torch.float64)
        if off == 0 and bool(self.model.represents(mid)):
            return Ball(mid, None, self.model)
        return Ball(mid, torch.tensor(off * (1 + 1e-15) + self.u * abs(value)), self.model)

    def in_blocks(self, function: Callable[..., Any], *numbers: Any, whole: int = 0) -> Any:
        return in_blocks(function, numbers, whole, self.block_scale)

    def ball(self, mid: Tensor, rad: Tensor) -> Ball:
        """Return a ball whose radius is infinite where a kernel may overflow."""
        made = Ball(mid, rad, self.model)
        return Ball(mid, made.bounded(mid, rad), self.model)

    def _function(self, mid: Tensor, spread: Tensor, name: str, scale: float | None = None) -> Ball:
        """Return a function's value: its spread, and its own error relative to ``scale`` (default: the value)."""
        size = mid.abs() + spread if scale is None else scale
        return self.ball(mid, spread + self.model.function_error(name) * size + self.model.function_underflow(name))

    def exp(self, x: Ball) -> Ball:
        return self._exp(x.mid, x.radius)

    def _exp(self, argument: Tensor, error: Tensor) -> Ball:
        """Return exp; its argument may be rounded once more, by 2 u |argument| (kernels fold log2 e into it)."""
        mid = torch.exp(argument)
        error = error + 2 * self.u * argument.abs()
        spread = mid * expm1_upper(error)
        if not all_finite(spread):
            spread = torch.where(mid == 0, torch.exp(argument + error), spread)
            spread = torch.where(argument == -math.inf, 0.0, spread)
        return self._function(mid, spread, "exp")

    def exp_shifted(self, x: Ball, shift: Ball) -> Ball:
        """Return exp(x - shift); x log2 e and shift log2 e may each be rounded before they are subtracted."""
        argument = x.mid - shift.mid
        folded = 2 * self.u * (x.mid.abs() + shift.mid.abs() + argument.abs())
        return self._exp(argument, x.radius + shift.radius + folded)

    def log(self, x: Ball) -> Ball:
        mid = torch.log(x.mid)
        return self._function(mid, torch.where(x.radius == 0, 0.0, spread_of_log(x.mid, x.radius)), "log")

    def erf(self, x: Ball, *, absolute: float = False) -> Ball:
        mid = torch.erf(x.mid)
        return self._function(mid, spread_of_erf(x.mid, x.radius), "erf", float(absolute) or None)

    def tanh(self, x: Ball, *, absolute: bool = False) -> Ball:
        """Return tanh; ``absolute``: its error is relative to two, since a kernel may compute 2 sigmoid(2x) - 1."""
        mid = torch.tanh(x.mid)
        return self._function(mid, spread_of_tanh(x.mid, x.radius), "tanh", 2.0 if absolute else None)

    def sigmoid(self, x: Ball) -> Ball:
        """Return s(x): s(x + e) - s(x) <= s (1 - s) (exp(e) - 1); if exp(-x) overflows a kernel gives 0, and s(x) <
        exp(x)."""
        mid = torch.sigmoid(x.mid)
        own = self.model.function_error("exp") + self.u + self.model.function_error("div")  # 1 / (1 + exp(-x))
        own = max(0.0, own - self.model.function_error("sigmoid"))
        error = x.radius + 2 * self.u * x.mid.abs()
        largest = float(error.max()) if error.numel() else math.inf
        if largest < 0.5 and largest - float(x.mid.min()) < math.log(self.model.largest):
            # No underflow, expm1(e) <= e (1 + e), and the other bound is not smaller.
            spread = mid * ((1.0 - mid) + 2.0**-52) * error * (1.0 + largest)
            return self._function(mid, spread + own * (mid + spread) if own else spread, "sigmoid")
        error = torch.where(torch.isinf(x.mid), 0.0, error)
        spread = torch.fmin(mid * torch.sigmoid(-x.mid) * expm1_upper(error), torch.sigmoid(error - x.mid.abs()))
        spread = torch.where(torch.isinf(x.radius), math.inf, spread)  # the argument may have overflowed, into NaN
        may_vanish = -x.mid + error > math.log(self.model.largest)
        most = torch.maximum(mid, torch.exp(x.mid + error))
        return self._function(mid, torch.where(may_vanish, most, spread + own * (mid + spread)), "sigmoid")

    def rsqrt(self, x: Ball) -> Ball:
        mid = 1 / torch.sqrt(x.mid)
        least = (x.mid - outward(x.radius)).clamp(min=0)
        spread = torch.where(x.radius == 0, 0.0, 0.5 * x.radius / (least * torch.sqrt(least)))
        return self._function(mid, spread, "rsqrt")

    def minimum(self, x: Ball, bound: float) -> Ball:
        limit = x.as_ball(bound)
        return Ball(x.mid.clamp(max=bound), _max_radius(x.rad, limit.rad), self.model)

    def maximum(self, x: Ball, y: Ball) -> Ball:
        return Ball(torch.maximum(x.mid, y.mid), _max_radius(x.rad, y.rad), self.model)

    def where(self, mask: Tensor, x: Ball, y: Ball | float) -> Ball:
        other = x.as_ball(y)
        rad = None if x.rad is None and other.rad is None else torch.where(mask, x.radius, other.radius)
        return Ball(torch.where(mask, x.mid, other.mid), rad, self.model)

    def above(self, x: Ball, bound: float) -> Tensor:
        return x.mid > bound

    def sum(self, x: Ball, axis: int = -1, *, rescaled: bool = False) -> Ball:
        """Return the sum, with gamma_(n-1) of the sum of magnitudes, in any order; exact if every partial sum is.

        gamma_n if converting to the accumulator rounds too.
        """
        terms = max(x.shape[axis] - (self.model.accumulate.format.unit_roundoff <= self.u), 0)
        mid = x.mid.sum(axis, keepdim=True)
        magnitude = x.magnitude.sum(axis, keepdim=True)
        lost = self.model.gamma(terms) + (self.rescaling(x.shape[axis]) if rescaled else 0.0)
        rounding = self.model.sum_rounding(x.shape[axis])
        rad = lost * rounding * magnitude
        if self.model.flush:  # otherwise subnormal partial sums are exact
            rad = rad + terms * self.model.underflow(self.model.accumulate.format)
        if x.rad is None:
            if terms == 0:
                return Ball(mid, None, self.model)
            few = lowest_bit(x.mid.narrow(axis, 0, min(_FEW, x.shape[axis]))).amin(axis, keepdim=True)
            if bool((magnitude <= few * 2.0**self.model.accumulate.exact_bits).any()):  # the unit of all is no larger
                return self._summed(mid, rad, magnitude, lowest_bit(x.mid).amin(axis, keepdim=True))
        else:
            rad = rad + rounding * x.rad.sum(axis, keepdim=True)
        return self._partly_overflowing(mid, rad, magnitude)

    def _partly_overflowing(self, mid: Tensor, rad: Tensor, magnitude: Tensor) -> Ball:
        """Return a sum whose partial sums, in some order, reach the sum of its positive terms, or of its negative ones.

        If overflow is followed (`RoundingModel.beyond`), the sum is infinite if the terms of one sign overflow, and
        unspecified if both do.
        """
        if self.model.beyond == "infinity":
            above, below = ((magnitude + side * mid) / 2 > self.model.range for side in (1, -1))
            followed = torch.where(above, math.inf, torch.where(below, -math.inf, mid))
            both = above & below & mid.isfinite()
            rad = torch.where(both, math.inf, torch.where(above | below, 0.0, rad))
            return Ball(torch.where(both, 0.0, torch.where(mid.isfinite(), followed, mid)), rad, self.model)
        overflow = (magnitude > self.model.largest) & torch.isfinite(mid)
        return self.ball(mid, torch.where(overflow, math.inf, rad))

    def rescaling(self, terms: int) -> float:
        """Return the error of a running sum that is multiplied by exp(old - new) once per block (`RoundingModel`)."""
        if self.model.certifies:
            return 0.0  # the evaluation itself makes two passes
        return self.model.compounded(self.model.rescalings(terms), self.model.function_error("exp") + 2 * self.u)

    def _summed(self, mid: Tensor, rad: Tensor, magnitude: Tensor, unit: Tensor) -> Ball:
        """Return a sum of multiples of ``unit``: exact, in every order, if magnitudes stay below 2^bits units.

        A unit below the format's least number underflows.
        """
        exact = outward(magnitude) <= unit * 2.0**self.model.accumulate.exact_bits
        exact &= (magnitude <= self.model.range) & (unit > self.model.underflow(self.model.accumulate.format))
        if bool(exact.all()):
            return Ball(mid, None, self.model)
        return self._partly_overflowing(mid, torch.where(exact, 0.0, rad), magnitude)

    def max(self, x: Ball) -> Ball:
        if x.shape[-1] == 0:
            return Ball(x.mid.new_full((*x.shape[:-1], 1), -math.inf), None, self.model)
        return Ball(x.mid.amax(-1, keepdim=True), None if x.rad is None else x.rad.amax(-1, keepdim=True), self.model)

    def matmul(self, a: Ball, b: Ball, plus: Ball | None = None, *, terms: int | None = None) -> Ball:
        """Return a @ b + plus, with gamma_n |a| |b| for products rounded or fused, in any order; ``plus`` is one more
        term.

        If all products are multiples of one unit and their magnitudes add up to at most 2^bits units, every
        partial sum is exact in any order. ``terms``: how many of the products may be nonzero.
        """
        terms = (a.shape[-1] if terms is None else terms) + (plus is not None)
        a, b = self.operand(a), self.operand(b)
        mid = a.mid @ b.mid
        if plus is not None:
            mid = mid + plus.mid
        rounding = self.model.sum_rounding(terms)
        gamma = self.model.gamma(terms) * rounding
        tiny = terms * self.model.underflow(self.model.accumulate.format)
        if self.model.certifies and a.rad is not None and b.rad is None and plus is None:
            # One product for the spread and the error: in float64 overflow needs no check beyond the midpoint's.
            rad = (gamma * a.magnitude + a.rad) @ b.mid.abs() * rounding + tiny
            return Ball(mid, rad, self.model)
        magnitude = a.magnitude @ b.magnitude
        if plus is not None:
            magnitude = magnitude + plus.magnitude
        rad = gamma * magnitude + tiny
        if a.rad is None and b.rad is None and (plus is None or plus.rad is None):
            if 0 in (*mid.shape, a.shape[-1]):
                return Ball(mid, None, self.model)
            if self.model.certifies and not self._may_be_exact(a.mid, b.mid, magnitude):
                return Ball(mid, rad, self.model)
            unit = lowest_bit(a.mid).amin(-1, keepdim=True) * lowest_bit(b.mid).amin(-2, keepdim=True)
            if plus is not None:
                unit = torch.minimum(unit, lowest_bit(plus.mid))
            return self._summed(mid, rad, magnitude, unit)
        for spread in (
            None if a.rad is None else a.rad @ b.magnitude,
            None if b.rad is None else a.mid.abs() @ b.rad,
            None if plus is None else plus.rad,
        ):
            rad = rad if spread is None else rad + spread * rounding
        return self._partly_overflowing(mid, rad, magnitude)

    def operand(self, x: Ball) -> Ball:
        """Return ``x`` as a unit that truncates operands reads it; rounding them before is no less accurate.

        Numbers of its format are read exactly.
        """
        name = self.model.accumulate.operands
        if not name:
            return x
        if x.rad is not None:
            tiny = format_named(name).smallest_subnormal
            return Ball(x.mid, x.rad + self.model.accumulate.cut * x.magnitude + tiny, self.model)
        finite = torch.where(x.mid.isfinite(), x.mid, 0.0)
        lost = (finite - round_to(finite, name, "toward_zero")).abs()
        return Ball(x.mid, lost, self.model) if bool(lost.any()) else x

    def _may_be_exact(self, a: Tensor, b: Tensor, magnitude: Tensor) -> bool:
        """Return whether some sum may be exact, by a few terms of each, whose unit is an upper bound."""
        units = lowest_bit(a[..., :_FEW]).amin(-1).amax() * lowest_bit(b[..., :_FEW, :]).amin(-2).amax()
        return not bool(magnitude.amin() > units * 2.0**self.model.accumulate.exact_bits)

    def unspecified(self, rows: Tensor | Callable[[], Tensor], x: Ball) -> Ball:
        """Return ``x``, unspecified in ``rows``: any result of a kernel is right."""
        if self.model.certifies:
            return x
        rows = rows() if callable(rows) else rows
        if not bool(rows.any()):
            return x
        return Ball(torch.where(rows, 0.0, x.mid), torch.where(rows, math.inf, x.radius), self.model)

    def spilled(self, mask: Callable[[], Tensor], x: Ball) -> Ball:
        return self.unspecified(mask, x) if self.model.spills else x

    def no_number(self, mask: Tensor, x: Ball) -> Ball:
        """Return ``x``, but NaN with an infinite radius where a kernel may give NaN or an infinity."""
        if self.model.certifies or not bool(mask.any()):
            return x
        return Ball(torch.where(mask, math.nan, x.mid), torch.where(mask, math.inf, x.radius), self.model)

    def topk_index(self, x: Ball, k: int) -> Tensor:
        return torch.argsort(x.mid, dim=-1, descending=True, stable=True)[..., :k]

    def rearranged(self, change: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Ball]) -> Ball:
        rad = None
        if any(part.rad is not None for part in parts):
            rad = change([torch.broadcast_to(part.radius, part.mid.shape) for part in parts])
        return Ball(change([part.mid for part in parts]), rad, self.model)

    def stores(self, stage: str) -> bool:
        """Return whether a kernel may round at this stage."""
        return stage in self.model.stages

    def round(self, x: Ball, stage: str) -> Ball:
        format = self.model.stages.get(stage)
        if format is None:
            return x
        size = x.magnitude
        lost = format.unit_roundoff * size + self.model.underflow(format)
        if x.rad is None:  # numbers of the format aren't rounded, but may be flushed
            flushed = torch.where(size < format.smallest_normal, size, 0.0) if self.model.flush else 0.0
            lost = torch.where(round_to(x.mid, format) == x.mid, flushed, lost)
        rad = torch.where(size > format.largest, math.inf, x.radius + lost)
        return Ball(x.mid, rad, self.model)

    def stored(self, x: Ball, stage: str, factor: Tensor | float = 1.0) -> Ball:
        """Return ``x`` times a factor, rounded as ``stage`` and divided by it again.

        x may be a number of the format, and its product with a factor that is no power of two is not.
        """
        format = self.model.stages.get(stage)
        if format is None:
            return x
        size = x.magnitude
        rad = x.radius + format.unit_roundoff * size + self.model.underflow(format) / factor
        return Ball(x.mid, torch.where(size * factor > format.largest, math.inf, rad), self.model)

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
        if not all_finite(mid):
            rad = torch.where(mid.isfinite(), torch.where(spread.isinf(), math.inf, rad), 0.0)
        return Ball(mid, rad, self.model)

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
_EXPONENTIAL: dict[str, Callable[[ElementaryBalls, Ball, Tensor], Tensor]] = {
    "exp": ElementaryBalls._of_exponential,
    "expm1": ElementaryBalls._of_exponential,
    "exp2": ElementaryBalls._of_exp2,
    "sigmoid": ElementaryBalls._of_sigmoid,
    "softplus": ElementaryBalls._of_softplus,
}


def expm1_upper(error: Tensor) -> Tensor:
    """Return an upper bound on exp(error) - 1; cheap for small errors: e^t - 1 <= t + t^2 for t <= 1.79."""
    small = error + error * error
    return small if bool((error < 1).all()) else torch.where(error < 1, small, torch.expm1(error))


def spread_of_log(x: Tensor, radius: Tensor) -> Tensor:
    """Return log x - log(x - radius), infinite where x - radius <= 0."""
    return -torch.log1p(-(outward(radius) / x).clamp(max=1.0))


def spread_of_erf(x: Tensor, radius: Tensor) -> Tensor:
    """Return a bound by erf' = 2/sqrt(pi) exp(-z^2), at the ball's least magnitude."""
    least = (x.abs() - outward(radius)).clamp(min=0)
    return _at_most_two(radius * (2 / math.sqrt(math.pi)) * torch.exp(-least * least), radius)


def spread_of_tanh(x: Tensor, radius: Tensor) -> Tensor:
    """Return a bound by tanh' = 1 - tanh^2 <= 4 exp(-2 |z|), at the ball's least magnitude."""
    slope = 4 * torch.exp(-2 * (x.abs() - outward(radius)).clamp(min=0))
    return _at_most_two(radius * slope.clamp(max=1.0), radius)


def _at_most_two(spread: Tensor, radius: Tensor) -> Tensor:
    """Limit the spread of a function between -1 and 1; infinite where the argument may have overflowed (to NaN)."""
    return torch.where(torch.isinf(radius), math.inf, spread.clamp(max=2.0))


def _max_radius(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.maximum(a, b)


_BLOCK = 2**15
"""Numbers in a block: some ten float64 arrays of this length fit in a second-level cache."""
_MIN_NUMBERS = 4 * _BLOCK  # fewer are evaluated at once


def in_blocks(function: Callable[..., Any], numbers: Sequence[Any], whole: int = 0, scale: int = 1) -> Any:
    """Return ``function(*numbers)``, independent along all axes but the last ``whole``, evaluated a block at a time.

    Intermediates stay in a processor's cache, and need no new memory; blocks are ``scale`` times as large as that.
    ``numbers`` are balls, broadcast against one another, and other arguments, which are passed unchanged. The result is
    a ball or a tuple of balls, of their common shape except for the last ``whole`` axes.
    """
    balls = [number for number in numbers if isinstance(number, Ball)]
    shape = np.broadcast_shapes(*(ball.shape for ball in balls))  # torch's takes ten times as long
    if math.prod(shape) < _MIN_NUMBERS * scale:
        return function(*numbers)
    mids: list[Tensor] = []
    radii: list[Tensor | None] = []
    for block in _blocks(shape[: len(shape) - whole], math.prod(shape[len(shape) - whole :]), _BLOCK * scale):
        parts = [_part(number, block, len(shape)) if isinstance(number, Ball) else number for number in numbers]
        result_of_block = function(*parts)
        results = result_of_block if isinstance(result_of_block, tuple) else (result_of_block,)
        if not mids:
            mids = [
                torch.empty((*shape[: len(block)], *ball.shape[len(block) :]), dtype=torch.float64) for ball in results
            ]
            radii = [None] * len(results)
        for number, ball in enumerate(results):
            mids[number][block] = ball.mid
            if ball.rad is not None:
                whole_radius = radii[number]
                if whole_radius is None:
                    whole_radius = radii[number] = torch.zeros_like(mids[number])
                whole_radius[block] = ball.rad
    joined = tuple(Ball(mid, rad, ball.model) for mid, rad, ball in zip(mids, radii, results, strict=True))
    return joined if isinstance(result_of_block, tuple) else joined[0]


def _blocks(shape: Sequence[int], width: int, size: int) -> list[tuple[slice, ...]]:
    """Return slices of the leading axes, each of about ``size`` numbers; ``width`` numbers stay together."""
    axes: list[list[slice]] = []
    inner = math.prod(shape) * width
    for count in shape:
        inner //= count
        step = max(size // inner, 1)
        axes.append([slice(first, min(first + step, count)) for first in range(0, count, step)])
        if step > 1:
            break
    return list(itertools.product(*axes))


def _part(number: Ball, block: tuple[slice, ...], axes: int) -> Ball:
    """Return the part of a ball in a block; an axis of size one is shared by all."""
    missing = axes - len(number.shape)

    def cut(part: torch.Tensor) -> torch.Tensor:
        key = [slice(None) if size == 1 else along for size, along in zip(number.shape, block[missing:], strict=False)]
        return part[tuple(key)]

    rad = None if number.rad is None else cut(torch.broadcast_to(number.rad, number.shape))
    return Ball(cut(number.mid), rad, number.model)
