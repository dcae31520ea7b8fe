"""The variants of a kernel: what its call runs at which sizes, observed without running a program.

The host's code is called at many sizes, in a fork of the process that runs the kernel, with launches of Triton kernels
recorded instead of run. Two sizes are one variant if the same lines of the kernel's own Python code ran, and the
same functions of torch, and if the same programs were launched about as often, with the same constants and options.
Constants that take another value at nearly every size, as a size that is passed as one, don't count. Autotuned launches
are recorded in the first of their configurations: `assay.interpreter.Assignment` spreads the others over the cases.
"""

from __future__ import annotations

import inspect
import json
import os
import site
import sys
import sysconfig
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from assay.golden.inputs.values import torch_dtype
from assay.interpreter import Assignment, pretend_cuda, put_on_device, triton_is_loaded
from assay.runtime.deadline import CpuLimit, thread_clock
from assay.runtime.environment import in_environment, with_setting
from assay.runtime.errors import first_line
from assay.runtime.process import Lost, Process
from assay.verify.cases.case import Case, Inputs, contents
from assay.verify.cases.layouts import Guarded
from assay.verify.harness.call import options_for
from assay.verify.harness.constants import Joint, compared_constants, joint_constants
from assay.verify.harness.runner import KernelHarness

_MANY = 3  # launches of one kind count as one, two, or this many and more
_MOST_VALUES = 16  # a constant with more values over an axis follows the size
_GRIDS = ((40, 1), (256, 8), (1024, 64))  # sizes to observe up to the first number, in steps of the second
_MOST_BISECTIONS = 200  # of an axis
_FEW = 64  # sizes to which a caller restricts a symbol: all are observed


@dataclass(frozen=True)
class Axis:
    """Sizes along which a kernel is observed: those of some symbols together, all others as in ``base``.

    ``steps`` maps each of these symbols to the number that its size must be a multiple of, ``ties`` other symbols to
    those whose size they share; ``values`` are ascending.
    """

    base: Case
    steps: Mapping[str, int]
    ties: Mapping[str, str]
    values: Sequence[int]

    def sizes(self, value: int) -> dict[str, int]:
        """Return the sizes of a call at this value."""
        sizes = {**self.base.sizes, **{symbol: -(-value // step) * step for symbol, step in self.steps.items()}}
        return {symbol: sizes.get(self.ties.get(symbol, symbol), size) for symbol, size in sizes.items()}


@dataclass(frozen=True)
class ObservedVariant:
    """What calls at some sizes run.

    ``launches`` are the names of programs, in order, and ``configs`` their constants and options in words. ``runs``
    maps the index of an axis to (first, last) of each series of neighbouring sizes that were seen to be this variant.
    ``refusal`` is the error's first line, where the host's code raises one.
    """

    launches: tuple[str, ...]
    configs: tuple[str, ...]
    runs: Mapping[int, tuple[tuple[int, int], ...]]
    refusal: str = ""


@dataclass(frozen=True)
class Variants:
    """The variants of a kernel, and the ``constants`` with which its source compares sizes (`compared_constants`).

    ``joint`` are those of one condition (`joint_constants`), ``programs`` are how many programs a call launches, by
    axis and size.
    """

    variants: tuple[ObservedVariant, ...] = ()
    constants: tuple[int, ...] = ()
    programs: tuple[Mapping[int, int], ...] = ()
    joint: tuple[Joint, ...] = ()

    def launched(self, axis: int, value: int) -> int:
        """Return how many programs a call launches at a size, or at the next larger one that was observed."""
        counts = self.programs[axis]
        return counts[min((each for each in counts if each >= value), default=max(counts))] if counts else 0


@dataclass(frozen=True)
class Question:
    """The arguments of `variants_of`, for a worker that has the kernel."""

    axes: tuple[Axis, ...]
    seconds: float
    dense: bool


def variants_of(harness: KernelHarness, axes: Sequence[Axis], seconds: float, *, dense: bool = True) -> Variants:
    """Return the variants along these axes, observed in a fork of this process for about these seconds at most.

    A kernel whose calls other processes make (it has an attribute ``is_remote``) isn't observed: a fork would share its
    pipes.
    """
    kernel = harness.call.kernel
    if not hasattr(os, "fork") or not axes or harness.call.framework != "torch" or getattr(kernel, "is_remote", False):
        return Variants()
    process = Process.fork(lambda parent: parent.serve(lambda _: _in_fork(harness, axes, seconds, dense)))
    try:
        process.heartbeats = 0  # the kernel can write to its pipe
        process.submit(b"", longest(seconds))
        answer = process.result()
    finally:
        process.kill()
    return Variants() if isinstance(answer, Lost) else unpacked_variants(json.loads(answer))


def longest(seconds: float) -> float:
    """Return the seconds that `variants_of` may take, where the kernel's calls don't end by themselves."""
    return 20 * seconds + 30


def _in_fork(harness: KernelHarness, axes: Sequence[Axis], seconds: float, dense: bool) -> bytes:
    torch.set_num_threads(1)  # a fork of a process that used its thread pool would hang with more
    call = replace(harness.call, environment=with_setting(harness.call.environment, torch.get_num_threads, 1))
    return json.dumps(asdict(Explorer(replace(harness, call=call), axes, seconds, dense).result())).encode()


def unpacked_variants(data: Mapping[str, Any]) -> Variants:
    """Return the variants of plain data, in which keys are text and tuples lists."""
    variants = [
        ObservedVariant(
            tuple(each["launches"]),
            tuple(each["configs"]),
            {int(axis): tuple((first, last) for first, last in runs) for axis, runs in each["runs"].items()},
            each["refusal"],
        )
        for each in data["variants"]
    ]
    programs = tuple({int(value): count for value, count in each.items()} for each in data["programs"])
    joint = tuple(((str(a), int(m)), (str(b), int(n))) for (a, m), (b, n) in data["joint"])
    return Variants(tuple(variants), tuple(data["constants"]), programs, joint)


Launch = tuple[str, tuple[tuple[str, str], ...]]
"""A program's name, and its constants and options by name, in words."""
Key = tuple[tuple[tuple[Launch, int], ...], frozenset[str], frozenset[tuple[int, int]], str]


@dataclass(frozen=True)
class Seen:
    """What one call did: launches with constants and options, functions of torch, lines, and the error it raised."""

    launches: tuple[Launch, ...]
    operators: frozenset[str]
    lines: frozenset[tuple[int, int]]
    refusal: str


class Explorer:
    """Observes a kernel along axes."""

    def __init__(self, harness: KernelHarness, axes: Sequence[Axis], seconds: float, dense: bool) -> None:
        self._call, self._axes, self._dense = harness.call, axes, dense
        self._pretend = harness.call.pretend
        self._limit = CpuLimit(seconds, thread_clock)
        self._tracer = LineTracer(harness.call.kernel)
        self._launches: list[Launch] = []
        self._sources: dict[str, set[int]] = defaultdict(set)
        self._seen: list[dict[int, Seen]] = [{} for _ in axes]
        self._counts: list[dict[int, int]] = [{} for _ in axes]
        self._programs = 0
        self._follows: list[frozenset[tuple[str, str]]] = [frozenset() for _ in axes]

    def result(self) -> Variants:
        """Observe the kernel, and return its variants."""
        with self._observing():
            for _ in range(2):  # what a first call does once for all later ones is no variant
                self._observe(0, self._axes[0].values[0])
                self._seen[0].clear()
            ran = self._ran()
            if not ran:  # nothing of it is the kernel's own: one operator of a library, or a definition
                return Variants()
            constants = compared_constants(ran)
            for index, axis in enumerate(self._axes):
                for value in probes(axis.values, constants, dense=self._dense):
                    self._observe(index, value)
                self._refine(index)
        return Variants(self._variants(), tuple(constants), tuple(self._counts), tuple(joint_constants(ran)))

    @contextmanager
    def _observing(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(pretend_cuda(self._pretend) if self._pretend else nullcontext())
            stack.enter_context(in_environment(self._call.environment))
            if triton_is_loaded():
                stack.enter_context(recorded_launches(self._note))
                stack.enter_context(_FirstConfiguration(on_device=True).current())
            yield

    def _note(self, owner: Any, values: Mapping[str, Any], grid: Any) -> None:
        """Note a launch: ``values`` of its parameters and options by name."""
        parameters = inspect.signature(owner.fn).parameters
        with suppress(Exception):  # the launch itself would fail
            sizes = grid(dict(values)) if callable(grid) else grid
            self._programs += prod(sizes) if isinstance(sizes, Iterable) else int(sizes)
        constants = {
            name: value
            for name, value in values.items()
            if name not in parameters or "constexpr" in str(parameters[name].annotation)
        }
        words = sorted((name, _in_words(value)) for name, value in constants.items())
        self._launches.append((owner.fn.__name__, tuple(words)))
        code = owner.fn.__code__
        self._sources[code.co_filename].add(code.co_firstlineno)

    def _ran(self) -> dict[str, set[int]]:
        """Return the files of the code that ran, and of the kernels that it launched, with first lines."""
        results = {file: set(lines) for file, lines in self._sources.items()}
        for code in self._tracer.codes:
            results.setdefault(code.co_filename, set()).add(code.co_firstlineno)
        return results

    def _observe(self, index: int, value: int) -> None:
        axis, known = self._axes[index], self._seen[index]
        if value in known or self._limit.is_over():
            return
        case = replace(axis.base, sizes=axis.sizes(value))
        inputs = _lazy_inputs(case)
        keywords = options_for(case, inputs, self._call.listed)
        put_on_device([guarded.tensor for guarded in inputs.guarded.values()] if self._pretend else ())
        self._launches.clear()
        self._programs = 0
        operators, refusal = Operators(), ""
        self._tracer.begin()
        try:
            with operators, self._tracer:
                self._call.kernel(*inputs.positional, **keywords)
        except Exception as error:
            refusal = f"{type(error).__name__}: {first_line(error)}"
        known[value] = Seen(tuple(self._launches), operators.names, self._tracer.lines, refusal)
        self._counts[index][value] = self._programs

    def _refine(self, index: int) -> None:
        """Bisect between neighbours of different variants until no value of the axis is between them."""
        values, known = self._axes[index].values, self._seen[index]
        follows = self._follows[index] = _following(known.values())
        keys = {value: _key(seen, follows) for value, seen in known.items()}
        open_pairs = [(a, b) for a, b in pairwise(sorted(known)) if keys[a] != keys[b]]
        for _ in range(_MOST_BISECTIONS):
            if not open_pairs:
                return
            low, high = open_pairs.pop()
            first, last = bisect_left(values, low), bisect_left(values, high)
            if last - first < 2:
                continue
            middle = values[(first + last) // 2]
            self._observe(index, middle)
            if middle not in known:  # no time is left
                return
            keys[middle] = _key(known[middle], follows)
            open_pairs += [(a, b) for a, b in pairwise((low, middle, high)) if keys[a] != keys[b]]

    def _variants(self) -> tuple[ObservedVariant, ...]:
        """Return what was seen, by key; the runs of neighbours are those among the sizes that were observed."""
        runs: dict[Key, dict[int, list[tuple[int, int]]]] = {}
        example: dict[Key, Seen] = {}
        for index, known in enumerate(self._seen):
            before = None
            for value in sorted(known):
                key = _key(known[value], self._follows[index])
                example.setdefault(key, known[value])
                own = runs.setdefault(key, {}).setdefault(index, [])
                if key == before:
                    own[-1] = (own[-1][0], value)
                else:
                    own.append((value, value))
                before = key
        return tuple(
            _variant(key[0], example[key], {index: tuple(each) for index, each in by_axis.items()})
            for key, by_axis in runs.items()
        )


def _variant(
    counts: Iterable[tuple[Launch, int]], seen: Seen, runs: Mapping[int, tuple[tuple[int, int], ...]]
) -> ObservedVariant:
    launches = [launch for launch, _ in counts]
    names = dict.fromkeys(name for name, _ in launches) or sorted(seen.operators)
    words = (", ".join(f"{constant}={value}" for constant, value in constants) for _, constants in launches)
    return ObservedVariant(tuple(names), tuple(dict.fromkeys(filter(None, words))), runs, seen.refusal)


def _following(seen: Iterable[Seen]) -> frozenset[tuple[str, str]]:
    """Return the constants, each with its program's name, that have more than `_MOST_VALUES` values: they follow the
    size."""
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for each in seen:
        for name, constants in each.launches:
            for constant, value in constants:
                values[name, constant].add(value)
    return frozenset(constant for constant, each in values.items() if len(each) > _MOST_VALUES)


def _key(seen: Seen, following: Container[tuple[str, str]]) -> Key:
    """Return what tells one variant from others."""
    kept = [
        (name, tuple((constant, value) for constant, value in constants if (name, constant) not in following))
        for name, constants in seen.launches
    ]
    counts = tuple((launch, min(count, _MANY)) for launch, count in Counter(kept).items())
    return counts, seen.operators, seen.lines, seen.refusal.partition(":")[0]


def probes(values: Sequence[int], constants: Sequence[int], *, dense: bool) -> list[int]:
    """Return those of ascending ``values`` at which a kernel is observed first.

    They are at and beside powers of two and constants of the source; if ``dense``, also small ones and multiples of
    tiles.
    """
    last = values[-1]
    wanted = {values[0], last}
    for center in (*(2**power for power in range(last.bit_length() + 1)), *constants):
        wanted |= {center - 1, center, center + 1}
    for end, step in _GRIDS if dense else ():
        wanted |= {*range(step, end + 1, step)}
    return (
        sorted(value for value in wanted if value in values) if isinstance(values, range) else _sparse(values, wanted)
    )


def _sparse(values: Sequence[int], wanted: Container[int]) -> list[int]:
    """Return the wanted ones of a caller's sizes; all of a few."""
    return [value for value in values if value in wanted or len(values) <= _FEW]


def _lazy_inputs(case: Case) -> Inputs:
    """Return the inputs of a case with numbers of zero, in memory that isn't touched; whole numbers are drawn."""
    tensors = {
        tensor.name: contents(case, tensor)
        if tensor.is_integer
        else torch.zeros(case.shape(tensor), dtype=torch_dtype(case.dtypes[tensor.name]), device="cpu")
        for tensor in case.signature.tensors
    }
    guarded = {name: Guarded(tensor, tensor, tensor) for name, tensor in tensors.items()}
    return Inputs(guarded, tuple(tensor.name for tensor in case.signature.tensors if tensor.keyword))


class _FirstConfiguration(Assignment):
    """Chooses the first configuration that pruning leaves."""

    def chosen(self, *_: Any, **__: Any) -> int:
        """Return the index of the first."""
        return 0


@contextmanager
def recorded_launches(note: Callable[[Any, Mapping[str, Any], Any], None]) -> Iterator[None]:
    """Inside, launches of Triton kernels are noted and not run; no autotuner times its configurations.

    ``note(owner, values, grid)`` is called with the values of parameters and options by name.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from assay.interpreter.launch import Launched, launches
    from assay.interpreter.replacing import replaced

    def run(owner: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        parameters = inspect.signature(owner.fn).parameters
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        note(owner, defaults | given, grid)
        return Launched(owner, args, kwargs, lambda *launch: None)

    with launches, replaced([(JITFunction, "run", run), (InterpretedFunction, "run", run)]):
        yield


class Operators(TorchFunctionMode):
    """Notes the names of the functions of torch that are called inside. A dispatch mode would import torch._dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """The names of functions that were called; attributes are left out."""
        return frozenset(self._names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name and not name.startswith("__get"):
            self._names.add(name)
        return func(*args, **(kwargs or {}))


class LineTracer:
    """Notes which lines of a kernel's own Python code run inside, those of libraries left out.

    Code of an installed package counts if it is the kernel's.
    """

    def __init__(self, kernel: Any) -> None:
        module = sys.modules.get((getattr(kernel, "__module__", None) or "").partition(".")[0])
        self._package = [f"{folder}{os.sep}" for folder in getattr(module, "__path__", ())]
        own = Path(__file__).parents[2]
        self._libraries = (
            sysconfig.get_path("stdlib") + os.sep,
            *(f"{own / name}{os.sep}" for name in _NOT_UNDER_TEST),
            *(f"{folder}{os.sep}" for folder in (*site.getsitepackages(), site.getusersitepackages())),
        )
        self.codes: set[CodeType] = set()
        """The code objects that have ever run."""
        self._is_own: dict[str, bool] = {}
        self._lines: set[tuple[int, int]] = set()
        self._before: Any = None

    @property
    def lines(self) -> frozenset[tuple[int, int]]:
        """The lines that ran since `begin`, each as its code object's id and its number."""
        return frozenset(self._lines)

    def begin(self) -> None:
        """Forget the lines."""
        self._lines = set()

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        own = self._is_own.get(code.co_filename)
        if own is None:
            own = self._is_own[code.co_filename] = self._counts(code.co_filename)
        if not own:
            return None
        self.codes.add(code)
        lines, number = self._lines, id(code)

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                lines.add((number, frame.f_lineno))
            return line

        return line

    def _counts(self, file: str) -> bool:
        if file.startswith("<"):
            return False
        is_library = file.startswith(self._libraries)
        return not is_library or file.startswith(tuple(self._package))


_NOT_UNDER_TEST = (
    "verify", "interpreter", "golden", "formats", "runtime", "configs", "charts", "bench", "judge", "cli", "package",
    "pytest_plugin", "mutation", "precision",
)  # fmt: skip
"""Packages of ours that hold no kernels."""


def _in_words(value: Any) -> str:
    value = getattr(value, "value", value)
    return getattr(value, "__name__", "") or str(value)
