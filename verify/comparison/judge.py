"""Judging an output: each element against the golden and the contract's radius.

Let g be the golden with radius r, and B the contract's radius: every kernel that keeps the contract computes, before
its store, a number within B of the exact result, and then rounds it once to the output format. Rounding is monotone,
so the output y is in [round(exact - B), round(exact + B)]. The exact result being known to r, three outcomes are
possible, as in Ziv's test: y is in the interval for B - r (kept), outside of that for B + r (proved broken), or
between (unresolved).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from assay.formats.format import Format
from assay.formats.rounding import Overflow, round_to, ulp_towards
from assay.golden.arithmetic.model import ENDS_OF_ROUNDING
from assay.golden.evaluation.golden import Golden
from assay.verify.contract import Contract
from assay.verify.findings import coordinates

Tensor = torch.Tensor


@dataclass(frozen=True)
class Ends:
    """The ends of the interval that a contract allows, as stored numbers.

    ``low`` and ``high`` are the least and the largest output that isn't certainly forbidden, ``sure_low`` and
    ``sure_high`` those that are certainly allowed.
    """

    low: Tensor
    high: Tensor
    sure_low: Tensor
    sure_high: Tensor
    may_be_nan: Tensor


@dataclass(frozen=True)
class Tolerance:
    """The outputs that a contract allows.

    ``judged`` marks the elements that it restricts. ``pre_store_radius`` is the radius before the store, which includes
    the golden's uncertainty ``golden_radius`` once. Where ``no_number``, NaN and infinities are allowed besides the
    interval, and so are numbers of the ball ``overflow_interval`` (NaN: no ball): those that follow from an overflow on
    the way. ``definition_ends`` are the ends if the definition itself rounds.
    """

    golden: Tensor
    judged: Tensor
    pre_store_radius: Tensor
    golden_radius: Tensor
    out: Format
    contract: Contract
    no_number: Tensor
    definition_ends: Ends | None = None
    overflow_interval: Golden | None = None

    @property
    def exact(self) -> Tensor:
        """The elements for which nothing but the stored golden is allowed."""
        return self.pre_store_radius == 0

    @property
    def share(self) -> float:
        """The part of a gap between two numbers of the format that the store may add to the radius."""
        return 0.5 if self.definition_ends is not None or self.contract.rounding in _NEAREST else 1.0

    @cached_property
    def ends(self) -> Ends:
        """The ends of the intervals; computed on demand, since most outputs are well inside."""
        if self.definition_ends is not None:
            return self.definition_ends
        out, contract, value, inner = self.out, self.contract, self.golden, self.pre_store_radius
        low, high, may_be_nan = _interval(value, inner, out, contract)
        sure_low, sure_high, _ = _interval(value, inner - 2 * self.golden_radius, out, contract)
        if contract.subnormals == "flush":
            near = (value.abs() - inner) < out.smallest_normal
            low, sure_low = (torch.where(near, bound.clamp(max=0), bound) for bound in (low, sure_low))
            high, sure_high = (torch.where(near, bound.clamp(min=0), bound) for bound in (high, sure_high))
        return Ends(low, high, sure_low, sure_high, may_be_nan)

    def is_clear(self, distance: Tensor, gap: Tensor) -> bool:
        """Whether every judged element is certainly allowed, by a cheap test that may miss some.

        ``distance`` is |y - golden|, ``gap`` that between y and its neighbour towards the golden. If y is within B - r
        of the golden, the exact result may be y itself; half a gap farther off, y is the nearest to a possible result;
        a whole gap farther off, y is next to one.
        """
        if self.definition_ends is not None:
            return False
        beyond = {"nearest": 0.5, "nearest_away": 0.5, "stochastic": 1.0}.get(self.contract.rounding, 0.0)
        clear = distance < (self.pre_store_radius - 2 * self.golden_radius + beyond * gap) * (1 - _COMPARED)
        clear &= self.golden.abs() + self.pre_store_radius < self.out.largest
        return bool(clear.all()) or bool((clear | ~self.judged).all())


_NEAREST = ("nearest", "nearest_away")
_JUST_BROKEN = 1 + 2.0**-40  # the least ratio of a broken element, whose distance may round to its radius
_COMPARED = 2.0**-40  # more than the float64 roundings of a distance and of what it is compared with


@dataclass(frozen=True)
class Judgement:
    """The judgement of an output, element by element.

    ``ratio`` is |y - golden| / ``radius``: above one if the contract is broken (infinite if y is wrongly NaN or
    infinite), zero if the element isn't judged. The radius is the one before the store plus the store's share of the
    gap between y and its neighbour towards the golden; |y - golden| is within it exactly if the interval allows y.
    """

    ratio: Tensor
    radius: Tensor
    broken: Tensor
    unresolved: Tensor
    tolerance: Tolerance

    @property
    def worst(self) -> float:
        """The largest ratio."""
        return float(self.ratio.max()) if self.ratio.numel() else 0.0

    def worst_index(self) -> tuple[int, ...]:
        """Return the index of the element that breaks the contract worst, the first of equals."""
        score = torch.where(self.broken, self.ratio, -1.0)
        flat = int(score.reshape(-1).argmax())
        return coordinates(flat, score.shape)


def tolerance(
    golden: Golden,
    allowed: Golden,
    out: Format,
    contract: Contract,
    *,
    rounded: bool = False,
    overflow_evaluations: tuple[Golden, Golden] | None = None,
    nan_propagated: Golden | None = None,
    fills: float | None = None,
) -> Tolerance:
    """Return what ``contract`` allows of an output in format ``out``; ``allowed`` is the definition under its model.

    ``rounded``: the definition itself rounds, and its balls hold whole codes. The contract then allows the codes within
    ``allowed`` and within the golden's own ball; none can be unresolved. ``overflow_evaluations``: the evaluations of a
    kernel that could overflow on the way, without and with that overflow. ``nan_propagated``: the evaluation in which
    NaN and infinities of masked or unread elements spread; its radius is infinite there. ``fills``: the infinity that
    the definition itself writes, which is judged like a number.
    """
    value, own, radius = golden.value.double(), golden.radius, allowed.radius
    if not rounded:  # of a choice that rounding leaves open the exact result is one end, and the middle another number
        shift = (allowed.value.double() - value).abs()
        radius = radius + torch.where(shift.isfinite(), shift, 0.0)
    nan_may_spread = torch.zeros_like(value, dtype=torch.bool)
    if nan_propagated is not None:
        nan_may_spread = nan_propagated.radius.isinf() & radius.isfinite() & allowed.value.isfinite()
    if not rounded and _largest(value.abs() + allowed.value.abs() + own + radius) < math.inf:
        everywhere = torch.ones_like(value, dtype=torch.bool)
        return Tolerance(value, everywhere, radius + own, own, out, contract, nan_may_spread)
    value = torch.where(allowed.value.isnan(), math.nan, value)  # where a contract asks for NaN: masked rows
    special = ~torch.isfinite(value)
    no_number, overflow_interval = allowed.value.isnan() & radius.isinf() | nan_may_spread, None
    if overflow_evaluations is not None and not rounded:
        unbounded, infinite = overflow_evaluations
        overflows = radius.isinf() & allowed.value.isfinite() & unbounded.radius.isfinite() & unbounded.value.isfinite()
        overflows &= infinite.radius.isfinite() | ~infinite.value.isfinite()  # else anything may follow from one
        radius, no_number = torch.where(overflows, unbounded.radius, radius), no_number | overflows
        overflow_interval = Golden(torch.where(overflows, infinite.value, math.nan), infinite.radius)
    said = torch.isfinite(radius) | ~torch.isfinite(allowed.value)
    judged = said & ~(special & (value != fills) & (contract.nonfinite == "unspecified"))
    own = torch.where(special | ~judged, 0.0, own)
    radius = torch.where(special | ~said, 0.0, radius)
    if not rounded:
        return Tolerance(
            value, judged, radius + own, own, out, contract, no_number, overflow_interval=overflow_interval
        )
    low, high = _codes(allowed, torch.where(said, radius, 0.0), out)
    own_low, own_high = _codes(golden, own, out)
    low, high = torch.minimum(low, own_low), torch.maximum(high, own_high)
    ends = Ends(low, high, low, high, torch.zeros_like(judged))
    return Tolerance(value, judged, (high - low) / 2, torch.zeros_like(own), out, contract, nan_may_spread, ends)


def _largest(x: Tensor) -> float:
    """Return the largest element, NaN if one is NaN, 0 if there is none."""
    return float(x.max()) if x.numel() else 0.0


def _codes(codes: Golden, radius: Tensor, out: Format) -> tuple[Tensor, Tensor]:
    """Return the least and the largest code in a ball."""
    middle = torch.where(codes.value.isfinite(), codes.value.double(), 0.0)
    radius = torch.where(radius.isfinite(), radius, 0.0)
    return round_to(middle - radius, out, overflow="saturate"), round_to(middle + radius, out, overflow="saturate")


def _interval(value: Tensor, radius: Tensor, out: Format, contract: Contract) -> tuple[Tensor, Tensor, Tensor]:
    """Return the stored ends of value +- radius, and the elements at which the contract turns an overflow into NaN.

    If one end overflows, the largest number replaces it; if both do, no number is left (two NaN).
    """
    down, up = ENDS_OF_ROUNDING[contract.rounding]
    overflow = cast(Overflow, contract.overflow)
    least, most = value - radius, value + radius
    low, high = round_to(least, out, down, overflow), round_to(most, out, up, overflow)
    may_be_nan = (low.isnan() | high.isnan()) & ~value.isnan()
    too_low, too_high = low.isnan() & (least < 0), high.isnan() & (most > 0)
    low = torch.where(too_low & ~(high.isnan() & (most < 0)), -out.largest, low)
    high = torch.where(too_high & ~(low.isnan() & (least > 0)), out.largest, high)
    return low, high, may_be_nan


def judge(got: Tensor, allowed: Tolerance) -> Judgement:
    """Judge each element of ``got`` (any dtype)."""
    y, golden = got.detach().cpu().double(), allowed.golden
    distance = (y - golden).abs()
    gap = ulp_towards(y, golden, allowed.out)
    radius = allowed.pre_store_radius + allowed.share * gap
    if allowed.is_clear(distance, gap):
        nowhere = torch.zeros_like(allowed.judged)
        return Judgement(torch.where(allowed.judged, distance / radius, 0.0), radius, nowhere, nowhere, allowed)
    ends, nan = allowed.ends, y.isnan()
    allowed_beside = y.isinf() & allowed.no_number
    if allowed.overflow_interval is not None:
        low, high, _ = _interval(
            allowed.overflow_interval.value, allowed.overflow_interval.radius, allowed.out, allowed.contract
        )
        followed = allowed.overflow_interval.value
        allowed_beside &= ~(followed.isinf() & (followed.sign() == golden.sign()) & (y == -followed))
        allowed_beside |= (y >= low) & (y <= high)
    may_be_nan = golden.isnan() | ends.may_be_nan | allowed.no_number
    passes = torch.where(nan, may_be_nan, (y >= ends.low) & (y <= ends.high) | allowed_beside)
    broken = ~passes & allowed.judged
    surely = torch.where(nan | allowed_beside, passes, (y >= ends.sure_low) & (y <= ends.sure_high))
    unresolved = ~broken & ~surely & allowed.judged
    ratio = distance / radius
    ratio = torch.where(y == golden, 0.0, torch.where(passes, ratio.clamp(max=1), ratio.clamp(min=_JUST_BROKEN)))
    regular = torch.isfinite(y) & torch.isfinite(golden) & ~ratio.isnan()
    ratio = torch.where(regular, ratio, torch.where(passes, 0.0, math.inf))
    return Judgement(torch.where(allowed.judged, ratio, 0.0), radius, broken, unresolved, allowed)
