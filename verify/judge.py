"""Judging an output: each element against the golden and the contract's radius.

Let g be the golden with radius r, and B the contract's radius: every kernel that keeps the contract computes, before
its store, a number within B of the exact result, and then rounds it once to the output format. Rounding is monotone,
so the output y lies in [round(exact - B), round(exact + B)]. The exact result being known to r, three outcomes are
possible, as in Ziv's test: y lies in the interval for B - r (kept), outside of that for B + r (proved broken), or
between (unresolved).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch

from assay.golden.run import Golden
from assay.precision.formats import Format
from assay.precision.rounding import Mode, Overflow, next_down, next_up, round_to
from assay.verify.contract import Contract

Tensor = torch.Tensor


@dataclass(frozen=True)
class Tolerance:
    """What a contract allows of one output.

    ``low`` and ``high`` are the least and the largest output that it certainly does not forbid, ``sure_low`` and
    ``sure_high`` those that it certainly allows; ``judged`` is where it says anything; ``exact`` where it leaves no
    freedom before the store. ``inner`` is the radius before the store, and ``share`` of a gap between two numbers of
    format ``out`` what the store may add to it (a half where it rounds to nearest).
    """

    golden: Tensor
    low: Tensor
    high: Tensor
    sure_low: Tensor
    sure_high: Tensor
    judged: Tensor
    exact: Tensor
    may_be_nan: Tensor
    inner: Tensor
    out: Format
    share: float


@dataclass(frozen=True)
class Judgement:
    """An output's verdict, element by element.

    ``ratio`` is |y - golden| / ``radius``: above one where the contract is broken (infinite where y is NaN or
    infinite and shouldn't be), zero where it isn't judged. The radius is the one before the store and the store's
    share of the gap between y and its neighbour towards the golden; y lies within it just where the interval allows y.
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
        """Where the contract is broken worst, the first of equals."""
        score = torch.where(self.broken, self.ratio, -1.0)
        flat = int(score.reshape(-1).argmax())
        return tuple(int(place) for place in torch.unravel_index(torch.tensor(flat), score.shape))


_ROUNDINGS: dict[str, tuple[Mode, Mode]] = {
    "nearest": ("nearest", "nearest"),
    "toward_zero": ("toward_zero", "toward_zero"),
    "stochastic": ("down", "up"),
}


def tolerance(golden: Golden, allowed: Golden, out: Format, contract: Contract, *, rounded: bool = False) -> Tolerance:
    """What ``contract`` allows of an output in format ``out``; ``allowed`` is the definition under its model.

    ``rounded``: the definition has rounded already, and its balls hold whole codes. What the contract allows is then
    the codes within ``allowed``, and of the golden's own; nothing lies between them that could be left unresolved.
    """
    value, own, radius = golden.value.double(), golden.radius, allowed.radius
    value = torch.where(allowed.value.isnan(), math.nan, value)  # where a contract asks for NaN: masked rows
    special = ~torch.isfinite(value)
    said = torch.isfinite(radius) | ~torch.isfinite(allowed.value)
    judged = said & ~(special & (contract.nonfinite == "unspecified"))
    own = torch.where(special, 0.0, own)
    radius = torch.where(special | ~said, 0.0, radius)
    if rounded:
        low, high = _codes(allowed, torch.where(said, radius, 0.0), out)
        own_low, own_high = _codes(golden, own, out)
        low, high = torch.minimum(low, own_low), torch.maximum(high, own_high)
        inner, nowhere = (high - low) / 2, torch.zeros_like(judged)
        return Tolerance(value, low, high, low, high, judged, inner == 0, nowhere, inner, out, 0.5)
    low, high, may_be_nan = _interval(value, radius + own, out, contract)
    sure_low, sure_high, _ = _interval(value, radius - own, out, contract)
    if contract.subnormals == "flush":
        near = (value.abs() - radius - own) < out.smallest_normal
        low, sure_low = (torch.where(near, bound.clamp(max=0), bound) for bound in (low, sure_low))
        high, sure_high = (torch.where(near, bound.clamp(min=0), bound) for bound in (high, sure_high))
    share = 0.5 if contract.rounding == "nearest" else 1.0
    inner = radius + own
    return Tolerance(value, low, high, sure_low, sure_high, judged, inner == 0, may_be_nan, inner, out, share)


def _codes(codes: Golden, radius: Tensor, out: Format) -> tuple[Tensor, Tensor]:
    """The least and the largest code in a ball."""
    middle = torch.where(codes.value.isfinite(), codes.value.double(), 0.0)
    radius = torch.where(radius.isfinite(), radius, 0.0)
    return round_to(middle - radius, out, overflow="saturate"), round_to(middle + radius, out, overflow="saturate")


def _interval(value: Tensor, radius: Tensor, out: Format, contract: Contract) -> tuple[Tensor, Tensor, Tensor]:
    """The stored ends of value +- radius, and where the contract makes an overflow NaN.

    Where one end overflows the largest number remains on that side; where both do, no number (two NaN).
    """
    down, up = _ROUNDINGS[contract.rounding]
    overflow = cast(Overflow, contract.overflow)
    least, most = value - radius, value + radius
    low, high = round_to(least, out, down, overflow), round_to(most, out, up, overflow)
    may_be_nan = (low.isnan() | high.isnan()) & ~value.isnan()
    too_low, too_high = low.isnan() & (least < 0), high.isnan() & (most > 0)
    low = torch.where(too_low & ~(high.isnan() & (most < 0)), -out.largest, low)
    high = torch.where(too_high & ~(low.isnan() & (least > 0)), out.largest, high)
    return low, high, may_be_nan


def judge(got: Tensor, allowed: Tolerance) -> Judgement:
    """Each element of ``got`` (any dtype) against what is allowed."""
    y, golden = got.detach().cpu().double(), allowed.golden
    nan = y.isnan()
    inside = (y >= allowed.low) & (y <= allowed.high)
    kept = torch.where(nan, golden.isnan() | allowed.may_be_nan, inside)
    broken = ~kept & allowed.judged
    surely = torch.where(nan, kept, (y >= allowed.sure_low) & (y <= allowed.sure_high))
    unresolved = ~broken & ~surely & allowed.judged
    number = torch.where(nan, 0.0, y)  # a format of codes may have no NaN
    gap = torch.where(y > golden, number - next_down(number, allowed.out), next_up(number, allowed.out) - number)
    radius = allowed.inner + allowed.share * gap
    ratio = (y - golden).abs() / radius
    ratio = torch.where(y == golden, 0.0, torch.where(kept, ratio.clamp(max=1), ratio.clamp(min=1 + 2.0**-40)))
    regular = torch.isfinite(y) & torch.isfinite(golden) & ~ratio.isnan()
    ratio = torch.where(regular, ratio, torch.where(kept, 0.0, math.inf))
    return Judgement(torch.where(allowed.judged, ratio, 0.0), radius, broken, unresolved, allowed)
