"""Engines run whatever comes as a list; a crash of one task costs that one."""

from collections.abc import Iterator

from assay.runtime.engines import Engine, engine_named, run_retried
from assay.runtime.pool import Raised
from assay.runtime.process import Lost
from tests.runtime.isolated_tasks import behave

WORDS = ["one", "exit", "complain", "sleep 1 after asking for 30", "two"]


def answers_to_words(engine: Engine) -> None:
    """Check that every item has an answer, and that an empty list has none."""
    answers = dict(engine.run(behave, WORDS))
    assert list(engine.run(behave, [])) == []
    assert [answers[index] for index in (0, 3, 4)] == [WORDS[index] for index in (0, 3, 4)]
    assert isinstance(answers[1], Lost)
    assert answers[1].kind == "crash"
    assert answers[2] == Raised("mend this", True, "")


def test_a_pool_answers_words() -> None:
    """Ray's answers are tested by `test_a_cluster_gives_the_same_verdicts`, on the one cluster that tests start."""
    with engine_named("local", 1, preload="json", timeout=20.0) as engine:
        answers_to_words(engine)


class LosesOnce:
    """An engine that loses the process of every item but "fine", each time that it has it."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []

    def run(self, task: object, items: list[str], *, until: float) -> Iterator[tuple[int, object]]:
        self.rounds.append(items)
        for index, item in enumerate(items):
            yield index, item if item == "fine" or (item == "unlucky" and len(self.rounds) > 1) else Lost("crash", item)


def test_what_was_lost_is_done_once_more() -> None:
    engine = LosesOnce()
    items = ["guilty", "unlucky", "fine", "hopeless"]
    retried = run_retried(engine, behave, items, again=lambda lost: lost.message != "guilty")  # type: ignore[arg-type]
    answers = list(retried)
    assert answers == [(0, Lost("crash", "guilty")), (2, "fine"), (1, "unlucky"), (3, Lost("crash", "hopeless"))]
    assert engine.rounds == [items, ["unlucky", "hopeless"]]
