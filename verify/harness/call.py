"""A call of a kernel: with a time limit, poisoned fresh memory, and a check of the form of its results.

`PoisonedMemory` intercepts allocations during a call, also those inside operators of libraries: it fills every
uninitialised tensor with NaN or 2^100 and puts guard zones around it. `litter` only leaves NaN in memory that the
allocator will hand out next; it costs nothing and reaches compiled code too.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from assay.formats.format import format_named
from assay.golden.inputs.values import torch_dtype
from assay.interpreter import NVIDIA, NotInterpreted, Watch, pretend_cuda, put_on_device, triton_is_loaded
from assay.runtime.deadline import CpuLimit
from assay.runtime.dispatch import ALLOCATIONS, AllocationMode
from assay.runtime.environment import Environment, environment, in_environment, with_setting
from assay.runtime.errors import first_line, one_line
from assay.runtime.modules import asks_for_cuda
from assay.verify.cases.case import Case, Inputs
from assay.verify.findings import Kind
from assay.verify.harness.compiled import every_variant_compiled
from assay.verify.harness.frameworks import framework_named
from assay.verify.harness.refusals import refusal, refused_by_reference
from assay.verify.harness.signature import call_in_words, is_of_signature
from assay.verify.harness.time_limit import KernelTimeout, Pace, time_limit
from assay.verify.harness.xla import make_room

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
_OF_A_DISPATCHER = ("__torch_dispatch__", "dispatch mode", "DispatchMode", "FakeTensor", "Dispatcher")


@dataclass(frozen=True)
class Finding:
    """A defect of a call other than wrong numbers; ``device_lost`` if it made the device unusable.

    ``aspect`` is the aspect that it breaks, whatever the case. ``refused``: the error comes from a compiler or
    dispatcher that can't handle watched memory, not from the kernel.
    """

    kind: Kind
    message: str
    output: int = 0
    index: tuple[int, ...] = ()
    device_lost: bool = False
    aspect: str = ""
    refused: bool = False


def options_for(case: Case, inputs: Inputs, listed: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the keyword arguments of a call: the options that the caller listed, and the keyword tensors that they
    need.

    Keyword tensors that only other values of these options need are None.
    """
    flags = [name for name, option in case.definition.options.items() if option.tensor]
    keywords = {name: None if name in flags else case.options[name] for name in listed}
    keywords |= {name: inputs.guarded[name].tensor for name in inputs.keywords}
    called_for = [{name: value} for name, values in listed.items() for value in values]
    others = {t.name for options in called_for for t in case.definition.signature(options).tensors if t.keyword}
    return dict.fromkeys(others - keywords.keys()) | keywords


@dataclass(frozen=True)
class Call:
    """How a kernel is called.

    ``timeout`` is in seconds of processor time (`time_limit`), raised if ``pace`` shows that calls take longer.
    ``before(case, seconds)`` is called for each case, before and after each call: the call returns within this many
    seconds (as `assay.runtime.deadline` counts them), or never; 0 if no call is in progress. ``environment`` is the
    numeric environment of the call; changes that the kernel leaves are undone, and listed in ``left``. Only torch's
    default dtype, which a kernel may set in its first call for all later ones, carries over (``default_dtype``).
    ``pretend`` is the device that "cuda" names during the call, and on which inputs pretend to be. ``refuses`` are the
    documented refusals (`refusals`).
    """

    kernel: Callable[..., Any]
    listed: Mapping[str, Sequence[Any]]
    framework: str = "torch"
    timeout: float = 30.0
    before: Callable[[Case, float], None] | None = None
    environment: Environment = field(default_factory=environment, compare=False, repr=False)
    left: dict[str, None] = field(default_factory=dict, compare=False, repr=False)  # in order, each once
    default_dtype: list[torch.dtype] = field(default_factory=list, compare=False, repr=False)  # none, or the one
    pretend: str = ""
    refuses: Mapping[str, str] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace, compare=False, repr=False)
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)

    def tell(self, case: Case, seconds: float = 0.0) -> None:
        """Report the case and its time limit to the observer, which needs them if the process dies or hangs."""
        if self.before is not None:
            self.before(case, seconds)

    def __call__(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Finding:
        """Return the kernel's results as torch tensors, or the finding of the call."""
        if self.framework == "jax":
            make_room()
        keywords = options_for(case, inputs, self.listed)
        arguments, keywords = framework_named(self.framework).arguments(inputs.positional, keywords)
        if case.memory == "plain" or self.framework != "torch":
            litter(case)
            return self._run(case, inputs, arguments, keywords, None)
        outputs = self._run(case, inputs, arguments, keywords, PoisonedMemory(case.memory))
        if not isinstance(outputs, Finding) or outputs.kind != "crash" or outputs.device_lost:
            return outputs
        again = self._run(case, inputs, arguments, keywords, None)
        if outputs.refused or isinstance(again, Finding):
            return again
        held = "NaN" if case.memory == "nan" else "2^100"
        message = f"only where fresh memory holds {held} (or 0 and 1, of integers): {outputs.message}"
        return replace(outputs, message=message, aspect="memory")

    def _run(
        self, case: Case, inputs: Inputs, arguments: list[Any], keywords: dict[str, Any], poison: PoisonedMemory | None
    ) -> tuple[torch.Tensor, ...] | Finding:
        on_cpu = all(tensor.device.type == "cpu" for tensor in inputs.positional)
        interpreted = on_cpu and triton_is_loaded()
        input_tensors = [guarded.tensor for guarded in inputs.guarded.values()]
        left: list[str] = []
        sanitizer = None
        wanted = self.environment
        for dtype in self.default_dtype:
            wanted = with_setting(wanted, torch.get_default_dtype, dtype)
        emission = NVIDIA if case.protocol == EMITTED else None
        limit = self.pace.limit(case, self.timeout)
        timer: CpuLimit | None = None
        self.tell(case, limit + GRACE)
        try:
            with (  # the interpreter outside of what a time-out interrupts
                pretend_cuda(self.pretend) if self.pretend else contextlib.nullcontext(),
                self.watch.interpreting(input_tensors, emission)
                if interpreted
                else contextlib.nullcontext() as sanitizer,
                time_limit(limit, lambda: self.tell(case, limit + GRACE)) as timer,
                poison or contextlib.nullcontext(),
                self.watch.allocating(sanitizer),
                in_environment(wanted) as left,
                self._default_dtype_kept(),
                every_variant_compiled(self.kernel),
            ):
                put_on_device(input_tensors if self.pretend else ())
                result = framework_named(self.framework).wait(self.kernel(*arguments, **keywords))
                if any(tensor.is_cuda for tensor in inputs.positional):
                    torch.cuda.synchronize()
        except KernelTimeout:
            if timer is not None and timer.uncounted > timer.most_uncounted:
                return Finding("timeout", f"it compiled for more than {timer.most_uncounted:g} s")
            return Finding("timeout", f"no result within {limit:g} s (the limit is examine's timeout=)")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            if on_cpu and not interpreted and triton_is_loaded():  # the kernel has imported it only now
                return self._run(case, inputs, arguments, keywords, poison)
            if sanitizer is not None and sanitizer.finding is not None:
                return Finding(sanitizer.finding.kind, str(sanitizer.finding))
            if missing := _not_interpreted(error):
                return Finding("not_interpreted", one_line(missing))
            if words := refusal(error, case, self.refuses) or refused_by_reference(error, case, arguments, keywords):
                return Finding("refused", words)
            if self.watch.allocates:
                self.watch.give_up_allocations()
                return self._run(case, inputs, arguments, keywords, poison)
            message = f"{type(error).__name__}: {first_line(error)}{_place(error)}"
            if on_cpu and not self.pretend and asks_for_cuda(error):
                return Finding("not_interpreted", f"{_NO_CUDA} ({message})")
            if is_of_signature(error):
                message += f"; the kernel is called as {call_in_words(case, self.listed)}"
            return Finding("crash", message, device_lost=_lost_device(error), refused=_is_refusal(error))
        finally:
            self.left.update(dict.fromkeys(left))
            self.tell(case)
        if timer is not None:
            self.pace.add(case, timer.used)
        if sanitizer is not None and sanitizer.finding is not None:  # and the kernel has caught it
            return Finding(sanitizer.finding.kind, str(sanitizer.finding))
        if poison is not None and poison.overrun():
            return Finding("out_of_bounds_write", "the kernel wrote beyond a tensor that it had allocated")
        return self.form(case, inputs, result)

    @contextlib.contextmanager
    def _default_dtype_kept(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        try:
            yield
        finally:
            if torch.get_default_dtype() != before:
                self.default_dtype[:] = [torch.get_default_dtype()]

    def form(self, case: Case, inputs: Inputs, result: Any) -> tuple[torch.Tensor, ...] | Finding:
        """Return the results if their number, shapes, dtypes and device are those of the signature; else a finding."""
        expected = case.signature.returns
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(expected):
            names = ", ".join(map(str, expected))
            return Finding("shape", f"expected {len(expected)} result(s) ({names}), got {len(results)}")
        outputs = []
        for index, (tensor, value, dtype) in enumerate(zip(expected, results, case.result_dtypes, strict=True)):
            try:
                value = plain(framework_named(self.framework).take(value, torch_dtype(dtype)))
            except TypeError as error:
                return Finding("dtype", f"{tensor.name}: {first_line(error)}", index)
            device = inputs.positional[0].device
            if value.device.type != device.type:
                return Finding(
                    "dtype", f"{tensor.name}: expected a tensor on device {device}, got {value.device}", index
                )
            shape = case.shape(tensor)
            if tuple(value.shape) != shape:
                return Finding("shape", f"{tensor.name}: expected shape {shape}, got {tuple(value.shape)}", index)
            if value.dtype != torch_dtype(dtype):
                got = str(value.dtype).removeprefix("torch.")
                return Finding(
                    "dtype", f"{tensor.name}: expected {dtype}, got {got} (out_dtype= states another)", index
                )
            outputs.append(value)
        return tuple(outputs)


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without graph and without subclass: a subclass could answer the checks as it likes.

    Raises `TypeError` for a subclass that defines its own numbers.
    """
    kind = type(value)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"expected a torch.Tensor, got a {kind.__name__}, which has operations of its own")
    with torch._C.DisableTorchFunctionSubclass():
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


def _lost_device(error: BaseException) -> bool:
    """Whether an error means that this process can't use the device any more. Triton and others have no class for
    that."""
    words = ("device-side assert", "CUDA error", "HIP error", "illegal memory access")
    return isinstance(error, torch.AcceleratorError) or any(part in str(error) for part in words)


def _is_refusal(error: BaseException) -> bool:
    """Whether an error comes from a compiler or dispatcher: by its class, its message, or its origin."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    made = (type(error).__module__, *frames[-1:])
    return any(name.startswith(_COMPILERS) for name in made) or any(word in str(error) for word in _OF_A_DISPATCHER)


def _place(error: BaseException) -> str:
    """Return the line of the kernel's own file at which the error arose, in words."""
    frames = traceback.extract_tb(error.__traceback__)
    if len(frames) < 2:
        return ""
    frame = frames[1]
    return f" (at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
