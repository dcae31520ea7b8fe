"""Decisions of a reference that its numbers leave open, and the answers that a run takes.

Operations that turn numbers into masks, whole numbers or indices *decide*: comparisons, roundings to whole numbers,
orders. Each element of their results is a decision, and the operation, by its position in the run, its site. A decision
is open where the radii admit several answers. What a run takes there depends on its `Choices`: nothing (the interval of
all answers), the likeliest answer or a wanted one that is admissible, or the answers of an earlier run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from assay.golden.errors import Undecided

Tensor = torch.Tensor
Ends = tuple[Tensor, Tensor]
Element = tuple[int, int]
"""A decision: its site, and its flat index there."""
MOST_CANDIDATES = 256
"""The most answers to one decision that are listed."""


class Decision(Protocol):
    """What a site decides: its likeliest answers ``guess``, of the shape of the result, and where they are ``open``."""

    @property
    def guess(self) -> Tensor: ...
    @property
    def open(self) -> Tensor: ...
    @property
    def ends(self) -> Ends:
        """The least and the greatest answer to each decision."""

    def without(self, answers: Tensor) -> Ends:
        """Return the answers as ends, but all that there may be where nothing is known."""

    def admits(self, answers: Tensor) -> Tensor:
        """Return where these answers are admissible."""

    def candidates(self, index: int) -> tuple[list[float], bool]:
        """Return the admissible answers at a flat index, the likeliest first, and whether these are all."""


@dataclass(frozen=True)
class Between:
    """Decisions whose answers are whole numbers between two ends: 0 and 1 of a mask, a rounded number, a count.

    Where an end is infinite nothing is known, and nothing is decided.
    """

    least: Tensor
    most: Tensor
    guess: Tensor

    @cached_property
    def _differ(self) -> Tensor:
        return (self.least != self.most) & ~(self.least.isnan() & self.most.isnan())

    @cached_property
    def open(self) -> Tensor:
        return self._differ & self.least.isfinite() & self.most.isfinite()

    @property
    def ends(self) -> Ends:
        return self.least, self.most

    def without(self, answers: Tensor) -> Ends:
        unknown = self._differ & ~self.open
        if not bool(unknown.any()):
            return answers, answers
        return torch.where(unknown, self.least, answers), torch.where(unknown, self.most, answers)

    def admits(self, answers: Tensor) -> Tensor:
        return (answers >= self.least) & (answers <= self.most)

    def candidates(self, index: int) -> tuple[list[float], bool]:
        least, most, guess = (float(part.reshape(-1)[index]) for part in (self.least, self.most, self.guess))
        first, last = max(least, guess - MOST_CANDIDATES // 2), min(most, guess + MOST_CANDIDATES // 2)
        whole = [float(value) for value in range(math.ceil(first), math.floor(last) + 1)]
        return sorted(whole, key=lambda value: abs(value - guess)), (first, last) == (least, most)


@dataclass(frozen=True)
class Ranking:
    """The indices of the first k numbers of the last axis in ascending order; ``low`` and ``high`` are their ends.

    Index j may be the i-th if at most i numbers certainly precede it and, with those that may, at least i do. Ties of
    exact numbers leave the index open too, as PyTorch says nothing of their order, unless the sort is ``stable``.
    """

    low: Tensor
    high: Tensor
    guess: Tensor
    stable: bool = False

    @cached_property
    def _sorted(self) -> Ends:
        return self.low.sort(-1).values, self.high.sort(-1).values

    @cached_property
    def open(self) -> Tensor:
        k = self.guess.shape[-1]
        low_sorted, high_sorted = self._sorted
        low_at, high_at = torch.gather(self.low, -1, self.guess), torch.gather(self.high, -1, self.guess)
        infinity = torch.full_like(low_at[..., :1], torch.inf)
        before = torch.cat([-infinity, high_sorted[..., : max(k - 1, 0)]], -1)
        after = torch.cat([low_sorted, infinity], -1)[..., 1 : k + 1]
        certain = (low_at == low_sorted[..., :k]) & (high_at == high_sorted[..., :k])
        certain &= (before < low_at) & (after > high_at)
        if self.stable:
            certain |= (self.low == self.high).all(-1, keepdim=True)
        return ~certain

    def _row(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ends of the numbers of a row, and the indices that may come at a flat index of the result."""
        row, rank = divmod(index, self.guess.shape[-1])
        low, high = (part.reshape(-1, part.shape[-1])[row] for part in (self.low, self.high))
        low_sorted, high_sorted = (part.reshape(-1, part.shape[-1])[row, rank] for part in self._sorted)
        return low, high, ((low <= high_sorted) & (high >= low_sorted)).nonzero()[:, 0]

    @cached_property
    def ends(self) -> Ends:
        first, last = self.guess.reshape(-1).clone(), self.guess.reshape(-1).clone()
        for index in self.open.reshape(-1).nonzero()[:, 0].tolist():
            may = self._row(index)[-1]
            first[index], last[index] = may.min(), may.max()
        return first.reshape(self.guess.shape), last.reshape(self.guess.shape)

    def without(self, answers: Tensor) -> Ends:
        return answers, answers

    def admits(self, answers: Tensor) -> Tensor:
        """A row is admissible if its indices differ, and no number that comes later or not at all certainly precedes
        one of them."""
        inside = ((answers >= 0) & (answers < self.low.shape[-1])).all(-1, keepdim=True)
        index = torch.where(inside, answers, 0)
        chosen = torch.zeros_like(self.low, dtype=torch.bool).scatter_(-1, index, True)
        others = self.high.masked_fill(chosen, math.inf).amin(-1, keepdim=True)
        later = torch.cat([self.high.gather(-1, index)[..., 1:], others], -1).flip(-1).cummin(-1).values.flip(-1)
        right = (later >= self.low.gather(-1, index)).all(-1, keepdim=True)
        different = chosen.sum(-1, keepdim=True) == index.shape[-1]
        return (inside & right & different).expand(answers.shape)

    def candidates(self, index: int) -> tuple[list[float], bool]:
        low, high, may = self._row(index)
        middle = (low / 2 + high / 2).nan_to_num()
        guess = int(self.guess.reshape(-1)[index])
        nearest = (middle[may] - middle[guess]).abs().argsort(stable=True)[:MOST_CANDIDATES]
        return may[nearest].double().tolist(), len(nearest) == len(may)


@dataclass(frozen=True)
class Site:
    """An operation that left decisions open, the answers that were taken, and its line."""

    decision: Decision
    answers: Tensor
    line: str


class Choices:
    """The answers of one run; this one takes none, so that each open decision is the interval of its answers.

    If the reference reads a Python number that is open, this run takes one of ``answers`` by their order, or else the
    first admissible one; ``branches`` lists the admissible answers, the one taken first. ``sites`` has the operations
    that left decisions open, by their position in the run.
    """

    def __init__(self, answers: Sequence[Any] = ()) -> None:
        self.answers = answers
        self.restart()

    def restart(self) -> None:
        """Forget what a run that didn't end has taken."""
        self.branches: list[list[Any]] = []
        self.sites: dict[int, Site] = {}
        self.count = 0

    def take(self, decision: Decision, line: Callable[[], str]) -> Ends:
        """Return the ends of what this run takes for each decision of a site: equal where it is one answer.

        Raises `Undecided` on a device where a decision is open: the CPU takes them.
        """
        number, self.count = self.count, self.count + 1
        if decision.guess.device.type != "cpu" and bool(decision.open.any()):
            raise Undecided(f"{line()}: numbers on a device that rounding leaves open", line())
        return self._taken(number, decision, line)

    def _taken(self, number: int, decision: Decision, line: Callable[[], str]) -> Ends:
        return decision.ends


class Answered(Choices):
    """Takes the ``wanted`` answers where they are admissible, and the likeliest ones elsewhere.

    ``checked``: where a row of an order is admissible as a whole; else each answer by itself.
    """

    def __init__(self, wanted: Mapping[Element, float] | None = None, *, checked: bool = True) -> None:
        super().__init__()
        self.checked = checked
        self._wanted: dict[int, dict[int, float]] = {}
        for (number, index), answer in (wanted or {}).items():
            self._wanted.setdefault(number, {})[index] = answer

    def _taken(self, number: int, decision: Decision, line: Callable[[], str]) -> Ends:
        open_, answers = decision.open, decision.guess
        if not bool(open_.any()):
            return decision.without(answers)
        wanted = self._wanted.get(number, {})
        index = [at for at in wanted if at < answers.numel()]
        if index:
            given = answers.reshape(-1).clone()
            given[index] = torch.tensor([wanted[at] for at in index], dtype=torch.float64).to(answers.dtype)
            given = given.reshape(answers.shape)
            allowed = open_ & (decision.admits(given) if self.checked else True)
            answers = torch.where(allowed, given, answers)
        self.sites[number] = Site(decision, answers, line())
        return decision.without(answers)


class Followed(Choices):
    """Takes the answers of an earlier run's ``sites``, and the likeliest ones at others."""

    def __init__(self, sites: Mapping[int, Site]) -> None:
        super().__init__()
        self.followed = sites

    def _taken(self, number: int, decision: Decision, line: Callable[[], str]) -> Ends:
        site = self.followed.get(number)
        if site is None:
            return decision.without(decision.guess)
        if site.answers.device != decision.guess.device:
            raise Undecided(f"{line()}: answers of a run on another device", line())
        if site.answers.shape != decision.guess.shape:
            raise Undecided(f"{line()}: a choice that rounding leaves open changes a shape", line())
        followed = site.decision.open
        least, most = decision.without(decision.guess)
        return torch.where(followed, site.answers, least), torch.where(followed, site.answers, most)


class Loosened(Followed):
    """Takes the answers of an earlier run, but none to the decisions that ``loose`` names by site, nor to those that
    these may change."""

    def __init__(self, sites: Mapping[int, Site], loose: Callable[[int, Site], Tensor]) -> None:
        super().__init__(sites)
        self.loose = loose

    def _taken(self, number: int, decision: Decision, line: Callable[[], str]) -> Ends:
        least, most = decision.ends
        site = self.followed.get(number)
        if site is None or site.answers.device != least.device or site.answers.shape != decision.guess.shape:
            return least, most
        first, last = site.decision.ends
        fixed = site.decision.open & (first == least) & (last == most) & ~self.loose(number, site)
        return torch.where(fixed, site.answers, least), torch.where(fixed, site.answers, most)


def open_elements(sites: Mapping[int, Site]) -> Iterable[Element]:
    """Yield the open decisions of a run."""
    for number, site in sites.items():
        for index in site.decision.open.reshape(-1).nonzero()[:, 0].tolist():
            yield number, index
