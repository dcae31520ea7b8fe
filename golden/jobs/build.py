"""Building a campaign: its tasks through an engine, and a manifest of what there shall be and what failed.

A build can be killed at any moment and started again: a record is in the store whole or not at all, and what is there
isn't made again. Nothing but the evaluation of goldens happens here: no kernel under test is ever loaded, let alone
handed a store.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from assay.golden.errors import DamagedRecord, MissingRecord
from assay.golden.jobs.attempts import attempts
from assay.golden.jobs.campaign import Campaign, parse_campaign
from assay.golden.jobs.tasks import FAILED, MADE, Job, Outcome
from assay.golden.store import Store, record_key
from assay.runtime.engines import Engine

RETRIES = 2


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
    campaign: Campaign,
    job: Job,
    engine: Engine,
    *,
    part: Part | None = None,
    retries: int = RETRIES,
    watch: Callable[[Outcome], None],
) -> Report:
    """Make every record of ``campaign`` (or of a part) that isn't there; ``watch`` is told of each task done.

    What goes wrong is tried ``retries`` more times, unless it is the user's to mend.

    Raises `StoreError` where the store can't be written; what is there by then stays valid.
    """
    part = part or Part()
    store, started = Store(job.store), time.monotonic()
    places = _order(store, campaign, part)
    _note(store, campaign, part, finished=False)
    made = 0
    failures: list[Failure] = []
    for outcome in attempts(job, campaign, engine, places, retries):
        if outcome.status == FAILED:
            failures.append(_failure(campaign, outcome))
        made += outcome.status == MADE
        watch(outcome)
    if made:
        store.sweep()  # what builds that were killed left unfinished
    failures.sort(key=lambda failure: failure.task)
    _note(store, campaign, part, finished=True, failed=[asdict(failure) for failure in failures])
    present = len(part.places(campaign)) - made - len(failures)
    return Report(made, present, tuple(failures), time.monotonic() - started)


def _order(store: Store, campaign: Campaign, part: Part) -> Iterable[int]:
    """The tasks' numbers, from anywhere on where another build may be at it: they then meet late, not at every task."""
    places = part.places(campaign)
    try:
        is_shared = not store.manifest(part.manifest(campaign)).get("finished")
    except (MissingRecord, DamagedRecord):
        is_shared = False
    first = secrets.randbelow(len(places)) if is_shared and places else 0
    return chain(places[first:], places[:first])


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
