"""Balls around discontinuities: scales of quantisers, and the codes that numbers near a midpoint may be rounded to.

The result of a rounding is a step function, and its ball the hull of the steps that an honest kernel may land on: the
least and the largest code, (least + most) / 2 +- (most - least) / 2. A code that is certain has the radius zero; near a
midpoint the two neighbours are the codes within the ball.
"""

from __future__ import annotations

import math

import torch

from assay.formats.format import format_named
from assay.golden.arithmetic.ball import Ball, is_power_of_two
from assay.golden.arithmetic.ball_arithmetic import ElementaryBalls
from assay.golden.arithmetic.model import ENDS_OF_ROUNDING
from assay.golden.arithmetic.real import codes_of, power_of_two

Tensor = torch.Tensor

_STORED = format_named("float32")  # scales are float32, whatever they are computed in
_CODE_SEPARATION = 1 + 2.0**-24  # no code lies so near to another; enclosures whose radii have 30 bits lie within


class CodeBalls(ElementaryBalls):
    """Ball arithmetic with quantisation."""

    def quantization_scale(self, span: Ball, largest: float) -> Ball:
        """A division, or a product with the reciprocal of ``largest``: d + u for a division's own error d.

        A span of zero, or one that may be flushed to zero, allows any finite scale; a span that is NaN or infinite
        says nothing.
        """
        scale = span / largest
        rad = scale.radius + self.u * scale.mid.abs()
        if self.model.certifies:
            exact = is_power_of_two(scale.mid) & (scale.mid * largest == span.mid) & (span.radius == 0)
            rad = torch.where(exact, 0.0, rad)
        vanishing = span.mid <= span.radius
        rad = torch.where(vanishing, 0.0 if self.model.certifies else _STORED.largest, rad)
        return self.unspecified(~span.mid.isfinite(), Ball(scale.mid, rad, self.model))

    def at_least(self, x: Ball, bound: float) -> Ball:
        """Where x is clearly larger, it is as it was; a kernel holds the constant rounded to its compute format."""
        if self.model.certifies:
            return super().at_least(x, bound)
        off = 2 * self.u * abs(bound) + self.model.tiny
        clear = x.mid - x.radius > bound + off
        return Ball(x.mid.clamp(min=bound), torch.where(clear, x.radius, x.radius + off), self.model)

    def power_of_two(self, x: Ball, *, above: bool) -> Ball:
        """Any power that x may lead to, by its bits, or by its logarithm, off by its ulps and rounded to an integer."""
        rad = x.radius
        if not self.model.certifies:
            size = torch.where((x.mid > 0) & x.mid.isfinite(), x.mid, 1.0)
            rad = rad + self.model.function_error("log2") * torch.log2(size).abs() * size
        low, high = (power_of_two(end, above=above) for end in ((x.mid - rad).clamp(min=0), x.mid + rad))
        known = (x.mid > rad) & x.mid.isfinite() & rad.isfinite()
        mid, made = torch.where(known, (low + high) / 2, x.mid), torch.where(known, (high - low) / 2, x.radius)
        return Ball(mid, made, self.model)

    def quantize(
        self, x: Ball, scale: Ball, format: str, zero: Ball | Tensor | None = None, stored: Ball | None = None
    ) -> Ball:
        """The quotient as x / scale, x (1 / scale) or x (largest / span): at most 2 d + u off beside the scale's error.

        With d the error of a division: x / scale adds d, x (1 / scale) d + u, and x (largest / span) is as far from
        the exact quotient as d + u. Dividing by a power of two loses nothing: a kernel that gave just that scale can
        tell a tie. (For each largest code n, 448, 127, 15 and 7, also n times the float32 number nearest to 1/n rounds
        to one; a kernel that gave another scale divides more roughly.) The reciprocal of a large span, which comes
        before largest / span, may be subnormal; where that of the scale may overflow, codes are not judged.
        """
        normal = scale.mid.isfinite() & scale.radius.isfinite()
        nothing = normal & (scale.mid == 0)
        step = torch.where(nothing | ~normal, 1.0, scale.mid)
        error = torch.where(nothing | ~normal, 0.0, scale.radius)
        quotient = x / Ball(step, error, self.model)
        exact = nothing | is_power_of_two(step)
        if self.model.certifies:
            exact &= error == 0
        else:
            exact &= nothing if stored is None else nothing | (stored.mid == scale.mid)
        span = step * format_named(format).largest
        subnormal = self.model.underflow(self.model.compute) * span  # what 1 / span may lose, relative to it
        if not self.model.certifies:
            exact &= nothing | (span * self.model.compute.smallest_normal <= 1)
        rad = quotient.radius * (1 + 2.0**-20) + (self.u + subnormal) * quotient.mid.abs()
        rad = torch.where(exact & (x.radius == 0), 0.0, rad)
        if not self.model.certifies:
            least = step - error
            unsafe = least * self.model.largest * (1 - 2.0**-20) < 1
            if self.model.flush:
                unsafe |= least < self.model.compute.smallest_normal
            rad = torch.where(unsafe & ~nothing, math.inf, rad)
        down, up = ENDS_OF_ROUNDING[self.model.rounding]
        lowest, highest = _points(zero)
        low = codes_of(quotient.mid - rad, format, lowest, down)
        high = codes_of(quotient.mid + rad, format, highest, up)
        unknown = ~normal | rad.isinf() | rad.isnan()
        mid = torch.where(normal, (low + high) / 2, 0.0)
        made = torch.where(unknown, math.inf, (high - low) / 2 * _CODE_SEPARATION)
        return self.unspecified(~normal.expand(mid.shape), Ball(mid, made, self.model))


def _points(zero: Ball | Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The least and the largest zero-point."""
    if not isinstance(zero, Ball):
        return zero, zero
    return (zero.mid - zero.radius).ceil(), (zero.mid + zero.radius).floor()
