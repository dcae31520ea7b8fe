"""Building a campaign: its tasks through an engine, and a manifest of what there shall be and what failed.

A build can be killed at any moment and started again: a record is in the store whole or not at all, and what is there
isn't made again. Nothing but the evaluation of goldens happens here: no kernel under test is ever loaded, let alone
handed a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from assay.golden.errors import DamagedRecord
from assay.golden.jobs.campaign import Campaign, parse_campaign
from assay.golden.jobs.tasks import BUSY, FAILED, MADE, Job, Outcome
from assay.golden.store import Store, record_key

_PAUSE = 1.0  # seconds before a task that another job has claimed is looked at again


class Engine(Protocol):
    """Runs tasks, each in a process that may die, with retries."""

    def run(self, job: Job, places: Iterable[int]) -> Iterator[Outcome]:
        """What became of each task, as it comes. Raises `StoreError`."""


@dataclass(frozen=True)
class Part:
    """Part ``number``, counted from one, of ``of`` parts of a campaign, each as long as the others."""

    number: int = 1
    of: int = 1

    def places(self, campaign: Campaign) -> range:
        """The numbers of its tasks."""
        first, last = (campaign.count * place // self.of for place in (self.number - 1, self.number))
        return range(first, last)

    def manifest(self, campaign: Campaign) -> str:
        """The name of its manifest: the same for every version of one file, another for another file of that name."""
        origin = f"-{campaign.origin}" if campaign.origin else ""
        return campaign.name + origin + (f".{self.number}-of-{self.of}" if self.of > 1 else "")


@dataclass(frozen=True)
class Failure:
    """A task that has no record: its number in the campaign, key, recipe in short, and why."""

    task: int
    key: str
    recipe: str
    message: str
    attempts: int


@dataclass(frozen=True)
class Report:
    """What a build did."""

    made: int
    present: int
    failures: tuple[Failure, ...]
    seconds: float


def build(
    campaign: Campaign, job: Job, engine: Engine, *, part: Part | None = None, watch: Callable[[Outcome], None]
) -> Report:
    """Make every record of ``campaign`` (or of a part) that isn't there; ``watch`` is told of each task done.

    Raises `StoreError` where the store can't be written; what is there by then stays valid.
    """
    part = part or Part()
    store, started = Store(job.store), time.monotonic()
    _note(store, campaign, part, finished=False)
    counts = {MADE: 0, FAILED: 0}
    failures: list[Failure] = []
    waiting: Iterable[int] = part.places(campaign)
    total = len(part.places(campaign))
    while waiting:
        busy: list[int] = []
        for outcome in engine.run(job, waiting):
            if outcome.status == BUSY:
                busy.append(outcome.place)
                continue
            if outcome.status == FAILED:
                failures.append(_failure(campaign, outcome))
            counts[outcome.status] = counts.get(outcome.status, 0) + 1
            watch(outcome)
        waiting = busy
        time.sleep(_PAUSE if busy else 0.0)
    if counts[MADE]:
        store.sweep()  # claims of builds that were killed
    failures.sort(key=lambda failure: failure.task)
    _note(store, campaign, part, finished=True, failed=[asdict(failure) for failure in failures])
    return Report(counts[MADE], total - counts[MADE] - len(failures), tuple(failures), time.monotonic() - started)


def _failure(campaign: Campaign, outcome: Outcome) -> Failure:
    task = campaign.task(outcome.place)
    key = record_key(task.recipe, task.digits)
    return Failure(outcome.place, key, str(task), outcome.message, outcome.attempts)


def _note(store: Store, campaign: Campaign, part: Part, **state: Any) -> None:
    """The manifest: the campaign's own text says which records there shall be, however many."""
    content = {"campaign": campaign.name, "text": campaign.text, "part": [part.number, part.of], "failed": []}
    store.write_manifest(part.manifest(campaign), content | state)


@dataclass(frozen=True)
class Plan:
    """What a manifest says: the campaign and part, whether its build came to its end, and what failed then."""

    campaign: Campaign
    part: Part
    finished: bool
    failed: dict[str, str]


def read_plan(store: Store, name: str) -> Plan:
    """The plan of the manifest ``name``. Raises `MissingRecord`, `DamagedRecord`, or `CampaignError`."""
    content = store.manifest(name)
    try:
        campaign = parse_campaign(content["text"], content["campaign"], f"campaign of manifest {name}")
        failed = {failure["key"]: failure["message"] for failure in content["failed"]}
        return Plan(campaign, Part(*content["part"]), content["finished"], failed)
    except (KeyError, TypeError) as error:
        raise DamagedRecord(f"manifest {name} isn't that of a build ({error}); build its campaign again") from None
