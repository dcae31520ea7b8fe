"""A kernel that loses its device, or its process on one: named, run again alone, shrunk; and the rest goes on.

There is no GPU here: `losing_kernels` raise what libraries raise, and one function says that the CPU could be lost.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.runtime import deadline
from assay.runtime.errors import AssayError
from assay.runtime.process import ForkServer
from assay.verify import Verdict
from assay.verify.campaign.survey import Job, examine_job
from assay.verify.campaign.table import Entry
from assay.verify.errors import DeviceLost, SettingError
from assay.verify.examination import diagnosis, procedure, run
from assay.verify.examination.aspects import attributed_to
from assay.verify.examination.repro import parse_line
from assay.verify.findings import Aspect
from assay.verify.harness import call, frameworks, isolation, lost_device
from assay.verify.harness.compilation import Compiled
from assay.verify.settings import Settings

from .examined import fails, failure_of, first, passes, quick

FEW: dict[str, Any] = {"shapes": {"R": [1, 3], "N": [4, 24]}, "shrinking": True, "layouts": ["contiguous"]}
SMALL: dict[str, Any] = FEW | {"shrinking": False}
SHRUNK = {"R": 1, "N": 24}
ALONE = "so again alone in a new process, with CUDA_LAUNCH_BLOCKING=1"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The stand-ins, as if the CPU could be lost; calls are counted in a file."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(call, "GRACE", call.GRACE)  # which the module of the kernels changes
    monkeypatch.setattr(lost_device, "can_be_lost", lambda device: True)
    result = importlib.import_module("losing_kernels")
    yield result
    result._lost.clear()


@pytest.fixture
def processes(tmp_path: Path) -> Any:
    """Return the processes that made calls, in order, each with whether launches block there."""

    def read() -> dict[int, str]:
        lines = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
        return {int(pid): blocks for pid, blocks in map(str.split, lines)}

    return read


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegal"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"), True),
        (RuntimeError("CUDA error: operation not supported on global/shared address space"), True),
        (RuntimeError("HIP error: of a kind that no table has"), True),
        (torch.AcceleratorError("of a kind that no table has"), True),
        (RuntimeError("CUDA error: operation not supported"), False),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
        (RuntimeError("CUDA error: invalid device ordinal: 3; pretend_cuda() has one device"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("INTERNAL: CUDA error: Failed to add a node: CUDA_ERROR_INVALID_VALUE [of a jit]"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (ValueError("an ordinary mistake"), False),
    ],
)  # fmt: skip
def test_which_errors_lose_the_device(error: Exception, is_lost: bool) -> None:
    """By the table of CUDA's own documentation; also where another error was raised while one was handled."""
    assert lost_device.is_lost(error) is is_lost
    later = ValueError("and then")
    later.__context__ = error
    assert lost_device.is_lost(later) is is_lost


def test_an_error_that_hides_the_loss_does_not_hide_it_from_us(monkeypatch: pytest.MonkeyPatch) -> None:
    hiding = ValueError("the kernel has a fallback, which is wrong too")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert lost_device.by_device(hiding) is hiding
    lost_device.check_not_lost()

    def answer() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", answer)
    assert "unspecified" in str(lost_device.by_device(hiding))
    with pytest.raises(DeviceLost, match=r"^the device's context is lost: run again .* \(CUDA error: unspecified"):
        lost_device.check_not_lost()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loses_by_torch", "AcceleratorError: CUDA error: an illegal memory access was encountered (at losing_kernels"),
        ("loses_by_assertion", "RuntimeError: CUDA error: device-side assert triggered (at losing_kernels"),
        ("loses_by_launch", "RuntimeError: CUDA error: unspecified launch failure (at losing_kernels"),
        ("loses_by_triton", "RuntimeError: Triton Error [CUDA]: misaligned address (at losing_kernels"),
        ("loses_by_jax", "RuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"),
        ("aborts", "the process was ended by SIGABRT"),
        ("leaves", "the process ended itself with status 3"),
    ],
)
def test_a_lost_device_is_a_finding(kernels: Any, processes: Any, name: str, words: str) -> None:
    failure = failure_of(verdict := fails(first(getattr(kernels, name), **SMALL)))
    broken(verdict)
    assert (failure.kind, failure.device_lost, failure.case.sizes["N"]) == ("crash", True, 24)
    assert failure.message.startswith(words)
    assert len(processes()) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loses_by_torch", "AcceleratorError: CUDA error: an illegal memory access was encountered (at losing_kernels"),
        ("aborts", "the process was ended by SIGABRT: CUDA error: an illegal memory access was encountered;"),
        ("leaves", "the process ended itself with status 3;"),
    ],
)
def test_a_lost_device_is_shrunk_alone_in_new_processes(kernels: Any, processes: Any, name: str, words: str) -> None:
    verdict = fails(first(getattr(kernels, name), **FEW))
    aspect = broken(verdict)
    failure = failure_of(verdict)
    assert (failure.kind, failure.device_lost, failure.case.sizes) == ("crash", True, SHRUNK)
    assert failure.message.startswith(words)
    assert failure.message.endswith(ALONE)
    _, target, case, repeated = parse_line(aspect.repro)
    assert (target.rpartition(":")[2], case.sizes, repeated) == (name, SHRUNK, "memory")
    seen = list(processes().values())
    assert seen[0] == "0"
    assert set(seen[1:]) == {"1"}
    assert len(seen) <= 2 + 8


def broken(verdict: Verdict) -> Aspect:
    assert list(verdict.broken) == ["memory"], str(verdict)
    return verdict.aspects["memory"]


@pytest.mark.parametrize(
    ("name", "count", "version", "named"),
    [
        ("loses_by_torch", 2, "12.8.93", True),
        ("loses_by_torch", 1, "12.8.93", False),
        ("loses_by_torch", 2, "13.3", False),
    ],
)
def test_a_verdict_names_a_compiler_whose_fault_it_may_be(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, name: str, count: int, version: str, named: bool
) -> None:
    """Only of a failure, of kernels with the instructions that the reports are about, in the versions reported."""
    made = Compiled(programs=1, instructions={"wgmma.commit_group": count})
    monkeypatch.setattr(run.Run, "compile_beforehand", lambda self: setattr(self, "compiled", made))
    monkeypatch.setattr(procedure, "ptxas_version", lambda: version)
    verdict = first(getattr(kernels, name), **SMALL)
    words = f"ptxas {version}, which made its machine code, is reported for illegal memory accesses and wrong numbers"
    assert [words in remark for remark in verdict.remarks] == [True] * named
    assert ("remark      perhaps the compiler's fault" in str(verdict)) == named
    assert procedure._of_compiler(run.Tally(), made, "cuda") == []  # nothing failed


def test_the_other_cases_go_on_in_a_new_process(kernels: Any, processes: Any) -> None:
    """Until so many processes are lost that the rest isn't worth their cost, which is told."""
    shapes = {"N": [4, 16, 24]}
    verdict = fails(quick(kernels.loses_by_torch, shapes=shapes))
    broken(verdict)
    assert verdict.aspects["numbers"].status == "kept"
    assert verdict.cases > len(processes()) > 2
    assert len(processes()) <= 7
    assert "ended early, as the kernel has lost 6 processes" in verdict.note
    assert "N=24: crash: AcceleratorError: CUDA error: an illegal memory access was encountered (at" in str(verdict)


def test_a_loss_that_does_not_come_again_is_told_as_found(kernels: Any) -> None:
    verdict = fails(first(kernels.loses_after_others, shrinking=True))
    assert "it passed when it was run again alone in a new process" in failure_of(verdict).message
    broken(verdict)


def test_a_hang_counts_as_it_did_and_ends_its_process(
    kernels: Any, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "GRACE", kernels.GRACE)
    monkeypatch.setattr(deadline, "_LEAST_IDLE", 0.2)
    monkeypatch.setitem(diagnosis._MOST_LOST, "timeout", 1)
    verdict = fails(first(kernels.hangs, timeout=0.3, **FEW))
    (aspect,) = verdict.broken
    failure = failure_of(verdict)
    assert aspect == attributed_to(failure, lambda case: None, None) != "memory"
    assert (failure.kind, failure.device_lost, failure.case.sizes["N"]) == ("timeout", False, 24)
    assert failure.message.endswith(ALONE)
    assert len(processes()) == 3


def test_an_honest_kernel_passes_in_other_processes(kernels: Any, processes: Any) -> None:
    """With the findings that it has in this process: one observes its variants, and one makes all calls of cases."""
    kept = {"seconds": 0.0, "about": {}}
    verdict = passes(quick(kernels.softmax, **SMALL))
    assert len(processes()) == 2
    assert os.getpid() not in processes()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(lost_device, "can_be_lost", lambda device: False)
        assert quick(kernels.softmax, **SMALL).as_dict() | kept == verdict.as_dict() | kept


def test_a_cpu_cannot_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no new process where there was none."""
    monkeypatch.setattr(ForkServer, "kept", lambda *_, **__: pytest.fail("a process is started"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    passes(quick(importlib.import_module("losing_kernels").softmax, **SMALL))
    assert [lost_device.can_be_lost(device) for device in ("cpu", "cuda", torch.device("cuda:1"))] == [
        False,
        True,
        True,
    ]


def test_a_kernel_that_cannot_be_sent_is_named_all_the_same(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in this process; what is lost with it is said in one line, now and in later examinations."""
    verdict = fails(quick(lambda x: kernels.loses_by_torch(x), shrinking=True))
    aspect = broken(verdict)
    assert failure_of(verdict).message.endswith(f"; {lost_device.LOST}")
    assert "N=" in str(aspect.failure and aspect.failure.case)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def answer() -> None:
        raise RuntimeError(kernels.ERRORS["torch"])

    monkeypatch.setattr(torch.cuda, "synchronize", answer)
    with pytest.raises(DeviceLost) as raised:
        quick(lambda x: kernels.softmax(x))
    assert len(str(raised.value).splitlines()) == 1
    passes(quick(kernels.softmax, **SMALL))


REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _softmax_kernel+0x70 in /mine.py:12
=========     by thread (33,0,0) in block (1,0,0)
=========     Access to 0x7f0000000202 is out of bounds
========= ERROR SUMMARY: 1 error
"""


def test_the_shrunk_case_is_run_once_under_compute_sanitizer(
    kernels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, seen = tmp_path / "compute-sanitizer", tmp_path / "seen"
    body = ["import sys", f"print({REPORT!r})", f"open({str(seen)!r}, 'a').write(sys.argv[-1] + chr(10))"]
    tool.write_text("\n".join([f"#!{sys.executable}", *body]), encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    verdict = fails(first(kernels.loses_by_torch, **FEW))
    assert broken(verdict).explanations[0].description == (
        "compute-sanitizer: Invalid __global__ read of size 4 bytes; at _softmax_kernel+0x70 in /mine.py:12; "
        "by thread (33,0,0) in block (1,0,0); Access to 0x7f0000000202 is out of bounds"
    )
    assert seen.read_text(encoding="utf-8").splitlines() == [broken(verdict).repro]
    page = verdict.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Invalid __global__ read of size 4 bytes" in page
    assert "the output comes within" not in page


def test_a_configuration_beyond_the_device_is_a_refusal(kernels: Any) -> None:
    verdict = quick(kernels.refuses, **SMALL)
    (words,) = verdict.refused
    needed = "out of resource: shared memory, Required: 262144, Hardware limit: 232448."
    assert words.startswith(f"triton refuses this configuration: {needed}")
    assert not verdict.broken


def test_a_gpu_is_there_without_being_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    expected: dict[str, AbstractContextManager[Any]] = {
        "cuda": nullcontext(),
        "cuda:0": nullcontext(),
        "cuda:1": pytest.raises(SettingError, match="can't be used"),
        "tpu": pytest.raises(AssayError, match="can't be used"),
    }
    for device, result in expected.items():
        with result:
            frameworks.check_device(device)


def test_a_survey_goes_on_with_the_next_kernel(kernels: Any, processes: Any) -> None:
    """In the same worker; its kernels may be adapters, which have no name of their own."""
    settings = Settings("softmax", dtype="float32", effort="quick", examples=0, every_aspect=False, **SMALL)
    lost, honest = (
        examine_job(Job(Entry(name, f"losing_kernels:lambda x: {name}(x)", settings), settings), lambda *_: None)
        for name in ("loses_by_torch", "softmax")
    )
    broken(fails(lost))
    passes(honest)
    assert os.getpid() not in processes()


def test_a_kernel_that_another_process_cannot_import_runs_in_this_one(kernels: Any, processes: Any) -> None:
    kernels.softmax.__module__, there = "no_such_module", kernels.softmax.__module__
    sys.modules["no_such_module"] = kernels
    try:
        passes(quick(kernels.softmax, **SMALL))
        assert next(iter(processes())) == os.getpid()
        assert len(processes()) == 2  # a fork observes its variants
        with pytest.raises(
            SettingError, match=r"^isolate: a new process can't run the kernel: .*no_such_module.*[^\n]$"
        ):
            quick(kernels.softmax, isolate=True, **SMALL)
    finally:
        kernels.softmax.__module__ = there
        del sys.modules["no_such_module"]
