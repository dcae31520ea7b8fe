"""The plot of error growth that a fingerprint's page draws as inline SVG."""

import math
from typing import Any

from assay.verify.fingerprint.error_growth import Growth

_WIDTH, _HEIGHT, _LEFT, _FOOT, _TOP = 560, 260, 64, 36, 12


def plot_of(growth: Growth) -> dict[str, Any]:
    """The errors over the lengths, both on logarithmic scales, and the line of the fit, as the template draws them."""
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

    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "floor": _HEIGHT - _FOOT,
        "points": [(across(n), down(error)) for n, error in known],
        "fit": [(across(n), down(error)) for n, error in ends],
        "columns": [(across(n), n) for n, _ in known],
        "rows": [(down(10.0**power), f"1e{power}") for power in range(low, high + 1)],
    }
