"""Matrix products of balls whose operands are codes with scales, or sparse: what kernels are free to do with them."""

from __future__ import annotations

import math

import torch

from assay.golden.arithmetic.ball import Ball, is_power_of_two, lowest_bit
from assay.golden.arithmetic.ball_arithmetic import ElementaryBalls

Tensor = torch.Tensor

_MOST_TERMS = 2**24  # of a sum that may overflow
_MODERATE = 2.0**50  # scales up to this, and their reciprocals, neither overflow nor underflow with codes of 8 bits


class ProductBalls(ElementaryBalls):
    """Ball arithmetic with quantised and sparse products."""

    def quantized_matmul(self, x: Ball, codes: Tensor, zero_points: Tensor, scale: Ball) -> Ball:
        """The zero-point may be subtracted from the codes, from the weights, or from the sums over each group."""
        product = super().quantized_matmul(x, codes, zero_points, scale)
        if self.model.certifies or not x.shape[-1]:
            return product
        apart = x.magnitude @ ((codes + zero_points) * scale.magnitude.clamp(min=1.0))
        folded = x.magnitude @ ((codes + zero_points) * scale.magnitude)
        lost = self.model.gamma(x.shape[-1] + 3) + 3 * self.u
        rad = product.radius + lost * folded
        if product.rad is None:
            unit = lowest_bit(x.mid).amin(-1, keepdim=True) * lowest_bit(scale.mid).amin(-2, keepdim=True)
            rad = self._summed(product.mid, rad, folded, unit).radius
        return Ball(product.mid, torch.where(apart > self.model.largest, math.inf, rad), self.model)

    def weighted(self, weights: Ball, values: Ball) -> Ball:
        """Overflow counts before the division too: rows of weights then have one as their largest."""
        product = self.matmul(weights, values)
        if self.model.certifies or not weights.shape[-1]:
            return product
        undivided = weights.mid / weights.mid.amax(-1, keepdim=True).clamp(min=self.model.compute.smallest_normal)
        sums = undivided @ values.mid
        late = self._partly_overflowing(sums, torch.zeros_like(sums), undivided @ values.magnitude)
        mid = torch.where(late.mid.isinf() & product.mid.isfinite(), late.mid, product.mid)
        rad = torch.where(mid.isinf(), 0.0, torch.maximum(product.radius, late.radius))
        return Ball(mid, rad, self.model)

    def dequantize(self, codes: Ball, scale: float) -> Ball:
        """The scale rounded, multiplied by another factor and then by a result: three roundings of the whole.

        A scale that shrinks large codes may come too late: their sums overflow before it is applied.
        """
        values = codes * scale
        if self.model.certifies or scale == 1:
            return values
        rad, size = values.radius, values.mid.abs()
        if math.frexp(abs(scale))[0] != 0.5:
            rad = torch.maximum(rad, 3 * self.u * size + self.model.tiny)
        if abs(scale) < 1:
            rad = torch.where(codes.magnitude * _MOST_TERMS > self.model.largest, math.inf, rad)
        return Ball(values.mid, torch.where(torch.isfinite(values.mid), rad, 0.0), self.model)

    def scaled_matmul(self, a: Ball, b: Ball, scale_a: Ball, scale_b: Ball) -> Ball:
        """Scales applied after the sum, or multiplied with each other first, cost three roundings of the result."""
        product = super().scaled_matmul(a, b, scale_a, scale_b)
        if self.model.certifies:
            return product
        if not all(bool(is_power_of_two(scale.mid).all()) for scale in (scale_a, scale_b)):
            size = (a.magnitude * scale_a.magnitude) @ (b.magnitude * scale_b.magnitude)
            product = Ball(product.mid, product.radius + 3 * self.u * size, self.model)
        return self._scaled_apart(product, a, b, scale_a, scale_b)

    def _scaled_apart(self, product: Ball, a: Ball, b: Ball, scale_a: Ball, scale_b: Ball) -> Ball:
        """What huge and tiny scales (e8m0 reaches 2^+-127) do to sums that meet one of them, or both as a product.

        A partial sum times one scale, or one scale times the other, may overflow although the result does not; and a
        product of scales below the least number vanishes.
        """
        sizes = [scale.magnitude for scale in (scale_a, scale_b)]
        if not (a.mid.numel() and b.mid.numel()) or all(
            bool(((size <= _MODERATE) & (size >= 1 / _MODERATE)).all()) for size in sizes
        ):
            return product
        most_a, most_b = (
            size.amax(axis, keepdim=True) if size.dim() else size for axis, size in zip((-1, -2), sizes, strict=True)
        )
        unscaled = a.magnitude @ b.magnitude
        overflow = unscaled.clamp(min=1) * most_a.clamp(min=1) * most_b.clamp(min=1) > self.model.largest
        vanishing = unscaled * self.model.underflow(self.model.compute) * 2
        rad = torch.where(overflow & product.mid.isfinite(), math.inf, product.radius + vanishing)
        return Ball(product.mid, rad, self.model)

    def sparse_matmul(self, values: Ball, place: Tensor, b: Ball) -> Ball:
        """gamma_n for the n stored values of a row: what is not stored adds nothing, or exact zeros.

        A kernel that fills in the zeros multiplies them with every row of b, and turns infinities and NaN there into
        NaN; so nothing is said of a column that has one which a row of values does not name.
        """
        named = torch.zeros(values.shape[0], b.shape[0], dtype=torch.float64)
        named.scatter_add_(1, place, torch.ones_like(values.mid))
        if bool((named > 1).any()):  # two values at one place, which one number cannot stand for
            return super().sparse_matmul(values, place, b)
        special = ~b.mid.isfinite()
        finite = b if not bool(special.any()) else Ball(torch.where(special, 0.0, b.mid), b.rad, self.model)
        dense = values.map(lambda part: torch.zeros_like(named).scatter_(1, place, part))
        product = self.matmul(dense, finite, terms=values.shape[-1])
        if finite is b:
            return product
        columns = special.any(0).nonzero()[:, 0]
        exactly = super().sparse_matmul(values, place, b[:, columns])
        mid, rad = product.mid.clone(), product.radius.clone()
        mid[:, columns], rad[:, columns] = exactly.mid, exactly.radius
        return self.unspecified((1 - named) @ special.double() > 0, Ball(mid, rad, self.model))
