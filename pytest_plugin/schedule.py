"""The time of a run: how much of the budget a test may take, an estimate before, and lines while it goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

_BETWEEN = 10.0  # seconds between two lines where no terminal is
_LEAST = 1.0  # seconds that a test gets while any are left
_CACHE = "assay/seconds"  # of earlier runs, by test, in pytest's cache
_MOST_TESTS = 100_000  # that the cache keeps


class Schedule:
    """Divides the run's ``budget`` of seconds among its examining tests; ``timeout`` is the most that one may take.

    With xdist each worker divides what is left of the same time among its share of the tests.
    """

    def __init__(self, config: pytest.Config, budget: float | None, timeout: float | None) -> None:
        self._config, self._budget, self._timeout = config, budget, timeout
        self._started = time.monotonic()
        self._left: set[str] = set()
        self._workers = getattr(config, "workerinput", {}).get("workercount", 1)
        self._done = 0
        self._phase: tuple[str, int, int] = ("", 0, 0)
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Note which tests examine kernels."""
        self._left = {item.nodeid for item in items if _examines(item)}

    def pytest_report_collectionfinish(self) -> list[str]:
        """Say how long the run is likely to take, by the last times of its tests."""
        cache = getattr(self._config, "cache", None)  # absent with -p no:cacheprovider
        known = cache.get(_CACHE, {}) if cache is not None else {}
        seconds = [known[test] for test in self._left if isinstance(known.get(test), (int, float))]
        if not self._left:
            return []
        words = f"assay: {len(self._left)} test{'s' if len(self._left) > 1 else ''} with kernels"
        if seconds:
            new = len(self._left) - len(seconds)
            words += f", about {sum(seconds):.0f} s by their last times" + (
                f" and {new} of unknown time" if new else ""
            )
        if self._budget is not None:
            words += f"; budget {self._budget:g} s"
        return [words]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Follow a test with kernels."""
        if item.nodeid not in self._left:
            return (yield)
        self._phase = ("", 0, 0)
        with self._told(item.nodeid):
            result = yield
        self._left.discard(item.nodeid)
        self._done += 1
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the time of a test with kernels, also of xdist's workers."""
        if getattr(report, "assay", []):
            self._seconds[report.nodeid] = round(report.duration, 2)

    def pytest_sessionfinish(self) -> None:
        """Keep the tests' times for the next run's estimate."""
        cache = getattr(self._config, "cache", None)
        if cache is not None and self._seconds and not hasattr(self._config, "workerinput"):
            known = cache.get(_CACHE, {})
            merged = {**(known if isinstance(known, dict) else {}), **self._seconds}
            cache.set(_CACHE, dict(list(merged.items())[-_MOST_TESTS:]))

    def seconds_of_test(self) -> float | None:
        """Return the seconds that the test which begins now may take; None: any, 0: none is left."""
        share = None
        if self._budget is not None:
            left = self._budget - (time.monotonic() - self._started)
            tests = len(self._left) + self._done - self._workers * self._done  # those that no worker has begun
            share = max(left / max(-(-tests // self._workers), 1), _LEAST) if left > 0 else 0.0
        return min((limit for limit in (share, self._timeout) if limit is not None), default=None)

    def report(self, phase: str, done: int, of: int) -> None:
        """Take an examination's progress."""
        self._phase = phase, done, of

    @property
    def words(self) -> str:
        """How far the current examination is."""
        phase, done, of = self._phase
        return f", {phase} {done} of {of}" if of else f", {phase}" if phase else ""

    @contextmanager
    def _told(self, test: str) -> Iterator[None]:
        """Print a line every ten seconds while a test runs, unless standard error is a terminal.

        pytest captures nothing yet as this begins, so that a copy of the descriptor is the run's own standard error.
        """
        descriptor = -1
        with suppress(OSError):  # it may be closed
            descriptor = -1 if os.isatty(2) else os.dup(2)
        if descriptor < 0:
            yield
            return
        over, started = threading.Event(), time.monotonic()

        def tell() -> None:
            while not over.wait(_BETWEEN):
                line = f"assay: {test}: {time.monotonic() - started:.0f} s{self.words}\n"
                with suppress(OSError):
                    os.write(descriptor, line.encode(errors="replace"))

        thread = threading.Thread(target=tell, name="assay-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            os.close(descriptor)


def _examines(item: Any) -> bool:
    return "assay" in getattr(item, "fixturenames", ())
