"""Scans and comparisons of balls: running sums, linear recurrences, and choices that hang on a number's side."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from assay.formats.accumulator import Accumulator
from assay.golden.arithmetic.ball import Ball, lowest_bit
from assay.golden.arithmetic.ball_arithmetic import ElementaryBalls
from assay.golden.arithmetic.chance import Chance
from assay.golden.arithmetic.model import RoundingModel

Tensor = torch.Tensor

_STEP = 3.0  # u a step: a product, a sum, and one more sum where a scan adds in another order


@lru_cache(128)
def _gammas(accumulate: Accumulator, chance: Chance | None, count: int, late: int) -> tuple[float, ...]:
    """gamma of one term, of two, and so on, or of one less."""
    model = RoundingModel(accumulate.format, accumulate, chance=chance)
    return tuple(model.gamma(max(terms - late, 0)) for terms in range(1, count + 1))


class ScanBalls(ElementaryBalls):
    """Ball arithmetic with running sums and recurrences."""

    def cumsum(self, x: Ball) -> Ball:
        """Each running sum as `sum` has it: gamma_(n-1) of its own n terms' magnitudes, in any order.

        An order that subtracts from a longer sum what comes behind is none of these.
        """
        count, late = x.shape[-1], int(self.model.accumulate.format.unit_roundoff <= self.u)
        lost = x.mid.new_tensor(_gammas(self.model.accumulate, self.model.chance, count, late))
        rounding = self.model.sum_rounding(count)
        mid, magnitude = x.mid.cumsum(-1), x.magnitude.cumsum(-1)
        rad = lost * rounding * magnitude
        if x.rad is not None:
            overflow = (magnitude > self.model.largest) & torch.isfinite(mid)
            return self.ball(mid, torch.where(overflow, math.inf, rad + rounding * x.rad.cumsum(-1)))
        return self._summed(mid, rad, magnitude, lowest_bit(x.mid).cummin(-1).values if count else mid)

    def recurrence(self, decay: Ball, term: Ball) -> Ball:
        """In sequence, or as a scan of pairs (a, b), (a', b') -> (a a', a' b + b') in any tree.

        h_t is the sum of b_s times all decays from s + 1 to t, and M_t the sum of their magnitudes. A tree rounds the
        product of a term and its decays as often as the sequence does, once a factor, and adds it in at most as many
        sums as it has steps behind it, and log2 n more (a scan by doubling adds the last term that often). So with r
        the radii of decays and terms R_t = (|a| + r_a) R_(t-1) + r_a M_(t-1) + r_b + 3 u M_t, and the radius of h_t is
        R_t + (log2 n + 2) u M_t.
        """
        shape = (decay.mid[..., :0] + term.mid[..., :0]).shape[:-1] + term.mid.shape[-1:]
        a, a_rad, b, b_rad = (part.broadcast_to(shape) for part in (decay.mid, decay.radius, term.mid, term.radius))
        h, most, rad = (torch.zeros(shape[:-1], dtype=torch.float64) for _ in range(3))
        lost = torch.zeros(shape[:-1], dtype=torch.bool)
        found: list[tuple[Tensor, Tensor]] = []
        more = (math.ceil(math.log2(max(shape[-1], 1))) + 2) * self.u
        tiny = 2 * (self.model.tiny + self.model.underflow(self.model.accumulate.format))
        unit = max(self.u, self.model.accumulate.format.unit_roundoff)
        for t in range(shape[-1]):
            size = a[..., t].abs()
            given = h.isnan() | a[..., t].isnan() | b[..., t].isnan()
            h = a[..., t] * h + b[..., t] if t else b[..., t]
            lost |= h.isnan() & ~given  # of a decay that overflowed, perhaps
            h = torch.where(lost, 0.0, h)
            inherited = (size + a_rad[..., t]) * rad + a_rad[..., t] * most + b_rad[..., t]
            most = size * most + b[..., t].abs()
            rad = inherited + _STEP * unit * (most + inherited) + tiny
            own = torch.where(lost | (most > self.model.largest), math.inf, rad + more * (most + rad))
            found.append((h, torch.where(h.isfinite(), own, 0.0)))
        if not found:
            return Ball(b, None, self.model)
        return self.ball(torch.stack([mid for mid, _ in found], -1), torch.stack([part for _, part in found], -1))

    def solve_unit_lower(self, lower: Ball, right: Ball) -> Ball:
        """In sequence, by blocks, or by inverses of diagonal blocks of any width, themselves computed so.

        With T = I + L and X = T^-1 the computed x' solve (T + dT) x' = b + db, |dT| <= r_L + gamma_n |L| =: E and
        |db| <= r_b + gamma_n |b| (N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., theorem 8.5,
        of any order of the sums). An inverse of a diagonal block D of T is off by gamma_n |X||D||X| (there, 14.2), and
        its product by gamma_n |X|, each times |b| + |L||x'|, the bound of what stands on the right of a block; that
        reaches x' through X D. So for the radius e, with G = gamma_n |X| + (1 + gamma_n) gamma_n |X||T||X|,

            e <= |X| (E (|x| + e) + db) + |X||T| G (|b| + |L| (|x| + e)),

        in which no entry that multiplies e stands on the diagonal or above: one substitution in positive numbers.
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
        overflow = (most @ (x.abs() + rad) + given) > self.model.largest
        hidden = unknown & right.mid.isfinite().all(-2, keepdim=True) & below.isfinite().all((-1, -2))[..., None, None]
        return self.ball(torch.where(hidden, 0.0, x), torch.where(unknown | overflow, math.inf, rad))

    def where_above(self, x: Ball, bound: float, y: Ball, z: Ball | float) -> Ball:
        """Nothing is said where the bound lies within x's ball, nor what is right there."""
        chosen = self.where(x.mid > bound, y, z)
        unsure = (((x.mid - bound).abs() <= x.radius) & (x.radius > 0)) | x.mid.isnan()
        return Ball(torch.where(unsure, 0.0, chosen.mid), torch.where(unsure, math.inf, chosen.radius), self.model)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + ``lower``)^-1 [..., n, n], of what lies below the diagonal."""
    one = torch.eye(lower.shape[-1], dtype=torch.float64)
    return torch.linalg.solve_triangular(lower, one.expand(lower.shape), upper=False, unitriangular=True)
