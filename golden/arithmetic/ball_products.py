"""Quantisation and matrix products of balls whose operands are codes with scales, or sparse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from assay.formats.format import format_named
from assay.golden.arithmetic.ball import Ball, ElementaryBalls
from assay.golden.arithmetic.model import ENDS_OF_ROUNDING, is_power_of_two, lowest_bit
from assay.golden.arithmetic.real import codes_of, power_of_two

Tensor = torch.Tensor


_STORED = format_named("float32")  # scales are stored in float32, whatever the compute format
_CODE_SEPARATION = 1 + 2.0**-24  # closer than any two codes, and wider than the rounding of radii to 30 bits
_MOST_TERMS = 2**24  # a limit on the terms of a sum that may overflow
_MODERATE = 2.0**50  # scales up to this, and their reciprocals, neither overflow nor underflow with codes of 8 bits


class ProductBalls(ElementaryBalls):
    """Ball arithmetic with quantisation, and with products of quantised and sparse operands.

    Rounding to codes is a step function: the ball is the hull of the codes that a correct kernel may return, from the
    least to the largest, (least + most) / 2 +- (most - least) / 2. A certain code has radius zero; near a midpoint the
    ball contains two neighbours.
    """

    def in_blocks(self, function: Callable[..., Any], *numbers: Any, whole: int = 0) -> Any:
        if self.model.regroup:  # a block's numbers have no mass
            return function(*numbers)
        return in_blocks(function, numbers, whole, self.block_scale)

    def quantization_scale(self, span: Ball, largest: float) -> Ball:
        """Return span / largest, or its product with the reciprocal: d + u for a division's error d.

        A span of zero, or one that may be flushed to zero, allows any finite scale; NaN and infinite spans leave it
        unspecified.
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
        """Return x unchanged where clearly larger; a kernel rounds the constant to its compute format."""
        if self.model.certifies:
            return super().at_least(x, bound)
        off = 2 * self.u * abs(bound) + self.model.tiny
        clear = x.mid - x.radius > bound + off
        return Ball(x.mid.clamp(min=bound), torch.where(clear, x.radius, x.radius + off), self.model)

    def power_of_two(self, x: Ball, *, above: bool) -> Ball:
        """Return the hull of the powers for x, by its bits, or by its logarithm with its error, rounded to an
        integer."""
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
        """Return the codes of x / scale, x (1 / scale) or x (largest / span): at most 2 d + u besides the scale's
        error.

        With d the error of a division: x / scale adds d, x (1 / scale) d + u, and x (largest / span) differs from the
        exact quotient by d + u. Dividing by a power of two loses nothing: a kernel that returned exactly that scale
        resolves ties. (For each largest code n, 448, 127, 15 and 7, also n times the float32 number nearest to 1/n
        rounds to one; a kernel that returned another scale divides less exactly.) The reciprocal of a large span, which
        comes before largest / span, may be subnormal; where that of the scale may overflow, codes are not judged.
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
        subnormal = (
            self.model.underflow(self.model.compute) * span
        )  # the error of 1 / span by underflow, relative to it
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
        ends = (
            ((zero.mid - zero.radius).ceil(), (zero.mid + zero.radius).floor())
            if isinstance(zero, Ball)
            else (zero, zero)
        )
        low = codes_of(quotient.mid - rad, format, ends[0], down)
        high = codes_of(quotient.mid + rad, format, ends[1], up)
        unknown = ~normal | rad.isinf() | rad.isnan()
        mid = torch.where(normal, (low + high) / 2, 0.0)
        made = torch.where(unknown, math.inf, (high - low) / 2 * _CODE_SEPARATION)
        return self.unspecified(~normal.expand(mid.shape), Ball(mid, made, self.model))

    def quantized_matmul(self, x: Ball, codes: Tensor, zero_points: Tensor, scale: Ball) -> Ball:
        """Return the product; zero-points may be subtracted from the codes, the weights, or the sums over each
        group."""
        product = super().quantized_matmul(x, codes, zero_points, scale)
        if self.model.certifies or not x.shape[-1]:
            return product
        unscaled = x.magnitude @ ((codes + zero_points) * scale.magnitude.clamp(min=1.0))
        folded = x.magnitude @ ((codes + zero_points) * scale.magnitude)
        lost = self.model.gamma(x.shape[-1] + 3) + 3 * self.u
        rad = product.radius + lost * folded
        if product.rad is None:
            unit = lowest_bit(x.mid).amin(-1, keepdim=True) * lowest_bit(scale.mid).amin(-2, keepdim=True)
            rad = self._summed(product.mid, rad, folded, unit).radius
        return Ball(product.mid, torch.where(unscaled > self.model.largest, math.inf, rad), self.model)

    def weighted(self, weights: Ball, values: Ball) -> Ball:
        """Return weights @ values, checking overflow before the division too, when a row's largest weight is one."""
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
        """Return codes * scale; rounding the scale, another factor, and their product with a result are three
        roundings.

        A scale below one may be applied after sums of large codes overflow.
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
        """Return the product; scales applied after the sum, or multiplied together first, add three roundings."""
        product = super().scaled_matmul(a, b, scale_a, scale_b)
        if self.model.certifies:
            return product
        if not all(bool(is_power_of_two(scale.mid).all()) for scale in (scale_a, scale_b)):
            size = (a.magnitude * scale_a.magnitude) @ (b.magnitude * scale_b.magnitude)
            product = Ball(product.mid, product.radius + 3 * self.u * size, self.model)
        return self._scaled_separately(product, a, b, scale_a, scale_b)

    def _scaled_separately(self, product: Ball, a: Ball, b: Ball, scale_a: Ball, scale_b: Ball) -> Ball:
        """Return the product with the errors of applying huge or tiny scales (e8m0 reaches 2^+-127) separately.

        A partial sum times one scale, or one scale times the other, may overflow although the result does not; and a
        product of scales may underflow.
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

    def sparse_matmul(self, values: Ball, index: Tensor, b: Ball) -> Ball:
        """Return the product with gamma_n for the n stored values of a row: the others add nothing, or exact zeros.

        A kernel that fills in zeros multiplies them with every row of b, which gives NaN for infinities and NaN; so
        columns with one that a row of values does not select are unspecified.
        """
        named = torch.zeros(values.shape[0], b.shape[0], dtype=torch.float64)
        named.scatter_add_(1, index, torch.ones_like(values.mid))
        if bool((named > 1).any()):  # two values with the same index, which one dense element cannot represent
            return super().sparse_matmul(values, index, b)
        special = ~b.mid.isfinite()
        finite = b if not bool(special.any()) else Ball(torch.where(special, 0.0, b.mid), b.rad, self.model)
        dense = values.map(lambda part: torch.zeros_like(named).scatter_(1, index, part))
        product = self.matmul(dense, finite, terms=values.shape[-1])
        if finite is b:
            return product
        columns = special.any(0).nonzero()[:, 0]
        exactly = super().sparse_matmul(values, index, b[:, columns])
        mid, rad = product.mid.clone(), product.radius.clone()
        mid[:, columns], rad[:, columns] = exactly.mid, exactly.radius
        return self.unspecified((1 - named) @ special.double() > 0, Ball(mid, rad, self.model))


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
