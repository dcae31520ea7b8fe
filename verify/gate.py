"""The gate check: a tolerance that can't fail proves nothing, so it is first shown outputs that are wrong.

The golden itself, rounded to the output format, is corrupted in ways that a faulty kernel might; the check must
reject every corruption that changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from assay.precision.formats import Format
from assay.precision.rounding import next_down, next_up, round_to
from assay.verify.judge import Tolerance, judge

Tensor = torch.Tensor


def corruptions(right: Tensor, limits: Tolerance, out: Format) -> Iterator[tuple[str, Tensor]]:
    """(what was done, the corrupted output) for a right output of at least one element."""
    yield "all zeros", torch.zeros_like(right)
    yield "the sign changed", -right
    yield "everything times 1.05", round_to(right * 1.05, out)
    rows = right.reshape(-1, right.shape[-1]) if right.dim() else right.reshape(1, 1)
    loud = int(_finite(rows).abs().sum(-1).argmax())
    row = rows.clone()
    row[loud] = 0
    yield "one row zero", row.reshape(right.shape)
    tile = rows.clone()
    tile[-16:, -16:] = 0
    yield "one tile zero", tile.reshape(right.shape)
    first, last = _finite(rows[0]), _finite(rows[-1])
    if bool(((first - last).abs() > 0.05 * torch.maximum(first.abs(), last.abs())).any()):  # else hardly a change
        swapped = rows.clone()
        swapped[[0, -1]] = swapped[[-1, 0]]
        yield "two rows swapped", swapped.reshape(right.shape)
    place = int(_finite(right).abs().reshape(-1).argmax())
    poisoned = right.clone().reshape(-1)
    poisoned[place] = math.nan
    yield "one NaN", poisoned.reshape(right.shape)
    high, low = (end.reshape(-1)[place : place + 1] for end in (limits.high, limits.low))
    for words, end, beyond in (
        ("one ulp above what is allowed", high, next_up(high, out)),
        ("one ulp below what is allowed", low, next_down(low, out)),
    ):
        if torch.equal(end, beyond):  # the format has nothing beyond
            continue
        off = right.clone().reshape(-1)
        off[place] = beyond[0]
        yield words, off.reshape(right.shape)


NOTHING_JUDGED = "anything at all: no element is judged"


def outcomes(limits: Tolerance, out: Format) -> dict[str, bool]:
    """Of each corruption, whether the check rejects it.

    A corruption that leaves every judged element as it was (zeros of an output that is zero) says nothing and is
    passed over; so is one that turns a number into an equal one of the format.
    """
    right = round_to(limits.golden, out)
    right = torch.where(torch.isfinite(right), right, limits.golden)
    if not right.numel():
        return {}
    if not bool(limits.judged.any()):
        return {NOTHING_JUDGED: False}
    if not bool((limits.judged & torch.isfinite(limits.golden)).any()):  # a logarithm of numbers below zero
        return {}
    found = {NOTHING_JUDGED: True}
    for words, wrong in corruptions(right, limits, out):
        changed = ((wrong != right) & ~(wrong.isnan() & right.isnan()) & limits.judged).any()
        if bool(changed):
            found[words] = bool(judge(wrong, limits).broken.any())
    return found


def loophole(seen: Iterable[Mapping[str, bool]]) -> str | None:
    """The first corruption that some case of `outcomes` lets through and none rejects, or None."""
    together: dict[str, bool] = {}
    for found in seen:
        together |= {words: together.get(words, False) or rejected for words, rejected in found.items()}
    return next((words for words, rejected in together.items() if not rejected), None)


def passes_gate(limits: Tolerance, out: Format) -> str | None:
    """The first corruption that the check of one case lets through, or None."""
    return loophole([outcomes(limits, out)])


def smallest_gain(limits: Tolerance) -> float:
    """The smallest relative error, common to all elements, that the check would detect; infinite if none."""
    golden = torch.where(limits.judged & torch.isfinite(limits.golden), limits.golden, 0.0)
    up = golden > 0
    end = torch.where(up, limits.high, limits.low)
    beyond = torch.where(up, next_up(end, limits.out), next_down(end, limits.out))
    gain = (end + limits.share * (beyond - end) - golden) / golden
    nothing = (golden == 0) | gain.isnan() | (beyond == end)  # beyond the format's end there is no number
    gain = torch.where(nothing, math.inf, gain)
    return float(gain.min()) if gain.numel() else math.inf


def _finite(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 0.0)
