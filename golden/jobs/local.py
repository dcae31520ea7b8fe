"""The engine of one machine: worker processes, any of which may die without harm to the others' tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any

from assay.golden.errors import StoreError
from assay.golden.isolate import Lost, Raised, Workers
from assay.golden.jobs.pace import Pace
from assay.golden.jobs.tasks import FAILED, STATUS, Job, Outcome, work

TIMEOUT = 900.0
RETRIES = 2


class Local:
    """``workers`` processes; a context manager, which ends them.

    A task that raises, takes its process down, or takes longer than ``timeout`` seconds is tried ``retries`` more
    times, alone.
    """

    def __init__(self, workers: int, *, retries: int = RETRIES, timeout: float = TIMEOUT) -> None:
        self._workers = Workers(workers, preload="assay.golden.jobs.tasks", patience=timeout, quiet=True)
        self._retries, self._timeout = retries, timeout

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.__exit__(kind, error, trace)

    def run(self, job: Job, places: Iterable[int]) -> Iterator[Outcome]:
        """What becomes of each task, retries done, as it comes. Raises `StoreError` where the store can't be used."""
        pace = Pace(job.campaign)
        queue = Queue(pace.batches(places), self._retries)
        while queue.has_more():
            given: dict[int, tuple[int, ...]] = {}
            for number, answer in self._workers.each(work, ((job, batch) for batch in queue.batches(given))):
                outcomes = self._understood(given.pop(number), answer, queue)
                pace.learn(outcomes)
                yield from queue.settled(outcomes)

    def _understood(self, batch: Sequence[int], answer: Any, queue: Queue) -> list[Outcome]:
        """An outcome for each task that was begun; the others are queued again."""
        if isinstance(answer, Raised):
            if answer.mendable:
                raise StoreError(answer.message)
            raise RuntimeError(f"a worker failed outside of any task: {answer.message}\n{answer.trace}")
        if not isinstance(answer, Lost):
            return list(answer)
        outcomes = [
            Outcome(place, STATUS[initial], "it failed, and its worker was lost soon after")
            for place, initial in zip(batch, answer.note, strict=False)
        ]
        if len(outcomes) < len(batch):
            what = f"it took longer than {self._timeout:g} s" if answer.kind == "timeout" else answer.message
            outcomes.append(Outcome(batch[len(outcomes)], FAILED, what))
        queue.again(batch[len(outcomes) :])
        return outcomes


class Queue:
    """Batches that wait, those to be tried again first, and how often each of their tasks has failed."""

    def __init__(self, fresh: Iterator[tuple[int, ...]], retries: int) -> None:
        self._fresh, self._retries = fresh, retries
        self._waiting: deque[tuple[int, ...]] = deque()
        self._failures: dict[int, int] = {}

    def batches(self, given: dict[int, tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """What waits now, noted in ``given`` under its number."""
        for number in count():
            batch = self._waiting.popleft() if self._waiting else next(self._fresh, None)
            if batch is None:
                return
            given[number] = batch
            yield batch

    def has_more(self) -> bool:
        if not self._waiting and (batch := next(self._fresh, None)) is not None:
            self._waiting.append(batch)
        return bool(self._waiting)

    def again(self, batch: Sequence[int]) -> None:
        if batch:
            self._waiting.append(tuple(batch))

    def settled(self, outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
        """The outcomes that are final; what failed is queued again, alone, while it has tries left."""
        for outcome in outcomes:
            failures = self._failures.pop(outcome.place, 0) + (outcome.status == FAILED)
            if outcome.status == FAILED and not outcome.mendable and failures <= self._retries:
                self._failures[outcome.place] = failures
                self._waiting.append((outcome.place,))
            else:
                yield replace(outcome, attempts=max(1, failures + (outcome.status != FAILED)))
