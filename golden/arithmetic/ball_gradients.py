"""Composite operations of gradients, on balls."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_arithmetic import expm1_upper
from assay.golden.arithmetic.ball_functions import FunctionBalls
from assay.golden.arithmetic.model import outward
from assay.golden.arithmetic.real import Real, visible_product
from assay.golden.arithmetic.spills import gradients_reached

Tensor = torch.Tensor

WELL_CONDITIONED = 1e-10  # relative errors below which one bound for a whole row is sharp enough
BASE_CHANGE = 8.0  # u of each part: m log2 e + log2 s, times ln 2, is two rounded constants, two products and a sum
_NORMALISED = 2.01  # (1 + t) / (1 - t) - 1 = 2 t / (1 - t) for weights off by t, below 10^-3
_OF_WEIGHTS, _OF_SUMS = 3.1, 6.1  # 2 rho + 3 gamma of dS, a gamma for each later product, and second-order terms
_SECOND_ORDER = 1.01  # (1 + e)^2 for a relative error e below 10^-3
_UNDERFLOWS = 64.0  # tiny = 2^-1000 each; an operation loses 2^-1075 at most, so that 2^80 on a term's way are covered


class GradientBalls(FunctionBalls):
    """Ball arithmetic in which a number may come by several formulas."""

    def any_formula(self, *formulas: Callable[[], Ball]) -> Ball:
        """The largest radius of any formula; unspecified where they differ in being a number, infinite or NaN."""
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
        return Ball(torch.where(unsure, 0.0, first.mid), torch.where(unsure, math.inf, rad), self.model)

    def silu_slope(self, x: Ball) -> Ball:
        """s (1 + x (1 - s)) or s + x s (1 - s), s the sigmoid; kernels subtract s from one, whatever its size."""
        infinite = torch.isinf(x.mid)
        numbers = Ball(torch.where(infinite, 0.0, x.mid), x.rad, self.model)
        s = self.sigmoid(numbers)
        slope = self.any_formula(lambda: s * (numbers * (1.0 - s) + 1.0), lambda: s + (numbers * s) * (1.0 - s))
        ends = self.sigmoid(x)
        return Ball(
            torch.where(infinite, ends.mid, slope.mid), torch.where(infinite, ends.radius, slope.radius), self.model
        )

    def silu_gradient(self, a: Ball, b: Ball, x: Ball) -> Ball:
        """a b s w with w = 1 + x (1 - s), any two or three of which may be multiplied first.

        A partial product that underflows is off by ``tiny``, and the rest multiplies that: at most tiny times the
        product of all 1 + |factor|, s being at most one. One that overflows is infinite. At x = inf, s w is one in the
        limit, and 0 inf in the formula: nothing is said there.
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

    def _weight_error(self, scores: Ball, largest: Tensor, lse: Tensor, weights: Tensor, keys: int) -> Tensor:
        """Error of exp(score - lse): the score's own, log2 e folded in before or after the subtraction, rescaling."""
        folded = 2 * self.u * (2 * scores.mid.abs() + 2 * largest.abs() + (scores.mid - largest).abs())
        error = scores.radius + folded
        own = self.model.function_error("exp") + self.rescaling(keys)
        grown = weights * expm1_upper(error)
        if not bool((error < 1).all()):
            grown = torch.where(error < 1, grown, torch.exp(scores.mid - lse + error))
        return grown + own * (weights + grown)

    def _row_error(
        self, scores: Ball, visible: Tensor, largest: Tensor, further: Tensor | float = 0.0
    ) -> Tensor | None:
        """Of each row of scores the largest radius, a ``further`` one, and 2 u |argument| of exp(score - largest).

        None where that is too large for one bound for the whole row. Of a row that sees nothing it is zero.
        """
        least = torch.where(visible, scores.mid, math.inf).amin(-1, keepdim=True)
        radius = scores.radius if scores.radius.shape[-1] == 1 else scores.radius.amax(-1, keepdim=True)
        error = radius + 2 * self.u * (largest - least) + further
        error = torch.where(visible.any(-1, keepdim=True), error, 0.0)
        return error if bool((error < WELL_CONDITIONED).all()) else None

    def attend_backward(
        self, scores: Ball, visible: Tensor, q: Ball, k: Ball, v: Ball, dout: Ball, scale: Ball | float, terms: int
    ) -> tuple[Ball, Ball, Ball]:
        """The gradients of attention, of online kernels too, whatever they keep of the forward pass.

        With A = |dout| |v|^T, e the error of normalised weights P (see `attend`) and E that of weights which were
        rounded, as the stage "probabilities", to be multiplied with v or dout: dP = dout v^T is off by gamma A; delta =
        sum P dP, or sum dout O, by sum E |dP| + (gamma_Sk + gamma_Dv + d + 2u) sum (P + E) A, with d the error of the
        division in P or O, u for its product with a reciprocal, and u for what enters an accumulator; and by
        u sum |dout O| where the output O is stored first, which the stage "output" allows; and
        dS = P (dP - delta), or P dP - P delta, by e |dP - delta| + (P + e)(e_dP + e_delta + 3u (A + |delta|)), and the
        stage "score_gradient", before the scale or after it. Each gradient is a product, gamma_n over all its terms.

        Of what infinities touch nothing is said: their sign hangs on the order of operations. Nor of all that a row
        reaches which meets an infinity in q, k or its scores: exp(score - lse) is zero where a quotient is NaN. NaN is
        NaN in any; but a row with one in q or dout, times its weights of zero, may reach keys that are masked for it.

        With the stage "query" dk may be a product of dS and q scale as that was rounded.
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
        rounding = rounding + model.accumulate.cut * (weights + error)
        own, error = error, torch.where(visible, error + rounding, 0.0)

        gradient = self._score_gradient(visible, v, dout, factor, (weights, own, error), (kept, lost))
        q = self.stored(q, "query", factor.magnitude)
        dq = self._visible_product(gradient, visible, k, keys)
        dk = self._visible_product(self.swap(gradient), visible.T, q, terms)
        dv = self._visible_product(self.swap(Ball(weights, error, model)), visible.T, dout, terms)
        dq, dk, dv = self._open_gradients(scores, visible, q, k, dout, gradient, (dq, dk, dv))
        if model.empty_row != 0.0:
            dq = Ball(dq.mid, torch.where(visible.any(-1)[:, None], dq.radius, math.inf), model)
        if model.spills:
            places = gradients_reached(scores, visible, q, k, v, dout)
            dq, dk, dv = (self.unspecified(place, x) for place, x in zip(places, (dq, dk, dv), strict=True))
        return dq, dk, dv

    def _score_gradient(
        self,
        visible: Tensor,
        v: Ball,
        dout: Ball,
        factor: Ball,
        weighted: tuple[Tensor, Tensor, Tensor],
        output: tuple[float, float],
    ) -> Ball:
        """dS times the scale [..., R, Sk]; see `attend_backward`.

        ``weighted``: the weights P, their error e, and E with that of rounding them, each [..., R, Sk]; ``output``: the
        unit roundoff of the format that O is stored in, and what underflow costs there.
        """
        model, u, (weights, own, error), (kept, lost) = self.model, self.u, weighted, output
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
        mean = ((weights + error) * sizes).sum(-1, keepdim=True)
        delta_error = (
            (error * torch.where(products.isfinite(), products, 0.0).abs()).sum(-1, keepdim=True)
            + (model.gamma(keys + 1) + inner + model.function_error("div") + 2 * u) * mean
            + kept * (left * (weights @ torch.where(v.mid.isfinite(), v.mid, 0.0)).abs()).sum(-1, keepdim=True)
            + ((weights + error) * product_error).sum(-1, keepdim=True)
            + lost * left.sum(-1, keepdim=True)
            + (keys + width) * model.tiny
        )
        gap = products - delta
        off = product_error + delta_error + 3 * u * (sizes + delta.abs())
        slope_error = own * gap.abs() + (weights + own) * off + model.function_underflow("div")
        # Of a vanishing weight too: 0 times infinity.
        beyond = (visible & (sizes > model.largest)).any(-1, keepdim=True)
        gradient = self._stored_gradient(weights * gap, slope_error, factor, beyond | (mean > model.largest))
        gradient = Ball(torch.where(visible, gradient.mid, 0.0), torch.where(visible, gradient.radius, 0.0), model)
        return self.unspecified(_touched(visible, v, dout), gradient)

    def _open_gradients(
        self,
        scores: Ball,
        visible: Tensor,
        q: Ball,
        k: Ball,
        dout: Ball,
        gradient: Ball,
        found: tuple[Ball, Ball, Ball],
    ) -> tuple[Ball, Ball, Ball]:
        """dq, dk and dv as ``found``, but anything in the rows that infinities and NaN reach; see `attend_backward`."""
        dq, dk, dv = found
        unclear, strange = _unclear_rows(scores, visible, q, k), ~_rows_are_finite(q, dout)
        blind = ~visible.any(-1)[:, None]
        seen, hidden = visible.double().T @ unclear.double(), (~visible).double().T
        dq = self.unspecified(unclear | (blind & strange), dq)
        # A score that is NaN or overflows may make NaN of the weights of masked keys too, a gradient of their slopes.
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
        """The float64 evaluation's own radius, from one relative error a row; None where that is no ordinary row.

        With rho the relative error of a row's weights, A = |dout| |v|^T and m = sum P A: dP is at most A and off by
        gamma A, delta at most m and off by (rho + 2 gamma) m; so dS is off by (2 rho + 3 gamma + 8u) P (A + m).
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
        """Errors of softmax's weights, from a sum or from a log-sum-exp that was stored; see `attend`."""
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
        return torch.where(sees & (largest == -math.inf), math.inf, error)  # 0 / 0, which kernels guard in several ways

    def _stored_gradient(self, slope: Tensor, error: Tensor, factor: Ball, overflow: Tensor) -> Ball:
        """dS times the scale, rounded to the stage "score_gradient" before that or after.

        ``slope`` and its ``error`` [..., R, Sk], ``factor`` the scale, ``overflow`` a mask [..., R, 1]; 3 u for the
        difference dP - delta, its product with P and that with the scale.
        """
        mid, size = slope * factor.mid, slope.abs() + error
        rad = error * factor.magnitude + slope.abs() * factor.radius + 3 * self.u * mid.abs() + self.model.tiny
        rad = rad + self.model.accumulate.cut * (mid.abs() + rad)
        stage = self.model.stages.get("score_gradient")
        if stage is not None:
            rad = rad + stage.unit_roundoff * (mid.abs() + rad)
            rad = rad + self.model.underflow(stage) * factor.magnitude.clamp(min=1.0)
            overflow = overflow | (size * factor.magnitude.clamp(min=1.0) > stage.largest)
        return Ball(mid, torch.where(overflow, math.inf, rad), self.model)

    def _visible_product(self, a: Ball, visible: Tensor, b: Ball, terms: int) -> Ball:
        """a @ b over what is visible, part of a sum of ``terms``: a [..., R, S], visible [R, S], b [..., S, D].

        3 u for a factor of a that may have been applied later: its own rounding, that of its product, and a's without.
        """
        mid = visible_product(a.mid, visible, b.mid)
        size, other = a.radius + torch.where(a.mid.isfinite(), a.mid, 0.0).abs(), _finite_size(b)
        magnitude = size @ other
        rad = (self.model.gamma(terms) + 3 * self.u) * magnitude + a.radius @ other
        rad = rad + terms * self.model.underflow(self.model.accumulate.format)
        if b.rad is not None:
            rad = rad + size @ b.rad
        rad = torch.where(visible.any(-1)[:, None], rad, 0.0)
        anything = (visible & a.radius.isinf()).any(-1, keepdim=True)  # NaN too, which no factor of zero takes away
        rad = torch.where((magnitude > self.model.largest) | anything, math.inf, rad)
        if self.model.certifies or (a.is_finite and b.is_finite):
            return Ball(mid, rad, self.model)
        touched = (visible.double() @ b.mid.isinf().double() > 0) | a.mid.isinf().any(-1, keepdim=True)
        return Ball(torch.where(touched, 0.0, mid), torch.where(touched, math.inf, rad), self.model)


def _touched(visible: Tensor, v: Ball, dout: Ball) -> Tensor:
    """The visible scores of rows in which an infinity may meet another: dP and delta are infinite there, or NaN."""
    reached = visible.double() @ v.mid.isinf().any(-1, keepdim=True).double() > 0
    return visible & (reached | dout.mid.isinf().any(-1, keepdim=True))


def _unclear_rows(scores: Ball, visible: Tensor, q: Ball, k: Ball) -> Tensor:
    """Rows [..., R, 1] with an infinity in q, in a key they see or in the score of one."""
    of_keys = visible.double() @ k.mid.isinf().any(-1, keepdim=True).double() > 0
    return of_keys | q.mid.isinf().any(-1, keepdim=True) | (visible & scores.mid.isinf()).any(-1, keepdim=True)


def _rows_are_finite(*tensors: Ball) -> Tensor:
    """Rows [..., R, 1] without NaN and infinities in any of the tensors."""
    return torch.cat([x.mid for x in tensors], -1).isfinite().all(-1, keepdim=True)


def _finite_size(x: Ball) -> Tensor:
    return torch.where(x.mid.isfinite(), x.magnitude, 0.0)
