"""`assay bench`: a table, a record, a gate over two records, plots, and mistakes in one line."""

import json
from pathlib import Path

import pytest

from assay.cli.main import main
from assay.verify.errors import BenchError
from assay.verify.timing.record import Record, history, read

KERNELS = """
import time
import torch

def softmax(x):
    return torch.softmax(x, -1)

def slower(x):
    time.sleep(0.01)  # a hundred times a softmax's time, which other work on the machine doesn't blur
    return torch.softmax(x, -1)

def wrong(x):
    return torch.softmax(x, -1) * 1.01
"""
SHORT = ["--shape", "R=64,N=512", "--dtype", "float32", "--seconds", "0.02", "--rounds", "2", "--no-compiled"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the current folder."""
    (tmp_path / "rows.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for one another beside other tests take any time
    return "rows"


def test_a_wrong_kernel_has_no_time_beside_a_right_one(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has times of the kernel and of PyTorch's own, none of the wrong kernel, and the exit status says so."""
    targets = [f"{module}:softmax", f"{module}:wrong"]
    assert main(["bench", *targets, "--spec", "softmax", *SHORT, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    lines = {line["kernel"]: line for line in content["lines"]}
    assert set(lines) == {*targets, "torch.nn.functional.softmax"}
    assert lines[targets[0]]["seconds"] > 0
    assert lines[targets[0]]["least"] > 0
    assert lines[targets[1]]["outcome"] == "FAIL"
    assert lines[targets[1]]["seconds"] is None
    assert lines[targets[1]]["runs"] == []


def test_records_are_kept_compared_and_drawn(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder holds records; a kernel that takes a hundred times as long is called slower, with status 1; the page of
    plots has the history."""
    pytest.importorskip("plotly")
    target, kept = f"{module}:softmax", tmp_path / "history"
    common = ["bench", target, "--spec", "softmax", *SHORT, "--against", "none", "--runs", "5"]
    assert main([*common, "--save", str(kept)]) == 0
    (tmp_path / "rows.py").write_text(KERNELS.replace("def softmax", "def old").replace("slower", "softmax"))
    page, words = tmp_path / "plots.html", tmp_path / "page.md"
    assert main([*common, "--save", str(kept), "--compare", str(kept), "--plot", str(page), "--out", str(words)]) == 1
    assert "SLOWER  rows:softmax" in capsys.readouterr().out
    assert len(history(kept)) == 2
    assert read(next(kept.glob("*.json"))).lines[0].kernel == target
    assert all(title in page.read_text(encoding="utf-8") for title in ("Roofline", "Speed against accuracy", "History"))
    assert "## Changes" in words.read_text(encoding="utf-8")


def test_mistakes_are_told_in_one_line(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be timed, compared or read is told with what was expected."""
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    Record("2026-01-01", "", "another machine", "cpu", "", "", "", {}, ()).save(tmp_path / "elsewhere.json")
    for arguments, told in [
        (["--against", "some"], "expected usual, none or all"),
        (["--compare", "other.json"], "expected a record of assay bench"),
        (["--compare", "empty"], "it has no .json"),
        (["--compare", "nowhere.json"], "can't be read"),
        (["--layout", "x"], "expected tensor=layout"),
        (["--shape", "Q=3"], "unknown dimension 'Q'"),
        (["--profile", "other.json"], "triton.profiler"),
        (["--compare", "elsewhere.json"], "no record of this machine"),
        (["--device", "cuda:77"], "can't be used"),
    ]:
        assert main(["bench", f"{module}:softmax", "--spec", "softmax", "--dtype", "float32", *arguments]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"bench": 1, "made": "x"}), encoding="utf-8")
    with pytest.raises(BenchError, match="commit"):
        read(broken)
