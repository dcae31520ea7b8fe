"""Isolation: whatever a kernel does to its process becomes a finding, with the case that caused it, and no more."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.verify import examine
from assay.verify.calls import Call
from assay.verify.contract import Contract
from assay.verify.errors import SettingError
from assay.verify.inputs.cases import Case
from assay.verify.isolation import Isolation, _spawned
from assay.verify.result import Failure
from assay.verify.trial import Bench

CASE = Case("softmax", {"R": 3, "N": 40}, {"x": "float32"})


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


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
    """Keeps 32 MiB at each call."""
    _hoard.append(torch.ones(2**23))
    return softmax(x)


def counts(x: Tensor) -> Tensor:
    """Keeps a state between calls, and fails when it is there."""
    _hoard.append(x)
    return softmax(x) if len(_hoard) < 3 else x


@pytest.mark.parametrize(
    ("kernel", "kind", "words", "sizes"),
    [
        (segmentation_fault, "crash", "SIGSEGV", {"N": 21}),
        (leaves, "crash", "ended itself with status 0", {"R": 3, "N": 1}),
        (leaks, "crash", "more than 0.25 GiB", {}),
    ],
)
def test_a_lost_process_is_a_finding(
    kernel: Callable[[Tensor], Tensor], kind: str, words: str, sizes: dict[str, int]
) -> None:
    """The examination goes on: the case is shrunk to the least that still takes the process down."""
    verdict = examine(kernel, "softmax", dtype="float32", examples=5, isolate=True, memory=0.25)
    assert verdict.failure is not None, str(verdict)
    assert (verdict.failure.kind, verdict.outcome) == (kind, "FAIL")
    assert words in verdict.failure.message
    assert {symbol: verdict.failure.case.sizes[symbol] for symbol in sizes} == sizes
    assert _hoard == []


def test_a_call_that_never_comes_back_is_a_time_out() -> None:
    """Even where the interpreter's own alarm can't reach it."""
    bench = Bench(Call(cannot_be_interrupted, {}, timeout=0.2), Contract())
    with Isolation(bench) as isolation:
        answer = isolation.observe(CASE)
    assert isinstance(answer, Failure)
    assert answer.kind == "timeout"


def test_an_honest_kernel_passes_and_is_not_called_here() -> None:
    """The same cases, the same verdict; the kernel's process is another."""
    seen: list[int] = []

    def kernel(x: Tensor) -> Tensor:
        seen.append(os.getpid())
        return softmax(x)

    verdict = examine(kernel, "softmax", dtype="bfloat16", examples=5, isolate=True)
    assert verdict.passed, str(verdict)
    assert not seen
    assert verdict.cases == examine(softmax, "softmax", dtype="bfloat16", examples=5).cases


def test_a_worker_is_kept_and_ended() -> None:
    """Cases share a worker, so that what a kernel keeps between calls still shows; after the examination it is gone."""
    bench = Bench(Call(counts, {}), Contract())
    with Isolation(bench) as isolation:
        results = [Bench(bench.call, bench.contract, isolation=isolation).try_case(CASE) for _ in range(3)]
        assert isolation._worker is not None
        pid = isolation._worker.process.pid
    assert [result.failure is None for result in results] == [True, True, False]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_where_a_fork_is_no_help_the_kernel_needs_a_name() -> None:
    """One line says what is expected."""
    with pytest.raises(SettingError, match="the kernel runs in a new process, which must import it"):
        _spawned(Bench(Call(lambda x: x, {}), Contract(), "cuda"), None)
