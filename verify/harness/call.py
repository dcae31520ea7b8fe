"""A call of a kernel: with a time limit, poisoned fresh memory, and a check of the form of its results.

`PoisonedMemory` intercepts allocations during a call, also those inside operators of libraries: it fills every
uninitialised tensor with NaN or 2^100 and puts guard zones around it. In an interpreted kernel the lanes that a masked
load leaves without a value hold NaN or large numbers then too. `litter` only leaves NaN in memory that the
allocator will hand out next; it costs nothing and reaches compiled code too.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from assay.formats.format import format_named
from assay.golden.inputs.values import torch_dtype
from assay.interpreter import (
    NVIDIA,
    Assignment,
    Emission,
    NotInterpreted,
    Watch,
    assigned,
    pretend_cuda,
    put_on_device,
    triton_is_loaded,
)
from assay.runtime.deadline import CpuLimit
from assay.runtime.dispatch import ALLOCATIONS, AllocationMode
from assay.runtime.environment import Environment, environment, in_environment, with_setting
from assay.runtime.errors import first_line, one_line
from assay.runtime.modules import asks_for_cuda
from assay.verify.cases.case import Case, Inputs
from assay.verify.cases.layouts import LAYOUTS
from assay.verify.findings import Failure, Kind
from assay.verify.harness import lost_device
from assay.verify.harness.compiled import every_variant_compiled
from assay.verify.harness.frameworks import framework_named, make_room
from assay.verify.harness.refusals import refusal, refused_by_library, refused_by_reference
from assay.verify.harness.time_limit import KernelTimeout, Pace, time_limit

if TYPE_CHECKING:
    from assay.formats.devices import CudaProperties
    from assay.interpreter.sanitizer import Sanitizer

_GUARD = 32  # elements in each guard zone; few, as every allocation of a call gets two zones
_MARK = 0xA5  # a byte that no common number repeats


def poison_value(memory: str, dtype: torch.dtype) -> float:
    """Return the content of fresh memory: NaN, or 2^100 (at most the largest value of the dtype); 0 or 1 for integers.

    Integers stay small: an index out of all bounds would crash the process instead of being detected.
    """
    if not dtype.is_floating_point:
        return 0.0 if memory == "nan" else 1.0
    return math.nan if memory == "nan" else min(2.0**100, format_named(dtype).largest)


class PoisonedMemory(AllocationMode):
    """A context in which uninitialised tensors hold ``poison_value(memory, dtype)`` and have guard zones around
    them."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self.memory = memory
        self._guarded: list[torch.Tensor] = []

    def called(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Poison a fresh tensor."""
        if func not in ALLOCATIONS or result.layout != torch.strided or result.device.type == "meta":
            return result
        return self._poisoned(result)

    def _poisoned(self, tensor: torch.Tensor) -> torch.Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = span if tensor.numel() else 0
        buffer = torch.empty(span + 2 * _GUARD, dtype=tensor.dtype, device=tensor.device)
        buffer.view(torch.uint8).fill_(_MARK)
        self._guarded.append(buffer)
        inner = buffer[_GUARD : _GUARD + span]
        _fill(inner, poison_value(self.memory, tensor.dtype))
        return buffer.as_strided(tensor.shape, tensor.stride(), _GUARD)

    def overrun(self) -> bool:
        """Whether something was written into a guard zone."""
        zones = (part for buffer in self._guarded for part in (buffer[:_GUARD], buffer[-_GUARD:]))
        return any(bool((zone.view(torch.uint8) != _MARK).any()) for zone in zones)


def _fill(tensor: torch.Tensor, value: float) -> None:
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor.copy_(torch.full(tensor.shape, value, dtype=torch.float32).to(tensor.dtype))
    else:
        tensor.fill_(value if tensor.dtype.is_floating_point or tensor.dtype.is_complex else int(value))


def litter(case: Case) -> None:
    """Allocate tensors of the results' sizes, fill them with NaN, and free them."""
    dirt = []
    for tensor, name in zip(case.signature.returns, case.result_dtypes, strict=True):
        dtype = torch_dtype(name)
        if dtype.is_floating_point and dtype.itemsize > 1:
            dirt.append(torch.full(case.shape(tensor), math.nan, dtype=dtype))
    del dirt


EMITTED = "emitted"
"""The protocol of calls in which Triton kernels compute as NVIDIA's backend emits them (`assay.interpreter.NVIDIA`)."""
GRACE = 10.0
"""Seconds beyond its own limit that a call which can't be interrupted has, before its process is ended."""
_COMPILERS = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch._subclasses", "torch.fx",
    "triton.compiler", "numba.", "jax.", "assay.verify.harness.memory",
)  # fmt: skip
_NO_CUDA = (
    "the kernel asks for CUDA, which isn't here; examine it by --pretend cuda, or inside faithful(pretend='cuda')"
)
_OF_A_SIGNATURE = re.compile("unexpected keyword argument|positional argument|missing [0-9]+ required|multiple values")
_OF_A_DISPATCHER = ("__torch_dispatch__", "dispatch mode", "DispatchMode", "FakeTensor", "Dispatcher")


_OF_LAYOUTS = (
    "; for a kernel that takes contiguous tensors alone: layouts=['contiguous'] (--layout contiguous), or, as a "
    "documented refusal, refuses=['contiguous']"
)


def failure_of(
    case: Case, kind: Kind, message: str, output: int = 0, index: tuple[int, ...] = (), **more: Any
) -> Failure:
    """Return a failure other than wrong numbers, of the output of this number."""
    return Failure(kind, case, message, case.signature.returns[output].name, index, **more)


def options_for(case: Case, inputs: Inputs, listed: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the keyword arguments of a call: the options that the caller listed, and the keyword tensors that they
    need.

    Keyword tensors that only other values of these options need are None.
    """
    return _keywords(case, listed, {name: inputs.guarded[name].tensor for name in inputs.keywords})


def _keywords(case: Case, listed: Mapping[str, Sequence[Any]], tensors: dict[str, Any]) -> dict[str, Any]:
    flags = [name for name, option in case.definition.options.items() if option.tensor]
    sets = [{name: value} for name, values in listed.items() for value in values]
    others = {t.name for options in sets for t in case.definition.signature(options).tensors if t.keyword}
    keywords = {name: None if name in flags else case.options[name] for name in listed} | tensors
    return dict.fromkeys(others - keywords.keys()) | keywords


def call_in_words(case: Case, listed: Mapping[str, Sequence[Any]]) -> str:
    """Return e.g. ``f(x, weight, eps=1e-06)``: tensors by position, listed options and their tensors by keyword."""
    positional, keywords = _names_of_arguments(case, listed)
    return f"f({', '.join([*positional, *(f'{name}={value}' for name, value in keywords.items())])})"


def signature_mismatch(kernel: Callable[..., Any], case: Case, listed: Mapping[str, Sequence[Any]]) -> str:
    """Return why the kernel's signature doesn't accept the op's call; empty if it does, or if the signature is
    unknown."""
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):  # a builtin may have none
        return ""
    positional, keywords = _names_of_arguments(case, listed)
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return f"called as {call_in_words(case, listed)}, but it takes {signature}: {error}"
    return ""


def _names_of_arguments(case: Case, listed: Mapping[str, Sequence[Any]]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments of a call, with names for tensors."""
    keywords = _keywords(case, listed, {t.name: t.name for t in case.signature.tensors if t.keyword})
    options = {name for name in listed if not case.definition.options[name].tensor}
    named = {name: value if name in options else name for name, value in keywords.items()}
    return [tensor.name for tensor in case.signature.tensors if not tensor.keyword], named


@dataclass(frozen=True)
class Call:
    """How a kernel is called.

    ``timeout`` is in seconds of processor time (`time_limit`), raised if ``pace`` shows that calls take longer.
    ``heartbeat(case, seconds)`` is called for each case, before and after each call: the call returns within this many
    seconds (as `assay.runtime.deadline` counts them), or never; 0 if no call is in progress. ``environment`` is the
    numeric environment of the call; changes that the kernel leaves are undone, and listed in ``left_changed``. Only
    torch's default dtype, which a kernel may set in its first call for all later ones, carries over
    (``default_dtype``).
    ``pretend`` is the device that "cuda" names during the call, and on which inputs pretend to be. ``refuses`` are the
    documented refusals (`refusals`). ``assignment`` says in which configurations autotuned launches run; ``launching``
    is a context that records launches instead of running them.
    """

    kernel: Callable[..., Any]
    listed: Mapping[str, Sequence[Any]]
    framework: str = "torch"
    timeout: float = 30.0
    heartbeat: Callable[[Case, float], None] | None = None
    environment: Environment = field(default_factory=environment, compare=False, repr=False)
    left_changed: dict[str, None] = field(default_factory=dict, compare=False, repr=False)  # in order, each once
    default_dtype: list[torch.dtype] = field(default_factory=list, compare=False, repr=False)  # none, or the one
    pretend: str | CudaProperties = ""
    refuses: Mapping[str, str] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace, compare=False, repr=False)
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)
    assignment: Assignment = field(default_factory=Assignment, compare=False, repr=False)
    launching: Callable[[Assignment], contextlib.AbstractContextManager[None]] | None = None

    def report(self, case: Case, seconds: float = 0.0) -> None:
        """Report the case and its time limit to the observer, which needs them if the process dies or hangs."""
        if self.heartbeat is not None:
            self.heartbeat(case, seconds)

    def __call__(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Failure:
        """Return the kernel's results as torch tensors, or the failure of the call."""
        if self.framework == "jax":
            make_room()
        keywords = options_for(case, inputs, self.listed)
        arguments, keywords = framework_named(self.framework).arguments(inputs.positional, keywords)
        if case.memory == "plain" or self.framework != "torch":
            litter(case)
            return self._run(case, inputs, arguments, keywords, None)
        return self._run(case, inputs, arguments, keywords, PoisonedMemory(case.memory))

    def _run(
        self, case: Case, inputs: Inputs, arguments: list[Any], keywords: dict[str, Any], poison: PoisonedMemory | None
    ) -> tuple[torch.Tensor, ...] | Failure:
        on_cpu = all(tensor.device.type == "cpu" for tensor in inputs.positional)
        interpretable = on_cpu and self.launching is None
        interpreted = interpretable and triton_is_loaded()
        input_tensors = [guarded.tensor for guarded in inputs.guarded.values()]
        changed: list[str] = []
        sanitizer = None
        wanted = self.environment
        for dtype in self.default_dtype:
            wanted = with_setting(wanted, torch.get_default_dtype, dtype)
        emission = NVIDIA if case.protocol == EMITTED else None
        memory = poison.memory if poison is not None else "plain"
        limit = self.pace.limit(case, self.timeout)
        timer: CpuLimit | None = None
        self.report(case, limit + GRACE)
        try:
            with (  # the interpreter outside of what a time-out interrupts
                pretend_cuda(self.pretend) if self.pretend else contextlib.nullcontext(),
                self._launching(input_tensors, emission, memory, interpreted=interpreted) as sanitizer,
                time_limit(limit, lambda: self.report(case, limit + GRACE)) as timer,
                poison or contextlib.nullcontext(),
                self.watch.allocating(sanitizer),
                in_environment(wanted) as changed,
                self._default_dtype_kept(),
                every_variant_compiled(self.kernel),
            ):
                put_on_device(input_tensors if self.pretend else ())
                result = framework_named(self.framework).wait(self.kernel(*arguments, **keywords))
                if any(tensor.is_cuda for tensor in inputs.positional):
                    torch.cuda.synchronize()
        except KernelTimeout:
            if timer is not None and timer.uncounted > timer.most_uncounted:
                return failure_of(case, "timeout", f"it compiled for more than {timer.most_uncounted:g} s")
            return failure_of(case, "timeout", f"no result within {limit:g} s (the limit is examine's timeout=)")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:
            error = lost_device.by_device(raised)
            if interpretable and not interpreted and triton_is_loaded():  # the kernel has imported it only now
                return self._run(case, inputs, arguments, keywords, poison)
            if sanitizer is not None and sanitizer.finding is not None:
                return failure_of(case, sanitizer.finding.kind, str(sanitizer.finding))
            if missing := _not_interpreted(error):
                return failure_of(case, "not_interpreted", one_line(missing))
            if words := (
                refusal(error, case, self.refuses)
                or refused_by_library(error)
                or refused_by_reference(error, case, arguments, keywords)
            ):
                return failure_of(case, "refused", words)
            if self.watch.allocates:
                self.watch.give_up_allocations()
                return self._run(case, inputs, arguments, keywords, poison)
            # the first frame is that of the call above, the second the kernel's own
            frame = traceback.extract_tb(raised.__traceback__)[1:2]
            line = "".join(f" (at {at.filename.rsplit('/', 1)[-1]}:{at.lineno})" for at in frame)
            message = f"{type(error).__name__}: {first_line(error)}{line}"
            loses = lost_device.is_lost(error)
            if on_cpu and not self.pretend and not loses and asks_for_cuda(error):
                return failure_of(case, "not_interpreted", f"{_NO_CUDA} ({message})")
            if isinstance(error, TypeError) and _OF_A_SIGNATURE.search(str(error)):
                message += f"; the kernel is called as {call_in_words(case, self.listed)}"
            if any(layout != LAYOUTS[0] for layout in case.layouts.values()) and "contiguous" in str(error):
                message += _OF_LAYOUTS
            crash = failure_of(case, "crash", message, device_lost=loses)
            if poison is None or loses:
                return crash
            again = self._run(case, inputs, arguments, keywords, None)
            if isinstance(again, Failure) or _is_refusal(error):
                return again
            held = "NaN" if case.memory == "nan" else "2^100"
            message = f"only where fresh memory holds {held} (or 0 and 1, of integers): {crash.message}"
            return replace(crash, message=message, aspect="memory")
        finally:
            self.left_changed.update(dict.fromkeys(changed))
            self.report(case)
        if timer is not None:
            self.pace.add(case, timer.used)
        if sanitizer is not None and sanitizer.finding is not None:  # and the kernel has caught it
            return failure_of(case, sanitizer.finding.kind, str(sanitizer.finding))
        if poison is not None and poison.overrun():
            return failure_of(case, "out_of_bounds_write", "the kernel wrote beyond a tensor that it had allocated")
        return self.checked_results(case, inputs, result)

    @contextlib.contextmanager
    def _launching(
        self, tensors: list[torch.Tensor], emission: Emission | None, memory: str, *, interpreted: bool
    ) -> Iterator[Sanitizer | None]:
        """Interpret the launches of a call inside, or run them in the configurations that are assigned."""
        if self.launching is not None:
            with self.launching(self.assignment):
                yield None
        elif interpreted:
            with self.watch.interpreting(tensors, emission, memory) as sanitizer, self.assignment.current():
                yield sanitizer
        elif self.assignment.on_device:
            with assigned(self.assignment):
                yield None
        else:
            yield None

    @contextlib.contextmanager
    def _default_dtype_kept(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        try:
            yield
        finally:
            if torch.get_default_dtype() != before:
                self.default_dtype[:] = [torch.get_default_dtype()]

    def checked_results(self, case: Case, inputs: Inputs, result: Any) -> tuple[torch.Tensor, ...] | Failure:
        """Return the results if their number, shapes, dtypes and device are those of the signature; else a failure."""
        expected = case.signature.returns
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(expected):
            names = ", ".join(map(str, expected))
            return failure_of(case, "shape", f"expected {len(expected)} result(s) ({names}), got {len(results)}")
        outputs, device = [], inputs.positional[0].device
        for index, (tensor, value, dtype) in enumerate(zip(expected, results, case.result_dtypes, strict=True)):
            kind: Kind = "dtype"
            try:
                value = plain(framework_named(self.framework).take(value, torch_dtype(dtype)))
                if value.device.type != device.type:
                    words = f"expected a tensor on device {device}, got {value.device}"
                elif tuple(value.shape) != case.shape(tensor):
                    kind, words = "shape", f"expected shape {case.shape(tensor)}, got {tuple(value.shape)}"
                elif value.dtype != torch_dtype(dtype):
                    got = str(value.dtype).removeprefix("torch.")
                    words = f"expected {dtype}, got {got} (out_dtype= states another)"
                else:
                    outputs.append(value)
                    continue
            except TypeError as error:
                words = first_line(error)
            return failure_of(case, kind, f"{tensor.name}: {words}", index)
        return tuple(outputs)


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without graph and without subclass: a subclass could answer the checks as it likes.

    Raises `TypeError` for a subclass that defines its own numbers, and for a sparse, nested or quantized tensor.
    """
    kind = type(value)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"expected a torch.Tensor, got a {kind.__name__}, which has operations of its own")
    with torch._C.DisableTorchFunctionSubclass():
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            layout = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
            raise TypeError(f"expected a dense tensor, got a {layout} one")
        return value.detach().as_subclass(torch.Tensor)


def _not_interpreted(error: BaseException | None) -> NotInterpreted | None:
    """Return the interpreter's missing feature that an error comes from, if any."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, NotInterpreted):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _is_refusal(error: BaseException) -> bool:
    """Whether an error comes from a compiler or dispatcher: by its class, its message, or its origin."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    made = (type(error).__module__, *frames[-1:])
    return any(name.startswith(_COMPILERS) for name in made) or any(word in str(error) for word in _OF_A_DISPATCHER)
