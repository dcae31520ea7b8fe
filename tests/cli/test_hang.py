"""A kernel that hangs in C, which no alarm reaches: it is named, and the run goes on and ends within its limit."""

import importlib
import json
import time
from pathlib import Path

import pytest

from assay.cli.main import main
from assay.verify import examine
from assay.verify.harness import call as calls
from tests.cli.kernels_of_a_user import entry

TABLE = entry("hanging", "hanging", module="kernels_that_hang") + entry("honest", "honest")
TIMEOUT = 1.0  # seconds of processor time for a call, which an honest one never takes
START = 60.0  # seconds that workers may take to import torch on a busy machine


@pytest.fixture(autouse=True)
def _grace(users_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE", calls.GRACE)  # which the module of the kernel changes


def test_verify_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(TABLE, encoding="utf-8")
    arguments = ("--jobs", "2", "--timeout", f"{TIMEOUT}", "--effort", "quick", "--examples", "0", "--json")
    begun = time.monotonic()
    assert main(("verify", "own.toml", *arguments)) == 1
    assert time.monotonic() - begun < TIMEOUT + calls.GRACE + START
    hanging, honest = json.loads(capfd.readouterr().out)
    assert honest["outcome"] == "PASS"
    assert (hanging["outcome"], hanging["cases"], hanging["failure"]["kind"]) == ("FAIL", 1, "timeout")
    assert "nothing came back for 1.5 s" in hanging["failure"]["message"]
    begun = time.monotonic()
    assert main(("repro", hanging["repro"])) == 1
    assert time.monotonic() - begun < TIMEOUT + calls.GRACE + START
    assert "failure     timeout: nothing came back for 1.5 s" in capfd.readouterr().out


def test_an_isolated_kernel_hangs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("kernels_that_hang")
    monkeypatch.setattr("assay.verify.harness.isolation.GRACE", kernels.GRACE)
    begun = time.monotonic()
    verdict = examine(kernels.hanging, "softmax", dtype="float32", examples=0, timeout=TIMEOUT, isolate=True)
    assert time.monotonic() - begun < TIMEOUT + calls.GRACE + START
    assert verdict.failure is not None
    assert (verdict.failure.kind, verdict.cases) == ("timeout", 1)
