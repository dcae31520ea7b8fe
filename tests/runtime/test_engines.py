"""Engines run whatever comes as a list; a crash of one task costs that one."""

import os
from pathlib import Path

import pytest

from assay.runtime.engines import Engine, engine_named
from assay.runtime.pool import Raised
from assay.runtime.process import Lost
from tests.runtime.isolated_tasks import behave

WORDS = ["one", "exit", "complain", "sleep 1 after asking for 30", "two"]


@pytest.mark.parametrize("name", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_engines_answer_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine or in a cluster: every item has an answer, and a list that is empty has none."""
    if name == "ray":
        pytest.importorskip("ray")
        root = str(Path(__file__).resolve().parents[2])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))))  # for its workers
    with engine_named(name, 1, preload="json", timeout=20.0) as engine:
        answers = answered(engine)
        assert list(engine.run(behave, [])) == []
    assert [answers[place] for place in (0, 3, 4)] == [WORDS[place] for place in (0, 3, 4)]
    assert isinstance(answers[1], Lost)
    assert answers[1].kind == "crash"
    assert answers[2] == Raised("mend this", True, "")


def answered(engine: Engine) -> dict[int, object]:
    """The answers by the places of the words."""
    return dict(engine.run(behave, WORDS))
