"""Isolation: whatever a kernel does to its process becomes a finding, with the case that caused it, and no more."""

import ctypes
import importlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.libraries.pytorch import softmax
from assay.runtime.environment import with_changes
from assay.runtime.sandbox import has_namespaces
from assay.verify import examine
from assay.verify.cases.case import Case
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.findings import Failure
from assay.verify.harness.call import Call
from assay.verify.harness.isolation import Isolation
from assay.verify.harness.runner import KernelHarness
from assay.verify.harness.variants import Axis, Variants

from .examined import fails, failure_of, first, quick

CASE = Case("softmax", {"R": 3, "N": 40}, {"x": "float32"})


def segmentation_fault(x: Tensor) -> Tensor:
    """Reads address 0 where a row has more than 20 columns."""
    if x.shape[1] > 20:
        ctypes.string_at(0)
    return softmax(x)


def leaves(x: Tensor) -> Tensor:
    """Ends its process, and says that all is well."""
    if x.shape[0] > 2:
        os._exit(0)
    return softmax(x)


def cannot_be_interrupted(x: Tensor) -> Tensor:
    """Comes back in an hour, deaf to alarms."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(3600)
    return softmax(x)


_hoard: list[Tensor] = []


def leaks(x: Tensor) -> Tensor:
    _hoard.append(torch.ones(2**23))
    return softmax(x)


def counts(x: Tensor) -> Tensor:
    """Keeps a state between calls, and fails when it is there."""
    _hoard.append(x)
    return softmax(x) if len(_hoard) < 3 else x


@pytest.mark.parametrize(
    ("kernel", "words", "sizes"),
    [
        (segmentation_fault, "SIGSEGV", {"N": 21}),
        (leaves, "ended itself with status 0", {"R": 3, "N": 1}),
        (leaks, "no more than 0.25 GiB", {}),
    ],
)
def test_a_lost_process_is_a_finding(kernel: Callable[[Tensor], Tensor], words: str, sizes: dict[str, int]) -> None:
    failure = failure_of(fails(first(kernel, examples=None, isolate=True, memory=0.25, shrinking=bool(sizes))))
    assert failure.kind == "crash"
    assert words in failure.message
    assert {symbol: failure.case.sizes[symbol] for symbol in sizes} == sizes
    assert _hoard == []


def answer_of(kernel: Callable[[Tensor], Tensor], case: Case = CASE, **settings: Any) -> Any:
    """What a kernel in a process of its own makes of one case."""
    memory = {"memory": settings.pop("memory")} if "memory" in settings else {}
    with Isolation(KernelHarness(Call(kernel, {}, **settings), Contract()), **memory) as isolation:
        return isolation.observe(case)


def expects_far_rows(x: Tensor) -> Tensor:
    assert x.stride(0) > 2**30
    return softmax(x)


def test_address_space_without_memory_is_not_counted() -> None:
    """A tensor whose rows lie 2^30 elements apart is within the limit, since it takes no more than its rows."""
    answer = answer_of(expects_far_rows, replace(CASE, layouts={"x": "far"}), memory=2**28)
    assert not isinstance(answer, Failure), answer.message


def hangs_when_timed(x: Tensor) -> Tensor:
    _hoard.append(x)
    return softmax(x) if len(_hoard) < 10 else cannot_be_interrupted(x)


@pytest.mark.parametrize(
    ("kernel", "protocol"), [(cannot_be_interrupted, "once"), (hangs_when_timed, "after_many")], ids=["once", "timed"]
)
def test_a_call_that_never_comes_back_is_a_time_out(
    kernel: Callable[[Tensor], Tensor], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the interpreter's own alarm can't reach it, and no later than a call may take in a case of many."""
    monkeypatch.setattr("assay.verify.harness.isolation.GRACE", 1.0)
    monkeypatch.setattr("assay.verify.harness.call.GRACE", 1.0)
    begun = time.monotonic()
    answer = answer_of(kernel, replace(CASE, protocol=protocol), timeout=0.5)
    assert isinstance(answer, Failure)
    assert answer.kind == "timeout"
    assert time.monotonic() - begun < 0.5 + 1.0 + 10.0


def starts_processes(x: Tensor) -> Tensor:
    with suppress(KeyError), Path(os.environ["CALLS"]).open("a", encoding="utf-8") as calls:
        calls.write("call\n")
    for _ in range(12):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)
    return softmax(x)


def test_one_that_starts_too_many_processes_is_not_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call would start as many, and take as long."""
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr("assay.verify.harness.isolation.MOST_PROCESSES", 10)
    with Isolation(KernelHarness(Call(starts_processes, {}), Contract())) as isolation:
        answers = [isolation.observe(CASE) for _ in range(3)]
    messages = [answer.message for answer in answers if isinstance(answer, Failure)]
    words = "it had started more than 10 processes"
    assert messages == [words, f"in an earlier call {words}", f"in an earlier call {words}"]
    assert (tmp_path / "calls").read_text(encoding="utf-8") == "call\n"


def leaves_some(x: Tensor) -> Tensor:
    for _ in range(6):
        if os.fork() == 0:
            time.sleep(600)
    return softmax(x)


def test_one_that_leaves_ever_more_processes_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they stay in its session, as a pool's do; before they are as many as it may start."""
    monkeypatch.setattr("assay.verify.harness.isolation._MOST_LEFT", 10)
    with Isolation(KernelHarness(Call(leaves_some, {}), Contract())) as isolation:
        answers = [isolation.observe(CASE) for _ in range(3)]
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    assert [failure.kind for failure in failures] == ["conduct", "crash", "crash"][: len(failures)]
    assert re.fullmatch("the kernel leaves [0-9]+ processes running", failures[0].message)
    assert re.fullmatch("an earlier call has left [0-9]+ processes running", failures[1].message)


def kills_its_parents(x: Tensor) -> Tensor:
    """Ends whatever it has a number of, and is right."""
    for pid in (os.getppid(), -1):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return softmax(x)


@pytest.mark.skipif(not has_namespaces(), reason="no namespaces of processes")
def test_a_kernel_can_not_signal_its_judge() -> None:
    answer = answer_of(kills_its_parents)
    assert not isinstance(answer, Failure), answer.message


def test_an_honest_kernel_passes_and_is_not_called_here() -> None:
    seen: list[int] = []

    def kernel(x: Tensor) -> Tensor:
        seen.append(os.getpid())
        return softmax(x)

    verdict = quick(kernel, dtype="bfloat16", examples=5, isolate=True)
    assert verdict.passed, str(verdict)
    assert not seen
    assert verdict.cases == quick(kernel, dtype="bfloat16", examples=5).cases


def test_a_fork_of_a_process_with_threads_answers() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1 << 20).exp()  # starts the pool
        answer = answer_of(softmax, replace(CASE, sizes={"R": 70, "N": 4096}))
    finally:
        torch.set_num_threads(threads)
    assert not isinstance(answer, Failure), answer.message


def children() -> set[int]:
    """The processes that this one has started and that are there, those of other tests too."""
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text(encoding="ascii").split()}


def test_a_worker_is_kept_and_ended() -> None:
    """Cases share a worker, so that what a kernel keeps between calls still shows; after the examination it is gone."""
    harness, before = KernelHarness(Call(counts, {}), Contract()), children()
    with Isolation(harness) as isolation:
        results = [KernelHarness(harness.call, harness.contract, isolation=isolation).try_case(CASE) for _ in range(3)]
        (pid,) = children() - before
    assert [result.failure is None for result in results] == [True, True, False]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_where_a_fork_is_no_help_the_kernel_needs_a_name() -> None:
    with (
        Isolation(KernelHarness(Call(lambda x: x, {}), Contract(), "cuda")) as isolation,
        pytest.raises(SettingError, match="the kernel runs in a new process, which must import it"),
    ):
        isolation.observe(CASE)


def test_a_new_process_answers_as_a_fork_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of a device, tried here on a CPU: it imports the kernel by its name, and ends when it is told."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    kernel = importlib.import_module("cheating_kernels").softmax
    harness, before = KernelHarness(Call(kernel, {}), Contract()), children()
    with Isolation(harness) as isolation, monkeypatch.context() as without:
        without.delattr(os, "fork")
        answers = [isolation.observe(CASE) for _ in range(2)]
        assert len(children() - before) == 1
    assert children() <= before
    expected = KernelHarness(Call(softmax, {}), Contract()).outputs(CASE)
    assert expected is not None
    for answer in answers:
        assert not isinstance(answer, Failure), answer.message
        assert torch.equal(answer[0], expected[0])


def test_a_new_process_calls_in_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right where float64 is the default is so in its own process too, and what it changes is told."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    kernel = importlib.import_module("cheating_kernels").leaves_no_gradients_in_double
    wanted = with_changes({"torch's default dtype": "float64"})
    monkeypatch.delattr(os, "fork")
    harness = KernelHarness(Call(kernel, {}, environment=wanted), Contract())
    with Isolation(harness) as isolation:
        answer = isolation.observe(CASE)
    assert not isinstance(answer, Failure), answer.message
    assert torch.allclose(answer[0].sum(-1), torch.ones(3))
    assert list(harness.call.left_changed) == ["torch's gradient mode at False (it was True)"]


def closes_and_sleeps(x: Tensor) -> Tensor:
    """Closes everything that it has open, the pipe to the harness too, and doesn't come back."""
    os.closerange(3, 256)
    time.sleep(3600)
    return x


def starts_another(x: Tensor) -> Tensor:
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(3)


@pytest.mark.parametrize("kernel", [closes_and_sleeps, starts_another])
def test_nothing_of_a_lost_worker_is_left(kernel: Callable[[Tensor], Tensor]) -> None:
    started_at = time.monotonic()
    answer = answer_of(kernel, timeout=1.0)
    assert isinstance(answer, Failure)
    assert answer.kind in ("crash", "timeout")
    assert time.monotonic() - started_at < 30


def starts_many(x: Tensor) -> Tensor:
    """Starts 40 processes that wait, and answers later."""
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(3600)
    time.sleep(2.0)
    return softmax(x)


def waits_while_a_copy_answers(x: Tensor) -> Tensor:
    if os.fork():
        time.sleep(3600)
    return x


def test_processes_without_end_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.verify.harness.isolation.MOST_PROCESSES", 30)
    answer = answer_of(starts_many)
    assert isinstance(answer, Failure)
    assert (answer.kind, answer.message) == ("crash", "it had started more than 30 processes")


def leaves_one_behind(x: Tensor) -> Tensor:
    """Starts a process of a session of its own, which it has no more to do with, and answers rightly."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    os.wait()
    return softmax(x)


def starts_one_that_ends(x: Tensor) -> Tensor:
    subprocess.run([sys.executable, "-c", ""], check=True, start_new_session=True)
    return softmax(x)


def test_a_process_that_is_left_behind_is_a_finding() -> None:
    """It is ended; one that has ended by itself, in whatever session, is none."""
    answer = answer_of(leaves_one_behind)
    assert isinstance(answer, Failure)
    assert (answer.kind, answer.aspect) == ("conduct", "conduct")
    assert answer.message == "the kernel leaves 1 process running outside of its session"
    assert not isinstance(answer_of(starts_one_that_ends), Failure)


def test_a_copy_of_the_worker_does_not_answer() -> None:
    answer = answer_of(waits_while_a_copy_answers)
    assert isinstance(answer, Failure)
    assert "a copy of its process" in answer.message


def says_that_it_takes_long(x: Tensor) -> Tensor:
    """Sends a sign of life into the pipe of its process, wherever it runs, and doesn't come back."""
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, struct.pack("!i", 9) + b"h" + struct.pack("<d", 1e9))
    time.sleep(3600)
    return x


def test_signs_of_life_of_the_kernel_itself_count_for_nothing() -> None:
    harness = KernelHarness(Call(says_that_it_takes_long, {}), Contract())
    axes = (Axis(CASE, {"N": 1}, {}, (1, 2)),)
    begun = time.monotonic()
    with Isolation(harness) as isolation:
        assert isolation.variants(axes, 0.1, dense=False) == Variants()
    assert time.monotonic() - begun < 10


def sends_another_shape(x: Tensor) -> Tensor:
    """Takes over how its process answers, and answers with what the case doesn't ask for."""
    isolation = importlib.import_module("assay.verify.harness.isolation")
    pack = vars(isolation)["pack"]
    vars(isolation)["pack"] = lambda answer: pack({**answer, "outputs": (torch.ones(7),)})
    return softmax(x)


def test_results_of_another_shape_are_no_answer() -> None:
    """They may be those of an earlier case, from a process that the kernel has forked; nothing is raised."""
    answer = answer_of(sends_another_shape)
    assert isinstance(answer, Failure)
    assert answer.message == "its process answered with what is no answer (TypeError)"


def test_a_fault_of_the_harness_is_not_the_kernels() -> None:
    with pytest.raises(RuntimeError, match="the worker failed before or after"):
        answer_of(softmax, Case("no such op", {}, {}))


def test_its_warnings_are_told_here_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    warns = importlib.import_module("cheating_kernels").warns
    with pytest.warns(UserWarning, match="a kernel's own warning") as told:
        examine(warns, "softmax", dtype="float32", isolate=True, effort="quick", examples=0, every_aspect=False)
    places = [Path(warning.filename).name for warning in told if warning.category is UserWarning]
    assert places == ["cheating_kernels.py"]
