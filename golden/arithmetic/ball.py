"""Balls: a float64 midpoint and a radius that holds both the exact number and every value a kernel may compute.

Each operation propagates the operands' radii (with the operands' largest magnitudes, so that no second-order term is
lost) and adds the error that its `RoundingModel` allows the operation itself. An operation on exact operands whose
exact result is a number of the format has no error; error-free transforms decide that.

Notation: u is the model's unit roundoff, r a radius, k u-multiples the error allowed to an elementary function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden.arithmetic.arbitrary_precision import working_precision
from assay.golden.arithmetic.base import Arithmetic, Formula
from assay.golden.arithmetic.double_double import add_radii, two_sum
from assay.golden.arithmetic.model import (
    EVALUATION,
    RADIUS_ROUNDING,
    RoundingModel,
    all_finite,
    expm1_upper,
    lowest_bit,
    outward,
    spread_of_erf,
    spread_of_log,
    spread_of_tanh,
)

Tensor = torch.Tensor


_FEW = 8  # terms of a sum that are checked first for whether it may be exact


@dataclass(frozen=True, eq=False)
class Ball:
    """Midpoints ``mid`` and radii ``rad`` (None: exact; else broadcastable to them), under one rounding model.

    - A finite midpoint with a finite radius: a number within the radius.
    - A midpoint that is NaN or infinite: that itself, whatever the radius.
    - A finite midpoint with an infinite radius: anything, NaN and infinities included.
    - Where ``own`` is set as well (zero or more): a number within ``own`` of the midpoint, or none, NaN or an infinity.
      An infinite ``own``: none. An operation that doesn't pass it on leaves anything, which is less, and never wrong.

    If overflow is followed (`RoundingModel.beyond`), a number that certainly overflows is the infinity.

    ``mass``: where sums and products may be regrouped (`regrouped`), the sum of magnitudes of all products in a number;
    ``peak``: that of the largest part of each product, other factors left out.
    """

    mid: Tensor
    rad: Tensor | None
    model: RoundingModel
    own: Tensor | None = None
    mass: Tensor | None = None
    peak: Tensor | None = None

    def __post_init__(self) -> None:
        if self.model.beyond == "infinity":
            mid, over = self.mid, self.mid.abs() - outward(self.radius) > self.model.surely_beyond
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
        """Return the largest absolute value in the ball, or the sum of magnitudes that it has been added up from."""
        if self.mass is not None:
            return self.mass
        return self.mid.abs() if self.rad is None else self.mid.abs() + self.rad

    @property
    def reach(self) -> Tensor:
        """Return the largest magnitude of a partial result, however the number is grouped."""
        return self.magnitude if self.peak is None else self.peak

    @cached_property
    def is_finite(self) -> bool:
        """Return whether all midpoints are finite."""
        return all_finite(self.mid)

    @cached_property
    def is_known(self) -> bool:
        """Return whether all midpoints and radii are finite."""
        return self.is_finite and (self.rad is None or all_finite(self.rad))

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
        rad, own, mass, peak = (
            None if part is None else change(torch.broadcast_to(part, self.mid.shape))
            for part in (self.rad, self.own, self.mass, self.peak)
        )
        return Ball(change(self.mid), rad, self.model, own, mass, peak)

    def __getitem__(self, key: Any) -> Ball:
        return self.map(lambda part: part[key])

    def reshape(self, *shape: int | tuple[int, ...]) -> Ball:
        return self.map(lambda part: part.reshape(*shape))  # type: ignore[arg-type]  # torch takes both forms

    def __neg__(self) -> Ball:
        return Ball(-self.mid, self.rad, self.model, self.own, self.mass, self.peak)

    def regrouped(self, spread: Tensor, mass: Tensor, peak: Tensor) -> Ball:
        """Return a sum or a product that a kernel may distribute and regroup: chunks, trees, another factor first.

        It is a sum of products of other numbers; ``mass`` is that of the products' magnitudes. However it is grouped,
        a rounding loses u of the mass: here 2 u for each operation, as a grouping may form twice as many products.
        ``spread``: the operands' radii, each times the mass of the other factor.

        A factor may be multiplied last: of w l + w m the sum l + m comes first, of the product of three decays and u
        that of the decays. Such a part of a product is at most the product of some of its factors, which is P(x y) =
        max(P(x), P(y), P(x) P(y)); sums of parts are at most P(x + y) = P(x) + P(y): the ``peak``. Of a product over
        which a matrix product sums, no factor comes last: P(A) P(B). Where the mass or the peak may overflow, so may a
        kernel. A part that is subnormal loses ``tiny``, times other parts of at most the peak.
        """
        if not self.model.regroup:
            return self
        peak = torch.maximum(peak, mass)
        lost = 2 * self.model.unit_roundoff * mass + 2 * self.model.tiny * (1 + peak)
        rad = torch.maximum(self.radius, spread + lost)
        may = ~(peak + rad <= self.model.largest) & self.mid.isfinite() & self.radius.isfinite()
        wide = overflowing(self.model, self.mid, torch.where(self.mid.isfinite(), rad, 0.0), may)
        mass, peak = (part.nan_to_num(nan=math.inf, posinf=math.inf) for part in (mass, peak))
        return Ball(wide.mid, wide.rad, self.model, wide.own, mass, peak)

    def __add__(self, other: Ball | float) -> Ball:
        other = self.as_ball(other)
        if self.model.regroup:
            mass, peak = self.magnitude + other.magnitude, self.reach + other.reach
            return self._plus(other).regrouped(self.radius + other.radius, mass, peak)
        return self._plus(other)

    def _plus(self, other: Ball) -> Ball:
        if self.own is not None or other.own is not None:
            total = (self.inner + other.inner).or_none(self.lost | other.lost)
            return total.without_number(self.is_none | other.is_none)
        tiny = self.model.tiny if self.model.flush else 0.0  # otherwise subnormal sums are exact
        spread = add_radii(self.rad, other.rad)
        return self.rounded(other, self.mid + other.mid, spread, lambda: two_sum(self.mid, other.mid)[1] == 0, tiny)

    def __sub__(self, other: Ball | float) -> Ball:
        return self + (-self.as_ball(other))

    def __mul__(self, other: Ball | float) -> Ball:
        other = self.as_ball(other)
        if self.model.regroup:
            spread = self.radius * other.magnitude + self.magnitude * other.radius
            alone, peak = torch.maximum(self.reach, other.reach), self.reach * other.reach
            return self._times(other).regrouped(spread, self.magnitude * other.magnitude, torch.maximum(alone, peak))
        return self._times(other)

    def _times(self, other: Ball) -> Ball:
        if self.own is not None or other.own is not None:
            product = (self.inner * other.inner).or_none(self.lost | other.lost)
            return product.without_number(self.is_none | other.is_none)
        spread = add_radii(
            None if self.rad is None else self.rad * other.magnitude,
            None if other.rad is None else self.mid.abs() * other.rad,
        )
        exact = lambda: _is_float32(self.mid) & _is_float32(other.mid)  # noqa: E731
        return self.rounded(other, self.mid * other.mid, spread, exact, self.model.tiny, is_product=True)

    def __truediv__(self, other: Ball | float) -> Ball:
        other = self.as_ball(other)
        if self.own is not None:
            return (self.inner / other).or_none(self.lost).without_number(self.is_none)
        mid = self.mid / other.mid
        least = other.mid.abs() - outward(other.radius)
        spread = (self.radius + mid.abs() * other.radius) / least.clamp(min=0)
        rad = spread + self.model.function_error("div") * (mid.abs() + spread) + self.model.function_underflow("div")
        unknown = (least <= 0) & (other.radius > 0) & torch.isfinite(other.mid)  # the divisor may be zero
        if not bool(unknown.any()) and (self.model.is_unlimited or bool((mid.abs() + rad <= self.model.largest).all())):
            return Ball(mid, rad, self.model)
        return self.limited(mid, rad, (self, other), unknown)

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

    def rounded(
        self,
        other: Ball,
        mid: Tensor,
        spread: Tensor | None,
        is_exact: Callable[[], Tensor],
        tiny: float,
        *,
        is_product: bool = False,
    ) -> Ball:
        """Return a sum or a product with ``other``: the operands' spread, and one rounding unless ``is_exact()``."""
        if spread is not None:
            rad = spread + self.model.unit_roundoff * (mid.abs() + spread) + tiny
        else:
            exact = is_exact() & self.model.represents(mid)
            if self.model.flush:
                exact &= (mid == 0) | (mid.abs() >= self.model.compute.smallest_normal)
            if bool(exact.all()):
                return Ball(mid, None, self.model)
            rad = torch.where(exact, 0.0, self.model.unit_roundoff * mid.abs() + tiny)
        if self.model.is_unlimited or bool((mid.abs() + rad <= self.model.largest).all()):
            return Ball(mid, rad, self.model)
        if is_product:
            unsigned = (self.mid.isinf() & _is_unsigned(other)) | (_is_unsigned(self) & other.mid.isinf())
        else:  # a kernel may add to what overflowed to one side the terms that overflow to the other by themselves
            unsigned = self.mid.isinf() & (self.mid == -other.mid) & (self.model.beyond == "infinity")
        return self.limited(mid, rad, (self, other), unsigned).without_number(unsigned)

    def limited(self, mid: Tensor, rad: Tensor, operands: Sequence[Ball], unknown: Tensor | None = None) -> Ball:
        """Return a result that may overflow, unspecified where an operand is, or ``unknown`` for another reason."""
        given = torch.zeros_like(mid, dtype=torch.bool)
        unknown = given if unknown is None else unknown
        for ball in operands:
            given = given | ball.mid.isnan()
            unknown = unknown | ball.unspecified
        return overflowing(self.model, mid, rad, None, unknown & ~given)

    @property
    def unspecified(self) -> Tensor:
        """Return where the ball holds anything."""
        return self.mid.isfinite() & ~self.radius.isfinite()

    @property
    def lost(self) -> Tensor:
        """Return where the ball holds a number or none."""
        return self.unspecified & (_owned(self) >= 0)

    @property
    def inner(self) -> Ball:
        """Return the ball of the numbers, without what overflow may have left instead."""
        return self if self.own is None else Ball(self.mid, torch.where(self.lost, self.own, self.radius), self.model)

    @property
    def is_none(self) -> Tensor:
        """Return where the ball holds NaN and infinities, and no number."""
        return self.lost & _owned(self).isinf()

    def without_number(self, mask: Tensor) -> Ball:
        """Return the ball with NaN and infinities alone where ``mask``; NaN stays NaN."""
        mask = mask & ~self.mid.isnan()
        if not bool(mask.any()):
            return self
        mid, rad, own = (
            torch.where(mask, a, b) for a, b in ((0.0, self.mid), (math.inf, self.radius), (math.inf, _owned(self)))
        )
        return Ball(mid, rad, self.model, own)

    def or_none(self, mask: Tensor) -> Ball:
        """Return the ball where ``mask`` also holds NaN and infinities."""
        mask = mask & ~self.mid.isnan() & ~self.unspecified
        own = torch.where(mask, torch.where(self.mid.isinf(), math.inf, self.radius), _owned(self))
        return Ball(
            torch.where(mask & self.mid.isinf(), 0.0, self.mid),
            torch.where(mask, math.inf, self.radius),
            self.model,
            own,
        )


def overflowing(
    model: RoundingModel, mid: Tensor, rad: Tensor, may: Tensor | None = None, unknown: Tensor | None = None
) -> Ball:
    """Return a ball as the model's ``beyond`` has it where it leaves the range, or ``may`` overflow on the way.

    - "anything": unspecified. "nothing": the ball itself.
    - "infinity": the infinity where it certainly leaves the range (`Ball`); else the ball, or none.

    ``unknown``: where it is unspecified. A radius that is infinite or NaN leaves a finite midpoint unspecified; an
    infinite midpoint is itself.
    """
    if unknown is None and may is None and (model.is_unlimited or bool((mid.abs() + rad <= model.largest).all())):
        return Ball(mid, rad, model)
    number = mid.isfinite()
    if unknown is not None:
        mid, number = torch.where(unknown & ~number, 0.0, mid), number | unknown
        rad = torch.where(unknown, math.inf, rad)
    rad = torch.where(number, rad, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    if model.is_unlimited:
        return Ball(mid, rad, model)
    known = number & rad.isfinite()
    over = known & ~(mid.abs() + rad <= model.largest)
    if model.beyond == "infinity":
        over &= mid.abs() - outward(rad) <= model.surely_beyond
    if may is not None:
        over |= may & known
    own = torch.where(over, rad, -1.0) if model.beyond == "infinity" else None
    return Ball(mid, torch.where(over, math.inf, rad), model, own)


def _owned(x: Ball) -> Tensor:
    return torch.full_like(x.mid, -1.0) if x.own is None else x.own


def _is_unsigned(x: Ball) -> Tensor:
    """Return where a ball holds numbers of either sign, or zero and others."""
    return (x.mid.abs() <= x.radius) & (x.radius > 0)


def _is_float32(x: Tensor) -> Tensor:
    """Return where x is a float32 number: the product of two such is exact in float64, and in range."""
    return x == x.to(torch.float32).to(torch.float64)


class ElementaryBalls(Arithmetic[Ball, Tensor]):
    """Ball arithmetic under a rounding model; the default model certifies the float64 evaluation itself.

    ``block_scale``: how many times as many numbers a block has as fit in a processor's cache, so as to fill a device.
    """

    block_scale = 1

    def __init__(self, model: RoundingModel = EVALUATION) -> None:
        self.model = model
        self.u = model.unit_roundoff
        self._largest_exponent = 0.0  # so far, where products of exponentials may be of prefix sums

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

    def ball(self, mid: Tensor, rad: Tensor) -> Ball:
        """Return a ball whose radius is infinite where a kernel may overflow."""
        return overflowing(self.model, mid, rad)

    def _function(
        self, mid: Tensor, spread: Tensor, name: str, scale: float | None = None, argument: Ball | None = None
    ) -> Ball:
        """Return a function's value: its spread, and its own error relative to ``scale`` (default: the value).

        ``argument``: of a function with poles, or one that overflows; infinite values of arguments that aren't exact
        are unspecified.
        """
        size = mid.abs() + spread if scale is None else scale
        rad = spread + self.model.function_error(name) * size + self.model.function_underflow(name)
        if argument is None or (all_finite(mid) and argument.is_finite):
            return self.ball(mid, rad)
        if not self.model.certifies:
            rad = torch.where(argument.mid.isinf() & (mid == 0), 0.0, rad)  # every kernel's exp(-inf)
        least = argument.mid - outward(argument.radius)  # where exp doesn't overflow, and others have no pole
        unsure = (argument.radius > 0) & (least <= (math.log(self.model.range) + 1 if name == "exp" else 0.0))
        return overflowing(self.model, mid, rad, None, mid.isinf() & argument.mid.isfinite() & unsure)

    def exp(self, x: Ball) -> Ball:
        return self._exp(x.mid, x.radius + self.prefix_error(x.mid))

    def _exp(self, argument: Tensor, error: Tensor) -> Ball:
        """Return exp; its argument may be rounded once more, by 2 u |argument| (kernels fold log2 e into it)."""
        mid = torch.exp(argument)
        error = error + 2 * self.u * argument.abs()
        spread = mid * expm1_upper(error)
        if not all_finite(spread):
            spread = torch.where(mid == 0, torch.exp(argument + error), spread)
            spread = torch.where(argument == -math.inf, 0.0, spread)
        return self._function(mid, spread, "exp", argument=Ball(argument, error, self.model))

    def prefix_error(self, exponent: Tensor) -> float:
        """Return the error of exponents as differences of prefix sums (`RoundingModel`), by the largest until now.

        So it holds sums that begin where the evaluation does: at the first position of a loop, or at any of a tensor
        whose exponentials are taken at once.
        """
        if not self.model.prefix_sums:
            return 0.0
        known = torch.where(exponent.isfinite(), exponent.abs(), 0.0)
        self._largest_exponent = max(self._largest_exponent, float(known.max()) if known.numel() else 0.0)
        return self.model.prefix_error(self._largest_exponent)

    def exp_shifted(self, x: Ball, shift: Ball) -> Ball:
        """Return exp(x - shift); x log2 e and shift log2 e may each be rounded before they are subtracted."""
        argument = x.mid - shift.mid
        folded = 2 * self.u * (x.mid.abs() + shift.mid.abs() + argument.abs())
        return self._exp(argument, x.radius + shift.radius + folded)

    def log(self, x: Ball) -> Ball:
        mid = torch.log(x.mid)
        return self._function(mid, torch.where(x.radius == 0, 0.0, spread_of_log(x.mid, x.radius)), "log", argument=x)

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
            return self._function(mid, spread + own * (mid + spread) if own else spread, "sigmoid", argument=x)
        error = torch.where(torch.isinf(x.mid), 0.0, error)
        spread = torch.fmin(mid * torch.sigmoid(-x.mid) * expm1_upper(error), torch.sigmoid(error - x.mid.abs()))
        spread = torch.where(torch.isinf(x.radius), math.inf, spread)  # the argument may have overflowed, into NaN
        may_vanish = -x.mid + error > math.log(self.model.largest)
        most = torch.maximum(mid, torch.exp(x.mid + error))
        return self._function(mid, torch.where(may_vanish, most, spread + own * (mid + spread)), "sigmoid", argument=x)

    def rsqrt(self, x: Ball) -> Ball:
        mid = 1 / torch.sqrt(x.mid)
        least = (x.mid - outward(x.radius)).clamp(min=0)
        spread = torch.where(x.radius == 0, 0.0, 0.5 * x.radius / (least * torch.sqrt(least)))
        return self._function(mid, spread, "rsqrt", argument=x)

    def minimum(self, x: Ball, bound: float) -> Ball:
        limit = x.as_ball(bound)
        return Ball(x.mid.clamp(max=bound), _max_radius(x.rad, limit.rad), self.model)

    def maximum(self, x: Ball, y: Ball) -> Ball:
        mid, rad = torch.maximum(x.mid, y.mid), _max_radius(x.rad, y.rad)
        if rad is None or all_finite(mid):
            return Ball(mid, rad, self.model)
        return Ball(mid, rad, self.model).limited(mid, rad, (x, y))

    def where(self, mask: Tensor, x: Ball, y: Ball | float) -> Ball:
        other = x.as_ball(y)
        rad = None if x.rad is None and other.rad is None else torch.where(mask, x.radius, other.radius)
        own = None
        if x.own is not None or other.own is not None:
            own = torch.where(mask, _owned(x), _owned(other))
        mass = peak = None
        if self.model.regroup:
            mass, peak = torch.where(mask, x.magnitude, other.magnitude), torch.where(mask, x.reach, other.reach)
        return Ball(torch.where(mask, x.mid, other.mid), rad, self.model, own, mass, peak)

    def above(self, x: Ball, bound: float) -> Tensor:
        return x.mid > bound

    def sum(self, x: Ball, axis: int = -1, *, rescaled: bool = False) -> Ball:
        total = self._total(x, axis, rescaled)
        if not self.model.regroup:
            return total
        mass = x.magnitude.sum(axis, keepdim=True)
        spread = x.radius.sum(axis, keepdim=True) + self.model.gamma(x.shape[axis]) * mass
        return total.regrouped(spread, mass, x.reach.sum(axis, keepdim=True))

    def _total(self, x: Ball, axis: int, rescaled: bool) -> Ball:
        """Return the sum, with gamma_(n-1) of the sum of magnitudes, in any order; exact if every partial sum is.

        gamma_n if converting to the accumulator rounds too.
        """
        terms = max(x.shape[axis] - (self.model.accumulate.format.unit_roundoff <= self.u), 0)
        if x.own is not None:
            return self._total(x.inner, axis, rescaled).or_none(x.lost.any(axis, keepdim=True))
        if not (self.model.is_unlimited or x.is_known):
            total = self._total(self.numbers(x), axis, rescaled)
            special = torch.where(x.mid.isfinite(), 0.0, x.mid).sum(axis, keepdim=True)
            return self._with_special(total, special, x.unspecified.any(axis, keepdim=True))
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
        """Return a sum of finite terms, some of whose partial sums may overflow.

        Let P and N be the sums of the magnitudes of the positive and of the negative terms, with their radii. Every
        partial sum of a kernel's terms, in any order and tree, is in [-N, P], and rounded in [-N - rad, P + rad], since
        ``rad`` holds gamma_n of all magnitudes. So none exceeds the range R if P + rad <= R, and none is below -R if N
        + rad <= R. P is (magnitude + mid) / 2 + r / 2, with r <= rad the sum of the radii; N likewise.

        - Neither may: the ball.
        - One may, say above: no -inf and so no NaN arises, and what reaches inf stays there: the ball, or inf. If all
          of the ball is above R, so is every last sum: inf, in every order.
        - Both may: the ball, either infinity, or NaN where they meet. A sum that is above R in exact arithmetic ends at
          -inf in an order that begins with the negative terms.

        (mid and magnitude are rounded in float64, within 2^-30 of the magnitude: `RADIUS_ROUNDING`.)
        """
        model = self.model
        if model.is_unlimited or bool((magnitude + 2 * rad <= model.largest).all()):
            return Ball(mid, rad, model)
        more = 2 * rad + (RADIUS_ROUNDING - 1) * magnitude
        above, below = (~((magnitude + side * mid) / 2 + more <= model.range) for side in (1, -1))
        may = above | below
        if model.beyond == "infinity":
            may &= (above & below) | (mid.abs() - outward(rad + more) <= model.surely_beyond)
        return overflowing(model, mid, rad, may)

    def numbers(self, x: Ball) -> Ball:
        """Return x, zero where it is NaN, infinite or unspecified."""
        known = x.mid.isfinite() & x.radius.isfinite()
        return Ball(
            torch.where(known, x.mid, 0.0), None if x.rad is None else torch.where(known, x.rad, 0.0), self.model
        )

    def _with_special(self, total: Ball, special: Tensor, unknown: Tensor) -> Ball:
        """Return a sum of finite terms ``total`` and of others, unspecified where a term is (``unknown``).

        ``special``: the sum of the infinite and NaN terms, else zero. An infinity stays unless the rest may be the
        other one; then it may become NaN.
        """
        none = special.isinf() & (unknown | total.unspecified | (total.mid == -special))
        mid = torch.where(special == 0, total.mid, torch.where(none, 0.0, special))
        rad = torch.where(none | (unknown & ~special.isnan()), math.inf, torch.where(special == 0, total.radius, 0.0))
        own = torch.where(unknown | (special != 0), -1.0, _owned(total))
        return Ball(mid, rad, self.model, torch.where(none, math.inf, own))

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
        product = self._product(a, b, plus, terms)
        if not self.model.regroup:
            return product
        mass, spread = a.magnitude @ b.magnitude, a.radius @ b.magnitude + a.magnitude @ b.radius
        if plus is not None:
            mass, spread = mass + plus.magnitude, spread + plus.radius
        peak = a.reach @ b.reach
        peak = peak if plus is None else peak + plus.reach
        return product.regrouped(spread + self.model.gamma(a.shape[-1] + 1) * mass, mass, peak)

    def _product(self, a: Ball, b: Ball, plus: Ball | None, terms: int | None) -> Ball:
        """Return a @ b + plus, with gamma_n |a| |b| for products rounded or fused, in any order; ``plus`` is one more
        term.

        If all products are multiples of one unit and their magnitudes add up to at most 2^bits units, every
        partial sum is exact in any order. ``terms``: how many of the products may be nonzero.
        """
        if any(x is not None and x.own is not None for x in (a, b, plus)):
            product = self._product(a.inner, b.inner, None if plus is None else plus.inner, terms)
            lost = a.lost.any(-1, keepdim=True) | b.lost.any(-2, keepdim=True)
            return product.or_none(lost if plus is None else lost | plus.lost)
        if not (self.model.is_unlimited or all(x is None or x.is_known for x in (a, b, plus))):
            return self._special_product(a, b, plus, a.shape[-1] if terms is None else terms)
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

    def _special_product(self, a: Ball, b: Ball, plus: Ball | None, terms: int) -> Ball:
        """Return `matmul` where some numbers are NaN, infinite or unspecified: zero times those is NaN, or may be."""
        added = None if plus is None else self.numbers(plus)
        total = self._product(self.numbers(a), self.numbers(b), added, terms)
        special = torch.where(a.mid.isfinite().all(-1, keepdim=True) & b.mid.isfinite().all(-2, keepdim=True), 0.0, 1.0)
        special = torch.where(special > 0, a.mid @ b.mid, 0.0)
        unknown = a.unspecified.any(-1, keepdim=True) | b.unspecified.any(-2, keepdim=True)
        infinite, loose = [x.mid.isinf().double() for x in (a, b)], [_is_unsigned(x).double() for x in (a, b)]
        unknown = unknown | (infinite[0] @ loose[1] + loose[0] @ infinite[1] > 0)
        if plus is not None:
            special = special + torch.where(plus.mid.isfinite(), 0.0, plus.mid)
            unknown = unknown | plus.unspecified
        return self._with_special(total, special, unknown)

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
        own = None
        if any(part.own is not None for part in parts):
            own = change([_owned(part) for part in parts])
        mass = peak = None
        if self.model.regroup:
            mass, peak = change([part.magnitude for part in parts]), change([part.reach for part in parts])
        return Ball(change([part.mid for part in parts]), rad, self.model, own, mass, peak)

    def stores(self, stage: str) -> bool:
        """Return whether a kernel may round at this stage."""
        return stage in self.model.stages

    def round(self, x: Ball, stage: str) -> Ball:
        format = self.model.stages.get(stage)
        if format is None:
            return x
        if x.own is not None:
            return self.round(x.inner, stage).or_none(x.lost)
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


def _max_radius(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.maximum(a, b)
