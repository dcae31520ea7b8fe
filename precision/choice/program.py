"""The integer program: one option per group, least sum of costs, sums of other quantities within limits.

Solved by HiGHS through scipy.optimize.milp. Its tolerances are absolute (1e-6), so every row is shifted by its least
sum and divided by what the limit leaves above that, and costs are divided by those of the best solution found, options
dearer than it dropped: figures from 1e-9 to 10 in one problem are distinguished. A solution that meets a limit only
within the tolerance is cut off and the program solved again, so limits hold exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from assay.precision.choice.problem import Floats, Problem, Solution, Totals
from assay.runtime.deadline import Deadline
from assay.runtime.output import without_lines

Mask = NDArray[np.bool_]
"""Which options may be taken, [options]."""

_COST = 1e3  # What the best known cost is scaled to: HiGHS ends at an absolute gap of 1e-6
_EXACT_OPTIONS = 1000  # Options up to which a program is solved to the least
_GAP = 1e-5  # Relative gap that is enough for larger ones; ten times that where a solution has to differ


@dataclass(frozen=True, slots=True)
class Difference:
    """Solutions must differ from ``picks`` in at least ``distance`` groups."""

    picks: Solution
    distance: int


def solve(
    problem: Problem,
    kept: Mask,
    costs: Floats,
    limits: Totals,
    deadline: Deadline,
    differences: Sequence[Difference] = (),
) -> Solution | None:
    """Return the picks of least total cost among the ``kept`` options; None where no assignment meets the limits and
    differences.

    costs: of each option, [options]. Of many options a cost within 1e-5 of the least suffices, 1e-4 where a solution
    has to differ from others; the likeliest options are searched first, and their bound tells whether that suffices.
    When time is up, the best so far, or None.
    """
    if not kept.any():
        return None
    shifted, candidates = _above_least(problem, kept, costs), []
    if not differences:
        few, bound = narrowed(problem, kept, costs, limits)
        if few.sum() < kept.sum() and (likely := _improved(problem, few, shifted, limits, deadline, ())) is not None:
            candidates.append(likely)
            if shifted[problem.rows(likely)].sum() <= bound * (1 + _GAP):
                return likely
    if (any_of_all := _improved(problem, kept, shifted, limits, deadline, differences)) is not None:
        candidates.append(any_of_all)
    return min(candidates, key=lambda picks: float(shifted[problem.rows(picks)].sum()), default=None)


def _improved(
    problem: Problem, kept: Mask, shifted: Floats, limits: Totals, deadline: Deadline, differences: Sequence[Difference]
) -> Solution | None:
    """Return the best solution over ever finer scales of the costs, which are those above the least of each group."""
    scale = float(shifted[kept].max()) or 1.0
    best: Solution | None = None
    usable = kept
    for _ in range(8):
        solution = _within(problem, usable, np.where(usable, shifted, np.inf) / scale, limits, deadline, differences)
        if solution is None:
            break
        best = solution
        reached = float(shifted[problem.rows(solution)].sum())
        if not 0 < reached < scale / 10:
            break
        scale, usable = reached, kept & (shifted <= reached * (1 + 1e-9))
    return best


def _within(
    problem: Problem, kept: Mask, costs: Floats, limits: Totals, deadline: Deadline, differences: Sequence[Difference]
) -> Solution | None:
    """Return one solution that meets the limits exactly. costs: about 1 in total."""
    differences, tight = list(differences), dict.fromkeys(limits, 0.0)
    for attempt in range(30):
        limited = _limited(problem, kept, limits, tight)
        if limited is None or not deadline.left:
            return None
        options, rows = limited
        constraints = [LinearConstraint(_one_each(problem, options), 1.0, 1.0)]
        if len(rows):
            constraints.append(LinearConstraint(sparse.csr_array(rows), -np.inf, 1.0))
        if differences:
            matrix = np.stack([np.isin(options, problem.rows(each.picks)) for each in differences]).astype(np.float64)
            shared = len(problem.groups) - np.array([each.distance for each in differences])
            constraints.append(LinearConstraint(sparse.csr_array(matrix), -np.inf, shared))
        x = _milp(
            costs[options] * _COST,
            10 * _GAP if differences else _GAP,
            deadline,
            integrality=np.ones(len(options)),
            bounds=Bounds(0, 1),
            constraints=constraints,
        )
        if x is None:
            return None
        solution = _picks(problem, options, x)
        choice = problem.choice(solution)
        over = [quantity for quantity, limit in limits.items() if choice.excess({quantity: limit})]
        if not over:
            return solution
        differences.append(Difference(solution, 1))
        if attempt >= 3:  # many lie between the limit and the tolerance
            tight.update({quantity: max(2 * tight[quantity], 1e-6) for quantity in over})
    return None


def narrowed(problem: Problem, kept: Mask, costs: Floats, limits: Totals) -> tuple[Mask, float]:
    """Return the few thousand options that an optimum likely uses, all if there are no more, and a lower bound of any
    solution's cost above the least option of each group.

    Every option left out costs at least its reduced cost over the bound of the linear relaxation, in which no more
    groups than there are limits take shares of several options (P. Sinha, A. Zoltners, *The multiple-choice knapsack
    problem*, Operations Research 27(3), 1979).
    """
    many = max(_EXACT_OPTIONS, 3 * len(problem.groups) // 2)
    limited = _limited(problem, kept, limits, {})
    if limited is None or len(limited[0]) <= many:
        return kept, 0.0
    options, rows = limited
    prices = _above_least(problem, kept, costs)[options]
    scale = max(float(prices.max()), 1e-300) / _COST
    prices /= scale
    ones = _one_each(problem, options)
    tops: dict[str, Any] = {"A_ub": sparse.csr_array(rows), "b_ub": np.ones(len(rows))} if len(rows) else {}
    relaxed = linprog(prices, A_eq=ones, b_eq=np.ones(ones.shape[0]), bounds=(0, None), method="highs", **tops)
    if relaxed.x is None:
        return kept, 0.0
    reduced = prices - ones.T @ relaxed.eqlin.marginals
    if len(rows):
        reduced = reduced - rows.T @ relaxed.ineqlin.marginals
    first = np.argsort(np.where(relaxed.x > 1e-9, -1.0, reduced), kind="stable")[:many]
    few = np.zeros(len(kept), dtype=bool)
    few[options[first]] = True
    return few, float(relaxed.fun) * scale


def nearest(problem: Problem, kept: Mask, limits: Totals, deadline: Deadline) -> Solution:
    """Return the picks whose largest relative excess over the limits, all above 0, is least.

    The least sum of all shares of limits has a largest share at most as many times the least as there are limits.
    Options that exceed that alone are left out and the rest divided by it, so limits far out of reach give figures
    about 1 all the same. When time is up, the best so far, or that least sum.
    """
    columns = [problem.column(quantity) / limit for quantity, limit in limits.items()]
    summed = _picks(problem, np.flatnonzero(kept), -np.sum(columns, 0)[kept])
    scale = max(math.fsum(column[problem.rows(summed)]) for column in columns)
    if scale <= 1:
        return summed
    alone = [least_sum(problem, kept, column) for column in columns]
    above = [_above_least(problem, kept, column) for column in columns]
    usable = kept & np.all([over <= scale - least for over, least in zip(above, alone, strict=True)], 0)
    usable[problem.rows(summed)] = True
    options = np.flatnonzero(usable)
    rows = [np.append(over[options] / scale, -1.0) for over in above]
    one = sparse.hstack([_one_each(problem, options), sparse.csr_array((len(problem.groups), 1))], format="csr")
    x = _milp(
        np.append(np.zeros(len(options)), 1.0),
        _GAP,
        deadline,
        integrality=np.append(np.ones(len(options)), 0),
        bounds=Bounds(np.append(np.zeros(len(options)), 1 / scale), np.append(np.ones(len(options)), np.inf)),
        constraints=[
            LinearConstraint(one, 1.0, 1.0),
            LinearConstraint(np.stack(rows), -np.inf, -np.array(alone) / scale),
        ],
    )
    return summed if x is None else _picks(problem, options, x[:-1])


def _above_least(problem: Problem, kept: Mask, column: Floats) -> Floats:
    """Return each option's excess over the least kept one of its group; infinite for options not kept. [options]"""
    least = _least(problem, kept, column)[problem.group_of]
    return np.where(kept, np.where(kept, column, 0.0) - least, np.inf)


def _least(problem: Problem, kept: Mask, column: Floats) -> Floats:
    return np.asarray(np.minimum.reduceat(np.where(kept, column, np.inf), problem.starts[:-1]))


def least_sum(problem: Problem, kept: Mask, column: Floats) -> float:
    """Return the least total of one quantity that any assignment can have."""
    return math.fsum(_least(problem, kept, column))


def _limited(problem: Problem, kept: Mask, limits: Totals, tight: Totals) -> tuple[NDArray[np.int64], Floats] | None:
    """Return the options that fit next to the least ones of the other groups, and rows [limits, these] with sums of at
    most 1.

    None where the least of all groups together exceed a limit.
    """
    usable, rows = kept.copy(), []
    for quantity, limit in limits.items():
        column = problem.column(quantity)
        above = _above_least(problem, kept, column)
        left = math.fsum([limit, *-_least(problem, kept, column)])
        if left < -1e-12 * limit:
            return None
        room = max(left, 0.0) + 1e-12 * limit
        usable &= above <= room
        if room > 0:
            rows.append(np.where(usable, above, 0.0) / (room * (1 - tight.get(quantity, 0.0))))
    options = np.flatnonzero(usable)
    if len(np.unique(problem.group_of[options])) < len(problem.groups):
        return None
    return options, np.stack(rows)[:, options] if rows else np.zeros((0, len(options)))


def _one_each(problem: Problem, options: NDArray[np.int64]) -> Any:
    shape = (len(problem.groups), len(options))
    return sparse.csr_array((np.ones(len(options)), (problem.group_of[options], np.arange(len(options)))), shape=shape)


def _milp(costs: Floats, gap: float, deadline: Deadline, **program: Any) -> Floats | None:
    """The solution, [options]. HiGHS (in scipy 1.17) prints a line whenever it repairs a solution, which is often
    needed after presolve: small programs go without, and the line stays out of the output."""
    many = len(costs) > _EXACT_OPTIONS
    options = {"time_limit": max(deadline.left, 0.05), "mip_rel_gap": gap if many else 0.0, "presolve": many}
    with without_lines("HighsMipSolverData::"):
        result = milp(costs, options=options, **program)
    return None if result.x is None else np.asarray(result.x)


def _picks(problem: Problem, options: NDArray[np.int64], x: Floats) -> Solution:
    taken = np.full(len(problem.group_of), -np.inf)
    taken[options] = x
    bounds = zip(problem.starts, problem.starts[1:], strict=False)
    return tuple(int(np.argmax(taken[first:last])) for first, last in bounds)
