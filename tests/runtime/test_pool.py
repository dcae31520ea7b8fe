"""Worker processes: whatever becomes of one, every item has an answer."""

import time

import pytest

from assay.runtime import process
from assay.runtime.pool import Pool, Raised
from assay.runtime.process import Lost
from tests.runtime.isolated_tasks import behave


@pytest.mark.parametrize("count", [1, 2])
def test_every_item_is_answered(count: int) -> None:
    words = ["one", "abort", "two", "exit", "complain", "stumble", "three"]
    with Pool(count, preload="json", timeout=30) as pool:
        answers = dict(pool.run(behave, words))
    assert [answers[place] for place in (0, 2, 6)] == ["one", "two", "three"]
    assert answers[1] == Lost("crash", "the process was ended by SIGABRT (last words)", "about to abort")
    assert answers[3] == Lost("crash", "the process ended itself with status 3", "about to exit")
    assert answers[4] == Raised("mend this", True, "")
    assert isinstance(answers[5], Raised)
    assert (answers[5].message, answers[5].user_error) == ("ZeroDivisionError: oops", False)
    assert "in behave" in answers[5].trace


def test_what_never_comes_back_is_ended() -> None:
    with Pool(1, preload="json", timeout=1) as pool:
        started = time.monotonic()
        answers = dict(pool.run(behave, ["hang", "one"]))
    assert time.monotonic() - started < 10
    assert isinstance(answers[0], Lost)
    assert (answers[0].kind, answers[0].note) == ("timeout", "about to hang")
    assert answers[1] == "one"


def test_a_task_may_restate_its_deadline() -> None:
    words = ["sleep 2.5 after asking for 30", "sleep 30 after asking for 0.5"]
    with Pool(1, preload="json", timeout=1) as pool:
        answers = dict(pool.run(behave, words))
    limit = "nothing came back for 0.5 s, and it could not be interrupted"
    assert answers == {0: words[0], 1: Lost("timeout", limit, f"about to {words[1]}")}


def test_a_run_that_is_given_up_leaves_nothing_to_the_next() -> None:
    with Pool(1, preload="json") as pool:
        for _ in pool.run(behave, ["one", "hang"]):
            break
        assert list(pool.run(behave, ["two"])) == [(0, "two")]


def test_nothing_is_begun_when_the_time_is_up() -> None:
    with Pool(1, preload="json") as pool:
        assert list(pool.run(behave, ["one"], until=time.monotonic())) == []


def test_a_worker_that_never_gets_ready_is_given_the_time_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_START", 2.0)
    with Pool(1, preload="tests.runtime.isolated_slow_start", timeout=0.5) as pool:
        started = time.monotonic()
        answers = dict(pool.run(behave, ["one"]))
    assert time.monotonic() - started >= 2.0
    assert answers[0] == Lost("timeout", "nothing came back for 2 s, and it could not be interrupted", "")
