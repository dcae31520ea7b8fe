"""Repro lines: they carry what the failure needs, and say in one line what this machine lacks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from assay.cli.main import main
from assay.interpreter import emulated_device, faithful
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.runtime.errors import AssayError
from assay.verify.cases.case import Case
from assay.verify.examination.repro import run_line

from .examined import quick

ROOT = Path(__file__).resolve().parents[2]
CASE = {"spec": "softmax", "sizes": {"R": 1, "N": 2}, "dtypes": {"x": "float32"}}


def line(**fields: object) -> str:
    """A repro line of a small case."""
    return json.dumps({"target": "torch:softmax", **fields, "case": CASE})


def test_a_failure_of_an_emulated_device_fails_again_elsewhere() -> None:
    """Its line names the device: in a fresh process the tensor cores are emulated again, and without it all is well."""
    with faithful(device="h200"):
        verdict = quick(gemm_fp8, "gemm_fp8", "float8_e4m3fn", shapes={"M": [64], "N": [40], "K": [128]})
    assert verdict.outcome == "FAIL", str(verdict)
    assert emulated_device() == ""
    assert '"faithful":"h200"' in verdict.repro
    again = [sys.executable, "-P", "-m", "assay.cli.main", "repro"]
    done = subprocess.run([*again, verdict.repro], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout[:4]) == (1, "FAIL"), done.stderr
    assert '"faithful":"h200"' in done.stdout
    assert run_line(verdict.repro.replace('"faithful":"h200",', "")).failure is None


@pytest.mark.parametrize(
    ("fields", "missing", "message"),
    [
        ({"framework": "jax"}, "jax", "framework='jax': jax is not installed; pip install 'kernel-assay[pallas]'"),
        ({"framework": "cupy", "device": "cuda"}, "cupy", "framework='cupy': cupy is not installed; pip install cupy"),
        ({"faithful": "h200"}, "triton", "faithful='h200' needs Triton, which is not installed: pip install triton"),
        ({"faithful": "h201"}, "", "unknown device of the interpreter 'h201'"),
        ({"framework": "tinygrad"}, "", "framework='tinygrad'; expected one of 'torch', 'numpy', 'jax', 'cupy'"),
        ({"device": "warp"}, "", "device='warp' can't be used"),
        ({"target": "needs_a_library:kernel"}, "", "No module named 'no_such_library'); it needs no_such_library"),
    ],
)
def test_what_a_line_needs_and_is_not_here_is_named(
    fields: dict[str, str], missing: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_a_library.py").write_text("import no_such_library\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(AssayError) as caught:
        run_line(line(**fields))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "needs_a_library.py").write_text("import no_such_library\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(("repro", line(target="needs_a_library:kernel"))) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_case_that_is_cut_at_the_front_says_so_in_words() -> None:
    whole = Case("softmax", {"R": 1, "N": 3}, {"x": "float32"})
    assert "; the first 28 places along N cut off" in str(replace(whole, origin={"N": 28}))
    assert "cut off" not in str(whole)
