"""Summarises profiles: Nsight Compute's table as CSV, and Proton's tree.

Read are the output of `ncu --csv --page details`, a row for each metric (Nsight Compute CLI guide, "Sections and
rules"), and the ``.hatchet`` file of triton.profiler, a tree of frames with "count" and "time (ns)".
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.runtime.files import read_text
from assay.runtime.records import from_json
from assay.verify.errors import BenchError

_HIGH = 60.0  # percent of a peak from which a unit bounds a kernel, as in Nsight Compute's own rules
_LOW_OCCUPANCY = 30.0  # percent below which latency is put down to too few resident warps
_CONFLICTS = 0.1  # bank conflicts per wavefront of shared memory from which they are reported
_EXPECTED = "expected Nsight Compute's table (ncu --csv --page details), or Proton's .hatchet"
_DURATION = "Duration"
_MEMORY = ("DRAM Throughput", "Memory Throughput")
_COMPUTE = ("Compute (SM) Throughput",)
_TENSOR = ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",)
_OCCUPANCY = ("Achieved Occupancy",)
_BANKS = (
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
)


def counters(path: Path) -> list[str]:
    """Return a line for each kernel of a profile: its time, its shares of the device's peaks, and what bounds it.

    Raises `BenchError` if the file has neither format.
    """
    text = read_text(path, BenchError)
    try:
        return list(_of_proton(path, text) if text.lstrip().startswith(("[", "{")) else _of_nsight(path, text))
    except BenchError:
        raise
    except (csv.Error, ArithmeticError, AttributeError, KeyError, TypeError, ValueError):  # another form of either
        raise BenchError(f"--profile {path}: {_EXPECTED}, got another form of it") from None


def _of_nsight(path: Path, text: str) -> Iterator[str]:
    lines = text.split("\n")
    head = next((index for index, line in enumerate(lines) if '"Metric Name"' in line), None)
    if head is None:
        raise BenchError(f"--profile {path}: {_EXPECTED}")
    kernels: dict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
    for row in csv.DictReader(lines[head:]):
        value = _number(row.get("Metric Value"))
        if value is not None:
            kernels[f"{row.get('ID')}: {row.get('Kernel Name')}"][row["Metric Name"]] = (
                value,
                row.get("Metric Unit") or "",
            )
    if not kernels:
        raise BenchError(f"--profile {path}: {_EXPECTED}, got a table without numbers")
    for name, result in kernels.items():
        yield f"{name}: {', '.join(_words(result))}"


def _words(result: Mapping[str, tuple[float, str]]) -> Iterator[str]:
    if _DURATION in result:
        yield "{:g} {}".format(*result[_DURATION])
    memory, compute, tensor = (_first(result, names) for names in (_MEMORY, _COMPUTE, _TENSOR))
    occupancy = _first(result, _OCCUPANCY)
    shares = (("memory", memory), ("compute", compute), ("tensor pipe", tensor), ("occupancy", occupancy))
    for name, share in shares:
        if share is not None:
            yield f"{name} {share:.3g} %"
    yield _bound(memory, compute, tensor, occupancy)
    conflicts, wavefronts = (result.get(name, (0.0, ""))[0] for name in _BANKS)
    if wavefronts and conflicts > _CONFLICTS * wavefronts:
        yield f"bank conflicts: {conflicts / wavefronts:.2g} for each access of shared memory"


def _bound(memory: float | None, compute: float | None, tensor: float | None, occupancy: float | None) -> str:
    """Return a kernel's bottleneck, from its shares of the peaks."""
    if (tensor or 0) >= _HIGH:
        return "bound by the tensor pipe"
    if (memory or 0) >= _HIGH and (memory or 0) >= (compute or 0):
        return "bound by bandwidth"
    if (compute or 0) >= _HIGH:
        return "bound by arithmetic"
    if occupancy is not None and occupancy < _LOW_OCCUPANCY:
        return "neither memory nor arithmetic is busy: too few warps are resident (occupancy)"
    return "neither memory nor arithmetic is busy: it waits for answers (latency)"


def _first(result: Mapping[str, tuple[float, str]], names: tuple[str, ...]) -> float | None:
    return next((result[name][0] for name in names if name in result and result[name][1] == "%"), None)


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _of_proton(path: Path, text: str) -> Iterator[str]:
    content = from_json(text, f"--profile {path}", BenchError)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for frame in _leaves(content):
        metrics = frame.get("metrics", {})
        if "time (ns)" in metrics:
            result = kernels[str(frame.get("frame", {}).get("name"))]
            result[0] += float(metrics["time (ns)"])
            result[1] += float(metrics.get("count", 1))
    if not kernels:
        raise BenchError(f'--profile {path}: expected the tree of triton.profiler, with "time (ns)" in its frames')
    for name, (nanoseconds, count) in kernels.items():
        yield f"{name}: {nanoseconds / count / 1e3:.4g} us, the mean of {count:g} launches"


def _leaves(content: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the frames without children."""
    for frame in content if isinstance(content, list) else [content]:
        if isinstance(frame, dict):
            if frame.get("children"):
                yield from _leaves(frame["children"])
            else:
                yield frame
