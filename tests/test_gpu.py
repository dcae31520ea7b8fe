"""`./dev gpu`: its scripts run to their end without a GPU, fail where a claim does, and write only what ran on one."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("random_tensors", "interpreter_bits", "accumulators", "libraries", "kernels", "model_audit")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the scripts share, as a module."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.gpu import part

    return part


def run(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One script of the folder, with environment variables beside those that there are."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "gpu" / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_rehearsal_runs_to_its_end_and_writes_nothing(name: str) -> None:
    """On the CPU, in small sizes, every claim of every script holds, and docs/gpu.md stays as it is."""
    before = (ROOT / "docs" / "gpu.md").read_bytes()
    done = run(name, "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds  " in done.stdout
    assert " claims hold, 0 fail" in done.stdout
    assert (ROOT / "docs" / "gpu.md").read_bytes() == before


def test_an_examination_compiles_each_program_once_and_times_nothing(part: ModuleType) -> None:
    """Counted on two kernels; with autotuners as they come the count is of more programs, and they time."""
    from benchmarks.gpu.compilations import available, pair

    names = [entry.name for entry in available()]
    for name in ("assay.softmax", "assay.gemm (few rows)"):
        tuning, assigned = pair(names.index(name))
        assert assigned.problem() == ""
        assert assigned.timed == 0 < tuning.timed
        assert len(assigned.needed) <= assigned.compilations < tuning.compilations
        assert assigned.launches < tuning.launches
        assert "timings" in tuning.problem()


def test_every_script_is_a_part_and_has_a_section(part: ModuleType) -> None:
    from benchmarks.gpu.run import PARTS as KNOWN

    scripts = {path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py") if "main(" in path.read_text("utf-8")}
    assert set(KNOWN) == set(PARTS) == scripts - {"run", "part"}
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for name in PARTS:
        assert part.written(page, name, "measured").count("\nmeasured\n") == 1


@pytest.mark.parametrize("name", ["x", "\\1"])
def test_a_section_is_replaced_and_nothing_else(part: ModuleType, name: str) -> None:
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    if name == "x":
        assert part.written(page, name, "1 \\1") == "a\n<!-- x -->\n1 \\1\n<!-- end of x -->\nb\n"
    else:
        with pytest.raises(ValueError, match="expected a section between"):
            part.written(page, name, "new")


def test_a_section_has_versions_command_and_all_but_claims_that_hold(part: ModuleType) -> None:
    assert f"torch {torch.__version__}" in part.circumstances()
    text = part.section(
        "kernels", "today: `python benchmarks/gpu/kernels.py`", ["holds  this", "FAILS  that", "  4 us"]
    )
    assert text.startswith("today: `python benchmarks/gpu/kernels.py` ([every line](gpu/kernels.log))")
    assert text.endswith("```\nFAILS  that\n  4 us\n```")


@pytest.mark.parametrize("body", ["claim", "error"])
def test_a_claim_that_fails_and_an_error_end_with_1(
    part: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    def script(running: Any) -> None:
        if body == "error":
            raise RuntimeError("no such thing")
        running.claim("two is three", False, "it is two")

    monkeypatch.setattr(sys, "argv", ["script.py", "--rehearse"])
    with pytest.raises(SystemExit) as ended:
        part.main("x", script)
    assert ended.value.code == 1
    told = "FAILS  two is three: it is two" if body == "claim" else "RuntimeError: no such thing"
    assert told in capsys.readouterr().out


def test_without_a_gpu_a_script_asks_for_a_rehearsal() -> None:
    done = run("random_tensors", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "expected a GPU of NVIDIA's, found none; --rehearse runs this on the CPU" in done.stderr


def test_an_unknown_part_is_refused() -> None:
    done = run("run", "kernel")
    assert done.returncode == 2
    assert "unknown part 'kernel'; expected of random_tensors" in done.stderr


def test_a_table_of_verdicts_joins_dtypes_that_came_out_alike(part: ModuleType) -> None:
    from benchmarks.gpu.verdicts import Line, table

    lines = [
        Line("mm", "float32", "PASS", 98),
        Line("mm", "bfloat16", "FAIL", 95, "a|b"),
        Line("mm", "float16", "PASS", 97),
    ]
    assert table(lines).splitlines()[2:] == [
        "| mm | float32, float16 | PASS | 97 to 98 |  |",
        "| mm | bfloat16 | FAIL | 95 | `a\\|b` |",
    ]
