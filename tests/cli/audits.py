"""Ways to run `assay audit` on the tiny Llama of conftest.py, and to read what it gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import main

FEW = ("--formats", "bf16,fp8,w8a16,w4a16-g32,kv-fp8", "--sequence", "12", "--sequences", "4", "--batch", "2")


def run(models: Path, out: Path, *more: str) -> int:
    """The exit status of an audit of the tiny Llama."""
    return main(("audit", str(models / "llama"), "--text", str(models / "text.txt"), "--out", str(out), *FEW, *more))


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "audit.json").read_text())


def one_line(capsys: pytest.CaptureFixture[str], message: str) -> None:
    """What was said is one line with the message."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("assay: ")
    assert message in err
