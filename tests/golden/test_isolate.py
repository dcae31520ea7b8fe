"""Worker processes: whatever becomes of one, every item has an answer."""

from __future__ import annotations

import time

import pytest

from assay.golden import isolate
from assay.golden.isolate import Lost, Raised, Workers
from tests.golden.isolated_tasks import behave


@pytest.mark.parametrize("count", [1, 2])
def test_every_item_is_answered(count: int) -> None:
    """A worker that dies or raises costs its own item only."""
    words = ["one", "abort", "two", "exit", "complain", "stumble", "three"]
    with Workers(count, preload="json", patience=30) as workers:
        answers = dict(workers.each(behave, words))
    assert [answers[place] for place in (0, 2, 6)] == ["one", "two", "three"]
    assert answers[1] == Lost("crash", "the process was ended by SIGABRT (last words)", "about to abort")
    assert answers[3] == Lost("crash", "the process ended itself with status 3", "about to exit")
    assert answers[4] == Raised("mend this", True, "")
    assert isinstance(answers[5], Raised)
    assert (answers[5].message, answers[5].mendable) == ("ZeroDivisionError: oops", False)
    assert "in behave" in answers[5].trace


def test_what_never_comes_back_is_ended() -> None:
    """A task that can't be interrupted is given up after the patience, and the next one is done."""
    with Workers(1, preload="json", patience=1) as workers:
        started = time.monotonic()
        answers = dict(workers.each(behave, ["hang", "one"]))
    assert time.monotonic() - started < 10
    assert isinstance(answers[0], Lost)
    assert (answers[0].kind, answers[0].note) == ("timeout", "about to hang")
    assert answers[1] == "one"


def test_nothing_is_begun_when_the_time_is_up() -> None:
    """Items that weren't begun have no answer."""
    with Workers(1, preload="json") as workers:
        assert list(workers.each(behave, ["one"], until=time.monotonic())) == []


def test_a_worker_that_never_gets_ready_is_given_the_time_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing may take longer than a task's patience, and the message says how long it was waited."""
    monkeypatch.setattr(isolate, "_START", 2.0)
    with Workers(1, preload="tests.golden.isolated_slow_start", patience=0.5) as workers:
        started = time.monotonic()
        answers = dict(workers.each(behave, ["one"]))
    assert time.monotonic() - started >= 2.0
    assert answers[0] == Lost("timeout", "nothing came back for 2 s, and it could not be interrupted", "")
