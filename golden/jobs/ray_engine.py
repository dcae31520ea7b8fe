"""The engine of a Ray cluster, or of Ray on this machine: the same batches, with Ray's own retries.

Ray starts a batch again when its worker is lost, and a lone task that raised; what was done by then is in the store
and isn't done again. The workers need assay, and the store under the same address.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from types import TracebackType
from typing import Any

from assay.golden.errors import EngineError, StoreError
from assay.golden.jobs.local import RETRIES, TIMEOUT
from assay.golden.jobs.pace import Pace
from assay.golden.jobs.tasks import FAILED, Job, Outcome, work

_AHEAD = 2  # batches in flight for each core: one being done and one waiting
_OBJECT_STORE = 80 * 2**20  # only outcomes pass through it


class TaskFailed(Exception):
    """A lone task raised; the first argument is its outcome."""


class RayEngine:
    """Ray at ``address`` (or RAY_ADDRESS), or else started here with ``workers`` cores; a context manager.

    Raises `EngineError` where ray is missing or can't be reached.
    """

    def __init__(
        self, workers: int | None = None, *, address: str = "", retries: int = RETRIES, timeout: float = TIMEOUT
    ) -> None:
        self._ray, self._retries, self._timeout = _ray(), retries, timeout
        self._ours = not self._ray.is_initialized()
        address = address or os.environ.get("RAY_ADDRESS", "")
        if self._ours:
            settings = (
                {"address": address}
                if address
                else {"num_cpus": workers, "object_store_memory": _OBJECT_STORE, "include_dashboard": False}
            )
            try:
                self._ray.init(log_to_driver=False, logging_level="error", **settings)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = f"at {address}" if address else "here"
                raise EngineError(f"ray can't be used {where}: {str(error).splitlines()[0]}") from None
        self._quiet = redirect_stdout(sys.stderr)  # where Ray says what it retries; standard output is the report's
        self._limit = _AHEAD * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def __enter__(self) -> RayEngine:
        self._quiet.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ours:
            self._ray.shutdown()
        self._quiet.__exit__(kind, error, trace)

    def run(self, job: Job, places: Iterable[int]) -> Iterator[Outcome]:
        """What becomes of each task, retries done, as it comes. Raises `StoreError` where the store can't be used.

        A record that a lost worker had made counts as present when its batch is started again.
        """
        pace, shared = Pace(job.campaign), self._ray.put(job)
        remote = self._ray.remote(_work).options(max_retries=self._retries, retry_exceptions=[TaskFailed], num_cpus=1)
        fresh, alone = pace.batches(places), deque[tuple[int, ...]]()
        flying: dict[Any, tuple[int, ...]] = {}
        try:
            while True:
                while len(flying) < self._limit and (batch := alone.popleft() if alone else next(fresh, None)):
                    flying[remote.remote(shared, batch, self._timeout)] = batch
                if not flying:
                    return
                for done in self._ray.wait(list(flying), num_returns=1)[0]:
                    outcomes = self._answer(done, batch := flying.pop(done))
                    pace.learn(outcomes)
                    again = {outcome.place for outcome in outcomes if _is_worth_another_try(outcome, batch)}
                    again |= set(batch) - {outcome.place for outcome in outcomes}
                    alone.extend((place,) for place in sorted(again))
                    yield from (outcome for outcome in outcomes if outcome.place not in again)
        finally:
            for reference in flying:
                self._ray.cancel(reference, force=True)

    def _answer(self, reference: Any, batch: Sequence[int]) -> list[Outcome]:
        """The outcomes of a batch; none where its workers were lost and it has more than one task."""
        try:
            return list(self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TaskFailed):
                return [replace(error.cause.args[0], attempts=self._retries + 1)]
            if isinstance(error.cause, StoreError):
                raise StoreError(str(error.cause)) from None
            raise
        except self._ray.exceptions.RayError as error:
            if len(batch) > 1:
                return []
            what = f"its worker was lost, or took longer than {self._timeout:g} s ({type(error).__name__})"
            return [Outcome(batch[0], FAILED, what, attempts=self._retries + 1)]


def _is_worth_another_try(outcome: Outcome, batch: Sequence[int]) -> bool:
    """A task that failed in company is tried alone, where Ray retries it."""
    return outcome.status == FAILED and not outcome.mendable and len(batch) > 1


def _work(job: Job, places: Sequence[int], timeout: float) -> list[Outcome]:
    """A batch in a worker of Ray's, which a task that takes too long ends."""

    def remember(note: str = "") -> None:
        faulthandler.dump_traceback_later(timeout, exit=True, file=2)

    remember()
    try:
        outcomes = work((job, places), remember)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if len(places) == 1 and outcomes[0].status == FAILED and not outcomes[0].mendable:
        raise TaskFailed(outcomes[0])
    return outcomes


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise EngineError("--engine ray needs the package ray: pip install 'kernel-assay[ray]'") from None
    return ray
