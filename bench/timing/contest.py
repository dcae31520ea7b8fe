"""Contests (kernels of one op at one case), their records, and the roofline's least time of a case.

A run is one process that times all contests in sequence. A record has the lines of all runs: what was timed, on which
machine, how fast and how accurate; a history is a folder of record files. The least time of a case is that of its
products at the peak rate, or that of its tensors' bytes, each moved once at the peak bandwidth, whichever is longer.

Source: S. Williams, A. Waterman, D. Patterson, *Roofline*, CACM 52(4), 2009. Peaks of GPUs are their vendors'
(configs/devices.toml); those of a CPU are measured here, by a copy and a product of PyTorch's.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from assay.bench.inspection.calls import Request, calls, own_bytes, own_products
from assay.bench.timing.timed import Competitor, Timing, clock_for, timed_and_judged
from assay.formats.devices import devices
from assay.runtime.files import write_text_atomically
from assay.runtime.pool import Heartbeat
from assay.runtime.records import plain, read_record
from assay.runtime.results import installed_version
from assay.verify.campaign.table import Entry, entries
from assay.verify.cases.case import Case
from assay.verify.errors import BenchError, SettingError
from assay.verify.harness.compiled import compiled
from assay.verify.harness.target import load_target
from assay.verify.settings import Settings

_COPIED = 1 << 27  # bytes of the copy that measures a CPU's bandwidth: beyond its caches
_SIDE = 1024  # of the matrices whose product measures a CPU's rate: long enough to be bound by arithmetic
_TIMES = 5  # measurements, of which the shortest counts
_ARITHMETIC = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16", "int8": "int8"}


@dataclass(frozen=True)
class Peak:
    """Peaks of a device: ``bandwidth`` in bytes/s, ``rates`` in operations/s by arithmetic, and their ``source``."""

    device: str
    bandwidth: float
    rates: Mapping[str, float]
    source: str


@dataclass(frozen=True)
class Least:
    """The least seconds of a case, their bound ("bandwidth" or "products"), its bytes and operations of products."""

    seconds: float
    bound: str
    bytes: float
    products: float


def arithmetic_of(case: Case) -> str:
    """Return the arithmetic of a case's products, by the dtype of its first tensor; a key of a device's rates."""
    dtype = next(iter(case.dtypes.values()))
    return _ARITHMETIC.get(dtype, "fp8" if dtype.startswith("float8") else "fp32")


def least_of(case: Case, peak: Peak | None) -> Least | None:
    """Return the least time of a case; None if the device, or its rate of these products, is unknown."""
    if peak is None:
        return None
    moved, products = own_bytes(case), own_products(case) or 0.0
    rate = peak.rates.get(arithmetic_of(case), 0.0)
    if products and not rate:
        return None
    by_products = products / rate if products else 0.0
    by_bytes = moved / peak.bandwidth
    bound = "products" if by_products > by_bytes else "bandwidth"
    return Least(max(by_products, by_bytes), bound, moved, products)


def peak_of(device: str, case: Case) -> Peak | None:
    """Return the peaks of this machine's device for a case's arithmetic; None for an unknown GPU."""
    if not device.startswith("cuda"):
        return _measured(case)
    title = torch.cuda.get_device_name(device)
    words = title.lower().replace(" ", "").replace("-", "")
    known = next((each for each in devices().values() if each.rates and each.name in words), None)
    return None if known is None else Peak(known.title, known.bandwidth, known.rates, known.source)


def _measured(case: Case) -> Peak:
    """Measure this CPU: the bandwidth of a copy (read and write), and the rate of a product in the case's dtype."""
    source = torch.ones(_COPIED // 4)
    target = torch.zeros_like(source)
    copy = _shortest(lambda: target.copy_(source))
    rates = {}
    if own_products(case):
        kind = arithmetic_of(case)
        dtype = {name: getattr(torch, long) for long, name in _ARITHMETIC.items() if name != "int8"}.get(kind)
        if dtype is not None:
            a = torch.ones(_SIDE, _SIDE, dtype=dtype)
            rates[kind] = 2.0 * _SIDE**3 / _shortest(lambda: a @ a)
    words = f"measured: a copy of {_COPIED >> 20} MiB, a product of {_SIDE} x {_SIDE} matrices by PyTorch"
    return Peak("CPU", 2 * _COPIED / copy, rates, f"{words}, {torch.get_num_threads()} threads")


def _shortest(call: Callable[[], object]) -> float:
    results = []
    for _ in range(_TIMES + 1):  # the first call touches fresh memory
        began = time.perf_counter()
        call()
        results.append(time.perf_counter() - began)
    return min(results[1:])


def gap_in_words(seconds: float, least: Least | None, launch: float) -> str:
    """Return in words what bounds a call, and how far from the roofline it is."""
    if launch > seconds:
        return f"launch overhead: the host takes {1e6 * launch:.3g} us for a call of {1e6 * seconds:.3g} us"
    if least is None:
        return ""
    share = least.seconds / seconds
    if share > 1:
        return "faster than the memory: its tensors are in a cache" if least.bound == "bandwidth" else "beyond the peak"
    needed = "products" if least.bound == "products" else "bytes"
    return f"bound by {least.bound}" if share > 0.5 else f"{1 / share:.2g} times what its {needed} need"


REFERENCE = "REFERENCE"


@dataclass(frozen=True)
class Line:
    """One kernel at one case. Its ``outcome`` is `REFERENCE` if the others' times are compared with its own.

    ``runs``: for each run the median seconds of a call in each round. ``yardstick``: the same for the baseline, a copy
    right after it or the reference. Both are empty without a valid time, and ``why`` says why. ``seconds``: the median
    over all rounds; ``spread``: the distance between their quartiles. ``least``: the seconds of the roofline, and
    ``bound`` its kind. ``worst``: the largest error over what the contract allows. ``bits``: the accuracy. ``launch``:
    the host's seconds.
    """

    kernel: str
    op: str
    dtype: str
    case: str
    outcome: str
    why: str = ""
    runs: list[list[float]] = field(default_factory=list)
    yardstick: list[list[float]] = field(default_factory=list)
    seconds: float | None = None
    spread: float | None = None
    least: float | None = None
    bound: str = ""
    bytes: float | None = None
    products: float | None = None
    calls: int = 0
    judged: int = 0
    worst: float | None = None
    bits: float | None = None
    launch: float | None = None
    gap: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return the key by which lines of two records are compared."""
        return self.kernel, self.case

    @property
    def share(self) -> float | None:
        """Return the share of the roofline, from 0 to 1; above 1 if a cache holds its tensors."""
        return self.least / self.seconds if self.least and self.seconds else None


@dataclass(frozen=True)
class Record:
    """A bench: when (``made``, ISO 8601), of which ``commit``, on which ``machine``, how, and what came of it."""

    made: str
    commit: str
    machine: str
    device: str
    clock: str
    peak: str
    command: str
    versions: Mapping[str, str]
    lines: tuple[Line, ...]
    note: str = ""
    key: str = ""
    """As `assay.runtime.results` makes it: a digest of the sources of the kernels and of the code that timed them."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as `read` takes it."""
        return {"bench": 1, **{name: plain(value) for name, value in vars(self).items()}}

    def save(self, path: Path) -> Path:
        """Write it to a file, or into a folder under a name of its own; return the file's path."""
        if path.suffix != ".json":
            base_name = f"{self.made}-{self.commit or 'unnamed'}".replace(":", "").replace("+0000", "Z")
            path = path / f"{base_name}.json"
            number = 2
            while path.exists():
                path = path.with_name(f"{base_name}-{number}.json")
                number += 1
        return write_text_atomically(path, json.dumps(self.as_dict(), indent=1) + "\n")


def read(path: Path) -> Record:
    """Return the record of a file. Raises `BenchError`."""
    result: Record = read_record(path, "bench", Record, BenchError)
    return result


def history(path: Path) -> list[Record]:
    """Return the records of a file or a folder, the oldest first. Raises `BenchError` if there are none."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"{path}: expected a record of assay bench --save, or a folder of such; it has no .json")
    return sorted(map(read, files), key=lambda record: record.made)


def lines_of(contests: Sequence[Contest], runs: Sequence[Sequence[ContestResult]]) -> list[Line]:
    """Return a line for each kernel of each contest, over all runs; a kernel that was wrong in one run is wrong."""
    results = []
    for index, contest in enumerate(contests):
        least = runs[0][index].least
        for number, runner in enumerate(contest.runners):
            timings = [run[index].timings[number] for run in runs]
            bad = next((each for each in timings if each.why), None)
            rounds = [] if bad else [each.medians for each in timings]
            every = [value for one in rounds for value in one]
            seconds = statistics.median(every) if every else None
            launch = _known(statistics.median(each.launch for each in timings))
            results.append(
                Line(
                    kernel=runner.name,
                    op=contest.case.definition.name,
                    dtype=_dtype(contest),
                    case=str(contest.case).partition("; seed")[0],
                    outcome=bad.outcome if bad else "PASS",
                    why=bad.why if bad else "",
                    runs=rounds,
                    yardstick=[] if bad else [each.baseline for each in timings],
                    seconds=seconds,
                    spread=_spread(every) if every else None,
                    least=least.seconds if least else None,
                    bound=least.bound if least else "",
                    bytes=least.bytes if least else None,
                    products=least.products if least else None,
                    calls=sum(each.calls for each in timings),
                    judged=sum(each.judged for each in timings),
                    worst=_known(max(each.worst for each in timings)),
                    bits=_known(min((each.bits for each in timings if not math.isnan(each.bits)), default=math.nan)),
                    launch=launch,
                    gap=gap_in_words(seconds, least, launch or 0.0) if seconds else "",
                )
            )
    return results


def _dtype(contest: Contest) -> str:
    kinds = dict.fromkeys(contest.case.dtypes.values())
    return ", ".join(kinds)


def _spread(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


_PACKAGES = ("torch", "triton", "jax", "liger-kernel", "flash-attn", "vllm", "kernel-assay")
SILENT = 3600.0
"""Seconds that a worker may take for a contest: several kernels may compile many configurations."""
PYTORCH = ("torch", "torch-composed")
"""Groups of the survey's table: PyTorch's own kernels, and model code in eager mode."""


@dataclass(frozen=True)
class Runner:
    """A kernel of a contest in a form that can be sent to another process; ``compiles``: by torch.compile."""

    name: str
    target: str
    settings: Settings
    compiles: bool = False

    def load(self) -> Competitor:
        """Load the kernel. Raises `TargetError`."""
        kernel = load_target(self.target)
        return Competitor(self.name, compiled(kernel) if self.compiles else kernel, self.settings)


@dataclass(frozen=True)
class Contest:
    """Kernels and the case at which they are called."""

    runners: tuple[Runner, ...]
    case: Case


@dataclass(frozen=True)
class TimingOptions:
    """How contests are timed: ``seconds`` of each kernel in each contest, divided into ``rounds``; for the others see
    `CudaClock`."""

    device: str = "cpu"
    seconds: float = 0.5
    rounds: int = 5
    cold: bool = False
    graph: bool | None = None


@dataclass(frozen=True)
class ContestResult:
    """The result of a contest in one run."""

    timings: list[Timing]
    clock: str
    peak: Peak | None
    least: Least | None


def contests_of(
    chosen: Sequence[Entry], request: Request, options: TimingOptions, *, against: str = "usual", compiles: bool = True
) -> Iterator[Contest]:
    """Yield a contest for each op, dtype, option and size of the ``chosen`` kernels, with rivals of the same op.

    ``against``: "usual" adds PyTorch's own kernels and installed ones of Liger, vLLM and others that need no
    interpreter, "all" also interpreted ones, "none" nothing. ``compiles``: add PyTorch's kernel under torch.compile.
    """
    known = [] if against == "none" else [*entries(), *entries("others")]
    on_gpu = options.device.startswith("cuda")
    rivals = [
        each
        for each in known
        if each.name not in {one.name for one in chosen}
        and not each.absence(options.device)
        and (on_gpu or against == "all" or each.group in PYTORCH)
    ]
    done: set[str] = set()
    problem: SettingError | None = None
    for entry in chosen:
        for dtype in entry.dtypes:
            usual = entry.settings.definition.default_settings["dtype"] if dtype is None else dtype
            try:
                cases = list(calls(replace(entry.settings, dtype=usual), request))
            except SettingError as error:  # one of several kernels lacks the requested dimension
                problem = error
                continue
            for case in cases:
                if str(case) not in done:
                    done.add(str(case))
                    yield _contest(chosen, rivals, case, usual, compiles=compiles)
    if problem is not None and not done:
        raise problem


def _contest(chosen: Sequence[Entry], rivals: Sequence[Entry], case: Case, dtype: Any, *, compiles: bool) -> Contest:
    """Return the contest of the kernels that take a case, and of PyTorch's first kernel compiled."""
    fitting = [each for each in (*chosen, *rivals) if _takes(each, case, dtype)]
    runners = [Runner(each.name, each.target, replace(each.settings, dtype=dtype)) for each in fitting]
    pytorch = [one for one, each in zip(runners, fitting, strict=True) if each.group in PYTORCH]
    composed = [replace(one, name=f"{one.name} (torch.compile)", compiles=True) for one in pytorch[:1] if compiles]
    return Contest((*runners, *composed), case)


def _takes(entry: Entry, case: Case, dtype: Any) -> bool:
    """Return whether a kernel implements a case's op in its dtype, under its options, at its sizes."""
    settings = entry.settings
    if settings.definition.name != case.definition.name or (dtype not in entry.dtypes and None not in entry.dtypes):
        return False
    defaults = case.definition.complete({})
    for name, value in case.options.items():
        listed = settings.options.get(name, (defaults[name],))
        if value not in listed:
            return False
    return all(size in settings.shapes.get(symbol, (size,)) for symbol, size in case.sizes.items())


@dataclass(frozen=True)
class Run:
    """All contests, for one process."""

    contests: tuple[Contest, ...]
    options: TimingOptions


def run(job: Run, heartbeat: Heartbeat) -> list[ContestResult]:
    """Time every contest; run in a worker."""
    results = []
    for contest in job.contests:
        heartbeat(str(contest.case), SILENT)
        clock = clock_for(job.options.device, cold=job.options.cold, graph=job.options.graph)
        peak = peak_of(job.options.device, contest.case)
        timings = timed_and_judged(
            [runner.load() for runner in contest.runners],
            contest.case,
            device=job.options.device,
            seconds=job.options.seconds,
            rounds=job.options.rounds,
            clock=clock,
        )
        results.append(ContestResult(timings, clock.words, peak, least_of(contest.case, peak)))
    return results


def versions() -> dict[str, str]:
    """Return the versions of Python, of installed libraries and of CUDA."""
    installed = {name: number for name in _PACKAGES if (number := installed_version(name))}
    results = {"python": platform.python_version(), **installed}
    if torch.cuda.is_available():
        results["cuda"] = str(torch.version.cuda)
    return results


def machine(device: str) -> str:
    """Return the machine that times are valid for: the GPU's name, or the CPU's and the number of threads."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
