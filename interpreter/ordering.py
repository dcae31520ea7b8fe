"""Which program's accesses come before which, of the programs of one launch.

Programs run at the same time, in any order; only atomics order them. An atomic that releases publishes what its program
has done so far, and what that program knew of others; one that acquires, at the same address, learns it (happens-before
as in Flanagan and Freund, FastTrack, PLDI 2009). Programs are interpreted one after another, so time is one number: a
new *segment* begins with each program and after each release.
"""

from __future__ import annotations

from collections.abc import Iterable


class Ordering:
    """The segments of a launch."""

    def __init__(self) -> None:
        self.segment = 0
        self.first = 1
        self._programs: list[tuple[int, ...]] = [()]
        self._known: dict[tuple[int, ...], int] = {}
        self._published: dict[int, dict[tuple[int, ...], int]] = {}

    def begin(self, program: tuple[int, ...]) -> None:
        """``program`` begins, knowing of no other."""
        self.first = self.segment + 1
        self._known = {}
        self._next(program)

    def _next(self, program: tuple[int, ...]) -> None:
        self.segment += 1
        self._programs.append(program)

    def program(self, segment: int) -> tuple[int, ...]:
        """The program that a segment belongs to."""
        return self._programs[segment]

    def acquire(self, addresses: Iterable[int]) -> None:
        """Learn what was published at ``addresses``."""
        for address in addresses:
            for program, segment in self._published.get(address, {}).items():
                self._known[program] = max(segment, self._known.get(program, 0))

    def release(self, addresses: Iterable[int]) -> None:
        """Publish what happened so far at ``addresses``."""
        present = self._programs[self.segment]
        for address in addresses:
            published = self._published.setdefault(address, {})
            for program, segment in self._known.items():
                published[program] = max(segment, published.get(program, 0))
            published[present] = self.segment
        self._next(present)

    def is_before(self, segment: int) -> bool:
        """Whether a segment comes before the present moment in every order of execution."""
        return segment >= self.first or segment <= self._known.get(self._programs[segment], 0)
