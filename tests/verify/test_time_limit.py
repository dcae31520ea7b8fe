"""A call's time: a busy machine and a compiler use up none of it, and what hangs ends with all that it started."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.runtime import deadline
from assay.runtime.deadline import CpuLimit
from assay.verify.cases.case import Case
from assay.verify.harness import time_limit as limits
from assay.verify.harness.time_limit import KernelTimeout, Pace, time_limit

from .examined import failure_of, quick

CASE = Case("softmax", {"R": 8, "N": 4}, {"x": "float32"}, {"scale": 1.0})


class Watch:
    """A clock by hand: what passes, and how much of it the processor works for who is watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.own = self.whole = 0.0
        monkeypatch.setattr(deadline.time, "monotonic", lambda: self.now)

    def over_after(self, given: CpuLimit, seconds: float, share: float, *, others: float = 0.0) -> float:
        """When it is over, looked at each second; ``share`` of a processor for its thread, ``others`` beside it."""
        while self.now < seconds:
            self.now, self.own, self.whole = self.now + 1, self.own + share, self.whole + share + others
            if given.is_over():
                return self.now
        return 0.0

    def clock(self) -> tuple[float, float]:
        return self.own, self.whole


@pytest.mark.parametrize(
    ("share", "others", "over"),
    [(1.0, 0.0, 30.0), (0.0, 0.0, 30.0), (0.25, 0.0, 120.0), (0.014, 0.0, 900.0), (0.0, 0.9, 900.0)],
    ids=["computes", "sleeps", "a quarter of a processor", "hardly any", "waits for its threads"],
)
def test_what_a_busy_machine_takes_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, share: float, others: float, over: float
) -> None:
    watch = Watch(monkeypatch)
    assert watch.over_after(CpuLimit(30.0, watch.clock), 1000, share, others=others) == over


@pytest.mark.parametrize(("busy", "over"), [(0.0, 120.0), (0.5, 240.0), (0.98, 900.0)])
def test_who_wakes_up_now_and_then_has_longer_only_where_others_take_the_cores(
    monkeypatch: pytest.MonkeyPatch, busy: float, over: float
) -> None:
    """``busy``: the share of the time for which it waits for a core."""
    watch = Watch(monkeypatch)
    given = CpuLimit(30.0, watch.clock, queued=lambda: busy * watch.now)
    assert watch.over_after(given, 1000, 0.014) == over


@pytest.mark.parametrize(("until", "over"), [(0.0, 30.0), (10.0, 38.0), (45.0, 54.0), (1000.0, 900.0)])
def test_who_waits_for_a_compiler_has_longer(monkeypatch: pytest.MonkeyPatch, until: float, over: float) -> None:
    """``until``: when the compiler ends, which uses a tenth of a processor."""
    watch = Watch(monkeypatch)
    given = CpuLimit(30.0, watch.clock, others=lambda: 0.1 * min(watch.now, until))
    assert watch.over_after(given, 1000, 0.0) == over


def test_a_process_that_wakes_up_now_and_then_is_ended_in_time() -> None:
    process = subprocess.Popen([sys.executable, "-Sc", "import time\nwhile True: time.sleep(1e-3)"])
    try:
        given = CpuLimit(0.3, deadline.process_clock(process.pid), queued=deadline.queue_clock(process.pid))
        began = time.monotonic()
        while not given.is_over():
            time.sleep(0.05)
        assert time.monotonic() - began < 9.0
    finally:
        process.kill()
        process.wait()


def test_who_computes_and_then_sleeps_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    given = CpuLimit(20.0, watch.clock)
    assert not watch.over_after(given, 18, 0.5)
    assert watch.over_after(given, 1000, 0.0) == 23.0


def test_the_limit_follows_the_longest_call() -> None:
    pace = Pace()
    assert pace.limit(CASE, 30.0) == 30.0
    pace.add(CASE, 1e-3)
    assert pace.limit(CASE, 30.0) == 30.0
    pace.add(CASE, 0.5)
    assert pace.limit(replace(CASE, sizes={"R": 80, "N": 1}), 30.0) == 40.0
    assert pace.limit(replace(CASE, sizes={"R": 80_000, "N": 1}), 30.0) == 300.0
    assert pace.limit(replace(CASE, sizes={"R": 1, "N": 1}), 30.0) == 30.0


def slowly_compiled(x: Tensor) -> Tensor:
    """Waits for a compiler, as a C++ extension does when it is loaded first."""
    if not _compiled:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)
        _compiled.append(True)
    return torch.softmax(x, -1)


_compiled: list[bool] = []


@pytest.mark.parametrize("isolate", [False, True])
def test_a_compilation_is_not_counted(isolate: bool) -> None:
    assert quick(slowly_compiled, isolate=isolate, timeout=0.3).passed


def test_a_compilation_has_a_limit_of_its_own_and_its_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMPILATION", 1.0)
    children: list[int] = []
    leave = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '77']).pid, flush=True); time.sleep(77)"

    def compiled_for_ever(x: Tensor) -> Tensor:
        with subprocess.Popen([sys.executable, "-c", leave], stdout=subprocess.PIPE, text=True) as process:
            children.append(int(process.stdout.readline()))
            process.wait()
        return x

    failure = failure_of(quick(compiled_for_ever, timeout=0.3))
    assert (failure.kind, failure.message) == ("timeout", "it compiled for more than 1 s")
    time.sleep(0.2)
    state = Path(f"/proc/{children[0]}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_kernel_that_catches_its_time_out_is_told_again() -> None:
    caught = 0

    def stubborn() -> None:
        nonlocal caught
        while True:
            try:
                while True:
                    pass
            except KernelTimeout:
                caught += 1
                if caught == 3:
                    raise

    with pytest.raises(KernelTimeout), time_limit(0.2):
        stubborn()
    assert caught == 3


def test_a_call_on_a_busy_machine_is_not_ended() -> None:
    """Two processes a processor beside it; the call takes half of what it may, and longer than that by the clock."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * len(os.sched_getaffinity(0)))
    ]

    try:
        begun = time.monotonic()
        with time_limit(0.5) as given:
            until = time.thread_time() + 0.25
            while time.thread_time() < until:
                pass
        assert time.monotonic() - begun > 0.5  # which would have been too much
        assert given.used < 0.5
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_another_thread_has_no_limit() -> None:
    """There no signal arrives."""
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(limits.can_be_limited).result()
    assert limits.can_be_limited()
