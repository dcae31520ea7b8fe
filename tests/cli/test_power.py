"""`assay power` on the command line."""

import json
from pathlib import Path

import pytest

from assay.cli.main import main

SMALL = ("--shape", "R=1,2,17", "--shape", "N=1,5,33", "--examples", "0")


def test_it_prints_rates_and_survivors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    line = ["power", "--spec", "exp", "--dtype", "bfloat16", *SMALL, "--against", "allclose(1e-2,1e-2)"]
    assert main([*line, "--family", "store", "--family", "tail", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "fault family" in out
    assert "allclose(1e-2,1e-2)" in out
    content = json.loads(path.read_text())
    assert content["spec"] == "exp"
    assert all(name in out for name in content["survivors"])
