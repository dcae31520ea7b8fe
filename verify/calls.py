"""Calling a kernel: in time, with fresh memory that is poisoned where asked, and with its result checked for form."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from assay.golden.inputs.values import torch_dtype
from assay.verify.frameworks import framework_named
from assay.verify.inputs.cases import Case, Inputs
from assay.verify.interpreter import Watch, triton_is_loaded
from assay.verify.memory import PoisonedMemory, litter

GRACE = 10.0
"""Seconds beyond its own limit that a call which can't be interrupted has, before its process is ended."""


class KernelTimeout(BaseException):
    """Raised inside a kernel that has run out of time; a BaseException, so that kernels don't swallow it."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with a call that is no matter of numbers."""

    kind: str
    message: str
    output: int = 0
    index: tuple[int, ...] = ()


def options_for(case: Case, inputs: Inputs, listed: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The keywords of a call: only the options that the caller listed, and the keyword tensors that they call for."""
    keywords = {name: case.options[name] for name in listed}
    for name in inputs.keywords:
        keywords[name] = inputs.guarded[name].tensor
    if "sinks" in keywords and not isinstance(keywords["sinks"], torch.Tensor):
        keywords["sinks"] = None
    if True in listed.get("alibi", ()):
        keywords.setdefault("slopes", None)
    return keywords


def target_of(kernel: Callable[..., Any]) -> str:
    """``module:name`` where the kernel can be imported by it, else an empty string."""
    module, name = getattr(kernel, "__module__", None), getattr(kernel, "__qualname__", "")
    if not module or "<" in name or module == "__main__":
        return ""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is kernel else ""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the body by `KernelTimeout` after ``seconds``; only possible in the main thread of a POSIX process."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(signum: int, frame: Any) -> None:
        raise KernelTimeout

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, expire)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:  # somebody else's deadline goes on
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, remaining - (time.monotonic() - started)), interval)


@dataclass(frozen=True)
class Call:
    """How a kernel is called.

    ``before(case, seconds)`` is told of each case that is tried, before and after each call: a call comes back within
    so many seconds, or not at all; 0 where no call is under way.
    """

    kernel: Callable[..., Any]
    listed: Mapping[str, Sequence[Any]]
    framework: str = "torch"
    timeout: float = 30.0
    before: Callable[[Case, float], None] | None = None
    watch: Watch = field(default_factory=Watch, compare=False, repr=False)

    def tell(self, case: Case, seconds: float = 0.0) -> None:
        """Tell whoever must know what a process died of, or hangs in."""
        if self.before is not None:
            self.before(case, seconds)

    def __call__(self, case: Case, inputs: Inputs) -> tuple[torch.Tensor, ...] | Finding:
        """The kernel's results as torch tensors, or what was wrong with the call."""
        keywords = options_for(case, inputs, self.listed)
        arguments, keywords = framework_named(self.framework).arguments(inputs.positional, keywords)
        if case.memory == "plain" or self.framework != "torch":
            litter(case)
            return self._run(case, inputs, arguments, keywords, None)
        outputs = self._run(case, inputs, arguments, keywords, PoisonedMemory(case.memory))
        if isinstance(outputs, Finding) and outputs.kind == "crash":  # some compilers cannot run under a dispatch mode
            return self._run(case, inputs, arguments, keywords, None)
        return outputs

    def _run(
        self, case: Case, inputs: Inputs, arguments: list[Any], keywords: dict[str, Any], poison: PoisonedMemory | None
    ) -> tuple[torch.Tensor, ...] | Finding:
        on_cpu = all(tensor.device.type == "cpu" for tensor in inputs.positional)
        interpreted = on_cpu and triton_is_loaded()
        given = [guarded.tensor for guarded in inputs.guarded.values()]
        sanitizer = None
        self.tell(case, self.timeout + GRACE)
        try:
            with (  # the interpreter outside of what a time-out interrupts
                self.watch.interpreting(given) if interpreted else contextlib.nullcontext() as sanitizer,
                time_limit(self.timeout),
                poison or contextlib.nullcontext(),
                self.watch.allocating(sanitizer),
            ):
                result = framework_named(self.framework).wait(self.kernel(*arguments, **keywords))
                if any(tensor.is_cuda for tensor in inputs.positional):
                    torch.cuda.synchronize()
        except KernelTimeout:
            return Finding("timeout", f"no result within {self.timeout:g} s (the limit is examine's timeout=)")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            if on_cpu and not interpreted and triton_is_loaded():  # the kernel has imported it only now
                return self._run(case, inputs, arguments, keywords, poison)
            if sanitizer is not None and sanitizer.finding is not None:
                return Finding(sanitizer.finding.kind, str(sanitizer.finding))
            if self.watch.allocates:
                self.watch.give_up_allocations()
                return self._run(case, inputs, arguments, keywords, poison)
            return Finding("crash", f"{type(error).__name__}: {_first_line(error)}{_place(error)}")
        finally:
            self.tell(case)
        if sanitizer is not None and sanitizer.finding is not None:  # and the kernel has caught it
            return Finding(sanitizer.finding.kind, str(sanitizer.finding))
        if poison is not None and poison.overrun():
            return Finding("out_of_bounds_write", "the kernel wrote beyond a tensor that it had allocated")
        return self.form(case, inputs, result)

    def form(self, case: Case, inputs: Inputs, result: Any) -> tuple[torch.Tensor, ...] | Finding:
        """The results, if they are as many as the signature says, of its shapes, dtypes and device."""
        expected = case.signature.returns
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(expected):
            names = ", ".join(map(str, expected))
            return Finding("shape", f"expected {len(expected)} result(s) ({names}), got {len(results)}")
        outputs = []
        for place, (tensor, value, dtype) in enumerate(zip(expected, results, case.result_dtypes, strict=True)):
            try:
                value = plain(framework_named(self.framework).take(value, torch_dtype(dtype)))
            except TypeError as error:
                return Finding("dtype", f"{tensor.name}: {_first_line(error)}", place)
            device = inputs.positional[0].device
            if value.device.type != device.type:
                return Finding(
                    "dtype", f"{tensor.name}: expected a tensor on device {device}, got {value.device}", place
                )
            shape = case.shape(tensor)
            if tuple(value.shape) != shape:
                return Finding("shape", f"{tensor.name}: expected shape {shape}, got {tuple(value.shape)}", place)
            if value.dtype != torch_dtype(dtype):
                got = str(value.dtype).removeprefix("torch.")
                return Finding(
                    "dtype", f"{tensor.name}: expected {dtype}, got {got} (out_dtype= states another)", place
                )
            outputs.append(value)
        return tuple(outputs)


def plain(value: torch.Tensor) -> torch.Tensor:
    """A tensor without a graph and without behaviour of its own, which could answer whoever judges it as it likes.

    Raises `TypeError` for one whose numbers are what its class makes of them.
    """
    kind = type(value)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"expected a torch.Tensor, got a {kind.__name__}, which has operations of its own")
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().as_subclass(torch.Tensor)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _place(error: BaseException) -> str:
    """Where in the kernel's own file the error arose."""
    frames = traceback.extract_tb(error.__traceback__)
    if len(frames) < 2:
        return ""
    frame = frames[1]
    return f" (at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
