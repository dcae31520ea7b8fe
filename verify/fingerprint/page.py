"""A fingerprint as one HTML page, its plot of error growth as inline SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass

from assay.verify.fingerprint.card import Card
from assay.verify.report import environment
from assay.verify.statistics.growth import Growth

_WIDTH, _HEIGHT, _LEFT, _FOOT, _TOP = 560, 260, 64, 36, 12


@dataclass(frozen=True)
class Plot:
    """What the template draws, in its own coordinates."""

    width: int
    height: int
    points: tuple[tuple[float, float], ...]
    fit: tuple[tuple[float, float], tuple[float, float]]
    columns: tuple[tuple[float, str], ...]
    rows: tuple[tuple[float, str], ...]
    left: int = _LEFT
    floor: int = _HEIGHT - _FOOT


def card_page(card: Card) -> str:
    """A card as an HTML page."""
    plot = plot_of(card.growth) if card.growth is not None else None
    return environment().get_template("fingerprint.html.j2").render(card=card, plot=plot)


def plot_of(growth: Growth) -> Plot:
    """The errors over the lengths, both on logarithmic scales, and the line of the fit."""
    known = [(n, error) for n, error in zip(growth.lengths, growth.errors, strict=True) if error > 0]
    ends = [(n, growth.factor * n**growth.exponent) for n in (known[0][0], known[-1][0])]
    sizes = [math.log10(error) for _, error in known + ends]
    low, high = math.floor(min(sizes)), math.ceil(max(sizes))
    high = max(high, low + 1)
    first, last = math.log2(known[0][0]), math.log2(known[-1][0])

    def across(n: float) -> float:
        return round(_LEFT + 12 + (math.log2(n) - first) / (last - first) * (_WIDTH - _LEFT - 36), 1)

    def down(error: float) -> float:
        return round(_TOP + (high - math.log10(error)) / (high - low) * (_HEIGHT - _TOP - _FOOT), 1)

    return Plot(
        _WIDTH,
        _HEIGHT,
        tuple((across(n), down(error)) for n, error in known),
        ((across(ends[0][0]), down(ends[0][1])), (across(ends[1][0]), down(ends[1][1]))),
        tuple((across(n), str(n)) for n, _ in known),
        tuple((down(10.0**power), f"1e{power}") for power in range(low, high + 1)),
    )
