"""Attention on balls: scores, softmax times values, merging of partial results, and gradients.

A kernel that masks by adding -inf to a score, or multiplies a masked value by its weight of zero, gives NaN if these
are not finite (zero times NaN is NaN, and so is -inf plus inf); one that selects doesn't. A masked score of -inf stays
-inf, and reaches nothing. The functions at the end of this module return the results that such masked numbers may
reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from assay.golden.arithmetic.ball import Ball, overflowing
from assay.golden.arithmetic.ball_composites import BASE_CHANGE, FOLDED_LOG2E, WELL_CONDITIONED, CompositeBalls
from assay.golden.arithmetic.ball_order import OrderBalls
from assay.golden.arithmetic.ball_products import ProductBalls
from assay.golden.arithmetic.ball_sequences import SequenceBalls
from assay.golden.arithmetic.model import EVALUATION, expm1_upper, outward
from assay.golden.arithmetic.real import Real, visible_product, weighted_values

Tensor = torch.Tensor


_SPLIT_SCALE = 6.0  # u: sqrt(scale) on both sides rounds a root and its storing twice, and two products
_QUERY_ERROR = 7.0  # u: gamma_(D+4) + 4u covers gamma_D + 8u, and so a query with an error of seven
_NORMALISED = 2.01  # (1 + t) / (1 - t) - 1 = 2 t / (1 - t) for weights with errors t below 10^-3
_OF_WEIGHTS, _OF_SUMS = 3.1, 6.1  # 2 rho + 3 gamma of dS, a gamma for each later product, and second-order terms
_SECOND_ORDER = 1.01  # (1 + e)^2 for a relative error e below 10^-3
_UNDERFLOWS = 64.0  # tiny = 2^-1000 each; an operation loses 2^-1075 at most, so factors of 2^80 are covered
_VANISHING = 4.0  # times the least normal number: weights above it, less their error, are never flushed
_MERGED_WEIGHT = 8.0  # u: product, two sums, product with a reciprocal; weights at most twice the exact ones
_MERGED_DIFFERENCE = 4.0  # u: a + s (b - a) has a difference, a product and a sum, and 1 - s instead of s
_SHORT_ROW = 1e-13  # 2 gamma_(n+6) up to 444 keys, used for all of these
_SQUARES = 2.0**-900  # sums of squares below it may have lost terms to underflow


class BallArithmetic(CompositeBalls, SequenceBalls, ProductBalls, OrderBalls):
    """Ball arithmetic with the sharp bounds of attention; the complete arithmetic."""

    def scores(self, q: Ball, k: Ball, scale: Ball | float) -> Ball:
        """Return q k^T scale; the scale may be applied to the scores, to q, or as a rounded square root to both.

        With the stage "query" q scale is rounded first, possibly with the factor log2 e; with "scores" products are
        rounded, and again after scaling.
        """
        scaled = q * scale
        if self.model.certifies:
            return self._certified_scores(scaled, k)
        query = self.stored(scaled, "query", FOLDED_LOG2E)
        cut = self.model.accumulate.cut
        if cut:  # with a factor log2 e, or a root, no operand has few enough bits to be read exactly
            query = Ball(query.mid, query.radius, self.model)
        product = self.matmul(query, self.swap(k))
        unscaled = q.magnitude @ k.magnitude.transpose(-1, -2)
        split = (
            (self.model.gamma(q.shape[-1]) + _SPLIT_SCALE * self.u + 2 * cut + cut * cut)
            * unscaled
            * q.as_ball(scale).magnitude
        )
        if k.rad is not None:
            split = split + q.magnitude @ k.rad.transpose(-1, -2) * q.as_ball(scale).magnitude
        rad = torch.maximum(product.radius, split)
        scores = overflowing(self.model, product.mid, rad, unscaled > self.model.largest)
        if "scores" not in self.model.stages:
            return scores
        factor = q.as_ball(scale)
        return self.stored(self.stored(scores, "scores", 1 / factor.magnitude), "scores")

    def _certified_scores(self, q: Ball, k: Ball) -> Ball:
        """Return scores with one radius per row: |q| |k| <= |q|_1 max |k|, without a second product."""
        longest = k.largest
        length = q.magnitude.sum(-1, keepdim=True)
        relative = self.model.gamma(q.shape[-1] + 4) + 4 * self.u
        radius = relative * length * longest + self.model.tiny * q.shape[-1] * (1 + longest)
        sharp = q.rad is None or bool((q.rad <= _QUERY_ERROR * self.u * q.mid.abs() + self.model.tiny).all())
        if k.rad is not None or not sharp or not bool((radius < WELL_CONDITIONED).all()):  # a radius per score
            return self.matmul(q, self.swap(k))
        return Ball(q.mid @ k.mid.transpose(-1, -2), radius, self.model)

    def attend(self, scores: Ball, visible: Tensor, values: Ball, sinks: Ball | None) -> tuple[Ball, Ball]:
        """Return attention with online softmax, in any blocking and order.

        Let P be the exact weights, theta_j the relative error of a computed weight before normalisation (its score's
        error, the fold of log2 e, the exponential's own, and T rescalings at new maxima), t = sum_j P theta.
        Errors of weights change the normalised output by at most sum_j P theta |v_j - O| / (1 - t): a common relative
        error cancels. The products and the rescaled accumulator cost (gamma_n + T u) sum_j P |v_j|, the sum of
        weights (gamma_n + T u) |O|. Rounding the weights (the stage "probabilities") costs
        sum_j w_j |v_j| with w_j = min(u_P P_j, 1 - P_j), or sum_j w_j |v_j - O| where their sum uses the rounded ones.
        A unit that truncates operands adds its error times sum_j P_j |v_j|, for weights that are not rounded first.
        """
        real, model, u = Real(), self.model, self.u
        keys = scores.shape[-1]
        weights, lse = real.attention_weights(scores.mid, visible, None if sinks is None else sinks.mid)
        masked = torch.where(visible, scores.mid, -math.inf)
        largest = real.max(
            masked if sinks is None else torch.cat([masked, sinks.mid.expand(*masked.shape[:-1], 1)], -1)
        )
        if self.model.certifies:
            seen = values
            if not values.is_finite:  # without the values that no row sees
                seen = values.map(lambda part: torch.where(visible.any(-2)[..., None], part, 0.0))
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
            # One is exact in every format: a weight near one, or the largest before normalisation, loses little.
            likely = weights + weighted_error
            rounding = torch.minimum(stage.unit_roundoff * likely, 1 - weights + weighted_error) / least
            both = _spread_about(out, rounding, rounding.sum(-1, keepdim=True), size, finite)
            centred = centred + torch.maximum(
                rounding @ size, both
            )  # with the sum of rounded weights, or of unrounded ones
        if model.accumulate.cut:  # a weight near one is truncated to below one
            centred = centred + model.accumulate.cut * rows
        rad = (
            centred
            + lost * rows
            + (lost + model.function_error("div")) * out.abs()
            + absolute * (visible.to(torch.float64) @ size)
            + (keys + 1) * model.function_underflow("div")
        )
        may = visible.double() @ size > model.largest
        if values.rad is not None:
            rad = rad + (weights + weighted_error) @ values.rad / least
        mid = out
        if not values.is_finite:
            mid = weighted_values(weights, visible, values.mid)
            # Every intermediate factor of a weight is at least the weight: running maxima ascend and are at least the
            # scores, and sums of weights are at least one. So none underflows unless the weight may.
            faint = max(format.smallest_normal for format in (model.compute, stage or model.compute))
            certain = (weights - weighted_error >= _VANISHING * faint) | weights.isnan()
            vanishing = (visible & ~certain).double()
            unsure = (vanishing @ torch.isinf(values.mid).double()) > 0  # a weight of zero times infinity
            mid, rad = torch.where(unsure, 0.0, mid), torch.where(unsure, math.inf, rad)
        sees = visible.any(-1, keepdim=True)
        undefined = sees & (largest == -math.inf)  # 0 / 0, which kernels treat in several ways
        rad = torch.where(undefined, math.inf, rad)
        if sinks is None:
            mid, rad = self._empty_rows(mid, rad, ~sees)
        log_total = lse - torch.where(largest == -math.inf, 0.0, largest)
        total_error = -torch.log1p(-outward(common + lost).clamp(max=1.0))
        near_one = 2 * u * model.ulps.get("log_near_one", 0.0)
        log_error = model.function_error("log") * log_total.abs() + near_one
        lse_error = total_error + BASE_CHANGE * u * (lse.abs() + largest.abs()) + log_error
        lse_error = torch.where(lse == -math.inf, 0.0, lse_error + model.tiny)
        out_ball = overflowing(model, mid, rad, may & mid.isfinite() & sees)
        lse_ball = self.unspecified(sees & largest.isinf(), self.ball(lse, lse_error))
        lse_ball = self.spilled(lambda: rows_reached(scores, visible), lse_ball)
        return self.spilled(lambda: reached(scores, visible, values), out_ball), lse_ball

    def merge(self, scores: Ball, visible: Tensor, values: Ball) -> tuple[Ball, Ball]:
        """As `attend`; or each value by exp(score - lse), whose error the weights share and no division takes away.

        Or as one value, and the difference to the other times a logistic function of the scores' difference: with
        both visible, an error relative to the values themselves, and in the log-sum-exp to the scores. Of more than two
        pair by pair: the k-th merge adds such errors, and its scores bring those of the k - 1 before it. Of the
        log-sum-exp see `_merged_lse_error`.
        """
        if self.model.accumulate.operands:  # no unit forms sums of two
            uncut = replace(self.model, accumulate=replace(self.model.accumulate, operands=""))
            return BallArithmetic(uncut).merge(scores, visible, values)
        out, lse = self.attend(scores, visible, values, None)
        if self.model.certifies:
            return out, lse
        weights, _ = Real().attention_weights(scores.mid, visible, None)
        finite_lse = torch.where(lse.mid.isfinite(), lse.mid, 0.0)
        score = torch.where(visible & scores.mid.isfinite(), scores.mid, 0.0)
        argument_error = 2 * self.u * (score.abs() + finite_lse.abs() + (score - finite_lse).abs())
        shared = expm1_upper(argument_error + lse.radius + self.model.function_error("exp"))
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
        lse_rad = torch.minimum(lse_rad, torch.maximum(lse.radius, self._merged_lse_error(scores, visible, pairs)))
        return self.ball(out.mid, rad), Ball(lse.mid, lse_rad, self.model)

    def _merged_lse_error(self, scores: Ball, visible: Tensor, pairs: Tensor) -> Tensor:
        """Return the error of merging ``pairs`` + 1 log-sum-exps two by two, in any order or tree.

        The error of log(e^a + e^b) by those of a and b is a mean of them, so that the errors of the merges at most add
        up. All partial results are between the least score and the largest plus log n: none exceeds A, and no two
        differ by more than R. One merge, starting at either state, has the error of a function of a - b, relative to
        R + log 2, those of differences, and of another base: 2 u for each of a, b and the largest, and `BASE_CHANGE` of
        the result's parts.
        """
        known = visible & scores.mid.isfinite()
        most = torch.where(known, scores.mid, -math.inf).amax(-1, keepdim=True)
        least = torch.where(known, scores.mid, math.inf).amin(-1, keepdim=True)
        further = torch.log1p(pairs)
        size = torch.where(known, scores.mid.abs(), 0.0).amax(-1, keepdim=True) + further
        largest_gap = torch.where(most.isfinite(), most - least, 0.0) + further
        model = self.model
        functions = max(model.function_error(name) for name in ("sigmoid", "log", "softplus"))
        own = functions + _MERGED_DIFFERENCE * self.u
        one = own * (largest_gap + 1) + (2 * BASE_CHANGE + 6) * self.u * size
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
        """Return the float64 evaluation with a radius from one relative error per row; None if a row is ill-
        conditioned."""
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
        """Set rows without visible keys to the contract's exact value, or leave them unspecified."""
        value = self.model.empty_row
        mid = torch.where(empty, 0.0 if value is None else value, mid)
        return mid, torch.where(empty, math.inf if value is None else 0.0, rad)

    def _weight_error(self, scores: Ball, largest: Tensor, lse: Tensor, weights: Tensor, keys: int) -> Tensor:
        """Return the error of exp(score - lse): of the score, of folding log2 e in before or after, and of
        rescaling."""
        folded = 2 * self.u * (2 * scores.mid.abs() + 2 * largest.abs() + (scores.mid - largest).abs())
        error = scores.radius + folded
        own = self.model.function_error("exp") + self.rescaling(keys)
        spread = weights * expm1_upper(error)
        if not bool((error < 1).all()):
            spread = torch.where(error < 1, spread, torch.exp(scores.mid - lse + error))
        return spread + own * (weights + spread)

    def _row_error(
        self, scores: Ball, visible: Tensor, largest: Tensor, further: Tensor | float = 0.0
    ) -> Tensor | None:
        """Return for each row the sum of the largest radius, ``further``, and 2 u |argument| of exp(score - largest).

        None if that is too large for one bound for the whole row; zero for a row without visible keys.
        """
        least = torch.where(visible, scores.mid, math.inf).amin(-1, keepdim=True)
        radius = scores.radius if scores.radius.shape[-1] == 1 else scores.radius.amax(-1, keepdim=True)
        error = radius + 2 * self.u * (largest - least) + further
        error = torch.where(visible.any(-1, keepdim=True), error, 0.0)
        return error if bool((error < WELL_CONDITIONED).all()) else None

    def attend_backward(
        self, scores: Ball, visible: Tensor, q: Ball, k: Ball, v: Ball, dout: Ball, scale: Ball | float, terms: int
    ) -> tuple[Ball, Ball, Ball]:
        """Return the gradients of attention, also of online kernels, whatever they store in the forward pass.

        With A = |dout| |v|^T, e the error of normalised weights P (see `attend`) and E that of weights rounded as the
        stage "probabilities" before they are multiplied with v or dout: dP = dout v^T has an error of gamma A; delta =
        sum P dP, or sum dout O, one of sum E |dP| + (gamma_Sk + gamma_Dv + d + 2u) sum (P + E) A, with d the error of
        the division in P or O, u for its product with a reciprocal, and u for what enters an accumulator; and by u sum
        |dout O| where the output O is stored first, which the stage "output" allows; and dS = P (dP - delta), or P dP -
        P delta, by e |dP - delta| + (P + e)(e_dP + e_delta + 3u (A + |delta|)), and the stage "score_gradient", before
        the scale or after it. Each gradient is a product, gamma_n over all its terms.

        Results that infinities reach are unspecified, since their sign depends on the order of operations; so is all
        that is reached by a row with an infinity in q, k or its scores, for which exp(score - lse) is zero and a
        quotient NaN. NaN stays NaN; but a row with NaN in q or dout, times weights of zero, may also reach keys masked
        for it.

        With the stage "query" dk may be a product of dS and the rounded q scale.

        What rounding as "probabilities" and as "score_gradient" changes of a sum is one error for each term, each for
        itself (`_with_roundings`).
        """
        model, keys, factor = self.model, scores.shape[-1], q.as_ball(scale)
        weights, lse = Real().attention_weights(scores.mid, visible, None)
        weights = torch.where(visible, weights, 0.0)
        if model.certifies:
            certified = self._certified_gradients(scores, visible, (q, k, v, dout), factor, terms, weights)
            if certified is not None:
                return certified
        error = torch.where(visible, self._normalised_error(scores, visible, weights, lse), 0.0)
        q, k, v, dout = (self.operand(x) for x in (q, k, v, dout))
        stage = model.stages.get("probabilities")
        stored, vanishing = (0.0, 0.0) if stage is None else (stage.unit_roundoff, model.underflow(stage))
        output = model.stages.get("output")
        kept, lost = (0.0, 0.0) if output is None else (output.unit_roundoff, model.underflow(output))
        rounding = torch.minimum(stored * (weights + error), (1 - weights + error).clamp(min=0)) + vanishing
        own, rounding = error, torch.where(visible, rounding, 0.0)
        error = torch.where(visible, error + model.accumulate.cut * (weights + error), 0.0)

        weighted = (weights, own, error, rounding)
        gradient, stored_gradient = self._score_gradient(visible, v, dout, factor, weighted, (kept, lost))
        q = self.stored(q, "query", factor.magnitude)
        unscaled = 1.0 / factor.magnitude.clamp(max=1.0)
        dq = self._visible_product(gradient, visible, k, keys, stored_gradient, unscaled)
        dk = self._visible_product(self.swap(gradient), visible.T, q, terms, stored_gradient.mT, unscaled)
        dv = self._visible_product(self.swap(Ball(weights, error, model)), visible.T, dout, terms, rounding.mT)
        dq, dk, dv = self._open_gradients(scores, visible, q, k, dout, gradient, (dq, dk, dv))
        if model.empty_row != 0.0:
            dq = Ball(dq.mid, torch.where(visible.any(-1)[:, None], dq.radius, math.inf), model)
        if model.spills:
            masks = gradients_reached(scores, visible, q, k, v, dout)
            dq, dk, dv = (self.unspecified(mask, x) for mask, x in zip(masks, (dq, dk, dv), strict=True))
        return dq, dk, dv

    def _score_gradient(
        self,
        visible: Tensor,
        v: Ball,
        dout: Ball,
        factor: Ball,
        weighted: tuple[Tensor, Tensor, Tensor, Tensor],
        output: tuple[float, float],
    ) -> tuple[Ball, Tensor]:
        """Return dS times the scale, and what storing it loses, both [..., R, Sk]; see `attend_backward`.

        ``weighted``: the weights P, their error e, that of truncated ones, and what rounding them loses, each [..., R,
        Sk]; ``output``: the unit roundoff of the format that O is stored in, and its absolute error by underflow.
        """
        model, u, (weights, own, error, rounding), (kept, lost) = self.model, self.u, weighted, output
        keys = weights.shape[-1]
        products = torch.where(visible, dout.mid @ v.mid.transpose(-1, -2), 0.0)
        left, right = _finite_size(dout), _finite_size(v)
        sizes = left @ right.transpose(-1, -2)
        width = v.shape[-1]
        inner = model.gamma(width)
        product_error = inner * sizes + width * model.underflow(model.accumulate.format)
        if dout.rad is not None:
            product_error = product_error + dout.rad @ right.transpose(-1, -2)
        if v.rad is not None:
            product_error = product_error + left @ v.rad.transpose(-1, -2)
        delta = (weights * products).sum(-1, keepdim=True)
        most = weights + error + rounding
        mean = (most * sizes).sum(-1, keepdim=True)
        known = torch.where(products.isfinite(), products, 0.0).abs()
        of_weights = self._with_roundings(error, rounding, lambda x, p: (x * known**p).sum(-1, keepdim=True))
        delta_error = (
            of_weights
            + (model.gamma(keys + 1) + inner + model.function_error("div") + 2 * u) * mean
            + kept * (left * (weights @ torch.where(v.mid.isfinite(), v.mid, 0.0)).abs()).sum(-1, keepdim=True)
            + (most * product_error).sum(-1, keepdim=True)
            + lost * left.sum(-1, keepdim=True)
            + (keys + width) * model.tiny
        )
        gap = products - delta
        off = product_error + delta_error + 3 * u * (sizes + delta.abs())
        slope_error = own * gap.abs() + (weights + own) * off + model.function_underflow("div")
        # Also for a weight of zero: 0 times infinity.
        beyond = (visible & (sizes > model.largest)).any(-1, keepdim=True)
        beyond = beyond | (mean > model.largest) | (visible & (gap.abs() + off > model.largest))
        gradient, stored = self._stored_gradient(weights * gap, slope_error, factor, beyond)
        gradient = Ball(torch.where(visible, gradient.mid, 0.0), torch.where(visible, gradient.radius, 0.0), model)
        # Visible scores of rows with infinities in v or dout, where dP and delta are infinite or NaN.
        reached = visible.double() @ v.mid.isinf().any(-1, keepdim=True).double() > 0
        open_ = visible & (reached | dout.mid.isinf().any(-1, keepdim=True))
        return self.unspecified(open_, gradient), torch.where(visible & stored.isfinite(), stored, 0.0)

    def _open_gradients(
        self,
        scores: Ball,
        visible: Tensor,
        q: Ball,
        k: Ball,
        dout: Ball,
        gradient: Ball,
        gradients: tuple[Ball, Ball, Ball],
    ) -> tuple[Ball, Ball, Ball]:
        """Return the gradients, unspecified in rows that infinities and NaN may reach; see `attend_backward`."""
        dq, dk, dv = gradients
        strange = ~torch.cat([q.mid, dout.mid], -1).isfinite().all(-1, keepdim=True)
        # Rows [..., R, 1] with an infinity in q, in a visible key, or in its score.
        unclear = visible.double() @ k.mid.isinf().any(-1, keepdim=True).double() > 0
        unclear = unclear | q.mid.isinf().any(-1, keepdim=True) | (visible & scores.mid.isinf()).any(-1, keepdim=True)
        blind = ~visible.any(-1)[:, None]
        seen, hidden = visible.double().T @ unclear.double(), (~visible).double().T
        dq = self.unspecified(unclear | (blind & strange), dq)
        # A score that is NaN or overflows may make the weights of masked keys NaN too; so may dS their slopes.
        is_open = scores.radius.isinf() | ~scores.mid.isfinite()
        for_dv = strange | (visible & is_open).any(-1, keepdim=True)
        for_dk = for_dv | (gradient.radius.isinf() | ~gradient.mid.isfinite()).any(-1, keepdim=True)
        dk = self.unspecified(seen + hidden @ for_dk.double() > 0, dk)
        dv = self.unspecified(seen + hidden @ for_dv.double() > 0, dv)
        return dq, dk, dv

    def _certified_gradients(
        self,
        scores: Ball,
        visible: Tensor,
        tensors: tuple[Ball, Ball, Ball, Ball],
        factor: Ball,
        terms: int,
        weights: Tensor,
    ) -> tuple[Ball, Ball, Ball] | None:
        """Return the float64 evaluation with a radius from one relative error per row; None if a row is
        ill-conditioned.

        With rho the relative error of a row's weights, A = |dout| |v|^T and m = sum P A: dP is at most A with an error
        of gamma A, delta at most m with one of (rho + 2 gamma) m; so the error of dS is (2 rho + 3 gamma + 8u) P (A +
        m).
        """
        if any(x.rad is not None or not x.is_finite for x in tensors) or 0 in scores.shape:
            return None
        q, k, v, dout = (x.mid for x in tensors)
        error = self._row_error(scores, visible, torch.where(visible, scores.mid, -math.inf).amax(-1, keepdim=True))
        if error is None:
            return None
        gamma = self.model.gamma(max(scores.shape[-1], v.shape[-1], terms) + 4) + 8 * self.u
        rho = _NORMALISED * (error + error * error + self.model.function_error("exp"))
        rho = rho + gamma + self.model.function_error("div")
        size = dout.abs() @ v.abs().transpose(-1, -2)
        products = torch.where(visible, dout @ v.transpose(-1, -2), 0.0)
        slopes = weights * (products - (weights * products).sum(-1, keepdim=True)) * factor.mid
        scale = factor.magnitude
        off = (_OF_WEIGHTS * rho + _OF_SUMS * gamma) * weights * (size + (weights * size).sum(-1, keepdim=True))
        dq, dq_error = slopes @ k, off @ k.abs()
        dk, dk_error = slopes.transpose(-1, -2) @ q, off.transpose(-1, -2) @ q.abs()
        sums = weights.transpose(-1, -2) @ torch.cat([dout, (rho + gamma) * dout.abs()], -1)
        dv, dv_error = sums[..., : dout.shape[-1]], sums[..., dout.shape[-1] :]
        ends = sum(part.abs().amax() for part in (q, k, dout))
        vanishing = (
            _UNDERFLOWS * self.model.tiny * (scores.shape[-1] + terms) * (1 + size.amax()) * (1 + scale) * (1 + ends)
        )
        radii = (scale * dq_error, scale * dk_error, dv_error)
        dq_ball, dk_ball, dv_ball = (
            Ball(mid, rad * _SECOND_ORDER + vanishing, self.model) for mid, rad in zip((dq, dk, dv), radii, strict=True)
        )
        return dq_ball, dk_ball, dv_ball

    def _normalised_error(self, scores: Ball, visible: Tensor, weights: Tensor, lse: Tensor) -> Tensor:
        """Return the errors of softmax's weights, from a sum or from a stored log-sum-exp; see `attend`."""
        keys = scores.shape[-1]
        largest = Real().max(torch.where(visible, scores.mid, -math.inf))
        error = torch.where(visible, self._weight_error(scores, largest, lse, weights, keys), 0.0)
        common = error.sum(-1, keepdim=True)
        lost = self.model.running_sum(keys)
        of_lse = (
            BASE_CHANGE * self.u * (lse.abs() + largest.abs())
            + self.model.function_error("log") * (lse - largest).abs()
        )
        shared = common + lost + self.model.function_error("div") + expm1_upper(of_lse)
        error = (error + (weights + error) * shared) / (1 - outward(common)).clamp(
            min=0
        ) + self.model.function_underflow("exp")
        sees = visible.any(-1)[:, None]
        return torch.where(sees & (largest == -math.inf), math.inf, error)  # 0 / 0, which kernels treat in several ways

    def _stored_gradient(self, slope: Tensor, error: Tensor, factor: Ball, overflow: Tensor) -> tuple[Ball, Tensor]:
        """Return dS times the scale, and what rounding it as the stage "score_gradient", before or after, loses.

        ``slope`` and its ``error`` [..., R, Sk], ``factor`` the scale, ``overflow`` a mask [..., R, Sk]; 3 u for the
        difference dP - delta, its product with P and that with the scale.
        """
        mid, size = slope * factor.mid, slope.abs() + error
        rad = error * factor.magnitude + slope.abs() * factor.radius + 3 * self.u * mid.abs() + self.model.tiny
        rad = rad + self.model.accumulate.cut * (mid.abs() + rad)
        stage = self.model.stages.get("score_gradient")
        lost = torch.zeros_like(rad)
        if stage is not None:
            lost = stage.unit_roundoff * (mid.abs() + rad)
            lost = lost + self.model.underflow(stage) * factor.magnitude.clamp(min=1.0)
            overflow = overflow | (size * factor.magnitude.clamp(min=1.0) > stage.largest)
        return Ball(mid, torch.where(overflow, math.inf, rad), self.model), lost

    def _with_roundings(self, own: Tensor, lost: Tensor, total: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return a bound on a sum of errors ``own``, and of those that rounding each term by ``lost`` adds.

        ``total``: the sum of |errors|^p, p = 1 or 2, each times the power of what multiplies it. With ``chance`` the
        latter is lambda sqrt(sum of squares / 3) if less, for errors that are uniform and independent (`Chance`).
        """
        chance = self.model.chance
        if chance is None or not chance.deviations:
            return total(own + lost, 1)
        likely = chance.deviations * torch.sqrt(total(lost * lost, 2) / 3)
        return total(own, 1) + torch.minimum(total(lost, 1), likely)

    def _visible_product(
        self, a: Ball, visible: Tensor, b: Ball, terms: int, rounding: Tensor, unscaled: Tensor | float = 1.0
    ) -> Ball:
        """Return a @ b over visible elements, part of a sum of ``terms``: a [..., R, S], visible [R, S], b [..., S, D].

        ``rounding`` [..., R, S]: what rounding a loses besides its radius. 3 u for a factor of a that may be applied
        later: its rounding, that of its product, and that of a without it. ``unscaled``: the product without that
        factor over the one with it, if larger; it may overflow earlier.
        """
        mid = visible_product(a.mid, visible, b.mid)
        size, other = a.radius + rounding + torch.where(a.mid.isfinite(), a.mid, 0.0).abs(), _finite_size(b)
        magnitude = size @ other
        rad = (self.model.gamma(terms) + 3 * self.u) * magnitude
        rad = rad + self._with_roundings(a.radius, rounding, lambda x, p: x @ other**p)
        rad = rad + terms * self.model.underflow(self.model.accumulate.format)
        if b.rad is not None:
            rad = rad + size @ b.rad
        rad = torch.where(visible.any(-1)[:, None], rad, 0.0)
        anything = (visible & a.radius.isinf()).any(-1, keepdim=True)  # NaN too, which a factor of zero does not remove
        rad = torch.where((magnitude * unscaled > self.model.largest) | anything, math.inf, rad)
        if self.model.certifies or (a.is_finite and b.is_finite):
            return Ball(mid, rad, self.model)
        touched = (visible.double() @ b.mid.isinf().double() > 0) | a.mid.isinf().any(-1, keepdim=True)
        return Ball(torch.where(touched, 0.0, mid), torch.where(touched, math.inf, rad), self.model)


def _spread_about(out: Tensor, weights: Tensor, total: Tensor, size: Tensor, values: Tensor) -> Tensor:
    """Return a bound on sum_j w_j |v_j - O| [..., Sq, Dv]: (sum w)^(1/2) (sum w (v - O)^2)^(1/2) (Cauchy-Schwarz).

    ``out`` O [..., Sq, Dv], ``weights`` w [..., Sq, Sk] and their sum ``total`` [..., Sq, 1]; ``values`` v and
    ``size``, a bound on |v|, [..., Sk, Dv]. The second sum, computed from n terms each of squares, cross terms and sums
    of weights, has an error of gamma_(n+2) (squares + 2 |O| sum w |v| + centre) and three roundings, in all at most 2
    gamma_(n+6) (squares + centre), since 2 |O v| <= v^2 + O^2. If squares underflow: sum_j w_j |v_j| + |O| sum w.
    """
    cancelled = max(_SHORT_ROW, 2 * EVALUATION.gamma(weights.shape[-1] + 6))
    squares, centre = weights @ (size * size), out * out * total
    spread = squares - 2 * out * (weights @ values) + centre
    spread = torch.sqrt(total * (spread.clamp(min=0) + cancelled * (squares + centre)))
    vanishing = squares + centre < _SQUARES
    if not bool(vanishing.any()):
        return spread
    return torch.where(vanishing, weights @ size + out.abs() * total, spread)


def _finite_size(x: Ball) -> Tensor:
    return torch.where(x.mid.isfinite(), x.magnitude, 0.0)


def rows_reached(scores: Ball, visible: Tensor) -> Tensor:
    """Return rows [..., Sq, 1] with a masked score that is NaN or inf, or may overflow before -inf is added."""
    loose = ~visible & (scores.mid.isnan() | (scores.mid == math.inf) | scores.radius.isinf())
    return loose.any(-1, keepdim=True)


def reached(scores: Ball, visible: Tensor, values: Ball) -> Tensor:
    """Return results [..., Sq, Dv] that a masked score, or a masked value that is not finite, may reach."""
    return rows_reached(scores, visible) | _weighted(~visible, values)


def gradients_reached(
    scores: Ball, visible: Tensor, q: Ball, k: Ball, v: Ball, dout: Ball
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the elements of dq, dk and dv that masked pairs of rows [..., R, D] and keys [..., Sk, D] may reach.

    dS = P (dout v^T - delta) contains the row's delta: one product of zero and NaN makes the whole row NaN, and each
    row enters all of dk; a score that is not finite does so to the row's weights, and each row enters all of dv.
    """
    of_scores = rows_reached(scores, visible)
    bad = _bad(v).any(-1)[..., None, :] | _bad(dout).any(-1, keepdim=True)
    rows = of_scores | (~visible & bad).any(-1, keepdim=True)
    keys = (~visible).transpose(-1, -2)
    dq = rows | _weighted(~visible, k)
    dk = rows.any(-2, keepdim=True) | _weighted(keys, q)
    dv = of_scores.any(-2, keepdim=True) | _weighted(keys, dout)
    return dq, dk, dv


def _bad(x: Ball) -> Tensor:
    return ~x.mid.isfinite() | x.radius.isinf()


def _weighted(masked: Tensor, x: Ball) -> Tensor:
    """Return where a sum over the last axis of ``masked`` multiplies a weight of zero with a number that is not
    finite."""
    bad = _bad(x)
    if not bool(bad.any()):
        return torch.zeros((), dtype=torch.bool)
    return masked.double() @ bad.double() > 0
