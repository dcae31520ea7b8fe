"""What a worker does: a batch of tasks, each answered by what became of it. Only goldens are evaluated here.

A batch names its tasks by their numbers in the campaign, so that a message is small whatever it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from assay.golden.errors import StoreError
from assay.golden.jobs.campaign import Campaign, parse_campaign
from assay.golden.jobs.entry import Task
from assay.golden.registry import load_ops
from assay.golden.store import Store, make_record, record_key
from assay.runtime.errors import AssayError
from assay.runtime.pool import Heartbeat

MADE, PRESENT, FAILED = "made", "present", "failed"
STATUS = {status[0]: status for status in (MADE, PRESENT, FAILED)}


@dataclass(frozen=True)
class Job:
    """What all batches of a build have in common.

    ``modules`` are imported first: they may define further specs.
    ``recheck``: a record that is there must prove itself undamaged.
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
    """What became of a task: "made", "present" (it was there already), or "failed".

    ``user_error``: the failure is an `AssayError`, which another try won't change.
    """

    place: int
    status: str
    message: str = ""
    user_error: bool = False
    attempts: int = 1


def work(batch: tuple[Job, Sequence[int]], heartbeat: Heartbeat) -> list[Outcome]:
    """Make the records of a batch; a worker that is lost leaves the initials of what it had done by then.

    What is wrong with the store is raised: it would be wrong for the next task as well.
    """
    job, places = batch
    torch.set_num_threads(1)  # there is a worker for each core
    campaign, store = job.campaign, _store(job.store)
    outcomes: list[Outcome] = []
    for place in places:
        outcomes.append(attempt(campaign, place, store, recheck=job.recheck))
        heartbeat("".join(outcome.status[0] for outcome in outcomes))
    return outcomes


def attempt(campaign: Campaign, place: int, store: Store, *, recheck: bool = False) -> Outcome:
    """One task, whatever becomes of it."""
    status, message, user_error = FAILED, "", False
    try:
        status = _made(campaign.task(place), store, recheck)
    except StoreError:
        raise
    except Exception as error:
        user_error = isinstance(error, AssayError)
        message = str(error) if user_error else f"{type(error).__name__}: {error}"
    return Outcome(place, status, " ".join(message.split()), user_error)


def _made(task: Task, store: Store, recheck: bool) -> str:
    key = record_key(task.recipe, task.digits)
    if store.is_valid(key) if recheck else key in store:
        return PRESENT
    store.put(make_record(task.recipe, task.digits))
    return MADE


@lru_cache(maxsize=4)
def _store(url: str) -> Store:
    """One for a process, since opening it means looking at what is there."""
    return Store(url)
