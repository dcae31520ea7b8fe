"""`assay bench`: a table, a record, a gate over two records, plots, and mistakes in one line."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.bench.timing.contest import Record, history, read
from assay.cli.main import main
from assay.verify.errors import BenchError
from tests.judge.judged.formats import INTO, filled, flashinfer_solution, flashinfer_trace

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
SHORT = ["--at", "R=64,N=512", "--dtype", "float32", "--seconds", "0.02", "--rounds", "2", "--no-compiled"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the current folder."""
    (tmp_path / "rows.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for one another beside other tests take any time
    return "rows"


def test_a_wrong_kernel_has_no_time_beside_a_right_one(module: str, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.usefixtures("in_process")
def test_records_are_kept_compared_and_drawn(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder holds records; a kernel that takes a hundred times as long is called slower, with status 1; the page of
    plots has the history, and loads nothing."""
    target, kept = f"{module}:softmax", tmp_path / "history"
    common = ["bench", target, "--spec", "softmax", *SHORT, "--against", "none", "--runs", "5"]
    assert main([*common, "--save", str(kept)]) == 0
    (tmp_path / "rows.py").write_text(KERNELS.replace("def softmax", "def old").replace("slower", "softmax"))
    sys.modules.pop(module)  # as a new process would
    importlib.invalidate_caches()
    page, words = tmp_path / "plots.html", tmp_path / "page.md"
    assert main([*common, "--save", str(kept), "--compare", str(kept), "--plot", str(page), "--out", str(words)]) == 1
    sys.modules.pop(module)
    assert "SLOWER  rows:softmax" in capsys.readouterr().out
    assert len(history(kept)) == 2
    assert read(next(kept.glob("*.json"))).lines[0].kernel == target
    drawn = page.read_text(encoding="utf-8")
    assert all(f"<h2>{title}</h2>" in drawn for title in ("Roofline", "Speed against accuracy", "History"))
    assert len(drawn) < 200_000
    assert not re.search(r"https?://|\ssrc=", drawn)
    assert "## Changes" in words.read_text(encoding="utf-8")


def test_mistakes_are_one_line(module: str, tmp_path: Path, one_line: Callable[..., None]) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    Record("2026-01-01", "", "another machine", "cpu", "", "", "", {}, ()).save(tmp_path / "elsewhere.json")
    for arguments, told in [
        (["--against", "some"], "expected usual, none or all"),
        (["--compare", "other.json"], "expected a record of assay bench"),
        (["--compare", "empty"], "it has no .json"),
        (["--compare", "nowhere.json"], "can't be read"),
        (["--layout", "x"], "--tensor-layout 'x^': expected = after x (as in b=transposed)"),
        (["--at", "Q=3"], "unknown dimension 'Q'"),
        (["--profile", "other.json"], "triton.profiler"),
        (["--compare", "elsewhere.json"], "no record of this machine"),
        (["--device", "cuda:77"], "can't be used"),
    ]:
        one_line(("bench", f"{module}:softmax", "--spec", "softmax", "--dtype", "float32", *arguments), told)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"bench": 1, "made": "x"}), encoding="utf-8")
    with pytest.raises(BenchError, match="commit"):
        read(broken)


def test_solutions_of_a_problem_are_timed_at_each_stated_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FlashInfer Trace definition: a right solution and the reference have a time at both workloads, a solution that
    is wrong at one of them has none at either, and each is a trace with its own latency."""
    wrong = INTO.replace("y.copy_(", "y.copy_((1.0 if len(x) != 9 else 1.1) * ")
    filled(flashinfer_trace(tmp_path), {"wrong.json": flashinfer_solution("theirs", wrong)})
    files = [str(tmp_path / name) for name in ("definition.json", "solution.json", "wrong.json")]
    made = tmp_path / "traces.jsonl"
    more = ["--seconds", "0.05", "--no-compiled", "--save", str(tmp_path / "history"), "--runs", "1"]
    assert main(["bench", *files, *more, "--trace", str(made), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    lines = {(line["kernel"], line["case"]): line for line in content["lines"]}
    cases = ["scaled_rows; T=40", "scaled_rows; T=9"]
    assert list(lines) == [(name, case) for case in cases for name in ("mine", "theirs", "reference")]
    for case in cases:
        mine, theirs, reference = (lines[name, case] for name in ("mine", "theirs", "reference"))
        assert mine["outcome"] == "PASS", mine
        assert mine["seconds"] > 0
        assert mine["worst"] < 1 < mine["bits"]
        assert mine["judged"] > 1
        assert (theirs["outcome"], theirs["seconds"], theirs["runs"]) == ("FAIL", None, [])
        assert (reference["outcome"], reference["seconds"] > 0) == ("REFERENCE", True)
    traces = [json.loads(line) for line in made.read_text().splitlines()]
    status = [(trace["solution"], trace["workload"]["uuid"], trace["evaluation"]["status"]) for trace in traces]
    assert status == [
        (name, uuid, told)
        for name, told in (("mine", "PASSED"), ("theirs", "INCORRECT_NUMERICAL"))
        for uuid in ("w40", "w9")
    ]
    assert all(trace["evaluation"]["performance"]["latency_ms"] > 0 for trace in traces[:2])
    assert [line.kernel for line in history(tmp_path / "history")[0].lines] == ["mine", "theirs", "reference"] * 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "expected its solutions behind it"),
        (["solution.json", "--at", "T=3"], "--at: a problem states its own sizes"),
    ],
)
def test_a_problem_without_solutions_or_with_sizes_is_refused(
    more: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., None]
) -> None:
    monkeypatch.chdir(flashinfer_trace(tmp_path))
    one_line(("bench", "definition.json", *more), words)
