"""From numbers to places along an axis, with the ticks that stand there."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_TICKS = 6
_FEW = 3
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Axis:
    """What a chart shows along one side: ``title`` names it with its unit.

    ``log``: on a logarithmic scale, where numbers that aren't above 0 have no place. ``zero``: a linear scale begins at
    0. ``ticks``: numbers with their labels; round ones where there are none.
    """

    title: str
    log: bool = False
    zero: bool = False
    ticks: Sequence[tuple[float, str]] = ()

    def holds(self, value: float) -> bool:
        """Whether a number has a place on it."""
        return math.isfinite(value) and (value > 0 or not self.log)


class Scale:
    """An axis that reaches over ``values``, of which those without a place don't count; ``edge``: the part of it that
    stays free at either end, but at 0 where it begins there."""

    def __init__(self, axis: Axis, values: Iterable[float], edge: float = 0.04) -> None:
        known = [self._along(axis, value) for value in values if axis.holds(value)] or [0.0, 1.0]
        low, high = min(known), max(known)
        if axis.zero and not axis.log:
            low = min(low, 0.0)
        room = (high - low) * edge if high > low else 0.15 if axis.log else abs(high) * 0.05 or 1.0
        self.axis = axis
        self._low = low if axis.zero and low == 0 else low - room
        self._high = high + room

    def place(self, value: float) -> float:
        """From 0 to 1 within; what has no place is at the nearer end."""
        if not self.axis.holds(value):
            return float(value > 0)
        return (self._along(self.axis, value) - self._low) / (self._high - self._low)

    @property
    def ends(self) -> tuple[float, float]:
        """The numbers at its ends."""
        low, high = (10.0**end if self.axis.log else end for end in (self._low, self._high))
        return low, high

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels."""
        if self.axis.ticks:
            return [(self.place(value), label) for value, label in self.axis.ticks if self.axis.holds(value)]
        values = self._powers() if self.axis.log else []
        if len(values) < _FEW:
            values = _round_numbers(*self.ends)
        return [(self.place(value), label) for value, label in zip(values, _labels(values), strict=True)]

    def _powers(self) -> list[float]:
        """Powers of ten, not more than a few of them; 2 and 5 times each where there are hardly any."""
        first, last = math.floor(self._low), math.ceil(self._high)
        step = math.ceil((self._high - self._low) / _TICKS)
        digits = (1, 2, 5) if self._high - self._low < _FEW else (1,)
        results = [digit * 10.0**power for power in range(first, last + 1, step) for digit in digits]
        return [value for value in results if self._low <= math.log10(value) <= self._high]

    @staticmethod
    def _along(axis: Axis, value: float) -> float:
        return math.log10(value) if axis.log else value


def _round_numbers(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two numbers."""
    least = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _labels(values: Sequence[float]) -> list[str]:
    """Plain decimals; digits and powers of ten where some are far from 1."""
    if any(value and not 1e-4 <= abs(value) < 1e7 for value in values):
        return [_power(value) for value in values]
    return [f"{float(f'{value:.10g}'):,.10g}" for value in values]


def _power(value: float) -> str:
    """A number of two digits at most: 10⁻³, 2·10⁻³, 2.5·10⁸."""
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    digits = f"{value / 10.0**power:.2g}"
    return f"{'' if digits == '1' else f'{digits}·'}10{str(power).translate(_RAISED)}"
