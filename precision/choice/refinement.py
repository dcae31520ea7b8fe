"""Exchanges of one or two options, as long as they make a choice better under the true error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from assay.precision.choice.problem import QUANTITIES, Choice, ErrorOf, Floats, Picks, Problem, Quantity

__all__ = ["Judge", "greedy", "linearised", "refine"]

_PAIRED = 300
"""Single exchanges of which pairs are formed."""
_TRIPLED = 40
"""Single exchanges up to which triples are."""

Key = tuple[float, float, float]


class Judge:
    """What a choice is worth: limits first, then what is minimised, then the error. Remembers what it was told."""

    def __init__(
        self, problem: Problem, limits: Mapping[Quantity, float], minimise: Quantity, error_of: ErrorOf | None
    ) -> None:
        self.problem = problem
        self.limits = dict(limits)
        self.minimise: Quantity = minimise
        self.exact = error_of is None
        """Errors add up, so that the integer program has the last word."""
        self.calls = 0
        self._error_of = error_of
        self._known: dict[Picks, Choice] = {}

    def choice(self, picks: Picks) -> Choice:
        """The totals, with the true error."""
        if picks not in self._known:
            error = None
            if self._error_of is not None:
                self.calls += 1
                error = float(self._error_of(self.problem.schemes(picks)))
            self._known[picks] = self.problem.choice(picks, error)
        return self._known[picks]

    def key(self, picks: Picks) -> Key:
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


def refine(judge: Judge, start: Picks, calls: int) -> Picks:
    """A choice that no exchange of one or two options makes better, nor of three where there are few, as far as
    ``calls`` of the true error reach.

    Exchanges are tried in the order of what they promise: single ones by their true changes where there are calls
    enough for all, otherwise by the options' own errors; pairs by the sums of these; triples by the true changes of
    their pairs, from which a quadratic form follows.
    """
    picks, last = start, judge.calls + calls
    while judge.calls < last:
        better = _step(judge, picks, last)
        if better is None:
            break
        picks = better
    return picks


@np.errstate(over="ignore", invalid="ignore")  # a combination may make infinities though none of its options does
def _step(judge: Judge, picks: Picks, last: int) -> Picks | None:
    problem = judge.problem
    current = problem.rows(picks)
    moves = _moves(problem, picks)
    here = judge.choice(picks)
    totals = np.array([getattr(here, quantity) for quantity in QUANTITIES])
    changes = problem.values[moves] - problem.values[current[problem.unit_of[moves]]]
    if len(moves) <= (last - judge.calls) * 3 // 4:
        changes[:, 0] = _single(judge, picks, moves)

    def best_of(places: NDArray[np.int64], change: Floats) -> Picks | None:
        """Exchanges of the moves at ``places`` [n, 1 to 3], what they change [n, 5]."""
        keys = judge.estimated(totals + change)
        order = np.lexsort(keys.T[::-1])[: last - judge.calls + len(moves)]
        order = order[judge.excess(totals + change[order], but="error") <= judge.key(picks)[0] * (1 + 1e-9) + 1e-9]
        return _first_better(judge, picks, moves[places[order]], keys[order], last)

    found = best_of(np.arange(len(moves))[:, None], changes)
    if found is not None:
        return found
    some = _promising(judge, changes) if len(moves) > _PAIRED else np.arange(len(moves))
    pairs = some[np.stack(np.triu_indices(len(some), 1), 1)]
    units = problem.unit_of[moves]
    pairs = pairs[units[pairs[:, 0]] != units[pairs[:, 1]]]
    found = best_of(pairs, changes[pairs].sum(1))
    if found is not None or len(moves) > _TRIPLED or len(pairs) > last - judge.calls:
        return found
    cross = np.zeros((len(moves), len(moves)))
    for one, other in pairs:
        both = judge.choice(_moved(problem, picks, moves[[one, other]])).error - here.error
        cross[one, other] = both - changes[one, 0] - changes[other, 0]
    triples = np.array([(*pair, third) for pair in pairs for third in range(pair[1] + 1, len(moves))], dtype=np.int64)
    triples = triples.reshape(-1, 3)[:, :3]
    triples = triples[units[triples[:, 1]] != units[triples[:, 2]]]
    change = changes[triples].sum(1)
    change[:, 0] += sum(cross[triples[:, one], triples[:, two]] for one, two in ((0, 1), (0, 2), (1, 2)))
    return best_of(triples, change)


def _first_better(judge: Judge, picks: Picks, exchanges: NDArray[np.int64], keys: Floats, last: int) -> Picks | None:
    """The first exchange that is better in truth. Only errors are estimated: what is worse without them isn't tried."""
    now = judge.key(picks)
    others: dict[Quantity, float] = {quantity: limit for quantity, limit in judge.limits.items() if quantity != "error"}
    for exchange, estimate in zip(exchanges, keys, strict=True):
        if judge.minimise != "error" and now[0] == 0 and estimate[1] > now[1]:
            continue
        changed = _moved(judge.problem, picks, exchange)
        if judge.problem.choice(changed, 0.0).excess(others) > now[0]:
            continue
        if judge.calls >= last:
            return None
        if judge.key(changed) < now:
            return changed
    return None


def _promising(judge: Judge, changes: Floats) -> NDArray[np.int64]:
    """Exchanges that lower the error most, and those that free most of a limited quantity for their error."""
    half = _PAIRED // 2
    chosen = [np.argsort(changes[:, 0], kind="stable")[:half]]
    limited = [quantity for quantity in {*judge.limits, judge.minimise} if quantity != "error"]
    for quantity in sorted(limited):
        freed = -changes[:, QUANTITIES.index(quantity)]
        worth = np.where(freed > 0, np.maximum(changes[:, 0], 0.0) / np.maximum(freed, 1e-300), np.inf)
        chosen.append(np.argsort(worth, kind="stable")[: half // len(limited)])
    return np.unique(np.concatenate(chosen))


def greedy(judge: Judge, calls: int) -> Picks | None:
    """From the least errors on, the exchange that frees most of what is short for its true error, until limits hold.

    A gain is looked at again only when it comes first (M. Minoux, *Accelerated greedy algorithms*, 1978). None where
    limits can't be met so, or the calls are spent before.
    """
    problem, last = judge.problem, judge.calls + calls
    limits: dict[Quantity, float] = {
        quantity: limit for quantity, limit in judge.limits.items() if quantity != "error" and limit > 0
    }
    errors = np.where(problem.finite, problem.values[:, 0], np.inf)
    ends = zip(problem.starts, problem.starts[1:], strict=False)
    picks: Picks = tuple(int(np.argmin(errors[first:end])) for first, end in ends)
    taken = np.zeros(len(errors), dtype=bool)
    added = errors - errors[problem.rows(picks)][problem.unit_of]
    while judge.choice(picks).excess(limits) > 0:
        here, moves = judge.choice(picks), _moves(problem, picks)
        changes = problem.values[moves] - problem.values[problem.rows(picks)[problem.unit_of[moves]]]
        freed = np.zeros(len(moves))
        for quantity, limit in limits.items():
            over = getattr(here, quantity) - limit
            freed += np.minimum(-changes[:, QUANTITIES.index(quantity)], over) / limit if over > 0 else 0.0
        useful = (freed > 0) & ~taken[moves]  # an option given up again is not taken twice: that could go in circles
        moves, freed = moves[useful], freed[useful]
        fresh: set[int] = set()
        while True:
            if not len(moves) or judge.calls >= last:
                return None
            place = int(np.argmin(added[moves] / freed))
            move = int(moves[place])
            if move in fresh:
                break
            added[move] = judge.choice(_moved(problem, picks, (move,))).error - here.error
            fresh.add(move)
        taken[move] = True
        picks = _moved(problem, picks, (move,))
    return picks


def linearised(judge: Judge, picks: Picks) -> Problem:
    """The problem with errors of options that add up to the true error of every choice one exchange from ``picks``."""
    problem = judge.problem
    moves = _moves(problem, picks)
    errors = np.zeros(len(problem.values))
    errors[moves] = _single(judge, picks, moves)
    return problem.with_errors(errors + judge.choice(picks).error / len(problem.units))


def _moves(problem: Problem, picks: Picks) -> NDArray[np.int64]:
    moves = np.flatnonzero(problem.finite)
    return moves[moves != problem.rows(picks)[problem.unit_of[moves]]]


def _single(judge: Judge, picks: Picks, moves: NDArray[np.int64]) -> list[float]:
    here = judge.choice(picks).error
    return [judge.choice(_moved(judge.problem, picks, (move,))).error - here for move in moves]


def _moved(problem: Problem, picks: Picks, moves: Iterable[int]) -> Picks:
    changed = list(picks)
    for move in moves:
        unit = int(problem.unit_of[move])
        changed[unit] = int(move - problem.starts[unit])
    return tuple(changed)
