"""Log-sum-exp and the logarithm of softmax on balls, with what kernels store on the way."""

from __future__ import annotations

import torch

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_gradients import BASE_CHANGE, GradientBalls
from assay.golden.arithmetic.ball_scores import FOLDED_LOG2E

Tensor = torch.Tensor

_FAR_BELOW = -200.0  # the exponential of less is zero in every format of 16 bits


class LogarithmBalls(GradientBalls):
    """Ball arithmetic with the logarithms of sums of exponentials."""

    def logsumexp(self, x: Ball) -> Ball:
        """max + log sum, in any base: the sum's relative error, and a few roundings of its parts.

        With the stages "exponentials" and "normalizer" (`_log_total`) the largest is added to what was stored.
        """
        largest = self.max(x)
        shift = torch.where(torch.isfinite(largest.mid), largest.mid, 0.0)
        log_total, moved, kept = self._log_total(x, shift)
        mid = shift + log_total.mid
        rad = log_total.radius + BASE_CHANGE * self.u * (mid.abs() + shift.abs() + log_total.mid.abs())
        return self.unspecified(torch.isinf(largest.mid), Ball(mid + moved, rad + kept, self.model))

    def log_softmax(self, x: Ball) -> Ball:
        """x - lse, or (x - max) - log sum, which rounds twice at the result's size."""
        largest = self.max(x).mid
        y = x - self.logsumexp(x)
        twice = Ball(y.mid, y.radius + self.u * y.mid.abs(), self.model)
        folded = x.magnitude * FOLDED_LOG2E > self.model.largest  # x log2 e may overflow
        return self.unspecified(torch.isinf(largest) | (folded & x.mid.isfinite()), twice)

    def _log_total(self, x: Ball, shift: Tensor) -> tuple[Ball, Tensor | float, Tensor | float]:
        """log sum exp(x - shift); what storing its parts moves it by where that is known, and may cost beside.

        Stages: "exponentials", differences and exponentials each; "normalizer", their sum and its logarithm.
        """
        total = self.sum(self.exp_shifted(x, Ball(shift, None, self.model)), rescaled=True)
        log_total = self.log(total)
        if not self.stores("normalizer"):
            return log_total, 0.0, 0.0
        if self.stores("exponentials"):
            apart = x - Ball(shift, None, self.model)
            near = apart.mid > _FAR_BELOW
            stored = self.round(apart.map(lambda part: torch.where(near, part, 0.0)), "exponentials")
            terms = self.round(self.exp(stored), "exponentials")
            total = self.sum(terms.map(lambda part: torch.where(near, part, 0.0)))
        kept = self.round(self.log(self.round(total, "normalizer")), "normalizer")
        regular = log_total.mid.isfinite()
        moved = torch.where(regular, kept.mid - log_total.mid, 0.0)
        return log_total, moved, torch.where(regular, (kept.radius - log_total.radius).clamp(min=0), 0.0)
