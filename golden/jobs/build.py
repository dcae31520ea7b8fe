"""Building a campaign: its tasks through an engine, and a manifest of the records to expect and of failures.

A build can be killed at any moment and started again: a record is in the store completely or not at all, and what is
there isn't made again. Tasks run in batches; one that fails is tried again alone. Only goldens are evaluated here: no
kernel under test is ever loaded.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from assay.golden.errors import DamagedRecord, MissingRecord, StoreError
from assay.golden.jobs.campaign import Campaign, parse_campaign
from assay.golden.registry import load_ops
from assay.golden.store import Store, make_record, record_key
from assay.runtime.engines import Engine
from assay.runtime.errors import AssayError
from assay.runtime.pool import Heartbeat, Raised
from assay.runtime.process import Lost

RETRIES = 2
MADE, PRESENT, FAILED = "made", "present", "failed"
_STATUS_OF_INITIAL = {status[0]: status for status in (MADE, PRESENT, FAILED)}
# Handing over a batch of this length costs nothing in comparison, and little is lost with it.
_BATCH_MILLISECONDS, _MAX_BATCH = 500.0, 500

Batch = tuple[int, ...]  # task numbers


@dataclass(frozen=True)
class Part:
    """Part ``number``, counted from one, of ``of`` equal parts of a campaign."""

    number: int = 1
    of: int = 1

    def task_numbers(self, campaign: Campaign) -> range:
        """Return the numbers of its tasks."""
        first, last = (campaign.count * number // self.of for number in (self.number - 1, self.number))
        return range(first, last)

    def manifest(self, campaign: Campaign) -> str:
        """Return its manifest's name: the same for every version of one file, another for another file."""
        origin = f"-{campaign.origin}" if campaign.origin else ""
        return campaign.name + origin + (f".{self.number}-of-{self.of}" if self.of > 1 else "")


@dataclass(frozen=True)
class Job:
    """What all batches of a build share.

    ``modules`` are imported first: they may define further specs. ``recheck``: records that are there are verified.
    """

    name: str
    text: str = field(repr=False)
    store: str
    modules: tuple[str, ...] = ()
    recheck: bool = False

    @property
    def campaign(self) -> Campaign:
        """The campaign; parsed once in a process."""
        load_ops(self.modules)
        return parse_campaign(self.text, self.name)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a task by its number: "made", "present" (it was there already), or "failed".

    ``user_error``: the failure is an `AssayError`, which another try won't change.
    """

    task: int
    status: str
    message: str = ""
    user_error: bool = False
    attempts: int = 1


@dataclass(frozen=True)
class Failure:
    """A task without a record: its number in the campaign, key, recipe in short, and why."""

    task: int
    key: str
    recipe: str
    message: str
    attempts: int


@dataclass(frozen=True)
class Report:
    """The counts of a build, its failures, and its seconds."""

    made: int
    present: int
    failures: tuple[Failure, ...]
    seconds: float


def build(
    campaign: Campaign,
    job: Job,
    engine: Engine,
    *,
    part: Part | None = None,
    retries: int = RETRIES,
    watch: Callable[[Outcome], None],
) -> Report:
    """Make every record of ``campaign`` (or of a part) that isn't there; call ``watch`` with each outcome.

    A failed task is tried ``retries`` more times, unless it is the user's to mend. Raises `StoreError` where the store
    can't be written; what is there by then stays valid.
    """
    part = part or Part()
    store, started = Store(job.store), time.monotonic()
    numbers = _order(store, campaign, part)
    _write_manifest(store, campaign, part, finished=False)
    made = 0
    failures: list[Failure] = []
    for outcome in _outcomes(job, campaign, engine, numbers, retries):
        if outcome.status == FAILED:
            task = campaign.task(outcome.task)
            key = record_key(task.recipe, task.digits)
            failures.append(Failure(outcome.task, key, str(task), outcome.message, outcome.attempts))
        made += outcome.status == MADE
        watch(outcome)
    if made:
        store.sweep()  # unfinished files of killed builds
    failures.sort(key=lambda failure: failure.task)
    _write_manifest(store, campaign, part, finished=True, failed=[asdict(failure) for failure in failures])
    present = len(part.task_numbers(campaign)) - made - len(failures)
    return Report(made, present, tuple(failures), time.monotonic() - started)


def _order(store: Store, campaign: Campaign, part: Part) -> Iterable[int]:
    """Order the tasks; start anywhere if another build may be running, so that the two meet late."""
    numbers = part.task_numbers(campaign)
    try:
        is_shared = not store.manifest(part.manifest(campaign)).get("finished")
    except (MissingRecord, DamagedRecord):
        is_shared = False
    first = secrets.randbelow(len(numbers)) if is_shared and numbers else 0
    return chain(numbers[first:], numbers[:first])


def _write_manifest(store: Store, campaign: Campaign, part: Part, **state: Any) -> None:
    """Write the manifest; the campaign's own text lists the records to expect, however many."""
    content = {"campaign": campaign.name, "text": campaign.text, "part": [part.number, part.of], "failed": []}
    store.write_manifest(part.manifest(campaign), content | state)


def _outcomes(job: Job, campaign: Campaign, engine: Engine, numbers: Iterable[int], retries: int) -> Iterator[Outcome]:
    """Yield the final outcome of each task. Raises `StoreError` where the store can't be used.

    A task that raises, takes its process down, or takes too long is tried ``retries`` more times, alone.
    """
    failures, batches = Counter[int](), _batches(campaign, numbers)
    while True:
        running: dict[int, Batch] = {}
        again: list[Batch] = []
        for number, answer in engine.run(work, _numbered(job, batches, running)):
            batch = running.pop(number)
            outcomes = _outcomes_of_batch(batch, answer)
            again += ((task,) for task in batch[len(outcomes) :])  # not begun when the worker was lost
            for outcome in outcomes:
                failed = outcome.status == FAILED
                failures[outcome.task] += failed
                if failed and not outcome.user_error and failures[outcome.task] <= retries:
                    again.append((outcome.task,))
                else:
                    yield replace(outcome, attempts=failures.pop(outcome.task) + (not failed))
        if not again:
            return
        batches = iter(again)


def _batches(campaign: Campaign, numbers: Iterable[int]) -> Iterator[Batch]:
    batch: list[int] = []
    milliseconds = 0.0
    for number in numbers:
        batch.append(number)
        milliseconds += campaign.milliseconds(number)
        if milliseconds >= _BATCH_MILLISECONDS or len(batch) == _MAX_BATCH:
            yield tuple(batch)
            batch, milliseconds = [], 0.0
    if batch:
        yield tuple(batch)


def _numbered(job: Job, batches: Iterator[Batch], running: dict[int, Batch]) -> Iterator[tuple[Job, Batch]]:
    """Yield the engine's items, and record each in ``running`` under the engine's number."""
    for number, batch in enumerate(batches):
        running[number] = batch
        yield job, batch


def _outcomes_of_batch(batch: Batch, answer: Sequence[Outcome] | Lost | Raised) -> Sequence[Outcome]:
    """Return an outcome for each task that was begun."""
    if isinstance(answer, Raised):
        if answer.user_error:
            raise StoreError(answer.message)
        raise RuntimeError(f"a worker failed outside of any task: {answer.message}\n{answer.trace}")
    if not isinstance(answer, Lost):
        return answer
    outcomes = [
        Outcome(task, _STATUS_OF_INITIAL[initial], "it failed, and its worker was lost soon after")
        for task, initial in zip(batch, answer.note, strict=False)
    ]
    culprit = batch[len(outcomes) :][:1]
    return [*outcomes, *(Outcome(task, FAILED, answer.message) for task in culprit)]


def work(batch: tuple[Job, Sequence[int]], heartbeat: Heartbeat) -> list[Outcome]:
    """Make the records of a batch, in a worker; a worker that is lost leaves the initials of its outcomes.

    Errors of the store are raised: they would recur for the next task.
    """
    job, numbers = batch
    torch.set_num_threads(1)  # there is a worker for each core
    campaign, store = job.campaign, _store(job.store)
    outcomes: list[Outcome] = []
    for number in numbers:
        outcomes.append(_attempt(campaign, number, store, job.recheck))
        heartbeat("".join(outcome.status[0] for outcome in outcomes))
    return outcomes


def _attempt(campaign: Campaign, number: int, store: Store, recheck: bool) -> Outcome:
    status, message, user_error = FAILED, "", False
    try:
        task = campaign.task(number)
        key = record_key(task.recipe, task.digits)
        if store.is_valid(key) if recheck else key in store:
            status = PRESENT
        else:
            store.put(make_record(task.recipe, task.digits))
            status = MADE
    except StoreError:
        raise
    except Exception as error:
        user_error = isinstance(error, AssayError)
        message = str(error) if user_error else f"{type(error).__name__}: {error}"
    return Outcome(number, status, " ".join(message.split()), user_error)


_store = lru_cache(maxsize=4)(Store)  # opened once in a process: opening reads what is there


@dataclass(frozen=True)
class Plan:
    """The content of a manifest: the campaign and part, whether its build finished, and what failed."""

    campaign: Campaign
    part: Part
    finished: bool
    failed: dict[str, str]


def read_plan(store: Store, name: str) -> Plan:
    """Return the plan of the manifest ``name``. Raises `MissingRecord`, `DamagedRecord`, or `CampaignError`."""
    content = store.manifest(name)
    try:
        campaign = parse_campaign(content["text"], content["campaign"], f"campaign of manifest {name}")
        failed = {failure["key"]: failure["message"] for failure in content["failed"]}
        return Plan(campaign, Part(*content["part"]), content["finished"], failed)
    except (KeyError, TypeError) as error:
        raise DamagedRecord(f"manifest {name} isn't that of a build ({error}); build its campaign again") from None
