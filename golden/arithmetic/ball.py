"""Balls: a float64 midpoint and a radius that holds both the exact number and every value a kernel may compute.

Each operation moves the operands' radii through (with the operands' largest magnitudes, so that no second-order term
is lost) and adds what its `RoundingModel` allows the operation itself to lose. An operation on exact operands whose
exact result is a number of the format loses nothing; that is decided by error-free transforms, not assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from assay.golden.arithmetic.double_double import add_radii, two_sum
from assay.golden.arithmetic.model import RoundingModel, all_finite, outward

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Ball:
    """Midpoints ``mid`` and radii ``rad`` (None: exact; else broadcastable to them), under one rounding model."""

    mid: Tensor
    rad: Tensor | None
    model: RoundingModel

    def __post_init__(self) -> None:
        if self.model.beyond == "infinity":
            mid, over = self.mid, self.mid.abs() > self.model.range
            object.__setattr__(self, "mid", torch.where(over, torch.copysign(mid.new_tensor(math.inf), mid), mid))
            if self.rad is not None:
                object.__setattr__(self, "rad", torch.where(over, 0.0, self.rad))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mid.shape)

    @property
    def radius(self) -> Tensor:
        """The radius as a tensor, to be read only."""
        return self.mid.new_zeros(()).expand(self.mid.shape) if self.rad is None else self.rad

    @property
    def magnitude(self) -> Tensor:
        """Largest absolute value in the ball."""
        return self.mid.abs() if self.rad is None else self.mid.abs() + self.rad

    @cached_property
    def is_finite(self) -> bool:
        """Whether all midpoints are finite."""
        return all_finite(self.mid)

    @cached_property
    def largest(self) -> Tensor:
        """The largest |midpoint| of each matrix, [..., 1, 1]."""
        return self.mid.abs().amax((-1, -2), keepdim=True) if self.mid.numel() else self.mid.new_zeros(())

    @cached_property
    def beside_magnitude(self) -> Tensor:
        """Midpoints and their magnitudes side by side, [..., 2 n]."""
        return torch.cat([self.mid, self.mid.abs()], -1)

    def map(self, change: Callable[[Tensor], Tensor]) -> Ball:
        """The same rearrangement of midpoints and radii."""
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
        """A ball for ``value``; a constant that the compute format lacks is rounded by a kernel."""
        if isinstance(value, Ball):
            return value
        mid = self.mid.new_tensor(float(value))
        exact = bool(self.model.represents(mid)) or not math.isfinite(value)
        return Ball(mid, None if exact else mid.abs() * self.model.unit_roundoff + self.model.tiny, self.model)

    def rounded(self, mid: Tensor, spread: Tensor | None, is_exact: Callable[[], Tensor], tiny: float = 0.0) -> Ball:
        """One operation's result: the operands' spread, and one rounding unless ``is_exact()`` shows none."""
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
        """``rad``, infinite where a kernel may overflow on a finite number."""
        if math.isinf(self.model.largest * 2):  # float64: there is nothing beyond
            return rad
        fits = mid.abs() + rad <= self.model.largest
        return rad if bool(fits.all()) else torch.where(torch.isfinite(mid) & ~fits, math.inf, rad)


def _is_float32(x: Tensor) -> Tensor:
    """Where x has 24 bits or fewer: the product of two such numbers is exact in float64, and in its range."""
    return x == x.to(torch.float32).to(torch.float64)


def is_power_of_two(x: Tensor) -> Tensor:
    """Where |x| is a power of two."""
    return torch.frexp(x.abs())[0] == 0.5


def lowest_bit(x: Tensor) -> Tensor:
    """The value of the lowest set bit of each float64 (infinite for zero)."""
    bits = x.contiguous().view(torch.int64)
    mantissa = (bits & ((1 << 52) - 1)) != 0
    cleared = torch.where(mantissa, bits & (bits - 1), 0).view(torch.float64)
    return torch.where(x == 0, math.inf, (x - cleared).abs())
