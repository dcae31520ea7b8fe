"""Tensors of the emulated device: the changes to `torch.Tensor` and to torch's factories.

All tensors are the CPU's. A device argument that names CUDA becomes the CPU, and the storage of the result is
remembered as on the device, on the host or in pinned memory; `device`, `is_cuda` and the like answer accordingly.
Computed tensors have no such record and count as on the device, as most of a kernel's arguments and results are. `.to`
another device copies, as between a host and a GPU, so that changing the copy in place leaves the original alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from assay.interpreter.replacing import Change

DEVICE = torch.device("cuda", 0)
"""The one emulated device."""

Location = Literal["device", "host", "pinned"]

_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided", "new")
_SAME_LOCATION = (
    "clone", "contiguous", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
)  # fmt: skip
_TYPE_NAMES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int8: "Char", torch.uint8: "Byte", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.bool: "Bool",
}  # fmt: skip
_locations: WeakKeyDictionary[Any, Location] = WeakKeyDictionary()
_true_device: Any = torch._C.TensorBase.device


class Memory:
    """Bytes of the live storages that were explicitly allocated on the device, and their peak."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage for as long as it lives."""
        size = storage.nbytes()
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        finalize(storage, self._release, size).atexit = False

    def _release(self, size: int) -> None:
        self.allocated -= size


memory = Memory()


def true_device(tensor: torch.Tensor) -> torch.device:
    """Return the real device of a tensor."""
    if type(tensor) in _PLAIN and not torch._C._len_torch_function_stack():
        device: torch.device = _true_device.__get__(tensor)
    else:  # a function mode or a subclass would return the claimed device
        with torch._C.DisableTorchFunction():
            device = _true_device.__get__(tensor)
    return device


def location_of(tensor: torch.Tensor) -> Location | None:
    """Return the recorded location of a tensor, None if it has none."""
    storage = _storage(tensor)
    return None if storage is None else _locations.get(storage)


def put(value: Any, location: Location | None) -> Any:
    """Record the location of ``value`` if it is a tensor on the CPU; return ``value``."""
    if location is not None and isinstance(value, torch.Tensor) and true_device(value).type == "cpu":
        storage = _storage(value)
        if storage is not None and _locations.get(storage) != location:
            _locations[storage] = location
            if location == "device":
                memory.count(storage)
    return value


def is_cuda(device: Any) -> bool:
    """Return whether a device argument of torch's functions names CUDA; a number alone does."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def real(device: Any) -> Any:
    """Return the CPU for a CUDA device, others unchanged."""
    return _CPU if is_cuda(device) else device


def location_for(device: Any) -> Location | None:
    """Return the location that ``device`` means; None for devices that aren't emulated (meta and the like)."""
    if is_cuda(device):
        return "device"
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return "host" if kind == "cpu" else None


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return torch._C.TensorBase.untyped_storage(tensor)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and tensors inside of a functorch transformation
        return None


def claimed(tensor: torch.Tensor) -> torch.device:
    """Return the device that a tensor claims to be on."""
    device = true_device(tensor)
    return DEVICE if device.type == "cpu" and location_of(tensor) in (None, "device") else device


def default_device() -> torch.device:
    """Return the device of `torch.set_default_device`, or of a block ``with torch.device(...)``."""
    if torch._C._len_torch_function_stack():
        modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        for mode in reversed(modes):
            if isinstance(mode, DeviceContext):
                return DEVICE if is_cuda(mode.device) else mode.device
    return _CPU


def changes() -> list[Change]:
    """Return the changes to `torch` and `torch.Tensor`."""
    tensor: Any = torch.Tensor
    from_numpy = torch.from_numpy
    result: list[Change] = []
    constructors: list[Any] = list(_device_constructors())
    for original in constructors:
        name = original.__name__
        owner, name = (torch.fft, name[4:]) if name.startswith("fft_") else (torch, name)
        present: Any = getattr(owner, name, None)
        if present is original:
            result.append((owner, name, factory(present)))
    result += [(torch, name, like(getattr(torch, name))) for name in _LIKE]
    result += [(torch, name, _matmul_out_dtype(getattr(torch, name))) for name in ("mm", "bmm", "addmm", "baddbmm")]
    result += [(tensor, name, like(getattr(tensor, name))) for name in _NEW]
    result += [(tensor, name, _same_location(getattr(tensor, name))) for name in _SAME_LOCATION]
    result += [
        (torch, "normal", _with_optional_device(torch.normal)),
        (torch, "from_numpy", lambda array: put(from_numpy(array), "host")),
        (torch, "get_device", lambda x: x.get_device()),
        (torch, "get_default_device", default_device),
        (tensor, "device", property(claimed)),
        (tensor, "is_cuda", property(lambda self: claimed(self).type == "cuda")),
        (tensor, "is_cpu", property(lambda self: claimed(self).type == "cpu")),
        (tensor, "get_device", lambda self: -1 if claimed(self).index is None else claimed(self).index),
        (tensor, "to", _to(tensor.to)),
        (tensor, "cuda", _cuda),
        (tensor, "cpu", _cpu),
        (tensor, "type", _type(tensor.type)),
        (tensor, "pin_memory", lambda self, device=None: put(torch._C.TensorBase.clone(self), "pinned")),
        (tensor, "is_pinned", lambda self, device=None: location_of(self) == "pinned"),
        (tensor, "record_stream", lambda self, stream: None),
        (tensor, "__dlpack__", lambda self, **_: torch._C._to_dlpack(self)),
        (tensor, "__dlpack_device__", lambda self: (1, 0)),  # kDLCPU, the real location of the bytes
    ]
    result += [(torch.cuda, f"{name}Tensor", _typed_tensor(dtype, name)) for dtype, name in _TYPE_NAMES.items()]
    return result


def factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a tensor, on the default device unless one is given."""
    converts = original.__name__ in ("as_tensor", "asarray")  # keep the device of a tensor argument

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if converts and isinstance(data, torch.Tensor):
            data = data if device is None else data.to(device)
            return original(data, *args[1:], **{k: v for k, v in kwargs.items() if k not in ("data", "obj", "device")})
        device = default_device() if device is None else device
        pinned = kwargs.pop("pin_memory", None)
        result = original(*args, **{**kwargs, "device": real(device)})
        return put(result, "pinned" if pinned and not is_cuda(device) else location_for(device))

    return make


def like(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a tensor, on the device of its first argument unless one is given."""

    @functools.wraps(original)
    def make(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        pinned = kwargs.pop("pin_memory", None)
        if device is None:
            return put(original(self, *args, **kwargs), "pinned" if pinned else location_of(self) or "device")
        result = original(self, *args, **{**kwargs, "device": real(device)})
        return put(result, "pinned" if pinned and not is_cuda(device) else location_for(device))

    return make


def _same_location(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method whose result is where its tensor is."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return put(original(self, *args, **kwargs), location_of(self))

    return method


def _with_optional_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            return original(*args, **kwargs)
        return put(original(*args, **{**kwargs, "device": real(device)}), location_for(device))

    return function


def _matmul_out_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``out_dtype``, which torch 2.13 supports on CUDA alone: convert operands to it, which is exact."""

    @functools.wraps(original)
    def matmul(*args: Any, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if out_dtype is None:
            return original(*args, **kwargs) if out is None else original(*args, out=out, **kwargs)
        wide = [value.to(out_dtype) if isinstance(value, torch.Tensor) else value for value in args]
        result = original(*wide, **kwargs)
        return result if out is None else out.copy_(result)

    return matmul


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to(device)``, ``to(dtype)``, ``to(device, dtype)`` and ``to(other)``."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first, rest = (args[0], args[1:]) if args else (kwargs.pop("other", kwargs.pop("device", None)), ())
        if isinstance(first, torch.Tensor):
            rest = (first.dtype, *rest)
            first = claimed(first)
        if first is None or isinstance(first, torch.dtype):
            return put(original(self, *args, **kwargs), location_of(self))
        target, source = location_for(first), location_of(self)
        if target == "host" and source == "pinned":
            target = source
        if target is not None and source != target and true_device(self).type == "cpu":
            kwargs["copy"] = True
        return put(original(self, real(first), *rest, **kwargs), target)

    return to


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
    more = {} if memory_format is None else {"memory_format": memory_format}
    return self.to(DEVICE if device is None else device, non_blocking=non_blocking, **more)


def _cpu(self: torch.Tensor, memory_format: Any = None) -> Any:
    return self.to(_CPU, **({} if memory_format is None else {"memory_format": memory_format}))


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()``: the name, such as "torch.cuda.FloatTensor", or the tensor converted to another type."""

    @functools.wraps(original)
    def of_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(self)
            return name.replace("torch.", "torch.cuda.") if claimed(self).type == "cuda" else name
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        return self.to(
            DEVICE if name.startswith("torch.cuda.") else _CPU,
            next(kind for kind, word in _TYPE_NAMES.items() if name.endswith(f".{word}Tensor")),
        )

    return of_type


class _TypedTensor(type):
    """The metaclass of ``torch.cuda.FloatTensor`` and its like."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype == cls.dtype and instance.is_cuda

    def __call__(cls, *args: Any) -> torch.Tensor:
        if args and not all(isinstance(size, int) for size in args):
            return torch.tensor(args[0], dtype=cls.dtype, device=DEVICE)
        return torch.empty(args or (0,), dtype=cls.dtype, device=DEVICE)


def _typed_tensor(dtype: torch.dtype, name: str) -> type:
    return _TypedTensor(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
