"""Repro lines: they carry what the failure needs, emissions too, and say in one line what this machine lacks."""

import json
import os
import pickle
import stat
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.interpreter import NVIDIA, Emission, emulated_device, emulated_emission, faithful
from assay.interpreter.numerics.emission import emission_named, name_of
from assay.kernels.triton.gemm_fp8 import gemm_fp8
from assay.runtime.errors import AssayError
from assay.runtime.pool import Raised
from assay.runtime.process import Lost
from assay.verify import Verdict, examine
from assay.verify.cases.case import Case
from assay.verify.errors import SettingError
from assay.verify.examination.repro import run_line, with_repeated
from assay.verify.findings import Aspect, Failure
from assay.verify.harness.compute_sanitizer import findings, sanitize
from assay.verify.settings import Settings

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


KERNELS = '''
"""Right where each product is rounded by itself, wrong where a compiler rounds it with the difference."""
import torch, triton
import triton.language as tl


@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n).to(tl.float32)
    nothing = v * v - v * v
    tl.store(y + i, (v * tl.sigmoid(v) + 1e6 * nothing).to(y.dtype.element_ty), mask=i < n)


def silu(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y


def refusing(x):
    if x.shape[-1] > 4096:
        raise ValueError("rows too wide")
    return torch.softmax(x, -1)
'''
QUICK: dict[str, Any] = {"dtype": "float32", "shapes": {"R": [3], "N": [40]}, "effort": "quick", "examples": 1}
COMMAND = ["verify", "contracted:silu", "--spec", "silu", "--dtype", "float32", "--effort", "quick", "--examples", "1"]
COMMAND += ["--shape", "R=3", "--shape", "N=40", "--layout", "contiguous", "--json"]
WORDS = "rows too wide where N > 4096"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module, which is another in each test."""
    (tmp_path / "contracted.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "contracted", raising=False)


@pytest.mark.usefixtures("kernels")
def test_a_failure_under_an_emission_is_repeated_under_it() -> None:
    with faithful(emission="contraction"):
        import contracted

        assert emulated_emission() == "contraction"
        verdict = examine(contracted.silu, "silu", shrinking=False, every_aspect=False, **QUICK)
    assert (verdict.outcome, emulated_emission()) == ("FAIL", "")
    assert '"emission":"contraction"' in verdict.repro
    assert run_line(verdict.repro).failure is not None
    assert run_line(verdict.repro.replace('"emission":"contraction",', "")).failure is None


@pytest.mark.usefixtures("kernels")
def test_the_command_line_names_an_emission_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    """`assay verify --emission --refuses`: the repro line has both, and an unknown one is answered in a line."""
    assert main([*COMMAND, "--emission", "nvidia", "--refuses", WORDS]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    line = next(aspect["repro"] for aspect in row["aspects"].values() if aspect.get("repro"))
    assert '"emission":"nvidia"' in line
    assert '"refuses":{"rows too wide":"N > 4096"}' in line
    assert main(["repro", line.removeprefix("assay repro ").strip("'")]) == 1
    assert '"emission":"nvidia"' in capsys.readouterr().out
    assert main([*COMMAND, "--emission", "amd"]) == 2
    assert "emission='amd': unknown choice 'amd' (known: " in capsys.readouterr().err
    assert main([*COMMAND, "--refuses", "too wide where M > 3"]) == 2
    assert "refuses: 'M > 3': unknown dimension 'M'" in capsys.readouterr().err


@pytest.mark.usefixtures("kernels")
def test_refusals_of_the_command_line_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A pattern with a condition, and one without, as in `refuses=`."""
    patterns = ["rows too narrow", WORDS]
    command = ["verify", "contracted:refusing", "--spec", "softmax", *COMMAND[4:]]
    assert main(
        [*command, "--shape", "R=1", "--shape", "N=4000,5000", *(f"--refuses={text}" for text in patterns)]
    ) in (0, 1)
    (row,) = json.loads(capsys.readouterr().out)
    assert list(row["refused"]) == ["ValueError 'rows too wide' where N > 4096"]


def test_names_of_emissions() -> None:
    for emission in (NVIDIA, Emission(), Emission(flush=True), Emission(contraction=True, approximate=True)):
        assert emission_named(name_of(emission)) == emission
    assert name_of(NVIDIA) == "nvidia"
    settings = Settings("silu", dtype="float32", emission="nvidia")
    assert Settings.from_table(settings.as_table()) == settings
    with pytest.raises(SettingError, match="unknown choice 'fast'"):
        Settings("silu", dtype="float32", emission="fast")


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
    """No summary, or a program that says that it could not run the case: the last line of its errors is told."""
    complete = "========= ERROR SUMMARY: 0 errors"
    words = "compute-sanitizer: the case was not run to its end: "
    assert findings("", "warning\nassay: no module mine\n") == f"{words}assay: no module mine"
    assert findings(complete, "assay: no module mine\n", 2) == f"{words}assay: no module mine"
    assert findings(complete, "", 139) == f"{words}exit status 139"
    assert findings(complete, "examined 1\n", 0) == "compute-sanitizer found nothing"
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
    assert "run_line(sys.argv[1])" in seen.read_text()
    assert seen.read_text().endswith(f" {LINE}")


def test_why_it_cannot_be_asked_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize(LINE, "mine:softmax") == "compute-sanitizer is not installed; it comes with the CUDA toolkit"
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    assert sanitize(LINE, "") == "compute-sanitizer needs a kernel with an importable name"


CALLS: list[int] = []


def wrong_later(x: Any) -> Any:
    """Wrong from its fifth call in a process on."""
    CALLS.append(1)
    return torch.softmax(x, -1) + float(len(CALLS) > 4)


def wrong(x: Any) -> Any:
    return torch.softmax(x, -1) + 1


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (wrong, "(so again in a fresh process)"),
        (wrong_later, "the failure depends on memory, or on the calls before it"),
    ],
)
def test_the_line_of_a_report_is_run_in_a_fresh_process(kernel: Any, words: str) -> None:
    CALLS.clear()
    verdict = examine(kernel, "softmax", dtype="float32", effort="quick", shrinking=False, every_aspect=False)
    assert verdict.outcome == "FAIL"
    repeated = with_repeated(verdict)
    assert repeated.gravest.repeated.endswith(words)
    assert words.split()[-1] in str(repeated)


class Touched:
    def __reduce__(self) -> Any:
        return Path.touch, (Path(os.environ["FORGED"]),)


def forges(x: Any) -> Any:
    """Sends whatever unpickles it to a file, through each socket that it has; and is wrong."""
    message = b"a" + pickle.dumps(Touched())
    for number in range(3, 64):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, struct.pack("!i", len(message)) + message)
    return wrong(x)


def test_what_a_kernel_sends_from_the_fresh_process_is_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGED", str(tmp_path / "forged"))
    settings = {"dtype": "float32", "effort": "quick", "shrinking": False, "every_aspect": False}
    verdict = examine(wrong, "softmax", **settings)
    name, aspect = next(iter(verdict.violated.items()))
    line = aspect.repro.replace(":wrong", ":forges")
    verdict = replace(verdict, aspects={name: replace(aspect, repro=line)})
    assert "fails by another kind: crash" in with_repeated(verdict).gravest.repeated
    assert not (tmp_path / "forged").exists()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("crash", "the same case fails by another kind: crash"),
        ("exact", "(so again in a fresh process)"),
        (Raised("no module", True, ""), "a fresh process can't run it: no module"),
        (Lost("crash", "it ended with signal 11"), "in a fresh process: it ended with signal 11"),
    ],
)
def test_words_of_what_the_line_gave(answer: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.verify.examination.repro.run_alone", lambda *_, **__: answer)
    failure = Failure("contract", Case.from_dict(CASE), "")
    found = Aspect("broken", failure=failure, repro=f"assay repro '{line()}'")
    verdict = Verdict("FAIL", "k", "softmax", "float32", "", aspects={"numbers": found}, target="a:b")
    assert words in with_repeated(verdict).gravest.repeated
    hanging = replace(verdict, aspects={"numbers": replace(found, failure=replace(failure, kind="timeout"))})
    assert with_repeated(hanging).gravest.repeated == "not run again: it hangs, or loses its process"
