"""Choices under the true error: made greedily, or better by exchanges of one, two or three options."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from assay.precision.choice.problem import QUANTITIES, Choice, ErrorOf, Floats, Problem, Quantity, Solution, Totals

_PAIRED = 300
"""Single exchanges of which pairs are formed."""
_TRIPLED = 40
"""Single exchanges up to which triples are."""

Key = tuple[float, float, float]


class Objective:
    """What a choice is worth: limits first, then what is minimised, then the error. Remembers what it was told."""

    def __init__(self, problem: Problem, limits: Totals, minimise: Quantity, error_of: ErrorOf | None) -> None:
        self.problem = problem
        self.limits = dict(limits)
        self.minimise: Quantity = minimise
        self.exact = error_of is None
        """Errors add up, so that the integer program has the last word."""
        self.calls = 0
        self._error_of = error_of
        self._known: dict[Solution, Choice] = {}

    def choice(self, picks: Solution) -> Choice:
        """The totals, with the true error."""
        if picks not in self._known:
            error = None
            if self._error_of is not None:
                self.calls += 1
                error = float(self._error_of(self.problem.schemes(picks)))
            self._known[picks] = self.problem.choice(picks, error)
        return self._known[picks]

    def key(self, picks: Solution) -> Key:
        """Less is better: the largest relative excess over a limit, the quantity that is minimised, the error."""
        choice = self.choice(picks)
        return choice.excess(self.limits), getattr(choice, self.minimise), choice.error

    def estimated(self, totals: Floats) -> Floats:
        """The keys of totals [n, 5], [n, 3]."""
        return np.stack([self.excess(totals), totals[:, QUANTITIES.index(self.minimise)], totals[:, 0]], 1)

    def excess(self, totals: Floats, but: Quantity | None = None) -> Floats:
        """Largest relative excess of totals [n, 5] over the limits, ``but`` one, [n]."""
        excess = np.zeros(len(totals))
        for quantity, limit in self.limits.items():
            over = totals[:, QUANTITIES.index(quantity)] - limit * (1 + 1e-12)
            if quantity != but:
                excess = np.maximum(excess, np.where(over > 0, over / (limit or 1e-300), 0.0))
        return excess


@np.errstate(over="ignore", invalid="ignore")
def greedy(objective: Objective, calls: int) -> Solution:
    """From the least errors on, the exchange that lowers the largest excess most for its true error, until limits hold
    or ``calls`` are spent. A change is asked for again only where it comes first (M. Minoux, *Accelerated greedy
    algorithms*, 1978)."""
    problem, last = objective.problem, objective.calls + calls
    errors = np.where(problem.finite, problem.values[:, 0], np.inf)
    picks = tuple(int(np.argmin(part)) for part in np.split(errors, problem.starts[1:-1]))
    added = errors - errors[problem.rows(picks)][problem.group_of]
    while objective.calls < last:
        totals, moves, changes = _exchanges(objective, picks)
        freed = objective.excess(totals, but="error") - objective.excess(totals + changes, but="error")
        moves, freed, fresh = moves[freed > 0], freed[freed > 0], set[int]()
        if not len(moves):
            break
        while (move := int(moves[np.argmin(added[moves] / freed)])) not in fresh and objective.calls < last:
            fresh.add(move)
            added[move] = _error(objective, picks, move) - totals[0, 0]
        picks = _moved(problem, picks, (move,))
    return picks


def refine(objective: Objective, start: Solution, calls: int) -> Solution:
    """A choice that no exchange of one or two options makes better, nor of three where there are few, as far as
    ``calls`` of the true error reach.

    Exchanges are tried in the order of what they promise: single ones by their true changes where there are calls
    enough for all, otherwise by the options' own errors; pairs by the sums of these; triples by the true changes of
    their pairs, from which a quadratic form follows.
    """
    picks, last = start, objective.calls + calls
    while objective.calls < last:
        better = _step(objective, picks, last)
        if better is None:
            break
        picks = better
    return picks


@np.errstate(over="ignore", invalid="ignore")  # a combination may make infinities though none of its options does
def _step(objective: Objective, picks: Solution, last: int) -> Solution | None:
    problem = objective.problem
    totals, moves, changes = _exchanges(objective, picks)
    if len(moves) <= (last - objective.calls) * 3 // 4:
        changes[:, 0] = [_error(objective, picks, move) - totals[0, 0] for move in moves]

    def best_of(places: NDArray[np.int64], change: Floats) -> Solution | None:
        """Exchanges of the moves at ``places`` [n, 1 to 3], what they change [n, 5]."""
        keys = objective.estimated(totals + change)
        order = np.lexsort(keys.T[::-1])[: last - objective.calls + len(moves)]
        order = order[
            objective.excess(totals + change[order], but="error") <= objective.key(picks)[0] * (1 + 1e-9) + 1e-9
        ]
        return _first_better(objective, picks, moves[places[order]], keys[order], last)

    found = best_of(np.arange(len(moves))[:, None], changes)
    if found is not None:
        return found
    some = _promising(objective, changes) if len(moves) > _PAIRED else np.arange(len(moves))
    pairs = some[np.stack(np.triu_indices(len(some), 1), 1)]
    groups = problem.group_of[moves]
    pairs = pairs[groups[pairs[:, 0]] != groups[pairs[:, 1]]]
    found = best_of(pairs, changes[pairs].sum(1))
    if found is not None or len(moves) > _TRIPLED or len(pairs) > last - objective.calls:
        return found
    cross = np.zeros((len(moves), len(moves)))
    for one, other in pairs:
        both = _error(objective, picks, *moves[[one, other]]) - totals[0, 0]
        cross[one, other] = both - changes[one, 0] - changes[other, 0]
    triples = np.array([(*pair, third) for pair in pairs for third in range(pair[1] + 1, len(moves))], dtype=np.int64)
    triples = triples.reshape(-1, 3)
    triples = triples[groups[triples[:, 1]] != groups[triples[:, 2]]]
    change = changes[triples].sum(1)
    change[:, 0] += sum(cross[triples[:, one], triples[:, two]] for one, two in ((0, 1), (0, 2), (1, 2)))
    return best_of(triples, change)


def _first_better(
    objective: Objective, picks: Solution, exchanges: NDArray[np.int64], keys: Floats, last: int
) -> Solution | None:
    """The first exchange that is better in truth. Only errors are estimated: what is worse without them isn't tried."""
    now = objective.key(picks)
    others: Totals = {quantity: limit for quantity, limit in objective.limits.items() if quantity != "error"}
    for exchange, estimate in zip(exchanges, keys, strict=True):
        if objective.minimise != "error" and now[0] == 0 and estimate[1] > now[1]:
            continue
        changed = _moved(objective.problem, picks, exchange)
        if objective.problem.choice(changed, 0.0).excess(others) > now[0]:
            continue
        if objective.calls >= last:
            return None
        if objective.key(changed) < now:
            return changed
    return None


def _promising(objective: Objective, changes: Floats) -> NDArray[np.int64]:
    """Exchanges that lower the error most, and those that free most of a limited quantity for their error."""
    half = _PAIRED // 2
    chosen = [np.argsort(changes[:, 0], kind="stable")[:half]]
    limited = [quantity for quantity in {*objective.limits, objective.minimise} if quantity != "error"]
    for quantity in sorted(limited):
        freed = -changes[:, QUANTITIES.index(quantity)]
        worth = np.where(freed > 0, np.maximum(changes[:, 0], 0.0) / np.maximum(freed, 1e-300), np.inf)
        chosen.append(np.argsort(worth, kind="stable")[: half // len(limited)])
    return np.unique(np.concatenate(chosen))


def _exchanges(objective: Objective, picks: Solution) -> tuple[Floats, NDArray[np.int64], Floats]:
    """The totals [1, 5]; the options that may be taken instead, [n]; what each changes by its own error, [n, 5]."""
    problem, here = objective.problem, objective.choice(picks)
    current = problem.rows(picks)[problem.group_of]
    moves = np.flatnonzero(problem.finite & (np.arange(len(current)) != current))
    totals = np.array([[getattr(here, quantity) for quantity in QUANTITIES]])
    return totals, moves, problem.values[moves] - problem.values[current[moves]]


def _error(objective: Objective, picks: Solution, *moves: int) -> float:
    return objective.choice(_moved(objective.problem, picks, moves)).error


def _moved(problem: Problem, picks: Solution, moves: Iterable[int]) -> Solution:
    changed = list(picks)
    for move in moves:
        group = int(problem.group_of[move])
        changed[group] = int(move - problem.starts[group])
    return tuple(changed)
