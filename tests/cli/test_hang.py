"""A kernel that hangs in C, which no alarm reaches: it is named, the run goes on, and ends when its limit says."""

import importlib
import json
import time
from pathlib import Path

import pytest

from assay.cli.main import main
from assay.verify import examine
from assay.verify.harness import call as calls
from tests.cli.kernels_of_a_user import entry

HERE = Path(__file__).parent
TABLE = entry("hanging", "hanging", module="kernels_that_hang") + entry("honest", "honest")
TIMEOUT = 1.0  # seconds of processor time for a call, which an honest one never takes
START = 60.0  # seconds that workers may take to import torch on a busy machine


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both kernels in a table."""
    monkeypatch.setattr(calls, "GRACE", calls.GRACE)  # which the module of the kernel changes
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.toml"
    path.write_text(TABLE, encoding="utf-8")
    return path


def test_verify_goes_on(own_table: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The next kernel is examined; the verdict says how long was waited, and its line hangs again."""
    begun = time.monotonic()
    assert (
        main(
            (
                "verify",
                own_table.name,
                "--jobs",
                "2",
                "--timeout",
                f"{TIMEOUT}",
                "--effort",
                "quick",
                "--examples",
                "0",
                "--json",
            )
        )
        == 1
    )
    assert time.monotonic() - begun < TIMEOUT + calls.GRACE + START
    hanging, honest = json.loads(capfd.readouterr().out)
    assert honest["outcome"] == "PASS"
    assert (hanging["outcome"], hanging["cases"], hanging["failure"]["kind"]) == ("FAIL", 1, "timeout")
    assert "nothing came back for 3 s" in hanging["failure"]["message"]
    begun = time.monotonic()
    assert main(("repro", hanging["repro"])) == 1
    assert time.monotonic() - begun < TIMEOUT + calls.GRACE + START
    assert "failure     timeout: nothing came back for 3 s" in capfd.readouterr().out


def test_survey_goes_on(own_table: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a row among the others."""
    monkeypatch.setattr("assay.cli.survey._TIMEOUT", TIMEOUT)
    begun = time.monotonic()
    assert main(("survey", "--table", own_table.name, "--examples", "0")) == 0
    assert time.monotonic() - begun < TIMEOUT + calls.GRACE + START
    out = capfd.readouterr().out
    assert "1 FAIL, 1 PASS" in out or "1 PASS, 1 FAIL" in out
    assert "timeout: nothing came back for" in out


def test_an_isolated_kernel_hangs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolated, it is a time-out of the case, and the examination ends."""
    monkeypatch.setattr(calls, "GRACE", calls.GRACE)
    monkeypatch.syspath_prepend(HERE)
    kernels = importlib.import_module("kernels_that_hang")
    monkeypatch.setattr("assay.verify.harness.isolation.GRACE", kernels.GRACE)
    begun = time.monotonic()
    verdict = examine(kernels.hanging, "softmax", dtype="float32", examples=0, timeout=TIMEOUT, isolate=True)
    assert time.monotonic() - begun < TIMEOUT + calls.GRACE + START
    assert verdict.failure is not None
    assert (verdict.failure.kind, verdict.cases) == ("timeout", 1)
