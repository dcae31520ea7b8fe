"""Composite operations on balls, where a bound derived by hand is sharper than the sum of the elementary ones."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_arithmetic import expm1_upper
from assay.golden.arithmetic.ball_codes import CodeBalls
from assay.golden.arithmetic.ball_decisions import DecisionBalls
from assay.golden.arithmetic.ball_delta import DeltaBalls
from assay.golden.arithmetic.ball_gradients import BASE_CHANGE, WELL_CONDITIONED
from assay.golden.arithmetic.ball_logarithms import LogarithmBalls
from assay.golden.arithmetic.ball_moments import MomentBalls
from assay.golden.arithmetic.ball_scores import ScoreBalls
from assay.golden.arithmetic.model import EVALUATION, outward
from assay.golden.arithmetic.real import Real, weighted_values
from assay.golden.arithmetic.spills import reached, rows_reached

Tensor = torch.Tensor

_BLOCK = 2**18  # numbers
_FEW_ROWS, _LARGEST_BLOCK = 64, 2**21  # numbers
_SLOPE_OF_SIGMOID = 128.0  # below -88 the sigmoid s, where it vanishes, is a hundredth of the slope s (1 + x (1 - s))
_VANISHING = 4.0  # least normal numbers: a weight above them, less its own error, is flushed at none of its roundings
_MERGED_WEIGHT = 8.0  # u: product, two sums, product with a reciprocal, of weights at most twice the exact ones
_MERGED_DIFFERENCE = 4.0  # u: of a + s (b - a): difference, product and sum, and 1 - s in place of s
_SHORT_ROW = 1e-13  # 2 gamma_(n+6) up to 444 keys, which share it
_SQUARES = 2.0**-900  # sums of squares below it may have lost what underflowed


class BallArithmetic(CodeBalls, DeltaBalls, ScoreBalls, MomentBalls, DecisionBalls, LogarithmBalls):
    """Ball arithmetic with the sharp bounds of standardisation and attention."""

    def softmax(self, x: Ball) -> Ball:
        """For ordinary finite x, one relative error for a whole row bounds the float64 evaluation."""
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
        """Blocks that stay in a processor's cache, or of rows enough to be worth reading what they share."""
        step = max(_BLOCK // max(width, 1), min(_FEW_ROWS, _LARGEST_BLOCK // max(width, 1)), 1)
        return [(first, min(first + step, rows)) for first in range(0, rows, step)] or [(0, 0)]

    def gate_mul(self, x: Ball, gate: Ball) -> Ball:
        """x times a gate, or x divided by what the gate is the reciprocal of."""
        product = x * gate
        product = Ball(product.mid, product.radius + self.model.function_underflow("div"), self.model)
        if not x.mid.numel() or bool(x.mid.amin() > -math.inf):
            return product
        closed = x.mid == -math.inf
        return Ball(torch.where(closed, 0.0, product.mid), torch.where(closed, 0.0, product.radius), self.model)

    def gather(self, x: Ball, index: Tensor) -> Ball:
        """Entries that were chosen; among NaN and numbers nothing says which those are."""
        unordered = x.mid.isnan().any(-1, keepdim=True) & ~x.mid.isnan().all(-1, keepdim=True)
        return self.unspecified(unordered, super().gather(x, index))

    def topk_admissible(self, x: Ball, index: Tensor, *, ordered: bool = False) -> Tensor:
        """Which chosen places no unchosen one, or one after it, certainly beats; foreign and repeated ones are wrong.

        A row with a NaN orders nothing, and admits every choice.
        """
        columns = x.shape[-1]
        inside = (index >= 0) & (index < columns)
        place = index.clamp(0, max(columns - 1, 0))
        repeated = (place[..., :, None] == place[..., None, :]).sum(-1) > 1
        taken = torch.zeros_like(x.mid, dtype=torch.bool).scatter(-1, place, True)
        least = torch.where(taken, -math.inf, x.mid - x.radius).amax(-1, keepdim=True)
        most = torch.gather(x.mid + x.radius, -1, place)
        if ordered and index.shape[-1] > 1:
            after = torch.gather(x.mid - x.radius, -1, place).flip(-1).cummax(-1).values.flip(-1)[..., 1:]
            least = torch.maximum(least, torch.nn.functional.pad(after, (0, 1), value=-math.inf))
        unordered = (x.mid.isnan() | x.radius.isnan()).any(-1, keepdim=True)
        return inside & ~repeated & ((most >= least) | unordered)

    def product(self, a: Ball, b: Ball, c: Ball, stage: str = "") -> Ball:
        return self._in_any_order(self.round(a * b, stage) * c, a, b, c)

    def gated_product(self, x: Ball, gate: Ball, y: Ball) -> Ball:
        return self._in_any_order(super().gated_product(x, gate, y), x, gate, y)

    def add_bias(self, x: Ball, bias: Ball) -> Ball:
        y = x + bias
        if self.model.certifies or y.rad is None:
            return y
        rad = y.rad + 2 * self.u * bias.magnitude
        return Ball(y.mid, torch.where(x.radius.isinf(), math.inf, rad), self.model)  # of NaN plus a bias too

    def _in_any_order(self, y: Ball, *factors: Ball) -> Ball:
        """A product of three: any two may overflow, or underflow by an amount that the third makes large.

        Nothing is said where one is infinite and the rest may vanish: it, or the sigmoid in a slope of it, which below
        -88, where it vanishes, is a hundredth of the slope. Where the rest is zero in exact arithmetic alone (a mean is
        off by a rounding), the product is NaN or infinite.
        """
        if self.model.certifies or y.rad is None:
            return y
        a, b, c = (torch.where(factor.magnitude.isfinite(), factor.magnitude, 0.0) for factor in factors)
        overflow = (a * b > self.model.largest) | (b * c > self.model.largest) | (a * c > self.model.largest)
        rad = y.rad + self.model.function_underflow("div") * (a + b + c)
        product = Ball(y.mid, torch.where(overflow & y.mid.isfinite(), math.inf, rad), self.model)
        if y.is_finite:
            return product
        least, certain = torch.ones_like(y.mid), torch.zeros_like(y.mid, dtype=torch.bool)  # that it is NaN
        for factor in factors:
            least = least * torch.where(factor.mid.isinf(), 1.0, (factor.mid.abs() - factor.radius).clamp(min=0))
            certain |= (factor.mid == 0) & (factor.radius == 0) | factor.mid.isnan()
        unsure = ~y.mid.isfinite() & ~certain & (least < _SLOPE_OF_SIGMOID * self.model.compute.smallest_normal)
        return self.unspecified(unsure & y.mid.isinf(), self.no_number(unsure & y.mid.isnan(), product))

    def attend(self, scores: Ball, visible: Tensor, values: Ball, sinks: Ball | None) -> tuple[Ball, Ball]:
        """Attention with online softmax, in any blocking and order.

        Let P be the exact weights, theta_j the relative error of a computed weight before normalisation (its score's
        error, the fold of log2 e, the exponential's own, and T rescalings at new maxima), t = sum_j P theta.
        Errors of weights move the normalised output by at most sum_j P theta |v_j - O| / (1 - t): what all weights
        have in common cancels. The products and the rescaled accumulator cost (gamma_n + T u) sum_j P |v_j|, the sum of
        weights (gamma_n + T u) |O|. Rounding the weights (the stage "probabilities") costs
        sum_j w_j |v_j| with w_j = min(u_P P_j, 1 - P_j), or sum_j w_j |v_j - O| where their sum uses the rounded ones.
        A unit that cuts operands adds its share of sum_j P_j |v_j|, for weights that are not rounded first.
        """
        real, model, u = Real(), self.model, self.u
        keys = scores.shape[-1]
        weights, lse = real.attention_weights(scores.mid, visible, None if sinks is None else sinks.mid)
        masked = torch.where(visible, scores.mid, -math.inf)
        largest = real.max(
            masked if sinks is None else torch.cat([masked, sinks.mid.expand(*masked.shape[:-1], 1)], -1)
        )
        if self.model.certifies:
            seen = values if values.is_finite else _seen(values, visible)
            certified = self._certified_attention(scores, visible, seen, sinks, weights, lse, largest)
            if certified is not None:
                return certified
        weighted_error = torch.where(visible, self._weight_error(scores, largest, lse, weights, keys), 0.0)
        common = weighted_error.sum(-1, keepdim=True)
        if sinks is not None:
            common = common + self._weight_error(sinks, largest, lse, torch.exp(sinks.mid - lse), keys)
        least = (1 - outward(common)).clamp(min=0)

        values = self.operand(values)
        finite = torch.where(torch.isfinite(values.mid), values.mid, 0.0)
        size = finite.abs() + values.radius
        out = weights @ finite
        centred = _spread_about(out, weighted_error, common, size, finite) / least
        rows = (weights + weighted_error) @ size / least
        lost = model.running_sum(keys)
        lost = lost / (1 - lost) if lost < 1 else math.inf
        stage = model.stages.get("probabilities")
        absolute = model.function_underflow("exp") + (0.0 if stage is None else model.underflow(stage))
        if stage is not None:
            # One is a number of every format: a weight near one, or the largest before normalisation, loses little.
            likely = weights + weighted_error
            rounding = torch.minimum(stage.unit_roundoff * likely, 1 - weights + weighted_error) / least
            both = _spread_about(out, rounding, rounding.sum(-1, keepdim=True), size, finite)
            centred = centred + torch.maximum(rounding @ size, both)  # the sum of weights rounded as well, or not
        if model.accumulate.cut:  # to below one, where it is near that
            centred = centred + model.accumulate.cut * rows
        rad = (
            centred
            + lost * rows
            + (lost + model.function_error("div")) * out.abs()
            + absolute * (visible.to(torch.float64) @ size)
            + (keys + 1) * model.function_underflow("div")
        )
        rad = torch.where(visible.double() @ size > model.largest, math.inf, rad)
        if values.rad is not None:
            rad = rad + (weights + weighted_error) @ values.rad / least
        mid = out
        if not values.is_finite:
            mid = weighted_values(weights, visible, values.mid)
            # Every factor on a weight's way is at least the weight: running maxima rise towards the last one and lie at
            # or above the scores, and sums of weights are one or more. So none vanishes unless the weight may.
            faint = max(format.smallest_normal for format in (model.compute, stage or model.compute))
            certain = (weights - weighted_error >= _VANISHING * faint) | weights.isnan()
            vanishing = (visible & ~certain).double()
            unsure = (vanishing @ torch.isinf(values.mid).double()) > 0  # a weight of zero times infinity
            mid, rad = torch.where(unsure, 0.0, mid), torch.where(unsure, math.inf, rad)
        sees = visible.any(-1, keepdim=True)
        undefined = sees & (largest == -math.inf)  # 0 / 0, which kernels guard in several ways
        rad = torch.where(undefined, math.inf, rad)
        if sinks is None:
            mid, rad = self._empty_rows(mid, rad, ~sees)
        log_total = lse - torch.where(largest == -math.inf, 0.0, largest)
        total_error = -torch.log1p(-outward(common + lost).clamp(max=1.0))
        near_one = 2 * u * model.ulps.get("log_near_one", 0.0)
        log_error = model.function_error("log") * log_total.abs() + near_one
        lse_error = total_error + BASE_CHANGE * u * (lse.abs() + largest.abs()) + log_error
        lse_error = torch.where(lse == -math.inf, 0.0, lse_error + model.tiny)
        out_ball, lse_ball = self.ball(mid, rad), self.unspecified(sees & largest.isinf(), self.ball(lse, lse_error))
        lse_ball = self.spilled(lambda: rows_reached(scores, visible), lse_ball)
        return self.spilled(lambda: reached(scores, visible, values), out_ball), lse_ball

    def merge(self, scores: Ball, visible: Tensor, values: Ball) -> tuple[Ball, Ball]:
        """As `attend`; or each value by exp(score - lse), whose error the weights share and no division takes away.

        Or as one value, and the difference to the other times a logistic function of the scores' difference: with
        both visible, an error relative to the values themselves, and in the log-sum-exp to the scores. Of more than two
        pair by pair: the k-th merge adds such errors, and its scores bring those of the k - 1 before it. Of the
        log-sum-exp see `_merged_level`.
        """
        if self.model.accumulate.operands:  # no unit forms sums of two
            uncut = replace(self.model, accumulate=replace(self.model.accumulate, operands=""))
            return BallArithmetic(uncut).merge(scores, visible, values)
        out, lse = self.attend(scores, visible, values, None)
        if self.model.certifies:
            return out, lse
        weights, _ = Real().attention_weights(scores.mid, visible, None)
        level = torch.where(lse.mid.isfinite(), lse.mid, 0.0)
        score = torch.where(visible & scores.mid.isfinite(), scores.mid, 0.0)
        apart = 2 * self.u * (score.abs() + level.abs() + (score - level).abs())
        shared = expm1_upper(apart + lse.radius + self.model.function_error("exp"))
        size = torch.where(values.mid.isfinite() & visible.any(-2)[..., None], values.magnitude, 0.0)
        rad = torch.where(visible, weights * shared, 0.0) @ size
        few = torch.where(visible, weights * (self.model.function_error("div") + _MERGED_WEIGHT * self.u), 0.0) @ size
        few = few + 4 * self.model.function_underflow("exp") * (1 + size.sum(-2, keepdim=True))
        rad = rad + torch.where(out.radius.isfinite(), torch.minimum(out.radius, few), math.inf)
        pairs = visible.double().sum(-1, keepdim=True).sub(1).clamp(min=0)
        own = self.model.function_error("sigmoid") + _MERGED_DIFFERENCE * self.u
        both = pairs * (pairs + 1) / 2 * own
        rad = rad * pairs.clamp(min=1) + both * size.sum(-2, keepdim=True)
        lse_rad = lse.radius * pairs.clamp(min=1) + both * score.abs().sum(-1, keepdim=True)
        lse_rad = torch.minimum(lse_rad, torch.maximum(lse.radius, self._merged_level(scores, visible, pairs)))
        return self.ball(out.mid, rad), Ball(lse.mid, lse_rad, self.model)

    def _merged_level(self, scores: Ball, visible: Tensor, pairs: Tensor) -> Tensor:
        """What merging ``pairs`` + 1 log-sum-exps two by two, in any order or tree, may lose.

        log(e^a + e^b) is off by a mean of the errors of a and b, so the errors of the merges add up at most. All levels
        lie between the least score and the largest plus log n: none is larger than A, and no two are farther apart than
        R. One merge, from either state on, loses a function of a - b, relative to R + log 2, differences, and what
        another base costs: 2 u for each of a, b and the largest, and `BASE_CHANGE` of the result's parts.
        """
        known = visible & scores.mid.isfinite()
        most = torch.where(known, scores.mid, -math.inf).amax(-1, keepdim=True)
        least = torch.where(known, scores.mid, math.inf).amin(-1, keepdim=True)
        further = torch.log1p(pairs)
        size = torch.where(known, scores.mid.abs(), 0.0).amax(-1, keepdim=True) + further
        apart = torch.where(most.isfinite(), most - least, 0.0) + further
        model = self.model
        functions = max(model.function_error(name) for name in ("sigmoid", "log", "softplus"))
        own = functions + _MERGED_DIFFERENCE * self.u
        one = own * (apart + 1) + (2 * BASE_CHANGE + 6) * self.u * size
        one = one + model.function_error("exp") + 2 * self.u * (2 + model.ulps.get("log_near_one", 0.0)) + model.tiny
        return pairs * one * (1 + 8 * pairs * own)

    def _certified_attention(
        self,
        scores: Ball,
        visible: Tensor,
        values: Ball,
        sinks: Ball | None,
        weights: Tensor,
        lse: Tensor,
        largest: Tensor,
    ) -> tuple[Ball, Ball] | None:
        """The float64 evaluation's own radius, from one relative error a row; None where that is no ordinary row."""
        if values.rad is not None or not values.is_finite or not scores.shape[-1]:
            return None
        error = self._row_error(scores, visible, largest, 0.0 if sinks is None else sinks.radius)
        if error is None:
            return None
        theta = error + error * error + self.model.function_error("exp")
        lost = self.model.gamma(scores.shape[-1] + 1) + self.model.function_error("div")
        pair = weights @ values.beside_magnitude
        out, rows = pair[..., : values.shape[-1]], pair[..., values.shape[-1] :]
        absolute = 4 * self.model.tiny * scores.shape[-1] * (1 + values.largest)
        rad = ((theta + lost) * (rows + out.abs())) * (1 + 4 * theta) + absolute
        lse_error = 2 * (theta + lost) + BASE_CHANGE * self.u * (lse.abs() + largest.abs())
        if sinks is None:
            out, rad = self._empty_rows(out, rad, ~visible.any(-1, keepdim=True))
        return Ball(out, rad, self.model), Ball(lse, torch.where(lse == -math.inf, 0.0, lse_error), self.model)

    def _empty_rows(self, mid: Tensor, rad: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
        """What the contract says of rows that see nothing: their value, exactly, or anything."""
        value = self.model.empty_row
        mid = torch.where(empty, 0.0 if value is None else value, mid)
        return mid, torch.where(empty, math.inf if value is None else 0.0, rad)


def _seen(values: Ball, visible: Tensor) -> Ball:
    """Zero for the values that no row sees."""
    return values.map(lambda part: torch.where(visible.any(-2)[..., None], part, 0.0))


def _spread_about(out: Tensor, weights: Tensor, total: Tensor, size: Tensor, values: Tensor) -> Tensor:
    """At least sum_j w_j |v_j - O| [..., Sq, Dv]: (sum w)^(1/2) (sum w (v - O)^2)^(1/2), by Cauchy and Schwarz.

    ``out`` O [..., Sq, Dv], ``weights`` w [..., Sq, Sk] and their sum ``total`` [..., Sq, 1]; ``values`` v and at or
    above their magnitudes ``size`` [..., Sk, Dv]. What cancels in the second sum, n terms each of squares, cross terms
    and sums of weights, is off by gamma_(n+2) (squares + 2 |O| sum w |v| + centre) and three roundings, in all at most
    2 gamma_(n+6) (squares + centre), for 2 |O v| <= v^2 + O^2. Where squares underflow: sum_j w_j |v_j| + |O| sum w.
    """
    cancelled = max(_SHORT_ROW, 2 * EVALUATION.gamma(weights.shape[-1] + 6))
    squares, centre = weights @ (size * size), out * out * total
    spread = squares - 2 * out * (weights @ values) + centre
    spread = torch.sqrt(total * (spread.clamp(min=0) + cancelled * (squares + centre)))
    vanishing = squares + centre < _SQUARES
    if not bool(vanishing.any()):
        return spread
    return torch.where(vanishing, weights @ size + out.abs() * total, spread)
