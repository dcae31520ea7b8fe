"""What `torch.cuda` and `torch.accelerator` answer in the pretended world: one device, whose work is done at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from assay.interpreter.cuda_devices import CudaDevice
from assay.interpreter.places import is_cuda, memory
from assay.interpreter.pretended_streams import DEFAULT, Event, Stream, current_stream, set_stream, use
from assay.interpreter.pretended_tensors import DEVICE
from assay.interpreter.replacing import Change

CUDA_VERSION = "12.8"
"""What `torch.version.cuda` says where torch was built without CUDA."""

_POOL = (0, 0)


def changes(device: Callable[[], CudaDevice]) -> list[Change]:
    """What is replaced in `torch.cuda` and around it; ``device`` gives the device that is pretended now."""
    answers = _answers(device)
    found: list[Change] = [(torch.cuda, name, value) for name, value in answers.items()]
    found += [(torch.cuda.random, name, answers[name]) for name in _RANDOM]
    found += [(torch.cuda.memory, name, answers[name]) for name in _MEMORY]
    found += [(torch.cuda.nvtx, name, _giving(None)) for name in ("range_push", "range_pop", "mark", "range_end")]
    found.append((torch.cuda.nvtx, "range_start", lambda message: 0))
    found += [(torch.cuda.graphs, name, answers[name]) for name in ("CUDAGraph", "graph", "make_graphed_callables")]
    found += [(torch, "Stream", Stream), (torch, "Event", Event), (torch.cuda.streams, "Stream", Stream)]
    found += [(torch.cuda.streams, "Event", Event)]
    found += [(torch.accelerator, name, value) for name, value in _of_accelerator(device).items()]
    found += [
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch._C, "_cuda_setDevice", _giving(None)),
        (torch._C, "_get_accelerator", lambda *_: torch.device("cuda")),
        (torch._C, "_accelerator_getAccelerator", lambda *_: torch.device("cuda")),
        (torch.backends.cuda, "is_built", lambda: True),
    ]
    if torch.version.cuda is None:
        found.append((torch.version, "cuda", CUDA_VERSION))
    return found


def _answers(device: Callable[[], CudaDevice]) -> dict[str, Any]:
    """The functions and classes of `torch.cuda` by name."""

    def properties(of: Any = None) -> CudaDevice:
        index(of)
        return device()

    def mem_get_info(of: Any = None) -> tuple[int, int]:
        total = device().total_memory
        return max(total - memory.allocated, 0), total

    return {
        **{name: _giving(True) for name in ("is_available", "is_initialized", "_is_compiled", "is_tf32_supported")},
        **{name: _giving(None) for name in _WITHOUT_EFFECT},
        **{name: lambda *_, **__: memory.allocated for name in _ALLOCATED},
        **{name: lambda *_, **__: memory.peak for name in _PEAKS},
        "is_bf16_supported": lambda including_emulation=True: including_emulation or device().major >= 8,
        "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _index(),
        "_exchange_device": _index(),
        "_maybe_exchange_device": _index(),
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
        "current_stream": current_stream,
        "default_stream": lambda of=None: DEFAULT,
        "set_stream": set_stream,
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
        "memory_summary": lambda of=None, abbreviated=False: f"pretended: {memory.allocated} bytes are allocated",
        "get_per_process_memory_fraction": lambda of=None: 1.0,
        "default_generators": (torch.default_generator,),
        "manual_seed": lambda seed: _seed_all(seed),
        "manual_seed_all": lambda seed: _seed_all(seed),
        "seed": lambda: torch.default_generator.seed() and None,
        "seed_all": lambda: torch.default_generator.seed() and None,
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": lambda of="cuda": torch.default_generator.get_state(),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "set_rng_state": lambda state, of="cuda": torch.default_generator.set_state(state),
        "set_rng_state_all": lambda states: [torch.default_generator.set_state(state) for state in states] and None,
    }  # fmt: skip


_RANDOM = (
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed",
    "get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all",
)  # fmt: skip
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


def _of_accelerator(device: Callable[[], CudaDevice]) -> dict[str, Any]:
    """The functions of `torch.accelerator` by name."""

    @contextlib.contextmanager
    def device_index(of: Any = None) -> Iterator[None]:
        index(of)
        yield

    return {
        "is_available": _giving(True),
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": _index(),
        "set_device_idx": _index(),
        "device_index": device_index,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "synchronize": _giving(None),
    }


def index(of: Any = None) -> int:
    """The index of a device as torch's functions take one. Raises RuntimeError for a device that isn't there."""
    if of is None:
        return 0
    kind = torch.device(of) if isinstance(of, str) else of
    number = kind.index if isinstance(kind, torch.device) else kind
    if isinstance(kind, torch.device) and not is_cuda(kind):
        raise ValueError(f"expected a cuda device, got {kind}")
    if number not in (None, 0, -1):
        raise RuntimeError(f"CUDA error: invalid device ordinal: {number}; pretend_cuda() has one device, {DEVICE}")
    return 0


def _giving(value: Any) -> Callable[..., Any]:
    """A function that gives ``value`` whatever it is asked; one of its own, since torch's compiler lists functions."""
    return lambda *_, **__: value


def _index() -> Callable[..., int]:
    """`index`, as a function of its own."""
    return lambda of=None: index(of)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _reset_peak() -> None:
    memory.peak = memory.allocated


def _refuse_graphs(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA graphs: pretend_cuda() has no GPU that could record one; call the function itself")


class _Refused:
    """`torch.cuda.CUDAGraph` and `torch.cuda.graph`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse_graphs()


__all__ = ["CUDA_VERSION", "DEVICE", "changes", "index"]
