"""A table whose cells are coloured by the logarithm of their numbers, and have them as text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 10
_DECADES = 4.0
"""What is further below the largest number has the palest colour."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Numbers by row and column; None: there is none. ``unit``: theirs, which is told with each. ``chosen``: of each
    row, the column that gets a frame. ``about``: it in words. ``corner``: what the names of rows are."""

    about: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    chosen: Sequence[str | None]
    unit: str
    corner: str = ""

    def __post_init__(self) -> None:
        for name, part in (("values", self.values), ("chosen", self.chosen)):
            if len(part) != len(self.rows):
                raise ValueError(f"{name}: expected {len(self.rows)}, one for each row; got {len(part)}")
        if wrong := next((row for row in self.values if len(row) != len(self.columns)), None):
            raise ValueError(f"values: expected {len(self.columns)} a row, one for each column; got {len(wrong)}")


def steps_of(heat: HeatMap) -> list[list[int | None]]:
    """The colour of each cell, from 0 (the least, and what isn't above 0) to 9; None where there is no number."""
    logs = [math.log10(value) for row in heat.values for value in row if value is not None and 0 < value < math.inf]
    high = max(logs, default=0.0)
    low = max(min(logs, default=0.0), high - _DECADES)

    def step(value: float | None) -> int | None:
        if value is None or math.isnan(value):
            return None
        if value <= 0 or math.isinf(value):
            return STEPS - 1 if value > 0 else 0
        share = (math.log10(value) - low) / (high - low) if high > low else 0.0
        return max(0, min(STEPS - 1, int(share * STEPS)))

    return [[step(value) for value in row] for row in heat.values]


def short(value: float | None) -> str:
    """A number in few letters: 0.25, 8e-3, ∞."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    digit, power = f"{value:.0e}".split("e")
    return f"{digit}e{int(power)}"
