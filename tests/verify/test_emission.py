"""What a compiler makes of a kernel's arithmetic, as a setting: by context, command line, pytest and repro line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import main
from assay.interpreter import NVIDIA, Emission, emulated_emission, faithful
from assay.interpreter.numerics.emission import emission_named, name_of
from assay.verify import examine
from assay.verify.errors import SettingError
from assay.verify.examination.repro import run_line
from assay.verify.settings import Settings

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
    """The line names it and fails again in a process that knows nothing of it; without it the case passes."""
    with faithful(emission="contraction"):
        import contracted  # type: ignore[import-not-found]

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
