"""Clocks: how long a call takes, on a CPU by its own clock and on a GPU by events.

Sources of the procedures: NVIDIA, *CUDA C++ Best Practices Guide*, "Timing"; the pitfalls of triton.testing.do_bench,
which counts a launch's way to the device where the queue is empty, and of its graphs, which leave the second-level
cache warm (triton-lang/triton#10149).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE = 64 * 2**20  # bytes, where a system tells nothing of its caches
_AHEAD = 400_000  # cycles that a device idles before a timed call, so that the call's launch doesn't count: 0.2 ms
_WARM_UPS = 3  # calls before a graph is recorded, as torch.cuda.CUDAGraph asks


class Clock(Protocol):
    """Times calls one by one."""

    @property
    def words(self) -> str:
        """How it is timed."""

    def series(
        self, count: int, prepare: Callable[[int], None], call: Callable[[], Any], take: Callable[[int, Any], None]
    ) -> list[float]:
        """The seconds of each of ``count`` calls: before the one of a number ``prepare`` is called with that, and after
        it ``take`` with that and its result; neither is timed."""


@dataclass
class CpuClock:
    """A process's own clock; ``cold``: the caches hold none of a call's tensors."""

    cold: bool = False
    _evicting: torch.Tensor | None = field(default=None, repr=False)

    @property
    def words(self) -> str:
        """How it is timed."""
        return f"time.perf_counter, {'cold' if self.cold else 'warm'} caches, {torch.get_num_threads()} threads"

    def series(
        self, count: int, prepare: Callable[[int], None], call: Callable[[], Any], take: Callable[[int, Any], None]
    ) -> list[float]:
        """As `Clock` says."""
        results = []
        for number in range(count):
            prepare(number)
            self._evict()
            began = time.perf_counter()
            result = call()
            results.append(time.perf_counter() - began)
            take(number, result)
        return results

    def _evict(self) -> None:
        if self.cold:
            if self._evicting is None:
                self._evicting = torch.zeros(2 * cpu_cache(), dtype=torch.uint8)
            self._evicting.add_(1)


def cpu_cache() -> int:
    """Bytes of the largest cache of the first core, 64 MiB where the system doesn't tell."""
    sizes = [path.read_text(encoding="ascii").strip() for path in _CPU_CACHE.glob("index*/size")]
    known = [int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if re.fullmatch(r"\d+[KM]", size)]
    return max(known, default=_USUAL_CACHE)


@dataclass
class CudaClock:
    """Events of a CUDA device around each call, behind a pause in which the launch has reached the device.

    ``cold``: the second-level cache is overwritten before each call. ``graph``: the call is recorded once as a CUDA
    graph, whose replays are timed. ``cuda`` is torch.cuda, or what stands for it. ``launches`` are the seconds that the
    host took for each call.
    """

    device: str = "cuda"
    cold: bool = True
    graph: bool = False
    cuda: Any = torch.cuda
    launches: list[float] = field(default_factory=list)
    _evicting: torch.Tensor | None = field(default=None, repr=False)

    @property
    def words(self) -> str:
        """How it is timed."""
        how = "replays of a CUDA graph" if self.graph else "launches hidden behind a pause"
        return f"CUDA events, {'cold' if self.cold else 'warm'} second-level cache, {how}"

    def series(
        self, count: int, prepare: Callable[[int], None], call: Callable[[], Any], take: Callable[[int, Any], None]
    ) -> list[float]:
        """As `Clock` says."""
        cuda, pairs = self.cuda, []
        if self.graph:
            call = self._recorded(prepare, call)
        for number in range(count):
            prepare(number)
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            self._evict()
            cuda._sleep(_AHEAD)
            start.record()
            began = time.perf_counter()
            result = call()
            self.launches.append(time.perf_counter() - began)
            end.record()
            take(number, result)
            pairs.append((start, end))
        cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def _evict(self) -> None:
        if self.cold:
            if self._evicting is None:
                size = self.cuda.get_device_properties(self.device).L2_cache_size
                self._evicting = torch.zeros(2 * size, dtype=torch.uint8, device=self.device)
            self._evicting.zero_()

    def _recorded(self, prepare: Callable[[int], None], call: Callable[[], Any]) -> Callable[[], Any]:
        """The call as a graph: a replay gives the result that was recorded, with the numbers of now."""
        cuda = self.cuda
        prepare(0)
        beside = cuda.Stream()
        beside.wait_stream(cuda.current_stream())
        with cuda.stream(beside):
            for _ in range(_WARM_UPS):
                call()
        cuda.current_stream().wait_stream(beside)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            result = call()

        def replay() -> Any:
            graph.replay()
            return result

        return replay


def clock_for(device: str, *, cold: bool, graph: bool = False) -> Clock:
    """The clock for calls on a device."""
    return CudaClock(device, cold, graph) if device.startswith("cuda") else CpuClock(cold)
