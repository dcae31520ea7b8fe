"""Units, their options and the budgets, as users give them and as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUANTITIES", "Budgets", "Choice", "ErrorOf", "Floats", "Option", "Picks", "Problem", "Quantity", "Unit"]

Quantity = Literal["error", "bytes", "kv_bytes", "prefill", "decode"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

ErrorOf = Callable[[Mapping[str, str]], float]
"""Unit names to scheme names, to the error of that assignment, cross terms included."""

Floats = NDArray[np.float64]
Picks = tuple[int, ...]
"""The place of the option taken in each unit."""

_ROUNDING = 1e-12
"""Relative: what a budget that was itself added up in another order may be off by."""


@dataclass(frozen=True, slots=True)
class Option:
    """A scheme that a unit may take, "" for leaving it as it is, with what it adds to each total."""

    scheme: str
    error: float
    bytes: float = 0.0
    kv_bytes: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Unit:
    """Sites that take one scheme together, and the options, of which exactly one is taken."""

    name: str
    sites: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Upper limits of the totals; None: no limit."""

    max_error: float | None = None
    max_bytes: float | None = None
    max_kv_bytes: float | None = None
    max_prefill: float | None = None
    max_decode: float | None = None

    @property
    def limits(self) -> dict[Quantity, float]:
        """The limits that there are. Raises ValueError for one that is negative or NaN."""
        found: dict[Quantity, float] = {}
        for quantity in QUANTITIES:
            limit = getattr(self, f"max_{quantity}")
            if limit is not None:
                if not limit >= 0:
                    raise ValueError(f"expected max_{quantity} of at least 0, got {limit}")
                found[quantity] = float(limit)
        return {quantity: limit for quantity, limit in found.items() if math.isfinite(limit)}


@dataclass(frozen=True, slots=True)
class Choice:
    """One option taken for each unit, and the totals."""

    schemes: Mapping[str, str]
    """Unit names to scheme names, "" for a unit left as it is."""
    error: float
    """With cross terms where the caller can tell them, otherwise the sum."""
    bytes: float
    kv_bytes: float
    prefill: float
    decode: float

    def excess(self, limits: Mapping[Quantity, float]) -> float:
        """Largest share by which a total exceeds its limit; 0 where all hold. Of a limit of 0: infinite."""
        return max([0.0, *(_excess(getattr(self, quantity), limit) for quantity, limit in limits.items())])


def _excess(total: float, limit: float) -> float:
    if total <= limit * (1 + _ROUNDING):
        return 0.0
    return total / limit - 1 if limit > 0 else math.inf


class Problem:
    """Units as arrays: the options of all units one after another.

    Raises ValueError if a unit has no option with finite figures, or two have one name.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        if len({unit.name for unit in units}) < len(units):
            raise ValueError("expected units of different names, got one name twice")
        names = [field.name for field in fields(Option)][1:]
        rows = [[getattr(option, name) for name in names] for unit in units for option in unit.options]
        sizes = [len(unit.options) for unit in units]
        self.values: Floats = np.array(rows, dtype=np.float64).reshape(-1, len(QUANTITIES))
        """[options, 5], columns as QUANTITIES."""
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """The first option of each unit, and one past the last."""
        self.unit_of = np.repeat(np.arange(len(self.units)), sizes)
        self.finite: NDArray[np.bool_] = np.asarray(np.isfinite(self.values).all(1))
        """Options that can be taken at all: a scheme that makes infinities has an infinite error."""
        for unit, first, last in zip(self.units, self.starts, self.starts[1:], strict=False):
            if not self.finite[first:last].any():
                raise ValueError(f"expected an option with finite figures in every unit, got none in {unit.name!r}")

    def with_errors(self, errors: Floats) -> Problem:
        """The same problem with other errors of the options, [options]; what isn't finite stays so."""
        other = copy(self)
        other.values = self.values.copy()
        other.values[self.finite, 0] = errors[self.finite]
        return other

    def column(self, quantity: Quantity) -> Floats:
        """What each option adds to a total."""
        column: Floats = self.values[:, QUANTITIES.index(quantity)]
        return column

    def yardsticks(self, limits: Mapping[Quantity, float]) -> dict[Quantity, float]:
        """What excesses over the limits are relative to: the limits; for one of 0, a millionth of the largest sum."""
        kept = np.where(self.finite[:, None], self.values, 0.0)
        most = np.maximum.reduceat(kept, self.starts[:-1]).sum(0)
        return {name: limit or float(most[QUANTITIES.index(name)]) * 1e-6 or 1.0 for name, limit in limits.items()}

    def rows(self, picks: Picks) -> NDArray[np.int64]:
        """The options taken, as rows of `values`."""
        return self.starts[:-1] + np.asarray(picks, dtype=np.int64)

    def schemes(self, picks: Picks) -> dict[str, str]:
        """Unit names to scheme names."""
        return {unit.name: unit.options[pick].scheme for unit, pick in zip(self.units, picks, strict=True)}

    def choice(self, picks: Picks, error: float | None = None) -> Choice:
        """The totals, each summed exactly and rounded once; ``error`` instead of the sum of errors."""
        taken = self.values[self.rows(picks)]
        totals = [math.fsum(taken[:, place]) for place in range(len(QUANTITIES))]
        return Choice(self.schemes(picks), totals[0] if error is None else error, *totals[1:])

    def undominated(self, quantities: Sequence[Quantity]) -> NDArray[np.bool_]:
        """Options that no other of their unit matches or beats in all of ``quantities`` (of equals, the first)."""
        kept = self.finite.copy()
        columns = [QUANTITIES.index(quantity) for quantity in quantities]
        for first, last in zip(self.starts, self.starts[1:], strict=False):
            here = np.where(kept[first:last, None], self.values[first:last][:, columns], np.inf)
            no_worse = (here[:, None] <= here[None]).all(2)
            better = no_worse & (~no_worse.T | np.tri(len(here), k=-1, dtype=bool).T)
            kept[first:last] &= ~better.any(0)
        return kept
