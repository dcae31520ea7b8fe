"""Groups and their options, as records and as arrays."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Quantity = Literal["error", "bytes", "kv_bytes", "prefill", "decode"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
Totals = Mapping[Quantity, float]
"""Totals of an assignment in some quantities, or finite limits on them, each at least 0."""

ErrorOf = Callable[[Mapping[str, str]], float]
"""Group names to scheme names, to the error of that assignment, cross terms included."""

Floats = NDArray[np.float64]
Solution = tuple[int, ...]
"""The index of the option taken in each group."""

_ROUNDING = 1e-12  # Relative tolerance for a budget that was itself added up in another order


@dataclass(frozen=True, slots=True)
class Option:
    """A scheme for a group, "" for none, with its part of each total."""

    scheme: str
    error: float
    bytes: float = 0.0
    kv_bytes: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """Sites that take one scheme together, and their options, of which exactly one is taken."""

    name: str
    sites: tuple[str, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One option taken for each group, and the totals."""

    schemes: Mapping[str, str]
    """Group names to scheme names, "" for a group left as it is."""
    error: float
    """With cross terms where known, otherwise the sum."""
    bytes: float
    kv_bytes: float
    prefill: float
    decode: float

    def excess(self, limits: Totals) -> float:
        """Return the largest share by which a total exceeds its limit; 0 where all hold. Of a limit of 0: infinite."""
        excess = 0.0
        for quantity, limit in limits.items():
            total: float = getattr(self, quantity)
            if not total <= limit * (1 + _ROUNDING):
                excess = max(excess, total / limit - 1 if limit > 0 else math.inf)
        return excess


class Problem:
    """Groups as arrays: the options of all groups one after another.

    Raises ValueError if a group has no option with finite figures, or two have one name.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        if len({group.name for group in groups}) < len(groups):
            raise ValueError("expected groups of different names, got one name twice")
        names = [field.name for field in fields(Option)][1:]
        rows = [[getattr(option, name) for name in names] for group in groups for option in group.options]
        sizes = [len(group.options) for group in groups]
        self.values: Floats = np.array(rows, dtype=np.float64).reshape(-1, len(QUANTITIES))
        """[options, 5], columns as QUANTITIES."""
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """The first option of each group, and one past the last."""
        self.group_of = np.repeat(np.arange(len(self.groups)), sizes)
        self.finite: NDArray[np.bool_] = np.asarray(np.isfinite(self.values).all(1))
        """Options that can be taken at all: a scheme that makes infinities has an infinite error."""
        for group, first, last in zip(self.groups, self.starts, self.starts[1:], strict=False):
            if not self.finite[first:last].any():
                raise ValueError(f"expected an option with finite figures in every group, got none in {group.name!r}")

    def column(self, quantity: Quantity) -> Floats:
        """Return each option's part of a total."""
        column: Floats = self.values[:, QUANTITIES.index(quantity)]
        return column

    def scales_of_limits(self, limits: Totals) -> dict[Quantity, float]:
        """Return the divisors of excesses over the limits: the limits; for zero, a millionth of the largest sum."""
        kept = np.where(self.finite[:, None], self.values, 0.0)
        most = np.maximum.reduceat(kept, self.starts[:-1]).sum(0)
        largest = dict(zip(QUANTITIES, most.tolist(), strict=True))
        return {
            name: limit if limit > largest[name] * 1e-200 else largest[name] * 1e-6 or 1.0
            for name, limit in limits.items()
        }

    def rows(self, picks: Solution) -> NDArray[np.int64]:
        """Return the taken options as rows of `values`."""
        return self.starts[:-1] + np.asarray(picks, dtype=np.int64)

    def schemes(self, picks: Solution) -> dict[str, str]:
        """Return group names to scheme names."""
        return {group.name: group.options[pick].scheme for group, pick in zip(self.groups, picks, strict=True)}

    def choice(self, picks: Solution, error: float | None = None) -> Choice:
        """Return the totals, each summed exactly and rounded once; ``error`` instead of the sum of errors."""
        taken = self.values[self.rows(picks)]
        totals = [math.fsum(taken[:, column]) for column in range(len(QUANTITIES))]
        return Choice(self.schemes(picks), totals[0] if error is None else error, *totals[1:])

    def undominated(self, quantities: Sequence[Quantity]) -> NDArray[np.bool_]:
        """Return the options that no other of their group matches or beats in all of ``quantities`` (of equals, the
        first)."""
        kept = self.finite.copy()
        columns = [QUANTITIES.index(quantity) for quantity in quantities]
        for first, last in zip(self.starts, self.starts[1:], strict=False):
            here = np.where(kept[first:last, None], self.values[first:last][:, columns], np.inf)
            no_worse = (here[:, None] <= here[None]).all(2)
            better = no_worse & (~no_worse.T | np.tri(len(here), k=-1, dtype=bool).T)
            kept[first:last] &= ~better.any(0)
        return kept
