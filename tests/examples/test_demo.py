"""The parts of `./dev demo`, of which each says when something didn't go as it must."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from assay.verify.campaign.survey import Row

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo"


def silent(*said: object) -> None:
    """A heartbeat that nobody hears."""


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[ModuleType, ModuleType]]:
    """Its two modules, as a process of its own has them."""
    sys.path.insert(0, str(FOLDER))
    try:
        import demo
        import parts

        yield demo, parts
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("demo", "parts", "planted"):
            sys.modules.pop(name, None)


@pytest.fixture
def screen() -> Console:
    """A terminal whose text can be read."""
    return Console(file=StringIO(), width=120)


def text_of(screen: Console) -> str:
    """What was printed."""
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue()


@pytest.fixture(scope="module")
def planted(demo: tuple[ModuleType, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel with the planted bug, and its verdict."""
    _, parts = demo
    todo = parts.parts(tmp_path_factory.mktemp("demo"))
    (job,) = [
        part.item for part in todo if getattr(part.item, "entry", None) and part.item.entry.target == parts.PLANTED
    ]
    return job, parts.do(parts.Part(parts.examined, job, 1.0), silent)[0]


def test_the_planted_bug_passes_allclose_and_is_found_and_explained(
    demo: tuple[ModuleType, ModuleType], planted: Any, screen: Console, tmp_path: Path
) -> None:
    show, parts = demo
    job, verdict = planted
    assert parts.allclose_passes(parts.PLANTED, silent) is True
    assert show.show_kernels([Row(job.entry, "bfloat16", verdict.outcome, verdict)], True, tmp_path, screen) == []
    said = text_of(screen)
    assert "allclose  passes" in said
    assert "rmsnorm: R=1, N=1" in said
    assert "eps is added to the root, not under it" in said
    assert (tmp_path / "planted.html").is_file()
    assert "rms_norm with a planted bug" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_bug_that_is_missed_or_not_explained_is_amiss(
    demo: tuple[ModuleType, ModuleType], planted: Any, screen: Console, tmp_path: Path
) -> None:
    verdict = planted[1]
    missed = replace(verdict, outcome="PASS", aspects={})
    assert demo[0].show_planted(missed, True, tmp_path, screen) == ["the planted bug was not found"]
    mute = {name: replace(aspect, explanations=()) for name, aspect in verdict.aspects.items()}
    assert demo[0].show_planted(replace(verdict, aspects=mute), True, tmp_path, screen) == [
        "the planted bug was not explained"
    ]


def test_allclose_sees_what_is_two_percent_off(
    demo: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps) * 1.05  # noqa: E731
    monkeypatch.setattr(demo[1], "load_target", lambda target: wrong)
    assert demo[1].allclose_passes("any", silent) is False


@pytest.mark.slow
def test_a_store_is_damaged_and_mended(demo: tuple[ModuleType, ModuleType], screen: Console, tmp_path: Path) -> None:
    show, parts = demo
    steps = parts.goldens(tmp_path / "goldens", silent)
    assert show.show_goldens(steps, screen) == []
    said = text_of(screen)
    made = int(re.findall(r"(\d+) records made, 0 were there", said)[0])
    assert "is damaged" in said
    assert f"1 records made, {made - 1} were there" in said
    unseen = [replace(step, status=0) for step in steps]
    assert show.show_goldens(unseen, screen) == ["the store of goldens was not mended as it must be"]


def test_the_front_is_a_picture(demo: tuple[ModuleType, ModuleType], screen: Console, tmp_path: Path) -> None:
    points = [{"bytes": 1_000_000, "measured": 1e-2}, {"bytes": 2_000_000, "measured": 1e-4}]
    best = {
        "bytes": 10**6,
        "measured": 0.01,
        "met": True,
        "assignment": {"a": "w8a16"},
        "prediction": {"error": 0.011},
    }
    content = {
        "model": {"name": "tiny", "parameters": 10**6},
        "untouched": {"bytes": 4 * 10**6},
        "pareto": [*points, {"bytes": 4 * 10**6, "measured": 0.0}],
        "recommended": best,
    }
    assert demo[0].show_audit(content, tmp_path, screen) == []
    bars = [line.count("█") for line in text_of(screen).splitlines() if " MB  " in line]
    assert bars == [40, 1]
    missed = json.loads(json.dumps(content | {"recommended": best | {"met": False}}))
    assert demo[0].show_audit(missed, tmp_path, screen) == ["the audit found no assignment within its budget"]


def test_a_kernel_that_can_not_be_judged_is_amiss(
    demo: tuple[ModuleType, ModuleType], planted: Any, screen: Console, tmp_path: Path
) -> None:
    row = Row(planted[0].entry, "bfloat16", "ERROR", reason="no such module")
    assert demo[0].show_kernels([row], True, tmp_path, screen) == ["rms_norm with a planted bug: no such module"]
