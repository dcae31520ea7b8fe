"""The gated delta rule on balls: what a kernel may lose by recurrence, or chunk by chunk through inverses of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch

from assay.golden.arithmetic.ball import Ball
from assay.golden.arithmetic.ball_scans import ScanBalls, unit_lower_inverse

Tensor = torch.Tensor

_FOLDED = 8.0  # u: beta, two decays and the scale as factors of either side of a product, each rounded there
_FACTORS = 3  # exponentials beside one for each step: of a chunk's first place, its last, and the place itself
_FAINT = 1e-30  # of a decay: what is off by an underflow is off by no relative error
_LONG = 256  # places up to which the largest partial product is looked for


class DeltaBalls(ScanBalls):
    """Ball arithmetic with the delta rule."""

    def delta_rule(
        self, q: Ball, k: Ball, v: Ball, factor: Ball | float, decays: Ball, decay: Ball, beta: Ball
    ) -> Ball:
        """A bound that grows with powers of the length, not with exponentials of it.

        With L_ts = beta_t d_ts k_t.k_s below the diagonal, P_ts = d_ts scale q_t.k_s up to it, X = (I + L)^-1 and
        Z = P X the exact results are u = X beta v and o = P u. Whatever a kernel does, its own u' solve
        (I + L) u' = beta v + rho, but for errors delta of the inverse of a block, of any width, and of its product,
        which reach u' directly: e = u' - u = X rho + W delta and o' - o = Z rho + Y delta + sigma, with W = X D and
        Y = Z D, D the diagonal blocks of I + L. Diagonal blocks of X are the inverses of those of I + L (N. J. Higham,
        *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 8.1 and 14.2; S. Yang et al., *Parallelizing linear
        transformers with the delta rule over sequence length*, 2024, for the chunks).

        - rho: each product beta d k k of L, or of the state that it stands for, is off by E relative to |k|^T |k| (sums
          over D and over places, factors rounded on either side, as "updates" too, decays as one exponential or as a
          product of one a step), and by the rounding of u' as "updates": E (|u| + |e|). The state S rounded as "state"
          before a product, and keys times decays as "updates": beta |k|^T (|S| + sum d |k| |e|).
        - delta: substitution for an inverse loses gamma_n |X||I + L||X|, rounding it as "inverse", and what it is
          multiplied with and what comes out as "updates", their shares of |X| (beta |v| + beta |k|^T (|S| + ...)).
        - sigma: the same as rho of q and P; scores times decays may be rounded as "scores".

        So e <= c + N e with N below the diagonal alone: one substitution in positive numbers gives the bound. As the
        errors of a place meet the true X, which forgets, and not a product of magnitudes, it keeps with float32 about
        the cube of the length where a bound that is carried from place to place doubles with each.
        """
        if self.model.certifies:
            return super().delta_rule(q, k, v, factor, decays, decay, beta)
        length, width = k.shape[-2:]
        if not length:
            return v
        special = ~q.mid.isfinite()
        if bool(special.any()):  # NaN of a query is that of its place; infinities cancel in one order, not in another
            finite = Ball(torch.where(special, 0.0, q.mid), torch.where(special, 0.0, q.radius), self.model)
            known = self.delta_rule(finite, k, v, factor, decays, decay, beta)
            no_number = torch.where(q.mid.isnan().any(-1, keepdim=True), math.nan, known.mid)
            known = Ball(no_number, torch.where(no_number.isnan(), 0.0, known.radius), self.model)
            return self.unspecified(special.any(-1, keepdim=True) & ~no_number.isnan(), known)
        model, u, cut = self.model, self.u, self.model.accumulate.cut
        updates, stored, inverted, scored = (
            cut + (model.stages[stage].unit_roundoff if stage in model.stages else 0.0)
            for stage in ("updates", "state", "inverse", "scores")
        )
        lost = model.gamma(width + length + 2) + _FOLDED * u + 2 * cut
        seen = torch.ones(length, length, dtype=torch.float64).tril()
        strict = seen.tril(-1)
        plain = copy(self)
        plain.model = replace(model, stages={})
        scores, keys = plain.scores(q, k, factor), self.matmul(k, self.swap(k))
        size_q, size_k, size_v = q.magnitude * q.as_ball(factor).magnitude, k.magnitude, v.magnitude
        b, size_b = beta.mid[..., None], beta.magnitude[..., None]

        d, off_d = self._decays(decays, decay)
        lower, read = strict * b * keys.mid * d, seen * scores.mid * d
        inverse = unit_lower_inverse(lower)
        u_, read_inverse = inverse @ (b * v.mid), read @ inverse
        out = read @ u_
        reached, reaching, held = self._states(size_q, k.mid, size_k, u_, decay)

        d = d + off_d
        pairs, reads = size_k @ size_k.mT, size_q @ size_k.mT
        most, most_read = strict * size_b * d * pairs, seen * d * reads
        written = (lost + updates) * pairs + updates * keys.mid.abs() + (1 + updates) * keys.radius
        error = strict * size_b * (d * written + off_d * pairs) + strict * beta.radius[..., None] * d * pairs
        read_size = seen * d * (scores.mid.abs() + scores.radius)
        read_error = seen * (d * (lost * reads + scores.radius) + off_d * reads) + updates * strict * d * reads
        read_error = read_error + (max(scored, updates) + updates) * read_size
        state = math.expm1(stored + updates + lost)

        one = _identity(error)
        sized = torch.linalg.solve_triangular(one - inverse.abs() @ error, inverse.abs(), upper=False)
        direct, whole = math.expm1(2 * updates + lost) * (1 + stored), one + lower.abs() + error
        block = (1 + direct) * (inverted * (sized - one) + (model.gamma(length) + 2 * cut) * sized @ whole @ sized)
        block = block + direct * sized
        given = size_b * size_v
        reached = size_b * reached
        right = (self.u + lost) * given + b.abs() * v.radius + beta.radius[..., None] * size_v
        across, across_read = _carried(inverse, lower), _carried(read_inverse, lower)
        tiny = self._tiny() * (length + width) * _largest(size_q + size_k, d) * _largest(given + reached, reaching, u_)

        rho, per_rho = right + error @ u_.abs() + state * reached + tiny, error + state * most
        delta, per_delta = block @ (given + reached) + tiny, block @ most
        growth = inverse.abs() @ per_rho + across @ per_delta
        start = inverse.abs() @ rho + across @ delta
        off = torch.linalg.solve_triangular(one - growth.tril(-1), start, upper=False)
        rad = read_inverse.abs() @ (rho + per_rho @ off) + across_read @ (delta + per_delta @ off)
        rad = rad + read_error @ (u_.abs() + off) + state * (reaching + most_read @ off) + 3 * u * out.abs() + tiny
        held = held + (size_k.amax(-1, keepdim=True).amax(-2, keepdim=True) * off).sum(-2, keepdim=True)
        unscaled = self.matmul(q, self.swap(k))  # where the scale comes last
        unscaled_read = seen * d * (q.magnitude @ size_k.mT)
        everything = (
            ("", size_b.clamp(min=1.0) * (size_v + strict * d * pairs @ (u_.abs() + off))),
            ("", most_read @ (u_.abs() + off)),
            ("", unscaled_read @ (u_.abs() + off)),
            ("updates", sized @ (given + reached + most @ off)),
            ("updates", sized @ (size_b * size_k).amax(-1, keepdim=True)),
            ("updates", torch.maximum(size_q, q.magnitude).amax(-1, keepdim=True)),
            ("state", held),
            ("inverse", sized.amax(-1, keepdim=True)),
            ("scores", torch.maximum(read_size, seen * d * unscaled.magnitude).amax(-1, keepdim=True)),
        )
        return self._bounded(out, rad, everything)

    def _decays(self, decays: Ball, decay: Ball) -> tuple[Tensor, Tensor]:
        """exp of sums of gates, zero ahead, and their errors: of the sums, and of products of an exponential a step."""
        length = decay.shape[-1]
        d, off = decays.mid.tril(), decays.radius.tril()
        steps = self.recurrence(decay[..., None, :], self.exact(torch.eye(length, dtype=torch.float64)))
        further = _FACTORS * (self.model.function_error("exp") + 2 * self.u)
        product = steps.radius.mT.tril() + further * d
        return d, off + product * (1 + torch.where(d > _FAINT, off / d, 1.0))

    def _states(self, q: Tensor, k: Tensor, size_k: Tensor, u: Tensor, decay: Ball) -> tuple[Tensor, Tensor, Tensor]:
        """|k_t|^T |S| and |q_t|^T |S|, S the state at any place before t, decayed to t; the largest |S|."""
        state = most = torch.zeros(*u.shape[:-2], k.shape[-1], u.shape[-1], dtype=torch.float64)
        by_keys, by_queries, held = [], [], most.amax(-2, keepdim=True)
        for t in range(u.shape[-2]):
            step = decay.mid[..., t, None, None]
            most = step * most
            by_keys.append((size_k[..., t, :, None] * most).sum(-2))
            by_queries.append((q[..., t, :, None] * most).sum(-2))
            state = step * state + k[..., t, :, None] * u[..., t, None, :]
            most = torch.maximum(most, state.abs())
            held = torch.maximum(held, most.amax(-2, keepdim=True))
        return torch.stack(by_keys, -2), torch.stack(by_queries, -2), held

    def _tiny(self) -> float:
        """Absolute error of one operation in any of the formats."""
        formats = {self.model.compute, self.model.accumulate.format, *self.model.stages.values()}
        return 8 * max(self.model.underflow(format) for format in formats)

    def _bounded(self, out: Tensor, rad: Tensor, sizes: Sequence[tuple[str, Tensor]]) -> Ball:
        """Nothing is said of a column of a head where one of its ``sizes`` may overflow, or what is stored of it."""
        beyond = ~rad.isfinite().all(-2, keepdim=True)
        for stage, size in sizes:
            limit = self.model.largest
            if stage in self.model.stages:
                limit = min(limit, self.model.stages[stage].largest)
            beyond = beyond | ~(size <= limit).all(-2, keepdim=True)
        return self.ball(torch.where(beyond, 0.0, out), torch.where(beyond, math.inf, rad))


def _identity(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=torch.float64)


def _largest(*sizes: Tensor) -> Tensor:
    """One more than the largest of a head, [..., 1, 1]."""
    return 1 + torch.stack([size.amax((-1, -2), keepdim=True) for size in sizes]).amax(0)


def _carried(x: Tensor, lower: Tensor) -> Tensor:
    """At or above |x D|, D any diagonal blocks of I + ``lower``: the largest sums of their products so far."""
    length = lower.shape[-1]
    whole = lower + _identity(lower)
    if length > _LONG:
        return x.abs() @ whole.abs()
    return torch.stack([(x[..., t, :, None] * whole).cumsum(-2).abs().amax(-2) for t in range(length)], -2)
