"""Clocks: what is timed and what isn't, on a CPU and, with torch.cuda replaced, on a GPU."""

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.bench.timing.timed import CpuClock, CudaClock, clock_for, cpu_cache


class Device:
    """What stands for torch.cuda: a queue in which every step takes its time, and a log of the steps."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, list[str]()

    def step(self, name: str, milliseconds: float = 0.0) -> None:
        """Something that the device does."""
        self.log.append(name)
        self.now += milliseconds

    def Event(self, *, enable_timing: bool) -> Any:  # noqa: N802
        """An event, which notes the device's time."""
        assert enable_timing
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            self.step("event")
            event.at = self.now

        event.record, event.elapsed_time = record, lambda end: end.at - event.at
        return event

    def _sleep(self, cycles: int) -> None:
        self.step("sleep", cycles / 1e6)

    def synchronize(self) -> None:
        """The end of a series."""
        self.step("synchronize")

    def get_device_properties(self, device: str) -> Any:
        """Of its cache."""
        return SimpleNamespace(L2_cache_size=1024)

    def Stream(self) -> Any:  # noqa: N802
        """A stream beside the current one."""
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, beside: Any) -> Any:
        """A context."""
        return contextlib.nullcontext()

    def CUDAGraph(self) -> Any:  # noqa: N802
        """A graph, whose replay takes 2 ms."""
        return SimpleNamespace(replay=lambda: self.step("replay", 2.0))

    def graph(self, graph: Any) -> Any:
        """Recording."""
        return contextlib.nullcontext()


def test_a_cpu_clock_times_the_call_alone() -> None:
    """What is done before and after a call doesn't count, and every call is told with its number and result."""
    seen: list[tuple[int, int]] = []
    found = CpuClock().series(
        3,
        lambda number: time.sleep(0.02),
        lambda: time.sleep(0.002) or 5,
        lambda number, result: seen.append((number, result)),
    )
    assert seen == [(0, 5), (1, 5), (2, 5)]
    assert all(0.002 <= each < 0.02 for each in found)


def test_cold_caches_are_overwritten_before_each_call() -> None:
    """A cold clock writes more than the largest cache holds."""
    clock = CpuClock(cold=True)
    clock.series(2, lambda number: None, lambda: None, lambda number, result: None)
    assert clock._evicting is not None
    assert clock._evicting.numel() == 2 * cpu_cache() > 2**18
    assert int(clock._evicting[0]) == 2
    assert "cold" in clock.words
    assert "warm" in CpuClock().words


def test_a_gpus_events_stand_next_to_the_call() -> None:
    """Preparation, eviction and the pause that hides a launch lie before the first event, the copy of a result after
    the second; the times are the device's."""
    device = Device()
    clock = CudaClock("cpu", cold=True, graph=False, cuda=device)
    found = clock.series(
        2,
        lambda number: device.step("prepare", 7.0),
        lambda: device.step("call", 3.0),
        lambda number, result: device.step("take", 5.0),
    )
    assert device.log == ["prepare", "sleep", "event", "call", "event", "take"] * 2 + ["synchronize"]
    assert found == [3e-3, 3e-3]
    assert len(clock.launches) == 2
    assert clock._evicting is not None
    assert clock._evicting.numel() == 2048


def test_a_graph_is_recorded_once_and_replayed() -> None:
    """With graphs the timed calls are replays, whose result is the one that was recorded."""
    device = Device()
    results: list[Any] = []
    clock = CudaClock("cpu", cold=False, graph=True, cuda=device)
    found = clock.series(
        3, lambda number: None, lambda: device.step("call") or "buffer", lambda number, result: results.append(result)
    )
    assert device.log.count("call") == 4  # three to warm up, one recorded
    assert device.log.count("replay") == 3
    assert results == ["buffer"] * 3
    assert found == [2e-3] * 3
    assert "graph" in clock.words


@pytest.mark.parametrize(
    ("on_host", "on_device", "recordable", "replays"),
    [(0.003, 1.0, True, True), (0.0, 50.0, True, False), (0.003, 1.0, False, False)],
)
def test_a_graph_is_timed_where_the_host_is_the_slower(
    on_host: float, on_device: float, recordable: bool, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    if not recordable:
        monkeypatch.setattr(device, "graph", raising)
    clock = CudaClock("cpu", cold=False, cuda=device)

    def call() -> str:
        time.sleep(on_host)
        device.step("call", on_device)
        return "buffer"

    spent = clock.series(3, lambda number: None, call, lambda number, result: None)
    assert spent == pytest.approx([2e-3 if replays else on_device / 1e3] * 3)
    assert ("graph" in clock.words) is replays
    assert ("launches" in clock.words) is not replays
    assert min(clock.launches) >= on_host


def raising(graph: Any) -> Any:
    """What a call meets that waits for the device while it is recorded."""
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_the_device_says_which_clock() -> None:
    """A CUDA device has events, anything else the process's clock."""
    assert isinstance(clock_for("cuda:0", cold=True), CudaClock)
    assert isinstance(clock_for("cpu", cold=False), CpuClock)
    assert torch.get_num_threads() >= 1
