"""compute-sanitizer on a failing case: its report in a line, and one line where there is none to ask."""

import sys
from pathlib import Path

import pytest

from assay.verify.harness.compute_sanitizer import findings, sanitize

LINE = """assay repro '{"target":"mine:softmax","listed":[],"case":{}}'"""
REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at softmax_kernel+0x70 in /mine.py:12
=========     by thread (33,0,0) in block (1,0,0)
=========     Address 0x7f0000000202 is out of bounds
========= Invalid __global__ read of size 2 bytes
=========     at softmax_kernel+0x70 in /mine.py:12
========= ERROR SUMMARY: 2 errors
"""


def test_the_first_finding_is_told_and_the_rest_counted() -> None:
    assert findings(REPORT) == (
        "compute-sanitizer: Invalid __global__ read of size 2 bytes; at softmax_kernel+0x70 in /mine.py:12; "
        "by thread (33,0,0) in block (1,0,0); Address 0x7f0000000202 is out of bounds (and 1 more)"
    )
    assert findings("========= ERROR SUMMARY: 0 errors") == "compute-sanitizer found nothing"


def test_a_case_that_was_not_run_has_no_clean_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No summary, or a repetition that ended with another status than a case's: the last line of its errors is told."""
    complete = "========= ERROR SUMMARY: 0 errors"
    words = "compute-sanitizer: the case was not run to its end: "
    assert findings("", "warning\nassay: no module mine\n") == f"{words}assay: no module mine"
    assert findings(complete, "assay: no module mine\n", 2) == f"{words}assay: no module mine"
    assert findings(complete, "", 139) == f"{words}exit status 139"
    assert findings(complete, "examined 1\n", 1) == "compute-sanitizer found nothing"
    tool = tmp_path / "compute-sanitizer"
    body = ["import sys", f"print({complete!r})", "print('assay: no module mine', file=sys.stderr)", "sys.exit(2)"]
    tool.write_text("\n".join([f"#!{sys.executable}", *body]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize(LINE, "mine:softmax") == f"{words}assay: no module mine"


def test_the_case_is_repeated_under_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    seen = tmp_path / "seen"
    body = ["import sys", f"print({REPORT!r})", f"open({str(seen)!r}, 'w').write(' '.join(sys.argv))"]
    tool.write_text("\n".join([f"#!{sys.executable}", *body]))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Invalid __global__ read" in sanitize(LINE, "mine:softmax")
    assert f"-m assay.cli.main repro {LINE}" in seen.read_text()


def test_why_it_cannot_be_asked_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize(LINE, "mine:softmax") == "compute-sanitizer is not installed; it comes with the CUDA toolkit"
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    assert sanitize(LINE, "") == "compute-sanitizer needs a kernel with an importable name"
