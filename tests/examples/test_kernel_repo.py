"""The example repository: its planted bug is found and named, with assay installed as its users have it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "kernel-repo"


def test_the_planted_bug_is_found_and_the_right_kernel_passes(tmp_path: Path) -> None:
    """In a copy of the example outside of this repository softmax fails, and only it, by the lanes behind the row."""
    repository = tmp_path / "kernel-repo"
    shutil.copytree(EXAMPLE, repository, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache", "report"))
    command = [sys.executable, "-m", "pytest", "--assay-faithful", "--assay-report", "report", "--assay-examples", "8"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"1 failed, 3 passed", done.stdout), done.stdout
    assert "FAILED tests/test_kernels.py::test_softmax" in done.stdout
    assert re.search(r"rms_norm +rmsnorm +float32 .* PASS", done.stdout), done.stdout
    [report] = (repository / "report").glob("*softmax*.json")
    verdict = json.loads(report.read_text())
    assert verdict["outcome"] == "FAIL"
    assert verdict["failure"]["case"]["sizes"]["N"] == 3, "the narrowest row with a lane behind its end"
