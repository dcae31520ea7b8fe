"""The integer program: one option per unit, least sum of costs, sums of other quantities within limits.

Solved by HiGHS through scipy.optimize.milp. Its tolerances are absolute (1e-6), so every row is shifted by its least
sum and divided by what the limit leaves above that, and costs are divided by those of the best solution found, options
dearer than it dropped: figures from 1e-9 to 10 in one problem are told apart. A solution that meets a limit only within
the tolerance is cut off and the program solved again, so limits hold exactly.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from assay.precision.choice.problem import Floats, Picks, Problem, Quantity

__all__ = ["Clock", "Cut", "Mask", "least_sum", "narrowed", "nearest", "solve"]

Mask = NDArray[np.bool_]
"""Which options may be taken, [options]."""

_COST = 1e3
"""What the best known cost is scaled to: HiGHS ends at an absolute gap of 1e-6."""
_MANY = 4000
"""Options up to which a program is solved as it is; half as many units at most."""
_GAP = 1e-5
"""Relative gap that is enough for programs of more than a quarter of these; ten times that under cuts."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Solutions must differ from ``picks`` in at least ``distance`` units, and in ``most`` units at most."""

    picks: Picks
    distance: int
    most: float = math.inf


class Clock:
    """Seconds that may still be spent."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)


def solve(
    problem: Problem,
    kept: Mask,
    costs: Floats,
    limits: Mapping[Quantity, float],
    clock: Clock,
    cuts: Sequence[Cut] = (),
) -> Picks | None:
    """The picks of least total cost among the ``kept`` options; None where no assignment keeps the limits and cuts.

    costs: of each option, [options]. Of many options a cost within 1e-5 of the least will do, 1e-4 under cuts. When the
    time is up, the best found so far, None if there is none.
    """
    few = narrowed(problem, kept, costs, limits)
    if few is None:
        return None
    shifted = above_least(problem, few, costs)
    scale = float(shifted[few].max()) or 1.0
    best: Picks | None = None
    usable = few
    for _ in range(8):
        found = _within(problem, usable, np.where(usable, shifted, np.inf) / scale, limits, clock, cuts)
        if found is None:
            break
        best = found
        reached = float(shifted[problem.rows(found)].sum())
        if not 0 < reached < scale / 10:
            break
        scale, usable = reached, few & (shifted <= reached * (1 + 1e-9))
    limited = _limited(problem, kept, limits, {})
    if best is None and limited is not None and few.sum() < len(limited[0]):
        whole = np.isin(np.arange(len(kept)), limited[0])
        shifted = above_least(problem, whole, costs)
        return _within(problem, whole, shifted / (float(shifted[whole].max()) or 1.0), limits, clock, cuts)
    return best


def _within(
    problem: Problem, kept: Mask, costs: Floats, limits: Mapping[Quantity, float], clock: Clock, cuts: Sequence[Cut]
) -> Picks | None:
    """One solution that keeps the limits exactly. costs: about 1 in all."""
    cuts, tight = list(cuts), dict.fromkeys(limits, 0.0)
    for attempt in range(30):
        found = _once(problem, kept, costs, limits, clock, cuts, tight)
        if found is None:
            return None
        choice = problem.choice(found)
        over = [quantity for quantity, limit in limits.items() if choice.excess({quantity: limit})]
        if not over:
            return found
        cuts.append(Cut(found, 1))
        if attempt >= 3:  # many lie between the limit and the tolerance
            tight.update({quantity: max(2 * tight[quantity], 1e-6) for quantity in over})
    return None


def _once(
    problem: Problem,
    kept: Mask,
    costs: Floats,
    limits: Mapping[Quantity, float],
    clock: Clock,
    cuts: Sequence[Cut],
    tight: Mapping[Quantity, float],
) -> Picks | None:
    limited = _limited(problem, kept, limits, tight)
    if limited is None or not clock.left:
        return None
    places, rows = limited
    constraints = [LinearConstraint(_one_each(problem, places), 1.0, 1.0)]
    if len(rows):
        constraints.append(LinearConstraint(sparse.csr_array(rows), -np.inf, 1.0))
    if cuts:
        matrix = np.stack([np.isin(places, problem.rows(cut.picks)) for cut in cuts]).astype(np.float64)
        shared = len(problem.units) - np.array([(cut.most, cut.distance) for cut in cuts])
        constraints.append(LinearConstraint(sparse.csr_array(matrix), shared[:, 0], shared[:, 1]))
    x = _milp(
        costs[places] * _COST,
        10 * _GAP if cuts else _GAP,
        clock,
        integrality=np.ones(len(places)),
        bounds=Bounds(0, 1),
        constraints=constraints,
    )
    return None if x is None else _picks(problem, places, x)


def narrowed(problem: Problem, kept: Mask, costs: Floats, limits: Mapping[Quantity, float]) -> Mask | None:
    """The few thousand options that an optimum is likely made of, all if there are no more; None: no assignment fits.

    Every option left out costs at least its reduced cost over the bound of the linear relaxation, in which no more
    units than there are limits take shares of several options (P. Sinha, A. Zoltners, *The multiple-choice knapsack
    problem*, Operations Research 27(3), 1979).
    """
    many = max(_MANY, 2 * len(problem.units))
    limited = _limited(problem, kept, limits, {})
    if limited is None:
        return None
    places, rows = limited
    few = np.zeros(len(kept), dtype=bool)
    few[places] = True
    if len(places) <= many:
        return few
    shifted = above_least(problem, few, costs)[places]
    prices = shifted / max(float(shifted.max()), 1e-300) * _COST
    ones = _one_each(problem, places)
    tops: dict[str, Any] = {"A_ub": sparse.csr_array(rows), "b_ub": np.ones(len(rows))} if len(rows) else {}
    relaxed = linprog(prices, A_eq=ones, b_eq=np.ones(ones.shape[0]), bounds=(0, None), method="highs", **tops)
    if relaxed.x is None:
        return None if relaxed.status == 2 else few
    reduced = prices - ones.T @ relaxed.eqlin.marginals
    if len(rows):
        reduced = reduced - rows.T @ relaxed.ineqlin.marginals
    first = np.argsort(np.where(relaxed.x > 1e-9, -1.0, reduced), kind="stable")[:many]
    few[places] = False
    few[places[first]] = True
    return few


def nearest(problem: Problem, kept: Mask, limits: Mapping[Quantity, float], clock: Clock) -> Picks:
    """The picks whose largest relative excess over the limits, all above 0, is least.

    The least sum of all shares of limits has a largest share at most as many times the least as there are limits. What
    exceeds that by itself is left out and the rest divided by it, so limits far out of reach give figures about 1 all
    the same. When the time is up, the best found so far: of none, that least sum.
    """
    columns = [problem.column(quantity) / limit for quantity, limit in limits.items()]
    summed = _picks(problem, np.flatnonzero(kept), -np.sum(columns, 0)[kept])
    scale = max(math.fsum(column[problem.rows(summed)]) for column in columns)
    if scale <= 1:
        return summed
    alone = [least_sum(problem, kept, column) for column in columns]
    above = [above_least(problem, kept, column) for column in columns]
    usable = kept & np.all([over <= scale - least for over, least in zip(above, alone, strict=True)], 0)
    usable[problem.rows(summed)] = True
    places = np.flatnonzero(usable)
    rows = [np.append(over[places] / scale, -1.0) for over in above]
    one = sparse.hstack([_one_each(problem, places), sparse.csr_array((len(problem.units), 1))], format="csr")
    x = _milp(
        np.append(np.zeros(len(places)), 1.0),
        _GAP,
        clock,
        integrality=np.append(np.ones(len(places)), 0),
        bounds=Bounds(np.append(np.zeros(len(places)), 1 / scale), np.append(np.ones(len(places)), np.inf)),
        constraints=[
            LinearConstraint(one, 1.0, 1.0),
            LinearConstraint(np.stack(rows), -np.inf, -np.array(alone) / scale),
        ],
    )
    return summed if x is None else _picks(problem, places, x[:-1])


def above_least(problem: Problem, kept: Mask, column: Floats) -> Floats:
    """What each option has above the least kept one of its unit; infinite for options not kept. [options]"""
    least = _least(problem, kept, column)[problem.unit_of]
    return np.where(kept, np.where(kept, column, 0.0) - least, np.inf)


def _least(problem: Problem, kept: Mask, column: Floats) -> Floats:
    least: Floats = np.minimum.reduceat(np.where(kept, column, np.inf), problem.starts[:-1])
    return least


def least_sum(problem: Problem, kept: Mask, column: Floats) -> float:
    """Of a quantity alone, the least that any assignment can have."""
    return math.fsum(_least(problem, kept, column))


def _limited(
    problem: Problem, kept: Mask, limits: Mapping[Quantity, float], tight: Mapping[Quantity, float]
) -> tuple[NDArray[np.int64], Floats] | None:
    """The options that fit beside the least ones of the other units, and rows [limits, these] with sums of at most 1.

    None where the least of all units together exceed a limit.
    """
    usable, rows = kept.copy(), []
    for quantity, limit in limits.items():
        column = problem.column(quantity)
        above = above_least(problem, kept, column)
        left = math.fsum([limit, *-_least(problem, kept, column)])
        if left < -1e-12 * limit:
            return None
        room = max(left, 0.0) + 1e-12 * limit
        usable &= above <= room
        if room > 0:
            rows.append(np.where(usable, above, 0.0) / (room * (1 - tight.get(quantity, 0.0))))
    places = np.flatnonzero(usable)
    if len(np.unique(problem.unit_of[places])) < len(problem.units):
        return None
    return places, np.stack(rows)[:, places] if rows else np.zeros((0, len(places)))


def _one_each(problem: Problem, places: NDArray[np.int64]) -> Any:
    shape = (len(problem.units), len(places))
    return sparse.csr_array((np.ones(len(places)), (problem.unit_of[places], np.arange(len(places)))), shape=shape)


def _milp(costs: Floats, gap: float, clock: Clock, **program: Any) -> Floats | None:
    """The solution, [options]. HiGHS, as scipy 1.17 has it, prints a line whenever it repairs one: swallowed."""
    options = {"time_limit": max(clock.left, 0.05), "mip_rel_gap": gap if len(costs) > _MANY // 4 else 0.0}
    sys.stdout.flush()
    with tempfile.TemporaryFile() as swallowed:
        stdout = os.dup(1)
        try:
            os.dup2(swallowed.fileno(), 1)
            result = milp(costs, options=options, **program)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    return None if result.x is None else np.asarray(result.x)


def _picks(problem: Problem, places: NDArray[np.int64], x: Floats) -> Picks:
    taken = np.full(len(problem.unit_of), -np.inf)
    taken[places] = x
    bounds = zip(problem.starts, problem.starts[1:], strict=False)
    return tuple(int(np.argmax(taken[first:last])) for first, last in bounds)
