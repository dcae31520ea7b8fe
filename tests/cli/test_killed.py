"""`assay survey` and `assay audit` killed with work saved: the same command goes on, and ends as if undisturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import main
from tests.cli import audits

SURVEY = ("survey", "--only", "functional.softmax", "--examples", "0", "--out")
MOMENTS = {"seconds", "made", "date", "command"}


def killed(command: tuple[str, ...], saved: Callable[[], bool], folder: Path, *, group: bool) -> None:
    """Start a command and kill it, or it and all of its group, as soon as it has saved something."""
    process = subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", *command],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not saved() and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it was killed"


def without_moments(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: without_moments(value) for name, value in content.items() if name not in MOMENTS}
    return [without_moments(each) for each in content] if isinstance(content, list) else content


def unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if ".hypothesis" not in path.parts]


@pytest.mark.slow
def test_a_killed_survey_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict that is saved is not made again, and what was being written is gone at the end."""
    monkeypatch.chdir(tmp_path)
    out, whole = tmp_path / "out", tmp_path / "whole"

    def saved() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in (out / "kept").glob("[!.]*.json")}

    killed((*SURVEY, "out"), lambda: bool(saved()), tmp_path, group=True)
    before = saved()
    (out / ".index.html.assay-leftover").write_text("half")
    assert main((*SURVEY, "out")) == main((*SURVEY, "whole")) == 0
    assert {path: saved()[path] for path in before} == before
    first, second = (json.loads((folder / "survey.json").read_text()) for folder in (out, whole))
    assert without_moments(first) == without_moments(second)
    assert unfinished(out) == []


@pytest.mark.slow
def test_a_killed_audit_goes_on(models: Path, tmp_path: Path) -> None:
    """Errors that were measured aren't measured again."""
    out, whole = tmp_path / "out", tmp_path / "whole"

    def measured() -> list[Any]:
        path = out / "kept" / "measured.json"
        return list(json.loads(path.read_text())["answer"]) if path.exists() else []

    killed(audits.line(models, out, "--quick"), lambda: len(measured()) >= 2, tmp_path, group=False)
    before = measured()
    assert audits.run(models, out, "--quick") == audits.run(models, whole, "--quick")
    assert measured()[: len(before)] == before
    first, second = (without_moments(audits.read(folder)) for folder in (out, whole))
    assert first == second
    assert unfinished(out) == []
