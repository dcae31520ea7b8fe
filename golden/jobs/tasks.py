"""What a worker does: a batch of tasks, each answered by what became of it. Only goldens are evaluated here.

A batch names its tasks by their numbers in the campaign, so that a message is small whatever it stands for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import parent_process

import torch

from assay.golden.errors import StoreError
from assay.golden.jobs.campaign import Campaign, parse_campaign
from assay.golden.jobs.entry import Task
from assay.golden.store import Store, make_record, record_key
from assay.precision.errors import AssayError

MADE, PRESENT, BUSY, FAILED = "made", "present", "busy", "failed"
STATUS = {status[0]: status for status in (MADE, PRESENT, BUSY, FAILED)}


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
        for module in self.modules:
            importlib.import_module(module)
        return parse_campaign(self.text, self.name)


@dataclass(frozen=True)
class Outcome:
    """What became of a task: "made", "present" (it was there already), "busy" (another job makes it), or "failed".

    ``mendable``: the failure is an `AssayError`, which another try won't change.
    """

    place: int
    status: str
    message: str = ""
    mendable: bool = False
    seconds: float = 0.0
    attempts: int = 1


def work(batch: tuple[Job, Sequence[int]], remember: Callable[[str], None]) -> list[Outcome]:
    """Make the records of a batch; a worker that is lost leaves the initials of what it had done by then.

    What is wrong with the store is raised: it would be wrong for the next task as well.
    """
    job, places = batch
    torch.set_num_threads(1)  # there is a worker for each core
    campaign, store = job.campaign, _store(job.store)
    outcomes: list[Outcome] = []
    for place in places:
        if (parent := parent_process()) is not None and not parent.is_alive():
            break  # nobody waits for the rest; what is done is in the store
        outcomes.append(attempt(campaign, place, store, recheck=job.recheck))
        remember("".join(outcome.status[0] for outcome in outcomes))
    return outcomes


def attempt(campaign: Campaign, place: int, store: Store, *, recheck: bool = False) -> Outcome:
    """One task, whatever becomes of it."""
    started = time.perf_counter()
    status, message, mendable = FAILED, "", False
    try:
        status = _made(campaign.task(place), store, recheck)
    except StoreError:
        raise
    except Exception as error:
        mendable = isinstance(error, AssayError)
        message = str(error) if mendable else f"{type(error).__name__}: {error}"
    return Outcome(place, status, " ".join(message.split()), mendable, time.perf_counter() - started)


def _made(task: Task, store: Store, recheck: bool) -> str:
    key = record_key(task.recipe, task.digits)
    if not recheck and key in store:
        return PRESENT
    with store.claim(key) as mine:
        if mine:
            store.put(make_record(task.recipe, task.digits))
            return MADE
    return PRESENT if key in store else BUSY


@lru_cache(maxsize=4)
def _store(url: str) -> Store:
    """One for a process, since opening it means looking at what is there."""
    return Store(url)
