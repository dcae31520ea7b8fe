"""Kernels that ask for CUDA, imported and examined on a CPU: every way in leads into the pretended world."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.interpreter import faithful, pretend_cuda, pretended
from assay.verify import examine
from assay.verify.errors import SettingError, TargetError
from assay.verify.examination.repro import pretending, run_line
from assay.verify.harness.target import load_target
from assay.verify.settings import Settings

GPU_KERNELS = '''
"""A module that can't be imported without CUDA, as many repositories' can't."""
import torch
import triton
import triton.language as tl

assert torch.cuda.is_available(), "needs a GPU"
PROCESSORS = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
TABLE = torch.zeros(4, device="cuda")
TARGET = triton.runtime.driver.active.get_current_target()


@triton.jit
def softmax_kernel(x, y, n, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * n + i, (SCALE * e / tl.sum(e, 0)).to(y.dtype.element_ty), mask=i < n)


def softmax(x, scale=1.0):
    assert x.is_cuda and x.device.type == "cuda"
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    with torch.cuda.device(x.device):
        softmax_kernel[(x.shape[0],)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]), scale)
    torch.cuda.synchronize()
    return y


def faulty(x):
    assert PROCESSORS in (132, 108)
    return softmax(x, 1.0 if torch.cuda.get_device_capability() == (8, 0) else 1.5)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module's folder is searched; what is imported of it is forgotten afterwards."""
    (tmp_path / "gpu_kernels.py").write_text(GPU_KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as context:
        context.delitem(sys.modules, "gpu_kernels", raising=False)
        yield
    sys.modules.pop("gpu_kernels", None)


pytest_plugins = ["pytester"]

QUICK: dict[str, Any] = {
    "dtype": "bfloat16", "effort": "quick", "examples": 1, "shapes": {"R": [3], "N": [40]}, "layouts": ["contiguous"],
}  # fmt: skip


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("isolate", [False, True])
def test_a_kernel_of_cuda_is_examined(isolate: bool) -> None:
    """It is given tensors of the device, and judged outside of the pretended world; the verdict tells of it."""
    with faithful(pretend="cuda"):
        import gpu_kernels

        verdict = examine(gpu_kernels.softmax, "softmax", device="cuda", isolate=isolate, **QUICK)
        assert (pretended(), torch.cuda.is_available()) == ("h200", True)
    assert verdict.outcome == "PASS", str(verdict)
    assert verdict.about["device"].endswith("pretending to be h200")


@pytest.mark.usefixtures("module")
def test_a_failure_is_repeated_in_its_world() -> None:
    """A repro line names the device that was pretended, and fails again; where another is named all is well."""
    with pretend_cuda():
        import gpu_kernels

        verdict = examine(gpu_kernels.faulty, "softmax", shrinking=False, every_aspect=False, **QUICK)
    assert verdict.outcome == "FAIL", str(verdict)
    assert '"pretend":"h200"' in verdict.repro
    assert run_line(verdict.repro).failure is not None
    assert pretended() == ""
    assert run_line(pretending(verdict.repro, "a100")).failure is None


@pytest.mark.usefixtures("module")
def test_the_command_line_pretends(capsys: pytest.CaptureFixture[str]) -> None:
    """`assay verify --pretend cuda` imports and examines what without it can't be imported."""
    command = ["verify", "gpu_kernels:faulty", "--spec", "softmax", "--dtype", "bfloat16", "--effort", "quick"]
    command += ["--examples", "1", "--shape", "R=3", "--shape", "N=40", "--layout", "contiguous", "--json"]
    assert main([*command, "--pretend", "a100"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["about"]["device"].endswith("pretending to be a100")
    with pytest.raises(TargetError, match="it asks for CUDA, which isn't here; --pretend cuda, or import it inside"):
        load_target("gpu_kernels:softmax")
    assert main([*command, "--pretend", "rocm"]) == 2
    assert "unknown device to pretend 'rocm' (known: a10, " in capsys.readouterr().err


def asserts_it(x: torch.Tensor) -> torch.Tensor:
    assert x.is_cuda
    return torch.softmax(x, -1)


def allocates_there(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.to(torch.device("cuda")), -1)


@pytest.mark.parametrize("kernel", [asserts_it, allocates_there])
def test_a_missing_gpu_is_no_fault_of_the_kernel(kernel: Any) -> None:
    """Without the pretended world a kernel that asks for CUDA is refused, and told the way there; within it passes."""
    verdict = examine(kernel, "softmax", **QUICK)
    assert (verdict.outcome, verdict.passed) == ("REFUSED", False)
    assert verdict.note.startswith("the kernel asks for CUDA, which isn't here; examine it by --pretend cuda, or ")
    with pretend_cuda():
        assert examine(kernel, "softmax", **QUICK).outcome == "PASS"


def test_another_crash_is_still_one() -> None:
    def crashes(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    assert examine(crashes, "softmax", shrinking=False, **QUICK).outcome == "FAIL"


def test_the_setting_is_checked_once() -> None:
    assert Settings("softmax", dtype="float32", device="cuda:0", pretend="cuda").device == "cpu"
    assert Settings("softmax", dtype="float32", device="cuda:0").device == "cuda:0"
    with pytest.raises(SettingError, match="unknown device to pretend 'h2000'"):
        Settings("softmax", dtype="float32", pretend="h2000")
    assert (
        Settings.from_table({"spec": "softmax", "dtype": "float32", "pretend": "a100"}).as_table()["pretend"] == "a100"
    )


TESTS = """
import gpu_kernels
import torch

X = torch.randn(3, 40, device="cuda")

def test_plain():
    torch.testing.assert_close(gpu_kernels.softmax(X).cpu(), torch.softmax(X.cpu(), -1))

def test_beside_the_fixture(assay):
    assay.check(gpu_kernels.softmax, "softmax", dtype="bfloat16", examples=1, effort="quick")
"""


@pytest.mark.usefixtures("module")
def test_a_whole_run_pretends(run: Any, pytester: pytest.Pytester) -> None:
    """`--assay-pretend cuda` holds while conftest files and tests are loaded and run; all is put back at the end."""
    pytester.makepyfile(gpu_kernels=GPU_KERNELS)
    pytester.makeconftest("import torch\nassert torch.zeros(1, device='cuda').is_cuda")
    run(TESTS, "--assay-pretend", "cuda").assert_outcomes(passed=2)
    assert pretended() == ""
    assert not torch.zeros(1).is_cuda
