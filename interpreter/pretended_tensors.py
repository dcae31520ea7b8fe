"""Tensors of the pretended world: what `torch.Tensor` and torch's factories are replaced by.

A device argument that names CUDA becomes the CPU, and the result remembers where it was asked for (`places`); `device`,
`is_cuda` and the like answer by that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from assay.interpreter.places import is_cuda, place_for, place_of, put, real, true_device
from assay.interpreter.replacing import Change

DEVICE = torch.device("cuda", 0)
"""The one device that there is."""

_CPU = torch.device("cpu")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided", "new")
_KEEPING = (
    "clone", "contiguous", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
)  # fmt: skip
_NAMES = {
    torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16",
    torch.int8: "Char", torch.uint8: "Byte", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
    torch.bool: "Bool",
}  # fmt: skip


def changes() -> list[Change]:
    """What is replaced in `torch` and `torch.Tensor`."""
    found: list[Change] = []
    constructors: list[Any] = list(_device_constructors())
    for original in constructors:
        name = original.__name__
        owner, name = (torch.fft, name[4:]) if name.startswith("fft_") else (torch, name)
        present: Any = getattr(owner, name, None)
        if present is original:
            found.append((owner, name, _factory(present)))
    found += [(torch, name, _like(getattr(torch, name))) for name in _LIKE]
    found.append((torch, "normal", _if_given(torch.normal)))
    found += [(torch, name, _product(getattr(torch, name))) for name in ("mm", "bmm", "addmm", "baddbmm")]
    found.append((torch, "from_numpy", _placed(torch.from_numpy, "host")))
    tensor: Any = torch.Tensor
    found += [(tensor, name, _like(getattr(tensor, name))) for name in _NEW]
    found += [(tensor, name, _keeping(getattr(tensor, name))) for name in _KEEPING]
    found += [
        (tensor, "device", property(claimed)),
        (tensor, "is_cuda", property(lambda self: claimed(self).type == "cuda")),
        (tensor, "is_cpu", property(lambda self: claimed(self).type == "cpu")),
        (tensor, "get_device", lambda self: -1 if claimed(self).index is None else claimed(self).index),
        (tensor, "to", _to(tensor.to)),
        (tensor, "cuda", _cuda),
        (tensor, "cpu", _cpu),
        (tensor, "type", _type(tensor.type)),
        (tensor, "pin_memory", lambda self, device=None: put(_copied(self), "pinned")),
        (tensor, "is_pinned", lambda self, device=None: place_of(self) == "pinned"),
        (tensor, "record_stream", lambda self, stream: None),
        (tensor, "__dlpack__", lambda self, **_: torch._C._to_dlpack(self)),
        (tensor, "__dlpack_device__", lambda self: (1, 0)),  # kDLCPU, since that is where its bytes are
        (torch, "get_device", lambda x: x.get_device()),
        (torch, "get_default_device", default_device),
    ]
    found += [(torch.cuda, f"{name}Tensor", _legacy(dtype, f"{name}Tensor")) for dtype, name in _NAMES.items()]
    return found


def claimed(tensor: torch.Tensor) -> torch.device:
    """Where a tensor says that it lies."""
    device = true_device(tensor)
    return DEVICE if device.type == "cpu" and place_of(tensor) in (None, "device") else device


def default_device() -> torch.device:
    """The device of `torch.set_default_device`, or of a block ``with torch.device(...)``."""
    if torch._C._len_torch_function_stack():
        modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        for mode in reversed(modes):
            if isinstance(mode, DeviceContext):
                return DEVICE if is_cuda(mode.device) else mode.device
    return _CPU


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor, on the default device where none is given."""
    follows = original.__name__ in ("as_tensor", "asarray")  # takes its device from a tensor

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if follows and isinstance(data, torch.Tensor):
            moved = data if device is None else data.to(device)
            return original(moved, *args[1:], **{k: v for k, v in kwargs.items() if k not in ("data", "obj", "device")})
        wanted = default_device() if device is None else device
        pinned = kwargs.pop("pin_memory", None)
        result = original(*args, **{**kwargs, "device": real(wanted)})
        return put(result, "pinned" if pinned and not is_cuda(wanted) else place_for(wanted))

    return factory


def _like(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor, on the device of its first argument where none is given."""

    @functools.wraps(original)
    def like(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        pinned = kwargs.pop("pin_memory", None)
        if device is None:
            return put(original(self, *args, **kwargs), "pinned" if pinned else place_of(self) or "device")
        result = original(self, *args, **{**kwargs, "device": real(device)})
        return put(result, "pinned" if pinned and not is_cuda(device) else place_for(device))

    return like


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose result lies where its tensor does."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return put(original(self, *args, **kwargs), place_of(self))

    return method


def _if_given(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that sometimes takes a device."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is None:
            return original(*args, **kwargs)
        device = kwargs["device"]
        return put(original(*args, **{**kwargs, "device": real(device)}), place_for(device))

    return function


def _product(original: Callable[..., Any]) -> Callable[..., Any]:
    """A product with ``out_dtype``, which torch has on CUDA alone: products of the operands, exact in that dtype."""

    @functools.wraps(original)
    def product(
        *args: Any, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        if out_dtype is None:
            return original(*args, **kwargs) if out is None else original(*args, out=out, **kwargs)
        wide = [value.to(out_dtype) if isinstance(value, torch.Tensor) else value for value in args]
        result = original(*wide, **kwargs)
        return result if out is None else out.copy_(result)

    return product


def _placed(original: Callable[..., Any], place: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return put(original(*args, **kwargs), place)

    return function


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to(device)``, ``to(dtype)``, ``to(device, dtype)`` and ``to(other)``."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        first, rest = (args[0], args[1:]) if args else (kwargs.pop("other", kwargs.pop("device", None)), ())
        if isinstance(first, torch.Tensor):
            rest = (first.dtype, *rest)
            first = claimed(first)
        if first is None or isinstance(first, torch.dtype):
            head = args if args else ()
            return put(original(self, *head, **kwargs), place_of(self))
        place, now = place_for(first), place_of(self)
        if place == "host" and now == "pinned":
            place = now
        if place is not None and now != place and true_device(self).type == "cpu":
            kwargs["copy"] = True
        return put(original(self, real(first), *rest, **kwargs), place)

    return to


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch._C.TensorBase.clone(tensor)


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
    """``Tensor.cuda()``."""
    more = {} if memory_format is None else {"memory_format": memory_format}
    return self.to(DEVICE if device is None else device, non_blocking=non_blocking, **more)


def _cpu(self: torch.Tensor, memory_format: Any = None) -> Any:
    """``Tensor.cpu()``."""
    return self.to(_CPU, **({} if memory_format is None else {"memory_format": memory_format}))


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()``: its name, as "torch.cuda.FloatTensor", or the tensor as another type."""

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
            next(kind for kind, word in _NAMES.items() if name.endswith(f".{word}Tensor")),
        )

    return of_type


class _Legacy(type):
    """The class of ``torch.cuda.FloatTensor`` and its like."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype == cls.dtype and instance.is_cuda

    def __call__(cls, *args: Any) -> torch.Tensor:
        if args and not all(isinstance(size, int) for size in args):
            return torch.tensor(args[0], dtype=cls.dtype, device=DEVICE)
        return torch.empty(args or (0,), dtype=cls.dtype, device=DEVICE)


def _legacy(dtype: torch.dtype, name: str) -> type:
    return _Legacy(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
