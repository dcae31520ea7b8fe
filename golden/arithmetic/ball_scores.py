"""Scores of attention on balls: where a kernel applies the scale, and what it rounds on the way."""

from __future__ import annotations

import math

import torch

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_gradients import WELL_CONDITIONED
from assay.golden.arithmetic.ball_products import ProductBalls

FOLDED_LOG2E = 1.45  # log2 e = 1.4427, rounded up
_SPLIT_SCALE = 6.0  # u: sqrt(scale) to both sides has a root's and a storing's rounding twice, and two products
_QUERY_ERROR = 7.0  # u: gamma_(D+4) + 4u covers gamma_D + 8u, and so a query that is off by seven


class ScoreBalls(ProductBalls):
    """Ball arithmetic with attention's scores."""

    def scores(self, q: Ball, k: Ball, scale: Ball | float) -> Ball:
        """q k^T scale; the scale may be applied to the scores, to q, or as a square root, rounded, to both.

        With the stage "query" q scale is rounded first, log2 e perhaps among its factors; with "scores" products are
        rounded, and again once they are scaled.
        """
        scaled = q * scale
        if self.model.certifies:
            return self._certified_scores(scaled, k)
        query = self.stored(scaled, "query", FOLDED_LOG2E)
        cut = self.model.accumulate.cut
        if cut:  # log2 e, or a root, among the factors leaves nothing that the unit reads as it is
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
        rad = torch.where(unscaled > self.model.largest, math.inf, torch.maximum(product.radius, split))
        found = self.ball(product.mid, rad)
        if "scores" not in self.model.stages:
            return found
        factor = q.as_ball(scale)
        return self.stored(self.stored(found, "scores", 1 / factor.magnitude), "scores")

    def _certified_scores(self, q: Ball, k: Ball) -> Ball:
        """Scores with one radius a row: |q| |k| <= |q|_1 max |k|, at no cost of another product."""
        longest = k.largest
        length = q.magnitude.sum(-1, keepdim=True)
        relative = self.model.gamma(q.shape[-1] + 4) + 4 * self.u
        radius = relative * length * longest + self.model.tiny * q.shape[-1] * (1 + longest)
        sharp = q.rad is None or bool((q.rad <= _QUERY_ERROR * self.u * q.mid.abs() + self.model.tiny).all())
        if k.rad is not None or not sharp or not bool((radius < WELL_CONDITIONED).all()):  # each score its own radius
            return self.matmul(q, self.swap(k))
        return Ball(q.mid @ k.mid.transpose(-1, -2), radius, self.model)
