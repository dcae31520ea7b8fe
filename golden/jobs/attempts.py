"""The tasks of a campaign through an engine: in batches, and once more, alone, where something went wrong.

A batch is as long as pays: handing it over costs nothing beside it, and little is lost with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from assay.golden.errors import StoreError
from assay.golden.jobs.campaign import Campaign
from assay.golden.jobs.tasks import FAILED, STATUS, Job, Outcome, work
from assay.runtime.engines import Engine
from assay.runtime.pool import Raised
from assay.runtime.process import Lost

_MILLISECONDS = 500.0  # that a batch should take
_MOST = 500  # tasks of a batch

Batch = tuple[int, ...]


def attempts(job: Job, campaign: Campaign, engine: Engine, places: Iterable[int], retries: int) -> Iterator[Outcome]:
    """What becomes of each task, as it comes. Raises `StoreError` where the store can't be used.

    A task that raises, takes its process down, or takes too long is tried ``retries`` more times, alone.
    """
    failures, batches = Counter[int](), _batches(campaign, places)
    while True:
        given: dict[int, Batch] = {}
        again: list[Batch] = []
        for number, answer in engine.run(work, _numbered(job, batches, given)):
            batch = given.pop(number)
            outcomes = _understood(batch, answer)
            again += ((place,) for place in batch[len(outcomes) :])  # not begun when the worker was lost
            for outcome in outcomes:
                place, failed = outcome.place, outcome.status == FAILED
                failures[place] += failed
                if failed and not outcome.user_error and failures[place] <= retries:
                    again.append((place,))
                else:
                    yield replace(outcome, attempts=failures.pop(place) + (not failed))
        if not again:
            return
        batches = iter(again)


def _numbered(job: Job, batches: Iterator[Batch], given: dict[int, Batch]) -> Iterator[tuple[Job, Batch]]:
    """What an engine is given, noted in ``given`` under its number."""
    for number, batch in enumerate(batches):
        given[number] = batch
        yield job, batch


def _understood(batch: Batch, answer: Sequence[Outcome] | Lost | Raised) -> Sequence[Outcome]:
    """An outcome for each task that was begun."""
    if isinstance(answer, Raised):
        if answer.user_error:
            raise StoreError(answer.message)
        raise RuntimeError(f"a worker failed outside of any task: {answer.message}\n{answer.trace}")
    if not isinstance(answer, Lost):
        return answer
    outcomes = [
        Outcome(place, STATUS[initial], "it failed, and its worker was lost soon after")
        for place, initial in zip(batch, answer.note, strict=False)
    ]
    culprit = batch[len(outcomes) :][:1]
    return [*outcomes, *(Outcome(place, FAILED, answer.message) for place in culprit)]


def _batches(campaign: Campaign, places: Iterable[int]) -> Iterator[Batch]:
    """``places`` in batches that take about half a second, by the campaign's own estimate."""
    batch: list[int] = []
    effort = 0.0
    for place in places:
        batch.append(place)
        effort += campaign.effort(place)
        if effort >= _MILLISECONDS or len(batch) == _MOST:
            yield tuple(batch)
            batch, effort = [], 0.0
    if batch:
        yield tuple(batch)
