"""Moments of balls: means, variances, and standardisation, whose mean's error cancels in first order."""

from __future__ import annotations

import math

import torch

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_arithmetic import ElementaryBalls

Tensor = torch.Tensor


class MomentBalls(ElementaryBalls):
    """Ball arithmetic with the sharp bounds of a variance."""

    def standardize(self, x: Ball, eps: float) -> tuple[Ball, Ball]:
        """x - mean and 1 / sqrt(variance + eps), for two-pass, pairwise and Welford's algorithms.

        With A = mean |x|, m the mean and s^2 the variance: the computed mean is off by dm <= gamma_(n+2) A. A common
        shift of all x - m changes the variance by dm^2 only, since the deviations add up to zero; rounding adds
        (gamma_(n+5) + 4u) (s^2 + dm^2), and Welford's update as much times 2 s rms(x) (Chan, Golub & LeVeque, 1983).
        Folding the mean into an offset, x r - m r, costs 2u(|x| + |m|) r. E[x^2] - m^2 is off by about u m^2 and
        stays outside for |m| >> s.
        """
        centred, deviation_error, moment, overflow = self._moments(x)
        root = self.rsqrt(moment + eps)
        return Ball(centred, torch.where(overflow, math.inf, deviation_error), self.model), root

    def variance(self, x: Ball, correction: float = 0.0) -> Ball:
        """sum (x - mean)^2 / (n - correction) along the last axis, with the bound of `standardize`."""
        n = x.shape[-1]
        _, _, moment, overflow = self._moments(x)
        if n <= correction:
            return Ball(torch.full_like(moment.mid, math.nan), None, self.model)
        mid, rad = moment.mid * n / (n - correction), moment.radius * n / (n - correction)
        error = rad + 2 * self.u * (mid.abs() + rad) + self.model.tiny
        constant = (x.mid == x.mid[..., :1]).all(-1, keepdim=True) & (x.radius == 0).all(-1, keepdim=True)
        error = torch.where(constant & (x.mid[..., :1] == 0), 0.0, error)
        return Ball(mid, torch.where(overflow, math.inf, error), self.model)

    def _moments(self, x: Ball) -> tuple[Tensor, Tensor, Ball, Tensor]:
        """x - mean and its error, the mean square of it, and where its sum may overflow."""
        n = max(x.shape[-1], 1)
        gamma = self.model.gamma
        size = x.magnitude
        own, own_mean, own_square = self._own(x)
        mean = x.mid.mean(-1, keepdim=True)
        centred = x.mid - mean
        squares = (centred * centred).sum(-1, keepdim=True)
        variance = squares / n
        if self.model.beyond == "infinity":  # of a sum that overflows, though what it is divided to does not
            variance = torch.where(squares > self.model.range, math.inf, variance)
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
        overflow = n * root_mean_square * root_mean_square > self.model.largest
        return centred, deviation_error, Ball(variance, variance_error, self.model), overflow

    def _own(self, x: Ball) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
        """The radii of a row, their mean, and that and their root mean square; zero of exact numbers."""
        if x.rad is None:
            return 0.0, 0.0, 0.0
        own = torch.broadcast_to(x.rad, x.mid.shape)
        mean = own.mean(-1, keepdim=True)
        return own, mean, torch.sqrt((own * own).mean(-1, keepdim=True)) + mean
