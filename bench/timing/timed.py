"""Times kernels of one op alternately with the same numbers, and judges timed calls; clocks, and accuracy in bits.

Each kernel is judged before, between and after its rounds in poisoned memory, as a large case of an examination is. In
each round randomly chosen results, and always the last, are kept and judged. Consecutive calls have different numbers
in the same memory, so a remembered result is wrong. Large results are judged by samples, but must as a whole have the
bits of an earlier untimed call with the same numbers, unless the contract allows others. After a round the inputs and
the guard zones around them must be unchanged. A kernel that is wrong once has no time.

A CPU's clock is the process's own; a GPU's are events. Sources of the procedures:
NVIDIA, *CUDA C++ Best Practices Guide*, "Timing"; the pitfalls of triton.testing.do_bench,
which counts a launch's way to the device where the queue is empty, and of its graphs, which leave the second-level
cache warm (triton-lang/triton#10149).
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from assay.golden.errors import Undecided
from assay.runtime.environment import in_environment, standard_environment
from assay.runtime.errors import first_line
from assay.runtime.tensors import same_bits, same_numbers
from assay.verify.cases.at_shape import smaller_cases
from assay.verify.cases.case import Case, all_contents, build
from assay.verify.cases.sampler import Sampler
from assay.verify.comparison.oracle import Oracle, Values
from assay.verify.comparison.result import Result
from assay.verify.comparison.sampled import judge_samples
from assay.verify.findings import Failure
from assay.verify.harness.call import options_for
from assay.verify.harness.compiled import every_variant_compiled
from assay.verify.harness.frameworks import framework_named
from assay.verify.harness.runner import KernelHarness
from assay.verify.settings import Settings

_CPU_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE = 64 * 2**20  # bytes, if the system doesn't report its caches
_AHEAD = 400_000  # cycles that the device idles before a timed call, so that the launch isn't timed: 0.2 ms at 2 GHz
_WARM_UPS = 3  # calls before a graph is recorded, as torch.cuda.CUDAGraph asks


class Clock(Protocol):
    """Times calls one by one."""

    @property
    def words(self) -> str:
        """Return how calls are timed, in words."""

    def series(
        self, count: int, prepare: Callable[[int], None], call: Callable[[], Any], take: Callable[[int, Any], None]
    ) -> list[float]:
        """Return the seconds of each of ``count`` calls.

        Before call i it calls ``prepare(i)`` and after it ``take(i, result)``; neither is timed.
        """


@dataclass
class CpuClock:
    """The process's own clock; ``cold``: caches are overwritten before each call."""

    cold: bool = False
    _evicting: torch.Tensor | None = field(default=None, repr=False)

    @property
    def words(self) -> str:
        """Return how calls are timed, in words."""
        return f"time.perf_counter, {'cold' if self.cold else 'warm'} caches, {torch.get_num_threads()} threads"

    def series(
        self, count: int, prepare: Callable[[int], None], call: Callable[[], Any], take: Callable[[int, Any], None]
    ) -> list[float]:
        """Time calls, as `Clock.series`."""
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
    """Return the bytes of the largest cache of the first core, 64 MiB if the system doesn't report it."""
    sizes = [path.read_text(encoding="ascii").strip() for path in _CPU_CACHE.glob("index*/size")]
    known = [int(size[:-1]) << {"K": 10, "M": 20}[size[-1]] for size in sizes if re.fullmatch(r"\d+[KM]", size)]
    return max(known, default=_USUAL_CACHE)


@dataclass
class CudaClock:
    """CUDA events around each call, after a pause in which the launch reaches the device.

    ``cold``: the L2 cache is overwritten before each call. ``graph``: the call is recorded once as a CUDA graph, whose
    replays are timed; None does so where the host takes longer than the device and the call can be recorded. ``cuda``:
    torch.cuda, or a replacement in tests. ``launches``: the host's seconds of each launched call. ``methods``: how the
    series were timed.
    """

    device: str = "cuda"
    cold: bool = True
    graph: bool | None = None
    cuda: Any = torch.cuda
    launches: list[float] = field(default_factory=list)
    methods: set[str] = field(default_factory=set, repr=False)
    _evicting: torch.Tensor | None = field(default=None, repr=False)

    @property
    def words(self) -> str:
        """Return how calls are timed, in words."""
        methods = f", {' or '.join(sorted(self.methods))}" if self.methods else ""
        return f"CUDA events, {'cold' if self.cold else 'warm'} second-level cache{methods}"

    def series(
        self, count: int, prepare: Callable[[int], None], call: Callable[[], Any], take: Callable[[int, Any], None]
    ) -> list[float]:
        """Time calls, as `Clock.series`."""
        replay = self._replay(prepare, call)
        if replay is not None:
            self.methods.add("replays of a CUDA graph")
            return self._timed(count, prepare, replay, take)[0]
        self.methods.add("launches hidden behind a pause")
        spent, launches = self._timed(count, prepare, call, take)
        self.launches += launches
        return spent

    def _timed(
        self, count: int, prepare: Callable[[int], None], call: Callable[[], Any], take: Callable[[int, Any], None]
    ) -> tuple[list[float], list[float]]:
        """Return the seconds of calls on the device and on the host."""
        cuda, pairs, launches = self.cuda, [], []
        for number in range(count):
            prepare(number)
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            self._evict()
            cuda._sleep(_AHEAD)
            start.record()
            began = time.perf_counter()
            result = call()
            launches.append(time.perf_counter() - began)
            end.record()
            take(number, result)
            pairs.append((start, end))
        cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs], launches

    def _replay(self, prepare: Callable[[int], None], call: Callable[[], Any]) -> Callable[[], Any] | None:
        """Return the call's replay as a graph; None where launches are timed."""
        if self.graph is not None:
            return self._recorded(prepare, call) if self.graph else None
        spent, launches = self._timed(_WARM_UPS, prepare, call, lambda number, result: None)
        self.launches += launches
        if min(launches) <= min(spent):
            return None
        try:
            return self._recorded(prepare, call)
        except RuntimeError:  # it waits for the device or allocates outside of torch: torch.cuda.graph says what
            return None

    def _evict(self) -> None:
        if self.cold:
            if self._evicting is None:
                size = self.cuda.get_device_properties(self.device).L2_cache_size
                self._evicting = torch.zeros(2 * size, dtype=torch.uint8, device=self.device)
            self._evicting.zero_()

    def _recorded(self, prepare: Callable[[int], None], call: Callable[[], Any]) -> Callable[[], Any]:
        """Record the call as a graph; a replay writes the present numbers' result into the recorded result."""
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


def clock_for(device: str, *, cold: bool, graph: bool | None = None) -> Clock:
    """Return the clock for calls on a device."""
    return CudaClock(device, cold, graph) if device.startswith("cuda") else CpuClock(cold)


@dataclass(frozen=True)
class Measuring(Oracle):
    """An oracle that also sums (got - golden)^2 and golden^2 over all judged elements."""

    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def judge(
        self,
        case: Case,
        values: Values,
        outputs: tuple[torch.Tensor, ...],
        except_outputs: Container[str] = (),
        only: Mapping[str, torch.Tensor] | None = None,
    ) -> Result:
        """Judge as `Oracle.judge`, and add the squares."""
        result = super().judge(case, values, outputs, except_outputs, only)
        pairs = zip(case.signature.returns, outputs, strict=True)
        floating = [output for tensor, output in pairs if not tensor.is_integer and tensor.name not in except_outputs]
        for limits, got in zip(result.tolerances, floating, strict=False):
            x = got.detach().cpu().double()
            known = limits.judged & limits.golden.isfinite() & x.isfinite()
            self.squares[0] += float((x - limits.golden)[known].square().sum())
            self.squares[1] += float(limits.golden[known].square().sum())
        return result

    @property
    def bits(self) -> float:
        """Return `bits_of` all judged elements.

        Results rounded to nearest in a format of p bits have between p + 0.8 and p + 1.8 bits: errors are uniform
        within 2^-p of the lower end of a number's binade, with a root mean square of 2^-p / sqrt(3).
        """
        return bits_of(*self.squares)


def bits_of(error: float, golden: float) -> float:
    """Return log2 of the goldens' root mean square over that of the errors, from sums of squares.

    Infinite without errors; NaN if nothing was judged.
    """
    if not golden:
        return math.nan
    return 0.5 * math.log2(golden / error) if error else math.inf


_DRAWS = 3  # of the inputs' numbers, among which calls alternate; each needs memory and a golden
_SAMPLED = 1  # results of a round that are judged besides the last: each costs a golden
_MOST_CALLS = 100  # of a round, also of the shortest kernels
_LEAST_CALLS = 3  # of a round, for a median
_COPIED = 1 << 22  # float32 numbers that the baseline copies: 16 MiB, beyond most second-level caches
_COPIES = 9  # of which the median counts


@dataclass(frozen=True)
class Competitor:
    """A kernel to time; ``settings`` say how it is called and judged, except sizes, options and layouts."""

    name: str
    kernel: Callable[..., Any]
    settings: Settings


@dataclass
class Timing:
    """The timing of one kernel.

    ``rounds``: the seconds of each call, by round; empty without a valid time, and ``why`` says why: the first failure
    of a judged call, a case that the kernel refuses, or an interpreted kernel. ``judged`` calls were judged, ``calls``
    were timed. ``worst``: the largest error over what the contract allows. ``bits``: the accuracy (`bits_of`).
    ``launch``: the host's seconds of a call, on a GPU. ``baseline``: the seconds of a copy after each round, by which
    times of a machine with changing load can be compared.
    """

    name: str
    rounds: list[list[float]] = field(default_factory=list)
    judged: int = 0
    calls: int = 0
    worst: float = 0.0
    bits: float = math.nan
    outcome: str = "PASS"
    why: str = ""
    launch: float = math.nan
    baseline: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Return the median seconds of a call; NaN without a valid time."""
        every = [value for one in self.rounds for value in one]
        return statistics.median(every) if every else math.nan

    @property
    def spread(self) -> float:
        """Return the distance between the quartiles of all calls, in seconds; NaN without a valid time."""
        ordered = sorted(value for one in self.rounds for value in one)
        return ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4] if ordered else math.nan

    @property
    def medians(self) -> list[float]:
        """Return the median seconds of each round."""
        return [statistics.median(one) for one in self.rounds]


def timed_and_judged(
    competitors: Sequence[Competitor],
    case: Case,
    *,
    device: str = "cpu",
    seconds: float = 1.0,
    rounds: int = 5,
    clock: Clock | None = None,
    seed: int | None = None,
) -> list[Timing]:
    """Time kernels of one op at one case, alternating in ``rounds``, each kernel for about ``seconds``.

    ``case`` gives sizes, dtypes, options and layouts; its memory and protocol are ignored. ``seed`` fixes the draws of
    numbers and the choice of judged calls, which are random otherwise. An exception or a wrong result of a kernel ends
    its own timing only.
    """
    chance = random.Random(seed) if seed is not None else random.SystemRandom()
    clock = clock or clock_for(device, cold=False)
    draws = [replace(case, seed=chance.randrange(2**31), protocol="once", memory="plain") for _ in range(_DRAWS)]
    numbers = [_on_device(all_contents(one), device) for one in draws]
    arms = [_Arm(competitor, draws, numbers, device, chance) for competitor in competitors]
    for arm in arms:
        arm.first()
    counts = {id(arm): arm.count(clock, seconds / rounds) for arm in arms if arm.runs}
    copy = _copy(device)
    for _ in range(rounds):
        for arm in arms:
            if arm.runs:
                arm.round(clock, counts[id(arm)])
            if arm.runs:
                copies = clock.series(_COPIES, lambda number: None, copy, lambda number, result: None)
                arm.timing.baseline.append(statistics.median(copies))
    return [arm.timing for arm in arms]


def _copy(device: str) -> Callable[[], Any]:
    """Return the baseline: a copy of `_COPIED` numbers."""
    source = torch.ones(_COPIED, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class _Arm:
    """One of the kernels that are timed, with memory of its own."""

    def __init__(
        self,
        competitor: Competitor,
        draws: Sequence[Case],
        numbers: Sequence[Values],
        device: str,
        chance: random.Random,
    ) -> None:
        settings = replace(competitor.settings, device=device)
        self.timing = Timing(competitor.name)
        self._kernel, self._draws, self._numbers, self._chance = competitor.kernel, draws, numbers, chance
        self._device = device
        self._bench = KernelHarness.of(competitor.kernel, settings)
        self._sampler = Sampler(
            settings.definition, settings.dtype or "float8_e4m3fn", settings.options, settings.sizes
        )
        self._oracle = Measuring(settings.contract)
        self._framework = framework_named(settings.framework)
        self._inputs = build(draws[0], device)
        self._at, self._arguments, self._keywords = 0, list[Any](), dict[str, Any]()
        self._known: list[tuple[torch.Tensor, ...]] = []

    @property
    def runs(self) -> bool:
        """Return whether the kernel still takes part."""
        return not self.timing.why

    def first(self) -> None:
        """Judge a call as an examination makes it, and keep the results for each draw."""
        settings = self._bench.call
        if self._device == "cpu":
            small = next(smaller_cases(self._draws[0], self._sampler), self._draws[0])
            self._bench.outputs(small)
            if settings.watch.launches:
                return self._ends("NOT TIMED", "Triton's interpreter runs it here, whose time says nothing of a GPU's")
        self._poisoned(self._draws[0])
        for draw in self._draws if self.runs and self._bench.contract.deterministic else ():
            outputs = self._bench.outputs(draw)
            if outputs is None:
                return self._ends("FAIL", "it gave no result when it was called again")
            self._known.append(tuple(output.clone() for output in outputs))
        return None

    def count(self, clock: Clock, seconds: float) -> int:
        """Return how many calls fit in ``seconds``, by the third call; the first two may compile or fill caches."""
        spent = [seconds]
        with self._calling() as call:
            spent = clock.series(3, self._prepare, call, lambda number, result: None)
        return min(max(int(seconds / max(spent[-1], 1e-9)), _LEAST_CALLS), _MOST_CALLS)

    def round(self, clock: Clock, count: int) -> None:
        """Make ``count`` timed calls and judge some."""
        kept: list[tuple[int, Any]] = []
        sampled = {count - 1, *(self._chance.randrange(count) for _ in range(_SAMPLED))}

        def take(number: int, result: Any) -> None:
            if number in sampled:
                results = self._bench.call.checked_results(self._draws[self._at], self._inputs, result)
                kept.append((self._at, results if isinstance(results, Failure) else tuple(x.clone() for x in results)))

        before, spent = len(getattr(clock, "launches", ())), list[float]()
        with self._calling() as call:
            spent = clock.series(count, self._prepare, call, take)
        if not self.runs:
            return
        launches = getattr(clock, "launches", ())[before:]
        if launches:
            self.timing.launch = statistics.median(launches)
        self.timing.rounds.append(spent)
        self.timing.calls += count
        self._check_memory()
        for at, outputs in kept:
            if self.runs:
                self._judge(at, outputs)
        if self.runs:
            self._poisoned(self._draws[self._chance.randrange(_DRAWS)])

    def _prepare(self, number: int) -> None:
        """Put other numbers than the previous call's into the same memory."""
        self._at = (self._at + 1 + self._chance.randrange(_DRAWS - 1)) % _DRAWS
        for name, guarded in self._inputs.guarded.items():
            _fill(guarded.tensor, self._numbers[self._at][name])
        keywords = options_for(self._draws[self._at], self._inputs, self._bench.call.listed)
        self._arguments, self._keywords = self._framework.arguments(self._inputs.positional, keywords)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Callable[[], Any]]:
        """Provide the timed call, in the environment of an examination; an exception ends this kernel's timing."""
        kernel, wait = self._kernel, self._framework.wait
        try:
            with in_environment(self._bench.call.environment), every_variant_compiled(kernel):
                yield lambda: wait(kernel(*self._arguments, **self._keywords))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except Exception as error:
            self._ends("FAIL", f"in a timed call: {type(error).__name__}: {first_line(error)}")

    def _poisoned(self, case: Case) -> None:
        """Judge one untimed call in memory that holds NaN."""
        result = self._bench.try_case(replace(case, protocol="at", memory="nan"))
        self.timing.judged += 1
        self.timing.worst = max(self.timing.worst, result.worst)
        if result.failure is not None:
            self._fails(result.failure, "")

    def _check_memory(self) -> None:
        """Check that the inputs and the guard zones around them are unchanged."""
        for name, guarded in self._inputs.guarded.items():
            if not same_bits(guarded.tensor, self._numbers[self._at][name]):
                return self._ends("FAIL", f"a timed call changed its input {name}")
        for name, guarded in self._inputs.guarded.items():
            _fill(guarded.tensor, self._numbers[0][name])  # as first placed, which guard zones expect
            if guarded.damage() is not None:
                return self._ends("FAIL", f"a timed call wrote beyond its input {name}")

    def _judge(self, at: int, outputs: Any) -> None:
        if isinstance(outputs, Failure):
            return self._ends("FAIL", f"in a timed call: {outputs.message}")
        if self._known and not all(map(same_numbers, outputs, self._known[at])):
            return self._ends("FAIL", "a timed call gave other bits than an earlier one of the same numbers")
        case = replace(self._draws[at], seed=self._chance.randrange(2**31))  # the seed chooses the samples
        values = {name: tensor.cpu() for name, tensor in self._numbers[at].items()}
        try:
            with standard_environment():
                result = judge_samples(self._oracle, case, values, outputs)
        except Undecided:
            return
        self.timing.judged += 1
        self.timing.worst = max(self.timing.worst, result.worst)
        self.timing.bits = self._oracle.bits
        if result.failure is not None:
            self._fails(result.failure, "in a timed call: ")

    def _fails(self, failure: Failure, where: str) -> None:
        refused = failure.kind in ("refused", "not_interpreted")
        self._ends("REFUSED" if refused else "FAIL", f"{where}{failure.kind}: {failure.message}")

    def _ends(self, outcome: str, why: str) -> None:
        self.timing.outcome, self.timing.why = outcome, why
        self.timing.rounds.clear()
        self.timing.baseline.clear()


def _on_device(values: Values, device: str) -> Values:
    return {name: tensor.to(device) for name, tensor in values.items()}


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[index].copy_(values[index])
