"""Composite operations on balls: softmax, log-sum-exp, moments, gates, and products of three factors.

A bound derived by hand is sharper than the sum of the elementary ones, or covers the orders and formulas of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from assay.golden.arithmetic.ball import Ball, ElementaryBalls, overflowing
from assay.golden.arithmetic.model import all_finite, outward, spread_of_log

Tensor = torch.Tensor


WELL_CONDITIONED = 1e-10  # relative errors below which one bound for a whole row is sharp enough
BASE_CHANGE = 8.0  # u of each part: m log2 e + log2 s, times ln 2, is two rounded constants, two products and a sum
FOLDED_LOG2E = 1.45  # log2 e = 1.4427, rounded up
_BLOCK = 2**18  # numbers in a block that fits in a processor's cache
_FEW_ROWS, _LARGEST_BLOCK = 64, 2**21  # rows in a block at least, as long as it has no more numbers
_SLOPE_OF_SIGMOID = 128.0  # below -88, where the sigmoid s underflows, the slope s (1 + x (1 - s)) is 100 s at most
_FAR = 60.0  # below the largest number; its exponential is far below one unit in the last place of their sum
_FAR_BELOW = -200.0  # the exponential of less is zero in every 16-bit format


class CompositeBalls(ElementaryBalls):
    """Ball arithmetic with the sharp bounds of composite operations."""

    def softmax(self, x: Ball) -> Ball:
        """Return softmax; for ordinary finite x one relative error for a whole row bounds the float64 evaluation."""
        if not self.model.certifies or x.rad is not None or 0 in x.shape:
            return super().softmax(x)
        most, least = torch.aminmax(x.mid, dim=-1, keepdim=True)[::-1]
        error = 2 * self.u * (most - least)
        if not bool((error < WELL_CONDITIONED).all()):
            return super().softmax(x)
        y = torch.softmax(x.mid, -1)
        own = error + error * error + self.model.function_error("exp")
        relative = 2 * own + self.model.gamma(x.shape[-1]) + self.model.function_error("div")
        return Ball(y, (y * (relative * (1 + relative))).add_(2 * self.model.tiny), self.model)

    def blocks(self, rows: int, width: int) -> list[tuple[int, int]]:
        """Return blocks that fit in a processor's cache, or have enough rows to amortise reading what they share."""
        step = max(self.block_scale * _BLOCK // max(width, 1), min(_FEW_ROWS, _LARGEST_BLOCK // max(width, 1)), 1)
        return [(first, min(first + step, rows)) for first in range(0, rows, step)] or [(0, 0)]

    def gather(self, x: Ball, index: Tensor) -> Ball:
        """Gather chosen entries; rows with both NaN and numbers have no specified order."""
        unordered = x.mid.isnan().any(-1, keepdim=True) & ~x.mid.isnan().all(-1, keepdim=True)
        return self.unspecified(unordered, super().gather(x, index))

    def topk_admissible(self, x: Ball, index: Tensor, *, ordered: bool = False) -> Tensor:
        """Return a mask of the chosen indices that no unchosen number (or later one) certainly exceeds.

        Indices out of range and repeated ones are wrong. A row with a NaN has no order, and admits every choice.
        """
        columns = x.shape[-1]
        inside = (index >= 0) & (index < columns)
        clamped = index.clamp(0, max(columns - 1, 0))
        repeated = (clamped[..., :, None] == clamped[..., None, :]).sum(-1) > 1
        taken = torch.zeros_like(x.mid, dtype=torch.bool).scatter(-1, clamped, True)
        least = torch.where(taken, -math.inf, x.mid - x.radius).amax(-1, keepdim=True)
        most = torch.gather(x.mid + x.radius, -1, clamped)
        if ordered and index.shape[-1] > 1:
            after = torch.gather(x.mid - x.radius, -1, clamped).flip(-1).cummax(-1).values.flip(-1)[..., 1:]
            least = torch.maximum(least, torch.nn.functional.pad(after, (0, 1), value=-math.inf))
        unordered = (x.mid.isnan() | x.radius.isnan()).any(-1, keepdim=True)
        return inside & ~repeated & ((most >= least) | unordered)

    def logsumexp(self, x: Ball) -> Ball:
        """Return max + log sum, in any base: the sum's relative error, and a few roundings of its parts.

        With the stages "exponentials" and "normalizer" (`_log_total`) the maximum is added to the stored logarithm.
        Numbers with large radii have the bound of `_moved_lse`.
        """
        largest = self.max(x)
        shift = torch.where(torch.isfinite(largest.mid), largest.mid, 0.0)
        log_total, moved, kept = self._log_total(x, shift)
        mid = shift + log_total.mid
        rad = log_total.radius + BASE_CHANGE * self.u * (mid.abs() + shift.abs() + log_total.mid.abs())
        if x.rad is not None and not (self.model.certifies or self.stores("normalizer")):
            rad = torch.fmin(rad, self._moved_lse(x, mid, shift))
        return self.unspecified(torch.isinf(largest.mid), Ball(mid + moved, rad + kept, self.model))

    def _moved_lse(self, x: Ball, lse: Tensor, shift: Tensor) -> Tensor:
        """Return the radius of log sum exp of a kernel's numbers y, |y_i - x_i| <= r_i, which grows with r, not exp(r).

        |lse(y) - lse(x)| <= R, the largest r_i, as the slopes of lse are shares that add up to one. To that come the
        errors at y of an evaluation by exp(y_i - m), m = max y: each argument has one of t_i = 4 u (|y_i| + |m|), so
        that the sum's is relatively at most e^t - 1, t the largest of the terms within `_FAR` of the maximum, plus
        exp(t_i - g_i) of each other one, which is at least g_i = m - x_i - 2 R below it; and the errors of `logsumexp`.
        """
        count, model = x.shape[-1], self.model
        known = x.mid.isfinite()
        most = torch.where(known, x.radius, 0.0).amax(-1, keepdim=True) if count else torch.zeros_like(lse)
        size = torch.where(known, x.magnitude, 0.0)
        argument = 4 * self.u * (size + shift.abs() + most)
        gap = shift - torch.where(known, x.mid, -math.inf) - 2 * most
        near = torch.where(gap <= _FAR, argument, 0.0).amax(-1, keepdim=True) if count else torch.zeros_like(lse)
        far = torch.where(gap > _FAR, torch.exp(argument - gap), 0.0).sum(-1, keepdim=True)
        own = model.function_error("exp") + self.rescaling(count) + model.gamma(count)
        total = torch.expm1(near) * (1 + own) + own + far
        log_total = lse.abs() + shift.abs() + 2 * most  # at least the logarithm's magnitude
        error = spread_of_log(torch.ones_like(lse), total) + model.function_error("log") * log_total
        error = error + 2 * self.u * model.ulps.get("log_near_one", 0.0) + BASE_CHANGE * self.u * 2 * log_total
        return torch.where((x.mid == math.inf).any(-1, keepdim=True), math.inf, most + error)

    def log_softmax(self, x: Ball) -> Ball:
        """Return x - lse, or (x - max) - log sum, which rounds twice at the result's size."""
        largest = self.max(x).mid
        y = x - self.logsumexp(x)
        twice = Ball(y.mid, y.radius + self.u * y.mid.abs(), self.model)
        folded = x.magnitude * FOLDED_LOG2E > self.model.largest  # x log2 e may overflow
        return self.unspecified(torch.isinf(largest) | (folded & x.mid.isfinite()), twice)

    def _log_total(self, x: Ball, shift: Tensor) -> tuple[Ball, Tensor | float, Tensor | float]:
        """Return log sum exp(x - shift), the known change by storing its parts, and the error that storing may add.

        Stages: "exponentials", each difference and each exponential; "normalizer", their sum and its logarithm.
        """
        total = self.sum(self.exp_shifted(x, Ball(shift, None, self.model)), rescaled=True)
        log_total = self.log(total)
        if not self.stores("normalizer"):
            return log_total, 0.0, 0.0
        if self.stores("exponentials"):
            shifted = x - Ball(shift, None, self.model)
            near = shifted.mid > _FAR_BELOW
            stored = self.round(shifted.map(lambda part: torch.where(near, part, 0.0)), "exponentials")
            terms = self.round(self.exp(stored), "exponentials")
            total = self.sum(terms.map(lambda part: torch.where(near, part, 0.0)))
        kept = self.round(self.log(self.round(total, "normalizer")), "normalizer")
        regular = log_total.mid.isfinite()
        moved = torch.where(regular, kept.mid - log_total.mid, 0.0)
        return log_total, moved, torch.where(regular, (kept.radius - log_total.radius).clamp(min=0), 0.0)

    def standardize(self, x: Ball, eps: float) -> tuple[Ball, Ball]:
        """Return x - mean and 1 / sqrt(variance + eps), for two-pass, pairwise and Welford's algorithms.

        With A = mean |x|, m the mean and s^2 the variance: the computed mean has an error dm <= gamma_(n+2) A. A common
        shift of all x - m changes the variance by dm^2 only, since the deviations add up to zero; rounding adds
        (gamma_(n+5) + 4u) (s^2 + dm^2), and Welford's update as much times 2 s rms(x) (Chan, Golub & LeVeque, 1983).
        Folding the mean into an offset, x r - m r, costs 2u(|x| + |m|) r. E[x^2] - m^2 has an error of about
        u m^2, which this bound does not cover for |m| >> s.
        """
        centred, deviation_error, moment, overflow = self._moments(x)
        root = self.rsqrt(moment + eps)
        if self.model.beyond != "infinity":  # then the root has what follows from it
            deviation_error = torch.where(overflow, math.inf, deviation_error)
        return self.ball(centred, deviation_error), root

    def variance(self, x: Ball, correction: float = 0.0) -> Ball:
        """Return sum (x - mean)^2 / (n - correction) along the last axis, with the bound of `standardize`."""
        n = x.shape[-1]
        _, _, moment, overflow = self._moments(x)
        moment = moment.inner
        if n <= correction:
            return Ball(torch.full_like(moment.mid, math.nan), None, self.model)
        mid, rad = moment.mid * n / (n - correction), moment.radius * n / (n - correction)
        error = rad + 2 * self.u * (mid.abs() + rad) + self.model.tiny
        constant = (x.mid == x.mid[..., :1]).all(-1, keepdim=True) & (x.radius == 0).all(-1, keepdim=True)
        error = torch.where(constant & (x.mid[..., :1] == 0), 0.0, error)
        return overflowing(self.model, mid, error, overflow & mid.isfinite())

    def _moments(self, x: Ball) -> tuple[Tensor, Tensor, Ball, Tensor]:
        """Return x - mean and its error, its mean square, and a mask of where the sum of squares may overflow."""
        n = max(x.shape[-1], 1)
        gamma = self.model.gamma
        size = x.magnitude
        own, own_mean, own_square = self._own(x)
        mean = x.mid.mean(-1, keepdim=True)
        centred = x.mid - mean
        squares = (centred * centred).sum(-1, keepdim=True)
        variance = squares / n
        mean_error = (gamma(n + 2) + 2 * self.u) * size.mean(-1, keepdim=True) + own_mean
        rounding = self.u * (centred.abs() + mean_error + 2 * size + 2 * mean.abs()) + self.model.tiny
        deviation_error = mean_error + own + rounding
        root_mean_square = torch.sqrt((size * size).mean(-1, keepdim=True))
        spread = torch.sqrt(variance)
        variance_error = (
            mean_error * mean_error
            + own_square * (2 * spread + own_square)
            + (gamma(n + 5) + 4 * self.u) * (variance + mean_error * mean_error + 2 * spread * root_mean_square)
            + self.model.tiny
        )
        overflow = ~(n * root_mean_square * root_mean_square <= self.model.largest) & x.mid.isfinite().all(
            -1, keepdim=True
        )
        if self.model.beyond == "infinity":  # the sum of squares overflows, even if the mean square does not
            sure = squares - outward(n * variance_error) > self.model.surely_beyond
            variance = torch.where(sure, math.inf, variance)
        moment = overflowing(self.model, variance, variance_error, overflow & variance.isfinite())
        return centred, deviation_error, moment, overflow

    def _own(self, x: Ball) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
        """Return the radii of a row, their mean, and the sum of the mean and the root mean square; zero if exact."""
        if x.rad is None:
            return 0.0, 0.0, 0.0
        own = torch.broadcast_to(x.rad, x.mid.shape)
        mean = own.mean(-1, keepdim=True)
        return own, mean, torch.sqrt((own * own).mean(-1, keepdim=True)) + mean

    def any_formula(self, *formulas: Callable[[], Ball]) -> Ball:
        """Return the largest radius of any formula; unspecified where they differ in being finite, infinite or NaN."""
        first = formulas[0]()
        if self.model.certifies:
            return first
        others = [formula() for formula in formulas[1:]]
        if all(ball.rad is None and torch.equal(ball.mid, first.mid) for ball in (first, *others)):
            return first
        rad, unsure = first.radius, torch.zeros_like(first.mid, dtype=torch.bool)
        for other in others:
            finite = first.mid.isfinite() & other.mid.isfinite()
            off = (other.mid - first.mid).abs() + other.radius
            rad = torch.maximum(rad, torch.where(finite, off, 0.0))
            unsure |= ~(finite | (first.mid == other.mid) | (first.mid.isnan() & other.mid.isnan()))
        mass, peak = (
            None if part is None else torch.broadcast_to(part, first.mid.shape) for part in (first.mass, first.peak)
        )
        mid, rad = torch.where(unsure, 0.0, first.mid), torch.where(unsure, math.inf, rad)
        return Ball(mid, rad, self.model, mass=mass, peak=peak)

    def gate_mul(self, x: Ball, gate: Ball) -> Ball:
        """Return x times a gate, or x divided by the gate's reciprocal."""
        product, lost = x * gate, None
        if product.own is not None:
            product, lost = product.inner, product.lost
        product = Ball(product.mid, product.radius + self.model.function_underflow("div"), self.model)
        product = product if lost is None else product.or_none(lost)
        if not x.mid.numel() or bool(x.mid.amin() > -math.inf):
            return product
        closed = x.mid == -math.inf
        return self.where(closed, self.exact(torch.zeros_like(product.mid)), product)

    def product(self, a: Ball, b: Ball, c: Ball, stage: str = "") -> Ball:
        return self._in_any_order(self.round(a * b, stage) * c, a, b, c)

    def gated_product(self, x: Ball, gate: Ball, y: Ball) -> Ball:
        return self._in_any_order(super().gated_product(x, gate, y), x, gate, y)

    def add_bias(self, x: Ball, bias: Ball) -> Ball:
        y = x + bias
        if self.model.certifies or y.rad is None:
            return y
        rad = y.inner.radius + 2 * self.u * bias.magnitude
        rad = torch.where(x.inner.radius.isinf(), math.inf, rad)  # of NaN plus a bias too
        sum_ = Ball(y.mid, rad, self.model)
        return sum_ if y.own is None else sum_.or_none(y.lost).without_number(y.is_none)

    def _in_any_order(self, y: Ball, *factors: Ball) -> Ball:
        """Return a product of three, any two of which may overflow, or underflow by an amount that the third enlarges.

        Unspecified where one is infinite and the rest may underflow: the rest, or a sigmoid in its slope, which below
        -88, where it underflows, is a hundredth of the slope. If the rest is zero only in exact arithmetic (a mean has
        a rounding error), the product is NaN or infinite.
        """
        if self.model.certifies:
            return y
        sizes = [factor.magnitude for factor in factors]
        a, b, c = (x if all_finite(x) else torch.where(x.isfinite(), x, 0.0) for x in sizes)
        overflow = (a * b > self.model.largest) | (b * c > self.model.largest) | (a * c > self.model.largest)
        may = overflow & y.mid.isfinite() if bool(overflow.any()) else None
        if y.rad is None and may is None:
            return y
        rad = y.radius if y.rad is None else y.rad + self.model.function_underflow("div") * (a + b + c)
        product = overflowing(self.model, y.mid, rad, may)
        product = product if y.own is None else product.without_number(y.is_none)
        if y.is_finite:
            return product
        least, certain = torch.ones_like(y.mid), torch.zeros_like(y.mid, dtype=torch.bool)  # that it is NaN
        for factor in factors:
            least = least * torch.where(factor.mid.isinf(), 1.0, (factor.mid.abs() - factor.radius).clamp(min=0))
            certain |= (factor.mid == 0) & (factor.radius == 0) | factor.mid.isnan()
        unsure = ~y.mid.isfinite() & ~certain & (least < _SLOPE_OF_SIGMOID * self.model.compute.smallest_normal)
        return self.unspecified(unsure & y.mid.isinf(), self.no_number(unsure & y.mid.isnan(), product))

    def silu_slope(self, x: Ball) -> Ball:
        """Return s (1 + x (1 - s)) or s + x s (1 - s), s the sigmoid; kernels subtract s from one, whatever its
        size."""
        infinite = torch.isinf(x.mid)
        numbers = Ball(torch.where(infinite, 0.0, x.mid), x.rad, self.model)
        s = self.sigmoid(numbers)
        slope = self.any_formula(lambda: s * (numbers * (1.0 - s) + 1.0), lambda: s + (numbers * s) * (1.0 - s))
        ends = self.sigmoid(x)
        return Ball(
            torch.where(infinite, ends.mid, slope.mid), torch.where(infinite, ends.radius, slope.radius), self.model
        )

    def silu_gradient(self, a: Ball, b: Ball, x: Ball) -> Ball:
        """Return a b s w with w = 1 + x (1 - s), any two or three of which may be multiplied first.

        A partial product that underflows has an error of ``tiny``, which the rest multiplies: at most tiny times the
        product of all 1 + |factor|, since s <= 1. One that overflows is infinite. At x = inf, s w is one in the limit,
        but 0 inf in the formula: unspecified.
        """
        y = super().silu_gradient(a, b, x)
        if self.model.certifies:
            return y
        above = torch.where(x.mid.isfinite(), x.magnitude, 0.0)
        w = 1 + above * (torch.sigmoid(-x.mid) + self.model.function_error("sigmoid") + self.u).nan_to_num(nan=0.0)
        left, right = (torch.where(factor.mid.isfinite(), factor.magnitude, 0.0) for factor in (a, b))
        rad = y.radius + 2 * self.model.function_underflow("div") * (1 + left) * (1 + right) * (1 + w)
        overflow = left.clamp(min=1) * right.clamp(min=1) * w > self.model.largest
        rad = torch.where(y.mid.isfinite(), torch.where(overflow, math.inf, rad), y.radius)
        return self.unspecified(x.mid == math.inf, Ball(y.mid, rad, self.model))
