"""Resolving what a reference leaves open: which admissible answers explain the outputs of a kernel.

A run of the reference takes the likeliest answer to each decision that its radii leave open
(`assay.golden.lowering.choices`). Most kernels agree. Where outputs don't:

1. Integer results that are a site's answers show the kernel's own: they are taken if they are admissible.
2. An evaluation that leaves all decisions open shows which elements hang on one, and encloses every answer. An element
   that hangs on none, or is beyond that enclosure, is wrong.
3. Decisions are put in groups by leading indices (an element, a row, all): the finest with which each wrong element
   hangs on one group alone. Two evaluations for each binary digit of the groups' numbers show this: one leaves the
   groups open whose digit is one, the other the rest.
4. The groups' answers are tried at the same time, each group's best answers first, in at most `MOST_TRIED` evaluations,
   as long as they explain more.
   Elements that none of all admissible answers explains are wrong; where not all were tried, the enclosure of step 2
   judges an element, and without one it is undecided.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod

import torch

from assay.golden.errors import Undecided
from assay.golden.lowering.choices import Answered, Choices, Element, Loosened, Ranking, Site
from assay.verify.comparison.judge import Tolerance
from assay.verify.findings import coordinates

Tensor = torch.Tensor
Sites = Mapping[int, Site]
Masks = list[Tensor]
Answers = dict[Element, float]

MOST_TRIED = 64
"""The most evaluations in which admissible answers are tried for the outputs of one call."""
_MOST_IDLE = 24  # evaluations one after another that explain no further element
_MOST_PENDING = 2**12  # answers of a group that wait to be tried


@dataclass(frozen=True)
class Resolved:
    """What a contract allows of each output, given the answers of ``sites``; ``undecided`` marks the elements that no
    answer explains though not all were tried, ``line`` is the reference's. ``own``: the answers aren't the likeliest.
    """

    limits: list[Tolerance]
    sites: Sites
    undecided: Masks = field(default_factory=list)
    line: str = ""
    own: bool = False


@dataclass(frozen=True)
class Resolver:
    """Finds the answers for the outputs ``got``.

    ``limits_of(choices)`` evaluates the reference; ``broken_in(limits)`` returns which elements of the outputs break
    them.
    """

    limits_of: Callable[[Choices], list[Tolerance]]
    broken_in: Callable[[list[Tolerance]], Masks]
    got: Sequence[Tensor]

    def resolve(self) -> Resolved:
        """Return the limits under the answers that explain the most."""
        choices = Answered()
        limits = self.limits_of(choices)
        if not choices.sites:
            return Resolved(limits, {})
        first = _Run({}, limits, choices.sites, self.broken_in(limits))
        if not _any(first.broken):
            return Resolved(limits, first.sites)
        run = self._hinted(first)
        if not _any(run.broken):
            return Resolved(run.limits, run.sites, own=True)
        enclosure = self._enclosure(run)
        proven = run.broken
        if enclosure is not None:
            beyond = self.broken_in(enclosure)
            hang = _changed(run.limits, enclosure)
            proven = [b & (~h | e) for b, h, e in zip(run.broken, hang, beyond, strict=True)]
            if _any(proven):
                return self._with_undecided(run, proven, None)
        run, proven = self._searched(run, enclosure is not None)
        return self._with_undecided(run, proven, enclosure)

    def _tried(self, wanted: Answers, *, checked: bool = True) -> _Run:
        choices = Answered(wanted, checked=checked)
        limits = self.limits_of(choices)
        return _Run(wanted, limits, choices.sites, self.broken_in(limits))

    def _hinted(self, run: _Run) -> _Run:
        """Return the run with answers that integer outputs show: of a site's own answers, in its shape."""
        for _ in range(len(run.sites)):
            wanted = dict(run.wanted)
            for number, site in run.sites.items():
                open_ = site.decision.open.reshape(-1)
                for got, limits in zip(self.got, run.limits, strict=True):
                    if got.dtype.is_floating_point or got.numel() != open_.numel():
                        continue
                    shown = limits.golden.reshape(-1)[open_] == site.answers.reshape(-1).double()[open_]
                    if bool(shown.all()):
                        values = got.detach().cpu().reshape(-1).double()
                        wanted |= {(number, at): float(values[at]) for at in open_.nonzero()[:, 0].tolist()}
            if wanted == run.wanted:
                break
            further = self._tried(wanted)
            if _count(further.broken) >= _count(run.broken):
                break
            run = further
        return run

    def _enclosure(self, run: _Run) -> list[Tolerance] | None:
        """Return the limits with all decisions open; None if the reference can't be evaluated so."""
        return self._loosened(run, lambda number, site: site.decision.open)

    def _loosened(self, run: _Run, loose: Callable[[int, Site], Tensor]) -> list[Tolerance] | None:
        try:
            return self.limits_of(Loosened(run.sites, loose))
        except Undecided:
            return None

    def _searched(self, run: _Run, is_enclosed: bool) -> tuple[_Run, Masks]:
        """Return the run with the most explained elements, and the elements that no answers explain."""
        left = MOST_TRIED
        sites = self._that_matter(run) if is_enclosed else run.sites
        depth = max((site.answers.ndim for site in sites.values()), default=0)
        for level in range(depth, -1, -1):
            groups = _Groups.of(sites, level)
            owners = [torch.zeros_like(mask, dtype=torch.int64) for mask in run.broken]
            if level and len(groups.keys) > 1:
                owned = self._owners(run, groups) if is_enclosed else None
                if owned is None or any(
                    bool((owner[mask] < 0).any()) for owner, mask in zip(owned, run.broken, strict=True)
                ):
                    continue
                owners = owned
            search = _Search(self, run, groups, owners, is_finest=level == depth > 0)
            left = search.execute(left)
            run = self._tried(search.answers())
            if not _any(run.broken):
                break
            if search.is_complete and _count(run.broken) == search.unexplained:
                return run, run.broken
            if not left:
                break
        return run, [torch.zeros_like(mask) for mask in run.broken]

    def _that_matter(self, run: _Run) -> Sites:
        """Return the sites of which some element hangs on an open decision."""
        matter = {}
        for number, site in run.sites.items():
            limits = self._loosened(run, lambda at, s, n=number: s.decision.open & (at == n))  # type: ignore[misc]
            if limits is None or _any(_changed(run.limits, limits)):
                matter[number] = site
        return matter

    def _owners(self, run: _Run, groups: _Groups) -> Masks | None:
        """Return the number of the group on which each element hangs: -1 if on none, -2 if on several; None if that
        can't be evaluated."""
        digits = max(len(groups.keys) - 1, 1).bit_length()
        owners = [torch.zeros_like(mask, dtype=torch.int64) for mask in run.broken]
        several = [torch.zeros_like(mask) for mask in run.broken]
        for digit in range(digits):
            sides = []
            for side in (0, 1):
                limits = self._loosened(run, lambda n, s, d=digit, v=side: groups.with_digit(n, s, d, v))  # type: ignore[misc]
                if limits is None:
                    return None
                sides.append(_changed(run.limits, limits))
            zero, one = sides
            for at, (a, b) in enumerate(zip(zero, one, strict=True)):
                owners[at] = owners[at] | (b.long() << digit)
                several[at] = several[at] | (a & b)
                owners[at] = torch.where(a | b, owners[at], -1)
        return [torch.where(mask, -2, owner) for mask, owner in zip(several, owners, strict=True)]

    def _with_undecided(self, run: _Run, proven: Masks, enclosure: list[Tolerance] | None) -> Resolved:
        """Return the limits with elements unjudged, or judged by their enclosure, that are neither explained nor
        proven wrong."""
        limits, undecided = list(run.limits), []
        for at, (broken, wrong) in enumerate(zip(run.broken, proven, strict=True)):
            left = broken & ~wrong
            if enclosure is not None and bool(left.any()):
                wide = enclosure[at]
                radius = wide.pre_store_radius + (wide.golden - limits[at].golden).abs()
                enclosed = left & wide.judged & radius.isfinite() & ~wide.no_number
                limits[at] = replace(
                    limits[at], pre_store_radius=torch.where(enclosed, radius, limits[at].pre_store_radius)
                )
                left = left & ~enclosed
            limits[at] = replace(limits[at], judged=limits[at].judged & ~left)
            undecided.append(left)
        line = next(iter(run.sites.values())).line if run.sites else ""
        return Resolved(limits, run.sites, undecided, line, own=bool(run.wanted))


@dataclass(frozen=True)
class _Run:
    """An evaluation with wanted answers: its limits, the sites that it left open, and the elements that break it."""

    wanted: Answers
    limits: list[Tolerance]
    sites: Sites
    broken: Masks


@dataclass(frozen=True)
class _Groups:
    """Groups of open decisions by their first ``level`` indices: the number of each group by its key."""

    level: int
    keys: dict[tuple[int, ...], int]
    elements: dict[Element, int]
    numbers: dict[int, Tensor]

    @staticmethod
    def of(sites: Sites, level: int) -> _Groups:
        keys: dict[tuple[int, ...], int] = {}
        elements, numbers = {}, {}
        for number, site in sites.items():
            shape = site.answers.shape
            groups = torch.full((prod(shape),), -1, dtype=torch.int64)
            for index in site.decision.open.reshape(-1).nonzero()[:, 0].tolist():
                key = coordinates(index, shape)[:level]
                groups[index] = elements[number, index] = keys.setdefault(key, len(keys))
            numbers[number] = groups.reshape(shape)
        return _Groups(level, keys, elements, numbers)

    def with_digit(self, number: int, site: Site, digit: int, value: int) -> Tensor:
        """Return which decisions of a site belong to groups whose number has this binary digit."""
        groups = self.numbers.get(number)
        if groups is None:
            return torch.zeros_like(site.decision.open)
        return (groups >= 0) & ((groups >> digit & 1) == value)

    def group_of(self, element: Element, site: Site) -> int | None:
        """Return the group of a decision, also of one that wasn't open before."""
        return self.keys.get(coordinates(element[1], site.answers.shape)[: self.level])


class _Search:
    """Tries the answers of all groups that have broken elements at the same time, those of each group best-first."""

    def __init__(self, resolver: Resolver, base: _Run, groups: _Groups, owners: Masks, *, is_finest: bool) -> None:
        self.resolver, self.base, self.groups, self.owners = resolver, base, groups, owners
        self.is_finest = is_finest
        self.is_complete = True
        self._order = count()
        wrong = {int(n) for owner, mask in zip(owners, base.broken, strict=True) for n in owner[mask].tolist()}
        self.pending: dict[int, list[tuple[int, int, int, Answers]]] = {group: [] for group in wrong}
        self.seen: dict[int, set[frozenset[tuple[Element, float]]]] = {group: set() for group in wrong}
        self.best: dict[int, tuple[int, Answers]] = {}
        own = {group: {e: v for e, v in base.wanted.items() if groups.elements.get(e) == group} for group in wrong}
        self.fixed = {e: v for e, v in base.wanted.items() if groups.elements.get(e) not in wrong}
        for group in wrong:
            self.best[group] = self._broken(base, group), own[group]
        for group in wrong:
            self._extend(base, group, own[group])

    def execute(self, left: int) -> int:
        """Try answers in at most ``left`` evaluations; return how many of them remain."""
        idle = 0
        while left and idle < _MOST_IDLE and any(self.pending[g] and self.best[g][0] for g in self.pending):
            idle += 1
            trial = {g: heapq.heappop(p)[-1] for g, p in self.pending.items() if p and self.best[g][0]}
            kept = {g: self.best[g][1] for g in self.pending if g not in trial}
            left -= 1
            try:
                run = self.resolver._tried(self._joined({**trial, **kept}), checked=not self.is_finest)
            except Undecided:
                self.is_complete = False
                continue
            if any(element not in self.groups.elements for element in self._new(run)) and self.is_finest:
                self.is_complete = False
            for group, answers in trial.items():
                broken = self._broken(run, group)
                if broken < self.best[group][0]:
                    self.best[group], idle = (broken, answers), 0
                if broken:
                    self._extend(run, group, answers, broken)
        self.is_complete &= not any(self.pending[g] for g in self.pending if self.best[g][0])
        return left

    def answers(self) -> Answers:
        """Return the best answers of all groups."""
        return self._joined({group: answers for group, (_, answers) in self.best.items()})

    @property
    def unexplained(self) -> int:
        """The number of elements that the best answers leave broken, if the groups are independent."""
        return sum(broken for broken, _ in self.best.values())

    def _joined(self, groups: Mapping[int, Answers]) -> Answers:
        joined = dict(self.fixed)
        for answers in groups.values():
            joined |= answers
        return joined

    def _broken(self, run: _Run, group: int) -> int:
        return sum(int((mask & (owner == group)).sum()) for owner, mask in zip(self.owners, run.broken, strict=True))

    def _new(self, run: _Run) -> Iterator[Element]:
        """Yield the decisions of a run that were not open before, of sites that matter."""
        for number, site in run.sites.items():
            if number in self.base.sites and number not in self.groups.numbers:
                continue
            known = self.groups.numbers.get(number)
            new = (
                site.decision.open
                if known is None or known.shape != site.answers.shape
                else (site.decision.open & (known < 0))
            )
            for index in new.reshape(-1).nonzero()[:, 0].tolist():
                yield number, index

    def _extend(self, run: _Run, group: int, answers: Answers, score: int | None = None) -> None:
        """Add the answers that differ from a run's in one decision of the group."""
        score = self.best[group][0] if score is None else score
        for number, site in run.sites.items():
            if number in self.base.sites and number not in self.groups.numbers:
                continue
            for index in site.decision.open.reshape(-1).nonzero()[:, 0].tolist():
                if self.groups.group_of((number, index), site) != group:
                    continue
                values, are_all = site.decision.candidates(index)
                self.is_complete &= are_all
                for value in values:
                    if len(self.pending[group]) >= _MOST_PENDING:
                        self.is_complete = False
                        return
                    changed = answers | self._change(number, site, index, value)
                    key = frozenset(changed.items())
                    if value == float(site.answers.reshape(-1)[index]) or key in self.seen[group]:
                        continue
                    self.seen[group].add(key)
                    heapq.heappush(self.pending[group], (score, len(changed), next(self._order), changed))

    def _change(self, number: int, site: Site, index: int, value: float) -> Answers:
        """Return another answer to a decision; in an order the index that stood there takes the other's rank."""
        if not isinstance(site.decision, Ranking) or self.is_finest:
            return {(number, index): value}
        k = site.answers.shape[-1]
        row = site.answers.reshape(-1, k)[index // k]
        other = (row == value).nonzero()[:, 0].tolist()
        swapped = {(number, index // k * k + at): float(row[index % k]) for at in other}
        return {(number, index): value, **swapped}


def _changed(limits: list[Tolerance], others: list[Tolerance]) -> Masks:
    """Return the elements whose limits differ."""
    return [
        (a.pre_store_radius != b.pre_store_radius) | (a.judged != b.judged) | (a.no_number != b.no_number)
        for a, b in zip(limits, others, strict=True)
    ]


def _any(masks: Masks) -> bool:
    return any(bool(mask.any()) for mask in masks)


def _count(masks: Masks) -> int:
    return sum(int(mask.sum()) for mask in masks)
