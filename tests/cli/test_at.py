"""`assay verify --at`: sizes of production on the command line, in a table and in a repro line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.cli.main import main

pytestmark = pytest.mark.usefixtures("in_process")
LATE = "tests.verify.large_kernels:last_rows_scaled"
SOFTMAX = ("--spec", "softmax", "--dtype", "float32", "--effort", "quick", "--examples", "0", "--shape", "N=130")


def test_a_kernel_that_fails_at_its_size_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("verify", LATE, *SOFTMAX, "--at", "R=9001,N=130", "--json")) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert "wrong from R=8999 on" in verdict["failure"]["message"]
    assert main(("repro", verdict["repro"])) == 1
    assert "wrong from R=8999 on" in capsys.readouterr().out


def test_a_table_has_sizes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(
        f'[[kernel]]\nname = "late"\ntarget = "{LATE}"\nspec = "softmax"\ndtypes = ["float32"]\n'
        "shapes = { N = [130] }\nexamples = 0\nat = [{ R = 9001 }]\n",
        encoding="utf-8",
    )
    assert main(("verify", str(table))) == 1
    assert "wrong from R=8999 on" in capsys.readouterr().out
    assert main(("verify", str(table), "--at", "R=100")) == 0
