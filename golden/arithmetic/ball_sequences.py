"""Sequences of balls: running sums, linear recurrences, triangular systems, and the gated delta rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from assay.formats.accumulator import Accumulator
from assay.golden.arithmetic.ball import Ball, ElementaryBalls, overflowing
from assay.golden.arithmetic.model import Chance, RoundingModel, lowest_bit

Tensor = torch.Tensor


_STEP = 3.0  # u per step: a product, a sum, and one more sum if a scan adds in another order
_FOLDED = 8.0  # u: beta, two decays and the scale as factors on either side of a product, each rounded there
_FACTORS = 3  # exponentials besides one per step: of a chunk's first position, its last, and the position itself
_FAINT = 1e-30  # decays below it have the absolute error of underflow, not a relative one
_PROBABLE = 2**28  # numbers: independent errors are followed from each chunk's end to each output
_LONG = 256  # length up to which partial products are maximised exactly


@lru_cache(128)
def _gammas(accumulate: Accumulator, chance: Chance | None, count: int, late: int) -> tuple[float, ...]:
    """Return gamma of 1, 2, ..., ``count`` terms, or of one less each if ``late``."""
    model = RoundingModel(accumulate.format, accumulate, chance=chance)
    return tuple(model.gamma(max(terms - late, 0)) for terms in range(1, count + 1))


class SequenceBalls(ElementaryBalls):
    """Ball arithmetic with running sums, recurrences and the delta rule."""

    def cumsum(self, x: Ball) -> Ball:
        """Return running sums, each with the bound of `sum`: gamma_(n-1) of its n terms' magnitudes, in any order.

        Subtracting later terms from a longer sum is not covered.
        """
        if not (self.model.is_unlimited or x.is_known):
            if x.own is not None:
                return self.cumsum(x.inner).or_none(x.lost.cummax(-1).values)
            numbers = self.cumsum(self.numbers(x))
            special = torch.where(x.mid.isfinite(), 0.0, x.mid).cumsum(-1)
            unknown = x.unspecified.cummax(-1).values if x.shape[-1] else x.unspecified
            return self._with_special(numbers, special, unknown)
        count, late = x.shape[-1], int(self.model.accumulate.format.unit_roundoff <= self.u)
        lost = torch.tensor(_gammas(self.model.accumulate, self.model.chance, count, late), dtype=torch.float64)
        rounding = self.model.sum_rounding(count)
        mid, magnitude = x.mid.cumsum(-1), x.magnitude.cumsum(-1)
        rad = lost * rounding * magnitude
        if x.rad is not None:
            return self._partly_overflowing(mid, rad + rounding * x.rad.cumsum(-1), magnitude)
        return self._summed(mid, rad, magnitude, lowest_bit(x.mid).cummin(-1).values if count else mid)

    def recurrence(self, decay: Ball, term: Ball) -> Ball:
        """Return the recurrence, in sequence, or as a scan of pairs (a, b), (a', b') -> (a a', a' b + b') in any tree.

        h_t is the sum of b_s times all decays from s + 1 to t, and M_t the sum of their magnitudes. A tree rounds the
        product of a term and its decays as often as the sequence does, once a factor, and adds it in at most as many
        sums as steps follow it, and log2 n more (a scan by doubling adds the last term that often). So with r
        the radii of decays and terms R_t = (|a| + r_a) R_(t-1) + r_a M_(t-1) + r_b + 3 u M_t, and the radius of h_t is
        R_t + (log2 n + 2) u M_t.

        A product of decays that is subnormal loses ``tiny``, and the term and the other decays multiply that: h_t loses
        at most (t - s + 1) tiny |b_s| prod max(1, |a| + r_a) for each s, which is E_t = max(1, |a| + r_a) E_(t-1) +
        tiny P_t with P_t = max(1, |a| + r_a) P_(t-1) + |b_t|.
        """
        shape = (decay.mid[..., :0] + term.mid[..., :0]).shape[:-1] + term.mid.shape[-1:]
        a, a_rad, b, b_rad = (part.broadcast_to(shape) for part in (decay.mid, decay.radius, term.mid, term.radius))
        sizes, reaches = (part.broadcast_to(shape) for part in (term.magnitude, term.reach))
        h, most, rad, peak, below = (torch.zeros(shape[:-1], dtype=torch.float64) for _ in range(5))
        lost, beyond = (torch.zeros(shape[:-1], dtype=torch.bool) for _ in range(2))
        reach = torch.zeros(shape[:-1], dtype=torch.float64)
        steps: list[tuple[Tensor, ...]] = []
        more = (math.ceil(math.log2(max(shape[-1], 1))) + 2) * self.u
        tiny = 2 * (self.model.tiny + self.model.underflow(self.model.accumulate.format))
        unit = max(self.u, self.model.accumulate.format.unit_roundoff)
        for t in range(shape[-1]):
            size = a[..., t].abs()
            given = h.isnan() | a[..., t].isnan() | b[..., t].isnan()
            unclear = (a[..., t].isfinite() & ~a_rad[..., t].isfinite()) | (
                b[..., t].isfinite() & ~b_rad[..., t].isfinite()
            )
            before = ~((size + a_rad[..., t]) * (h.abs() + rad) <= self.model.largest) | beyond
            reach = (size + a_rad[..., t]) * reach.clamp(min=1)  # of products of decays, which a scan forms
            unclear |= (b[..., t].isinf() & before) | (h.isinf() & ~(reach <= self.model.largest))
            unclear |= a[..., t].isinf() & (t > 0)  # in a scan it multiplies sums of either sign
            h = a[..., t] * h + b[..., t] if t else b[..., t]
            lost |= (h.isnan() | unclear) & ~given  # NaN perhaps by a decay that overflowed
            h = torch.where(lost & ~given, 0.0, h)
            inherited = (size + a_rad[..., t]) * rad + a_rad[..., t] * most + b_rad[..., t]
            most = size * most + (sizes[..., t] if self.model.regroup else b[..., t].abs())
            rad = inherited + _STEP * unit * (most + inherited) + tiny
            beyond |= (
                ~(torch.maximum(most + rad, reach) <= self.model.largest) & h.isfinite()
            )  # what overflowed stays so
            grown = (size + a_rad[..., t]).clamp(min=1)
            peak = grown * peak + reaches[..., t]
            if t and not self.model.certifies:  # float64's evaluation is the sequence
                below = grown * below + tiny * peak
            own = torch.where(lost, math.inf, rad + below + more * (most + rad))
            steps.append((h, torch.where(h.isfinite(), own, 0.0), beyond.clone(), most + rad, peak))
        if not steps:
            return Ball(b, None, self.model)
        mid, rad, may, mass, peak = (torch.stack(parts, -1) for parts in zip(*steps, strict=True))
        return overflowing(self.model, mid, rad, may).regrouped(rad, mass, peak)

    def solve_unit_lower(self, lower: Ball, right: Ball) -> Ball:
        """Solve in sequence, by blocks, or by inverses of diagonal blocks of any width, themselves computed so.

        With T = I + L and X = T^-1 the computed x' solve (T + dT) x' = b + db, |dT| <= r_L + gamma_n |L| =: E and
        |db| <= r_b + gamma_n |b| (N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., theorem 8.5,
        of any order of the sums). An inverse of a diagonal block D of T has an error of gamma_n |X||D||X| (14.2),
        and its product one of gamma_n |X|, each times |b| + |L||x'|, the bound on a block's right-hand side; these
        errors reach x' through X D. So for the radius e, with G = gamma_n |X| + (1 + gamma_n) gamma_n |X||T||X|,

            e <= |X| (E (|x| + e) + db) + |X||T| G (|b| + |L| (|x| + e)),

        in which every coefficient of e is below the diagonal: one substitution in positive numbers solves it.
        """
        size = right.shape[-2]
        below, off = lower.mid.tril(-1), lower.radius.tril(-1)
        inverse = unit_lower_inverse(below)
        x = torch.linalg.solve_triangular(below, right.mid, upper=False, unitriangular=True)
        one = torch.eye(size, dtype=torch.float64)
        gamma, cut = self.model.gamma(size), self.model.accumulate.cut
        lost = gamma + 2 * cut
        error = off + lost * (below.abs() + off)
        sized = torch.linalg.solve_triangular(one - inverse.abs() @ error, inverse.abs(), upper=False)
        most = below.abs() + off
        block = lost * sized + (1 + lost) * lost * sized @ (one + most) @ sized
        tiny = self.model.underflow(self.model.accumulate.format) * size * (1 + x.abs().amax(-2, keepdim=True))
        given = right.magnitude
        rho, delta = error @ x.abs() + right.radius + lost * given + tiny, block @ (given + most @ x.abs()) + tiny
        through = sized @ (one + most)
        growth = (sized @ error + through @ block @ most).tril(-1)
        rad = torch.linalg.solve_triangular(one - growth, sized @ rho + through @ delta, upper=False)
        unknown = ~(x.isfinite() & rad.isfinite())
        reach = torch.maximum(most @ (x.abs() + rad) + given, sized.amax(-1, keepdim=True))
        overflow = ~(reach.nan_to_num(nan=math.inf).cummax(-2).values <= self.model.largest)  # rows below take it in
        regular = right.mid.isfinite().all(-2, keepdim=True) & below.isfinite().all((-1, -2))[..., None, None]
        mid = torch.where(unknown & regular, 0.0, x)
        strange = unknown & ~regular & ~x.isnan()  # infinities that meet by turns
        return overflowing(self.model, mid, torch.where(unknown, math.inf, rad), overflow & x.isfinite(), strange)

    def where_above(self, x: Ball, bound: float, y: Ball, z: Ball | float) -> Ball:
        """Return y where x > bound, else z; unspecified where the bound is inside x's ball."""
        chosen = self.where(x.mid > bound, y, z)
        unsure = (((x.mid - bound).abs() <= x.radius) & (x.radius > 0)) | x.mid.isnan()
        return Ball(torch.where(unsure, 0.0, chosen.mid), torch.where(unsure, math.inf, chosen.radius), self.model)

    def delta_rule(
        self, q: Ball, k: Ball, v: Ball, factor: Ball | float, decays: Ball, decay: Ball, beta: Ball
    ) -> Ball:
        """Return the delta rule with a bound that grows with powers of the length, not exponentially.

        With L_ts = beta_t d_ts k_t.k_s below the diagonal, P_ts = d_ts scale q_t.k_s up to it, X = (I + L)^-1 and
        Z = P X the exact results are u = X beta v and o = P u. The u' of any kernel solve
        (I + L) u' = beta v + rho, except for errors delta of the inverse of a block, of any width, and of its product,
        which reach u' directly: e = u' - u = X rho + W delta and o' - o = Z rho + Y delta + sigma, with W = X D and
        Y = Z D, D the diagonal blocks of I + L. Diagonal blocks of X are the inverses of those of I + L (N. J. Higham,
        *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 8.1 and 14.2; S. Yang et al., *Parallelizing linear
        transformers with the delta rule over sequence length*, 2024, for the chunks).

        - rho: each product beta d k k of L, or of the state that represents it, has an error E relative to |k|^T |k|
          (sums over D and over positions, factors rounded on either side, as "updates" too, decays as one exponential
          or as a product of one per step), and the rounding of u' as "updates": E (|u| + |e|). The state S rounded as
          "state" before a product, and keys times decays as "updates": beta |k|^T (|S| + sum d |k| |e|).
        - delta: substitution for an inverse loses gamma_n |X||I + L||X|; rounding it as "inverse", and its other factor
          and its product as "updates", loses their unit roundoffs times |X| (beta |v| + beta |k|^T (|S| + ...)).
        - sigma: the same as rho for q and P; scores times decays may be rounded as "scores".

        So e <= c + N e with N strictly below the diagonal: one substitution in positive numbers gives the bound. Since
        the errors of a position are multiplied by the true X, which decays, and not by a product of magnitudes, the
        bound grows in float32 as about the cube of the length; one carried from position to position doubles with each.

        Of sequences longer than a chunk of w positions (`RoundingModel`) errors of pairs count only where t - s < w.
        What is further behind is read from the state S', of which a kernel keeps S'_e = d S'_c + sum d k u' + alpha at
        the end e of each chunk from c (`_CarriedState`); u' is the update as written there, its rounding part of rho.
        S' - S follows S's own recurrence, Phi_t = exp(g_t) (I - beta_t k_t k_t^T), with alpha and k rho as terms: alpha
        changes o by q_t Phi_t ... Phi_(e+1) alpha, and u by beta_t k_t of the same before t, as far as S remembers it.
        """
        if self.model.certifies:
            return super().delta_rule(q, k, v, factor, decays, decay, beta)
        length, width = k.shape[-2:]
        if not length:
            return v
        special = ~q.mid.isfinite()
        if bool(special.any()):  # a NaN query makes its own position NaN; infinities cancel in some orders only
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
        window = min(length, model.chunk)
        lost = model.gamma(width + window + 2) + _FOLDED * u + 2 * cut
        seen = torch.ones(length, length, dtype=torch.float64).tril()
        strict, near = seen.tril(-1), seen.triu(1 - window)
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

        carried = None
        if window < length:
            carried = _CarriedState.of(self, q, k, factor, decay, beta, u_, window, updates + 2 * cut)
            off_d = torch.where(carried.is_regular, torch.fmin(off_d, d * torch.expm1(carried.decay_error)), off_d)

        d = d + off_d
        pairs, reads = size_k @ size_k.mT, size_q @ size_k.mT
        most, most_read = strict * size_b * d * pairs, seen * d * reads
        written = (lost + updates) * pairs + updates * keys.mid.abs() + (1 + updates) * keys.radius
        error = size_b * (d * written + off_d * pairs) + beta.radius[..., None] * d * pairs
        error = near * strict * error
        read_size = near * d * (scores.mid.abs() + scores.radius)
        read_error = near * (d * (lost * reads + scores.radius) + off_d * reads + updates * strict * d * reads)
        read_error = read_error + (max(scored, updates) + updates) * read_size
        state = torch.as_tensor(math.expm1(stored + updates + lost))

        one = torch.eye(length, dtype=torch.float64)
        sized = near * torch.linalg.solve_triangular(one - inverse.abs() @ error, inverse.abs(), upper=False)
        direct, whole = math.expm1(2 * updates + lost) * (1 + stored), one + near * lower.abs() + error
        block = (1 + direct) * (inverted * (sized - one) + (model.gamma(window) + 2 * cut) * sized @ whole @ sized)
        block = near * (block + direct * sized)
        given = size_b * size_v
        right = (self.u + lost) * given + b.abs() * v.radius + beta.radius[..., None] * (size_v + reached)
        per_rho = error
        if carried is not None:
            state = torch.expm1(stored + updates + lost + carried.decay_error)
            reached, reaching = reached + carried.off_keys, reaching + carried.off_queries
            right = right + updates * u_.abs() + size_b * carried.moved_keys
            per_rho = per_rho + updates * one + size_b * state * carried.per_keys
        reached = size_b * reached
        across, across_read = _carried(inverse, lower, window), _carried(read_inverse, lower, window)
        formats = {model.compute, model.accumulate.format, *model.stages.values()}
        least = 8 * max(model.underflow(format) for format in formats)  # error of one operation in any of the formats
        least = least + (0.0 if carried is None else float(carried.faint_error))
        tiny = least * (length + width) * _largest(size_q + size_k, d) * _largest(given + reached, reaching, u_)

        rho, per_rho = right + error @ u_.abs() + state * reached + tiny, per_rho + state * most
        delta, per_delta = block @ (given + reached) + tiny, block @ most
        growth = inverse.abs() @ per_rho + across @ per_delta
        start = inverse.abs() @ rho + across @ delta
        if carried is not None:
            growth, start = growth + size_b * carried.per_updates, start + size_b * carried.of_updates
        off = torch.linalg.solve_triangular(one - growth.tril(), start, upper=False)
        rad = read_inverse.abs() @ (rho + per_rho @ off) + across_read @ (delta + per_delta @ off)
        rad = rad + read_error @ (u_.abs() + off) + state * (reaching + most_read @ off) + 3 * u * out.abs() + tiny
        if carried is not None:
            rad = rad + carried.of_outputs + carried.per_outputs @ off + carried.moved_queries
            held = held + carried.held
        held = held + (size_k.amax(-1, keepdim=True).amax(-2, keepdim=True) * off).sum(-2, keepdim=True)
        unscaled = self.matmul(q, self.swap(k))  # where the scale comes last
        unscaled_read = seen * d * (q.magnitude @ size_k.mT)
        sizes = (
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
        # Unspecified in a head's columns where a size may overflow, also when stored.
        beyond = ~rad.isfinite().all(-2, keepdim=True)
        for stage, size in sizes:
            limit = min(model.largest, model.stages[stage].largest if stage in model.stages else math.inf)
            beyond = beyond | ~(size <= limit).all(-2, keepdim=True)
        brief = length * length * width * window <= _PROBABLE
        if model.chance is not None and model.chance.deviations and model.stages and brief:
            rad = torch.fmin(rad, self._probable_delta(q, k, v, factor, decays, decay, beta))
        return self.ball(torch.where(beyond, 0.0, out), torch.where(beyond, math.inf, rad))

    def _probable_delta(
        self, q: Ball, k: Ball, v: Ball, factor: Ball | float, decays: Ball, decay: Ball, beta: Ball
    ) -> Tensor:
        """Return the delta rule's probable radius: stages' roundings add up as independent errors (`_delta_variance`).

        Everything else is as in the worst case without these stages.
        """
        model, chance = self.model, self.model.chance
        assert chance is not None
        plain = copy(self)
        plain.model = replace(model, stages={})
        normalized = model.stages["normalized"].unit_roundoff if "normalized" in model.stages else 0.0
        rest_q, rest_k = (Ball(x.mid, (x.radius - normalized * x.mid.abs()).clamp(min=0), plain.model) for x in (q, k))
        rest = plain.delta_rule(rest_q, rest_k, Ball(v.mid, v.rad, plain.model), factor, decays, decay, beta)
        parts = (q.mid * q.as_ball(factor).mid, k.mid, v.mid, decays.mid.tril(), decay.mid, beta.mid)
        shape = v.shape[:-2]
        tensors = [part.expand(*shape, *part.shape[len(shape) :]).flatten(0, len(shape) - 1) for part in parts]
        units = {name: format.unit_roundoff**2 for name, format in model.stages.items()}
        by_head = zip(*tensors, strict=True)
        window = min(v.shape[-2], model.chunk)
        heads = [_delta_variance(a, b, c, d, e, f, units, window) for a, b, c, d, e, f in by_head]
        return rest.radius + chance.deviations * torch.sqrt(torch.stack(heads).reshape(rest.shape) / 3)

    def _decays(self, decays: Ball, decay: Ball) -> tuple[Tensor, Tensor]:
        """Return exp of sums of gates, zero ahead, and their errors, for one exponential or a product of one per
        step."""
        length = decay.shape[-1]
        d, off = decays.mid.tril(), decays.radius.tril()
        steps = self.recurrence(decay[..., None, :], self.exact(torch.eye(length, dtype=torch.float64)))
        further = _FACTORS * (self.model.function_error("exp") + 2 * self.u)
        product = steps.radius.mT.tril() + further * d
        return d, off + product * (1 + torch.where(d > _FAINT, off / d, 1.0))

    def _states(self, q: Tensor, k: Tensor, size_k: Tensor, u: Tensor, decay: Ball) -> tuple[Tensor, Tensor, Tensor]:
        """Return |k_t|^T |S| and |q_t|^T |S|, S the state at any position before t, decayed to t; and the largest
        |S|."""
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


@dataclass(frozen=True)
class _CarriedState:
    """What roundings of the state that is carried over from chunk to chunk may change, by position (see `delta_rule`).

    ``of_updates`` [..., T, Dv] and ``per_updates`` [..., T, T] bound the changes of u over beta, the latter for errors
    of earlier updates; ``of_outputs`` and ``per_outputs`` those of o. The state may be off by A: ``off_keys`` and
    ``off_queries`` bound |k_t| A and |q_t| A, ``per_keys`` the former for errors of updates, ``held`` A itself.
    ``moved_keys`` and ``moved_queries``: what the radii of k and q change of their reads of the state.
    ``decay_error``: relative, of a decay between positions of one chunk [..., T, 1], where it ``is_regular``; elsewhere
    a step's decay is below `_FAINT`, with an error of at most ``faint_error``.
    """

    of_updates: Tensor
    per_updates: Tensor
    of_outputs: Tensor
    per_outputs: Tensor
    off_keys: Tensor
    off_queries: Tensor
    per_keys: Tensor
    held: Tensor
    moved_keys: Tensor
    moved_queries: Tensor
    decay_error: Tensor
    is_regular: Tensor
    faint_error: Tensor

    @staticmethod
    def of(
        xp: SequenceBalls,
        q: Ball,
        k: Ball,
        factor: Ball | float,
        decay: Ball,
        beta: Ball,
        u: Tensor,
        window: int,
        written: float,
    ) -> _CarriedState:
        """Return it for chunks of at most ``window`` positions, keys times decays or updates rounded by ``written``.

        A chunk of m positions from c to e leaves |alpha_e| <= (gamma_(m+2) + x + y_m) M_e(c) + written sum d |k| |u'|,
        where M_e(c) = d |S'_c| + sum d |k| |u'| over its positions, x is what the factors and the decay's exponential
        are off by, and y_m what the decay's exponent is. gamma_(m+2) <= (m + 2) h with h the larger of gamma_1 and
        gamma_(w+2) / (w + 2); y_m is a sum over its positions too. So alpha_e is at most a sum over the chunk's
        positions s of

            i_s = (h + y_s) M + (2 h + x) M_1 + (written |k_s| + r_s) d |u'_s|,

        with r the radii of k, M the largest M_e over the ends s <= e < s + w of windows of w, and M_1 the largest of d
        |S| + |k_e| |u_e|, since m positions share (2 h + x) M_e(c), and M_e(c) / m <= M_1. All are 2-norms over the
        width. Each i_s is read from the end e at which that counts most. A is at most the sum of all i before, and i
        grows with it and with errors of u: with a = sum (3 h + x + y), by 1 / (1 - a) in all.
        """
        model, unit = xp.model, xp.u
        length = k.shape[-2]
        size_k = k.magnitude.norm(dim=-1, keepdim=True)
        rad_k, scale = k.radius.norm(dim=-1, keepdim=True), q.as_ball(factor)
        scaled, size_q = q.mid * scale.mid, (q.magnitude * scale.magnitude).norm(dim=-1, keepdim=True)
        rad_q = (q.radius * scale.magnitude + q.magnitude * scale.radius).norm(dim=-1, keepdim=True)
        b, steps = beta.mid[..., None], decay.mid[..., None]
        states, level = [], torch.zeros(*u.shape[:-2], k.shape[-1], u.shape[-1], dtype=torch.float64)
        for t in range(length):
            level = steps[..., t, :, None] * level + k.mid[..., t, :, None] * u[..., t, None, :]
            states.append(level.norm(dim=-2))

        # The reads of the state behind each position, of outputs and of updates: [..., 2 T, D], the last first.
        reads = torch.zeros(*u.shape[:-2], 2 * length, k.shape[-1], dtype=torch.float64)
        norms = []
        for e in range(length - 1, -1, -1):
            reads[..., e, :] = scaled[..., e, :]
            norms.append(reads.norm(dim=-1))
            key = k.mid[..., e, None, :]
            along = (reads * key).sum(-1, keepdim=True)
            reads = steps[..., e, None, :] * (reads - b[..., e, None, :] * along * key)
            reads[..., length + e, :] = steps[..., e, :] * k.mid[..., e, :]
        latest = _latest(torch.stack(norms[::-1], -1), window, -1)
        by_outputs, by_updates = latest[..., :length, :], latest[..., length:, :]

        regular = decay.mid > _FAINT
        relative = torch.where(regular, decay.radius / decay.mid, 0.0)[..., None]
        faint = torch.where(regular, 0.0, decay.radius)[..., None]
        exponents = decay.mid.clamp(min=_FAINT).log().abs()[..., None]
        once = _FACTORS * (model.function_error("exp") + 2 * unit)
        each = 2 * model.gamma(window + 1) * exponents + relative + unit
        decay_error = once + _window_sums(each, window) + 2 * model.gamma(window + 1) * _window_sums(exponents, window)
        most = steps.abs().clamp(min=1.0).log().sum(-2, keepdim=True).exp()  # the largest decay, one where all shrink

        held = torch.stack(states, -2)
        peaks = []
        peak, term = torch.zeros_like(held[..., 0, :]), size_k * u.abs()
        for t in range(length):
            peaks.append(peak := torch.maximum(steps[..., t, :] * peak, held[..., t, :]))
        before = torch.stack(peaks, -2)
        decayed = torch.cat([torch.zeros_like(before[..., :1, :]), before[..., :-1, :]], -2) * steps
        sums = [decayed + _decayed_window(term, decay.mid, window), decayed + term]
        whole, single = (_latest(x, window, -2) for x in sums)
        high = max(model.gamma(1), model.gamma(window + 2) / (window + 2))
        of_term = 2 * high + _FOLDED * unit + once
        own = most * (written * size_k + rad_k)
        every = high + each + of_term
        growth = most * every.sum(-2, keepdim=True)
        by = torch.where(growth < 0.5, 1 / (1 - growth), math.inf)
        given = (high + each) * whole + of_term * single + own * u.abs()
        given = given + faint * torch.cat([torch.zeros_like(before[..., :1, :]), before[..., :-1, :]], -2)
        given = given + every * most * given.sum(-2, keepdim=True) * by
        off = most * given.cumsum(-2)
        strict = torch.ones(length, length, dtype=torch.float64).tril(-1)
        shared = (most * by * size_k).mT  # what an error of u changes of all later sums
        per_state = (most * every.sum(-2, keepdim=True) + 0 * size_k) * shared + most * own.mT

        def of_errors(read: Tensor) -> Tensor:
            return strict * (read @ every) * shared + read * own.mT

        return _CarriedState(
            by_updates @ given,
            of_errors(by_updates),
            by_outputs @ given,
            of_errors(by_outputs),
            size_k * off,
            size_q * off,
            strict * size_k * per_state,
            off.amax(-2, keepdim=True),
            rad_k * decayed,
            rad_q * torch.maximum(before, decayed),
            decay_error,
            _window_sums((~regular).double()[..., None], window) == 0,
            faint.amax(),
        )


def _latest(x: Tensor, window: int, axis: int) -> Tensor:
    """Return the largest of each number and the ``window`` - 1 behind it along an axis, none of which is negative."""
    x = x.transpose(axis, -1)
    padded = torch.nn.functional.pad(x, (0, window - 1))
    return torch.nn.functional.max_pool1d(padded.flatten(0, -2), window, 1).reshape(x.shape).transpose(axis, -1)


def _window_sums(x: Tensor, window: int) -> Tensor:
    """Return the sum of each and the ``window`` - 1 before it, along the last axis but one."""
    return _decayed_window(x, torch.ones_like(x[..., 0]), window)


def _decayed_window(x: Tensor, decay: Tensor, window: int) -> Tensor:
    """Return sum d_ts x_s over the last ``window`` positions up to t, d the product of decays [..., T]; x [..., T,
    n]."""
    total, moved, factor = x, x, torch.ones_like(decay)[..., None]
    for _ in range(window - 1):
        factor = decay[..., None] * torch.cat([torch.zeros_like(factor[..., :1, :]), factor[..., :-1, :]], -2)
        moved = torch.cat([torch.zeros_like(moved[..., :1, :]), moved[..., :-1, :]], -2)
        total = total + factor * moved
    return total


def _delta_variance(
    q: Tensor, k: Tensor, v: Tensor, d: Tensor, g: Tensor, beta: Tensor, units: Mapping[str, float], window: int
) -> Tensor:
    """Return the sum V of the squares of what roundings of stages change in a head's outputs [T, Dv], to first order.

    q, k [T, D]; v [T, Dv]; decays d_es [T, T] from s to e; decays g and beta of each position [T]; the squared unit
    roundoffs of stages; the most positions of a chunk. Each rounding is uniform within its unit roundoff times its
    number, so that |o' - o| <= lambda sqrt(V / 3) with the probability of `Chance` (Hoeffding's bound for uniform
    errors).

    A change e of the state S_c behind position c changes o_t by R_tc e, where R_tt = q_t and R_t(c-1) = g_c (R_tc -
    beta_c (R_tc k_c) k_c): what the updates between leave of a read, never longer than q if keys have length one; K_tc
    is the same of the read by k_t. A kernel's chunk from c to e reads S_c for positions up to e; then the change is by
    R_tc - d_ec R_te, as the state itself goes on unrounded. An error e of u_s changes o_t by Y_ts e, Y_ts = R_ts k_s,
    before a chunk's solution, and after it by P_ts e in its own chunk, by d_es R_te k_s e behind it: by Z_ts at most.
    With c and e those of the chunks for which each is largest, V adds up:

    - "state": (R_tc - d_ec R_te)^2 S_c^2 of all chunks (by dynamic programming over their ends).
    - "normalized": q^2 S_t^2; k_s in its read and its write, 2 (R^2 k^2 u^2 + Y^2 beta^2 k^2 S^2).
    - "updates": q and k as they read the state and within the chunk, x^2 ((d S_c)^2 + (S - d S_c)^2); keys as they are
      written and read in the chunk, ((R_ts - d R_te)^2 + (d R_te)^2) k^2 u^2; beta v, Y^2 (beta v)^2; and, times Z^2,
      u^2; what the inverse makes of values, (u + beta K S_c)^2, and of keys, beta^2 K^2 S_c^2, and the product of the
      latter, (beta K S_c)^2.
    - "inverse", and partial ones: 2 Z^2 X^2 (beta (v - K S_c))^2; "scores", or their factors: P^2 u^2.
    """
    state, normalized, updates, inverse, scores = (
        units.get(name, 0.0) for name in ("state", "normalized", "updates", "inverse", "scores")
    )
    length, width = k.shape
    strict = torch.ones(length, length, dtype=torch.float64).tril(-1)
    near = torch.ones_like(strict).triu(1 - window)  # what may be in one chunk
    solved = unit_lower_inverse(strict * beta[:, None] * (k @ k.mT) * d)
    u = solved @ (beta[:, None] * v)
    s, states = torch.zeros(width, v.shape[1], dtype=torch.float64), []
    for t in range(length):
        s = g[t] * s + k[t, :, None] * u[t]
        states.append(s)
    after = torch.stack([torch.zeros_like(s), *states])  # S before the first position, and behind each [T + 1, D, Dv]
    ahead = torch.cat([d[:, :1] * g[:1], d], 1)  # decays from there [T, T + 1]

    # Reads of each S_c, one row for each output, and one for each position's own update.
    reads = torch.zeros(length + 1, 2 * length, width, dtype=torch.float64)
    left = reads[0]
    for c in range(length - 1, -1, -1):
        left = left.clone()
        left[c] = q[c]
        reads[c + 1] = left
        left[length + c] = 0.0
        left = g[c] * (left - beta[c] * (left @ k[c])[:, None] * k[c])
        left[length + c] = g[c] * k[c]
    reads[0] = left
    of_outputs, of_updates = reads[:, :length], reads[:, length:]
    b, largest = beta[:, None], torch.zeros_like(u)
    of_keys, of_solved, of_held, right = (torch.zeros_like(u) for _ in range(4))
    for c in range(length):
        part = slice(c, c + window)  # a chunk that begins at the position c
        held = of_updates[c, part] @ after[c]  # K S_c
        for sizes, seen in (
            (of_keys, b[part] ** 2 * (of_updates[c, part] ** 2 @ after[c] ** 2)),
            (of_solved, (u[part] + b[part] * held) ** 2),
            (of_held, (b[part] * held) ** 2),
            (right, (b[part] * (v[part] - held)) ** 2),
        ):
            sizes[part] = torch.maximum(sizes[part], seen)
    of_values = of_solved + of_held

    into = torch.einsum("ctd,cd->tc", of_outputs[1:], k)  # Y [T, T]
    pairs = near * (q @ k.mT) * d
    further = pairs.abs()
    variance, after_chunks = torch.zeros_like(u), [torch.zeros_like(u) for _ in range(length + 1)]
    for c in range(length, -1, -1):
        # A chunk that begins at the position c (from 0) takes in the output, or ends before a later one.
        rest = (of_outputs[c] ** 2) @ after[c] ** 2
        if c < length:
            ends = slice(c + 1, c + 1 + window)
            later = of_outputs[ends, c:] * ahead[c : c + window, c, None, None]
            pieces = (of_outputs[c, c:] - later) ** 2 @ after[c] ** 2
            behind = pieces + torch.stack(after_chunks[ends])[:, c:]
            rest[c:] = torch.maximum(rest[c:], behind.amax(0))
        after_chunks[c] = rest
        largest = torch.maximum(largest, rest)
    variance = state * largest
    for t in range(length):
        first = max(0, t + 1 - window)
        early = ahead[t, first : t + 2, None, None] * after[first : t + 2]  # S_c decayed to t, c up to t
        early[-1] = after[t + 1]
        two = early**2 + (after[t + 1] - early) ** 2
        variance[t] += (q[t] ** 2 @ two).amax(0) * updates + normalized * (q[t] ** 2 @ after[t + 1] ** 2)
        before = early[:-1]
        two = before**2 + (g[t] * after[t] - before) ** 2
        by_key = (k[t] ** 2 @ two).amax(0) * updates + 2 * normalized * (k[t] ** 2 @ (g[t] * after[t]) ** 2)
        variance += into[:, t, None] ** 2 * (beta[t] ** 2 * by_key)
        here, later = of_outputs[t + 1], of_outputs[t + 1 : t + 1 + window] * d[t : t + window, t, None, None]
        further[:, t] = torch.maximum(further[:, t], (later @ k[t]).abs().amax(0))
        written = (((here - later) ** 2 + later**2) @ k[t] ** 2).amax(0)
        variance += (updates * written + 2 * normalized * (here**2 @ k[t] ** 2))[:, None] * u[t] ** 2
    moved = updates * (u**2 + of_values + of_keys) + 2 * inverse * (solved * strict * near) ** 2 @ right
    variance = variance + further**2 @ moved + into**2 @ (updates * (b * v) ** 2)
    return variance + max(scores, updates) * pairs**2 @ u**2


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Return (I + ``lower``)^-1 [..., n, n]; only the part below the diagonal is read."""
    one = torch.eye(lower.shape[-1], dtype=torch.float64)
    return torch.linalg.solve_triangular(lower, one.expand(lower.shape), upper=False, unitriangular=True)


def _largest(*sizes: Tensor) -> Tensor:
    """Return one more than the largest element of a head, [..., 1, 1]."""
    return 1 + torch.stack([size.amax((-1, -2), keepdim=True) for size in sizes]).amax(0)


def _carried(x: Tensor, lower: Tensor, window: int) -> Tensor:
    """Return a bound on |x D|, D any diagonal blocks of I + ``lower``, so wide at most: the largest partial sums of the
    products."""
    length = lower.shape[-1]
    whole = lower + torch.eye(length, dtype=torch.float64)
    if window < length:
        total, largest = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(window):  # a block's last row is so far below the column
            below = whole.diagonal(-step, -2, -1)[..., None, :]
            total[..., : length - step] += x[..., step:] * below
            largest = torch.maximum(largest, total.abs())
        return largest
    if length > _LONG:
        return x.abs() @ whole.abs()
    return torch.stack([(x[..., t, :, None] * whole).cumsum(-2).abs().amax(-2) for t in range(length)], -2)
