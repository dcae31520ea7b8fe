"""`./dev gpu`: its scripts run to their end without a GPU, fail where a claim does, and write only what ran on one."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    *("random_tensors", "interpreter_bits", "accumulators", "libraries", "kernels", "model_audit"),
    *("device", "crashes", "goldens", "pytorch"),
)


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
def test_a_rehearsal_runs_to_its_end_and_writes_nothing(name: str, tmp_path: Path) -> None:
    """On the CPU, in small sizes, every claim of every script holds, and docs/gpu.md stays as it is."""
    before = (ROOT / "docs" / "gpu.md").read_bytes()
    done = run(name, "--rehearse", f"--out={tmp_path}", "--workers=2")
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


@pytest.mark.slow
def test_parts_run_side_by_side_and_go_on_where_they_were_cut_off(tmp_path: Path) -> None:
    """A run that was cut off fails and says so; the next one repeats only what wasn't finished."""
    out = f"--out={tmp_path}"
    done = run("run", "accumulators", "random_tensors", "--rehearse", out, "--seconds=0.5")
    assert done.returncode == 1
    assert "parts that failed or were cut off: accumulators, random_tensors" in done.stdout
    done = run("run", "accumulators", "random_tensors", "--rehearse", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accumulators: 4 claims hold, 0 fail" in (tmp_path / "summary.txt").read_text()
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert run("run", "accumulators", "--rehearse", out).returncode == 0
    assert finished == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert run("run", "accumulators", "--rehearse", out, "--anew").returncode == 0
    assert finished != {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}


def test_a_step_that_has_ended_is_not_run_again(part: ModuleType, tmp_path: Path) -> None:
    def ran(anew: bool = False, fails: bool = False) -> tuple[list[str], int]:
        calls = 0
        running = part.Part(True, "kernels", tmp_path, anew)

        def body() -> None:
            nonlocal calls
            calls += 1
            running.say("  4 us")
            if fails:
                raise RuntimeError
            running.claim("two is three", False, "it is two")

        if fails:
            with pytest.raises(RuntimeError):
                running.step("a / b", body)
        else:
            running.step("a / b", body)
        return running.failed, calls

    assert ran(fails=True) == ([], 1)  # nothing is kept of a step that didn't end
    assert ran() == (["two is three: it is two"], 1)
    assert ran() == (["two is three: it is two"], 0)
    assert ran(anew=True) == (["two is three: it is two"], 1)


def test_processes_run_side_by_side_and_late_ones_are_stopped(part: ModuleType, tmp_path: Path) -> None:
    from benchmarks.gpu.run import Running, side_by_side

    began, ended = time.monotonic(), dict[str, Running]()
    scripts = {"short": "echo done", "long": "sleep 60", "deaf": "trap '' TERM; sleep 0.1; exit 3", "never": "exit 0"}

    def start(name: str) -> Running:
        running = Running(name, tmp_path / name, began + (0.5 if name == "long" else 60))
        return running.start(["sh", "-c", scripts[name]], os.environ)

    def end(running: Running) -> None:
        ended[running.name] = running

    side_by_side(["short", "long", "deaf"], start, end, began + 30, 3)
    assert time.monotonic() - began < 20
    assert (ended["short"].last_line, ended["short"].process.returncode) == ("done", 0)
    assert [running.name for running in ended.values() if running.stopped] == ["long"]
    assert ended["deaf"].process.returncode == 3
    side_by_side(["never"], start, end, began, 3)
    assert "never" not in ended


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
    running = part.Part(True, "kernels", tables=["| a |"])
    running.claim("this", True)
    running.claim("that", False)
    running.say("  4 us")
    running.say_listed("PASS a")
    assert part.section(running, "today") == (
        "today ([every line](gpu/kernels.log))\n\n| a |\n\n```\nFAILS  that\n  4 us\n```"
    )


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
    assert "unknown part 'kernel'; expected quick, all, or of device" in done.stderr


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


def test_adapters_of_cuda_kernels_call_pytorch_as_the_specs_do(part: ModuleType) -> None:
    """On a CPU, which has some of them; each entry for CUDA names a function that there is."""
    from assay.kernels.libraries import pytorch_cuda
    from assay.verify.campaign.table import entries
    from assay.verify.harness.target import load_target

    for entry in entries():
        if entry.group == "torch-cuda":
            assert callable(load_target(entry.target))
            assert entry.absence("cpu") == "runs on cuda, not on cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 64, generator=generator) for heads in (4, 2, 2))
    scores = (q / 8) @ k.repeat_interleave(2, 1).mT
    scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf"))
    wanted = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(pytorch_cuda.sdpa_flash(q, k, v, causal="top_left"), wanted)  # CPUs have this backend
    a, b = torch.randn(16, 32, generator=generator), torch.randn(32, 48, generator=generator)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(16, 1) + 0.5, torch.rand(1, 48) + 0.5
    got = pytorch_cuda.scaled_mm(a8, b8, scale_a, scale_b, granularity="row")
    torch.testing.assert_close(got, (a8.float() @ b8.float() * scale_a * scale_b).bfloat16())
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.matmul.allow_tf32
    for multiply in (pytorch_cuda.mm_full_reduction, pytorch_cuda.mm_tf32):
        torch.testing.assert_close(multiply(a, b), a @ b)
    after = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.matmul.allow_tf32
    assert before == after
