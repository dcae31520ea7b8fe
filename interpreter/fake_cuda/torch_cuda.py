"""`torch.cuda`, `torch.accelerator` and other parts of torch that take a device, with one emulated device.

All work is done when it is issued, so streams have nothing to wait for; events record this machine's time.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import Library
from torch.testing._comparison import TensorLikePair

from assay.formats.devices import CudaProperties
from assay.interpreter.fake_cuda import random
from assay.interpreter.fake_cuda.tensors import DEVICE, is_cuda, memory, real
from assay.interpreter.replacing import Change

CUDA_VERSION = "12.8"
"""`torch.version.cuda` if torch was built without CUDA."""

_POOL = (0, 0)
_ALLOCATED = ("memory_allocated", "memory_reserved", "memory_cached", "device_memory_used")
_PEAKS = ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
_MEMORY = (
    *_ALLOCATED[:3], *_PEAKS, "reset_peak_memory_stats", "reset_max_memory_allocated", "mem_get_info", "memory_stats",
    "memory_summary", "empty_cache", "set_per_process_memory_fraction", "get_per_process_memory_fraction",
    "reset_accumulated_memory_stats",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "_lazy_init", "init", "synchronize", "empty_cache", "ipc_collect", "set_per_process_memory_fraction",
    "reset_accumulated_memory_stats", "set_sync_debug_mode", "_sleep",
)  # fmt: skip
_CPU_KEYS = {"CUDA": "CPU", "AutogradCUDA": "AutogradCPU", "AutocastCUDA": "AutocastCPU"}
_TORCHS_NAMESPACES = ("_", "inductor", "prims", "symm_mem", "fsdp", "c10d")
"""Prefixes of the namespaces of operators that torch registers itself."""


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.device_index, self.device_type = DEVICE, 0, 1
        self.priority = priority
        self.stream_id = self.cuda_stream = 0

    def __enter__(self) -> Stream:
        self._context = use(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """`torch.cuda.Event`: the time at which it was recorded."""

    def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
        self.device, self.enable_timing, self.cuda_event = DEVICE, enable_timing, 0
        self.event_id = 0
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds between two recorded events, at least 1e-6. Raises RuntimeError without a record."""
        if self._time is None or end._time is None:
            raise RuntimeError("Event.elapsed_time: expected two recorded events; call record() of both first")
        return max((end._time - self._time) * 1e3, 1e-6)


class use:  # noqa: N801 - a context manager, as torch.cuda.stream is one
    """`torch.cuda.stream`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(_current[0])
        _set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        _current[0] = self._before.pop()


_DEFAULT_STREAM = Stream()
_current = [_DEFAULT_STREAM]


def _current_stream(device: Any = None) -> Stream:
    return _current[0]


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _current[0] = stream


def changes(device: Callable[[], CudaProperties]) -> list[Change]:
    """Return all changes outside of tensors; ``device`` returns the device that is emulated now."""
    functions = _cuda_functions(device)
    autocast: Any = torch.autocast
    result: list[Change] = [(torch.cuda, name, value) for name, value in functions.items()]
    result += [(torch.cuda.random, name, functions[name]) for name in random.STATE_FUNCTIONS]
    result += [(torch.cuda.memory, name, functions[name]) for name in _MEMORY]
    result += [(torch.cuda.nvtx, name, _constant(None)) for name in ("range_push", "range_pop", "mark", "range_end")]
    result += [(torch.cuda.graphs, name, functions[name]) for name in ("CUDAGraph", "graph", "make_graphed_callables")]
    result += [(torch.accelerator, name, value) for name, value in _accelerator_functions().items()]
    result += [
        (torch.cuda.nvtx, "range_start", lambda message: 0),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
        (torch.cuda.streams, "Stream", Stream),
        (torch.cuda.streams, "Event", Event),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch._C, "_cuda_setDevice", _constant(None)),
        (torch._C, "_get_accelerator", lambda *_: torch.device("cuda")),
        (torch._C, "_accelerator_getAccelerator", lambda *_: torch.device("cuda")),
        (torch.backends.cuda, "is_built", lambda: True),
        (autocast, "__enter__", _enter_autocast(autocast.__enter__)),
        (autocast, "__exit__", _exit_autocast(autocast.__exit__)),
        (Library, "impl", _impl_for_cpu_too(Library.impl)),
        (torch, "load", _load(torch.load)),
        (torch, "get_device_module", _device_module(torch.get_device_module)),
        (TensorLikePair, "_compare_attributes", _without_device(TensorLikePair._compare_attributes)),
    ]
    if torch.version.cuda is None:
        result.append((torch.version, "cuda", CUDA_VERSION))
    return result


def _cuda_functions(device: Callable[[], CudaProperties]) -> dict[str, Any]:
    """Return the functions and classes of `torch.cuda` by name."""

    def properties(of: Any = None) -> CudaProperties:
        device_index(of)
        return device()

    def mem_get_info(of: Any = None) -> tuple[int, int]:
        total = device().total_memory
        return max(total - memory.allocated, 0), total

    return {
        **{name: _constant(True) for name in ("is_available", "is_initialized", "_is_compiled", "is_tf32_supported")},
        **{name: _constant(None) for name in _WITHOUT_EFFECT},
        **{name: lambda *_, **__: memory.allocated for name in _ALLOCATED},
        **{name: lambda *_, **__: memory.peak for name in _PEAKS},
        **random.state_functions(),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or device().major >= 8,
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _index_function(),
        "_exchange_device": _index_function(),
        "_maybe_exchange_device": _index_function(),
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "get_device_name": lambda of=None: properties(of).name,
        "get_device_capability": lambda of=None: properties(of).capability,
        "get_arch_list": lambda: [f"sm_{device().major}{device().minor}"],
        "can_device_access_peer": lambda of, peer: False,
        "Stream": Stream,
        "ExternalStream": lambda pointer, device=None: Stream(),
        "get_stream_from_external": lambda pointer, device=None: Stream(),
        "Event": Event,
        "stream": use,
        "StreamContext": use,
        "current_stream": _current_stream,
        "default_stream": lambda of=None: _DEFAULT_STREAM,
        "set_stream": _set_stream,
        "CUDAGraph": _Refused,
        "graph": _Refused,
        "make_graphed_callables": _refuse_graphs,
        "graph_pool_handle": lambda: _POOL,
        "reset_peak_memory_stats": lambda of=None: _reset_peak(),
        "reset_max_memory_allocated": lambda of=None: _reset_peak(),
        "reset_max_memory_cached": lambda of=None: _reset_peak(),
        "mem_get_info": mem_get_info,
        "memory_stats": lambda of=None: {"allocated_bytes.all.current": memory.allocated,
                                         "allocated_bytes.all.peak": memory.peak},
        "memory_summary": lambda of=None, abbreviated=False: f"emulated: {memory.allocated} bytes are allocated",
        "get_per_process_memory_fraction": lambda of=None: 1.0,
    }  # fmt: skip


def _accelerator_functions() -> dict[str, Any]:
    """Return the functions of `torch.accelerator` by name."""

    @contextlib.contextmanager
    def index_context(of: Any = None) -> Iterator[None]:
        device_index(of)
        yield

    return {
        "is_available": _constant(True),
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": _index_function(),
        "set_device_idx": _index_function(),
        "device_index": index_context,
        "current_stream": _current_stream,
        "set_stream": _set_stream,
        "synchronize": _constant(None),
    }


def device_index(of: Any = None) -> int:
    """Return the index of a device argument of torch's functions. Raises RuntimeError for a second device."""
    if of is None:
        return 0
    kind = torch.device(of) if isinstance(of, str) else of
    number = kind.index if isinstance(kind, torch.device) else kind
    if isinstance(kind, torch.device) and not is_cuda(kind):
        raise ValueError(f"expected a cuda device, got {kind}")
    if number not in (None, 0, -1):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {number}; pretend_cuda() has one device, {DEVICE}")
    return 0


# torch's compiler keeps tables of functions, so that each replacement is a function of its own.
def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _index_function() -> Callable[..., int]:
    return lambda of=None: device_index(of)


def _reset_peak() -> None:
    memory.peak = memory.allocated


def _refuse_graphs(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA graphs: pretend_cuda() has no GPU that could record one; call the function itself")


class _Refused:
    """`torch.cuda.CUDAGraph` and `torch.cuda.graph`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse_graphs()


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run functions that `torch.compile` compiled as they were written: there is no GPU to compile them for."""
    from torch._dynamo import trace_rules

    table: Any = trace_rules.get_torch_obj_rule_map
    before = table() if table.cache_info().currsize else None
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if table.cache_info().currsize and table() is not before:  # built inside: it lists the replaced functions
            trace_rules.clear_lru_cache()


def _enter_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    """``with torch.autocast("cuda")`` also casts on the CPU, where the tensors are."""

    @functools.wraps(original)
    def enter(self: Any) -> Any:
        result = original(self)
        if self.device == "cuda":
            inner = torch.autocast(
                "cpu", dtype=self.fast_dtype, enabled=self._enabled, cache_enabled=self._cache_enabled
            )
            original(inner)
            self.__dict__.setdefault("_assay_inner", []).append(inner)
        return result

    return enter


def _exit_autocast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(self: Any, *error: Any) -> Any:
        if self.__dict__.get("_assay_inner"):
            original(self._assay_inner.pop(), *error)
        return original(self, *error)

    return leave


def _impl_for_cpu_too(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Library.impl`: an operator's implementation for CUDA becomes that for the CPU too."""

    @functools.wraps(original)
    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> Any:
        key = dispatch_key or self.dispatch_key
        name = str(getattr(op_name, "_name", op_name)).rpartition("::")[2]
        registered = self.__dict__.setdefault("_assay_on_cpu", set())
        if (name, key) in registered:  # CUDA's implementation has priority
            return None
        result = original(self, op_name, fn, dispatch_key, **kwargs)
        if key in _CPU_KEYS and not self.ns.startswith(_TORCHS_NAMESPACES):
            registered.add((name, _CPU_KEYS[key]))
            original(self, op_name, fn, _CPU_KEYS[key], **kwargs)
        return result

    return impl


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, (str, torch.device)):
            map_location = real(map_location)
        return original(f, "cpu" if map_location is None else map_location, *args, **kwargs)

    return load


def _device_module(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_device_module(device: Any = None) -> Any:
        return torch.cuda if device is None or is_cuda(device) else original(device)

    return get_device_module


def _without_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `torch.testing.assert_close` from comparing devices: computed tensors of the host claim the device."""

    @functools.wraps(original)
    def compare(self: Any, *args: Any) -> None:
        before, self.check_device = self.check_device, False
        try:
            original(self, *args)
        finally:
            self.check_device = before

    return compare
