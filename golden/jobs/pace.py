"""How many tasks make a batch: enough that handing them over costs nothing, few enough that little is lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from assay.golden.jobs.campaign import Campaign
from assay.golden.jobs.tasks import Outcome

_SECONDS = 0.5  # that a batch should take
_MOST = 500


class Pace:
    """Batches of neighbouring tasks of one entry, by what a task of that entry has taken so far."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._seconds: dict[int, float] = {}

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Take note of how long tasks took; later ones count for more."""
        for outcome in outcomes:
            number = self._campaign.entry(outcome.place)
            before = self._seconds.get(number, outcome.seconds)
            self._seconds[number] = 0.8 * before + 0.2 * outcome.seconds

    def batches(self, places: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """``places`` in batches; the first of an entry, of which nothing is known, has one."""
        batch: list[int] = []
        number = -1
        for place in places:
            other = self._campaign.entry(place)
            if batch and (other != number or len(batch) >= self._size(number)):
                yield tuple(batch)
                batch = []
            number = other
            batch.append(place)
        if batch:
            yield tuple(batch)

    def _size(self, number: int) -> int:
        if number not in self._seconds:
            return 1
        return max(1, min(_MOST, round(_SECONDS / max(self._seconds[number], 1e-6))))
