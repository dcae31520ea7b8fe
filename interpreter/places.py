"""Where a tensor of the pretended world lies: on its device, on the host, or in the host's pinned memory.

All of them lie on the CPU. A storage is remembered as lying where it was asked for; of what torch computes nobody knows
that, and it counts as on the device, as what a kernel gets and makes mostly does. What matters more than the name: to
another place a tensor is copied, as from a host to a GPU, so that changing the copy in place leaves the original alone.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize

import torch

Place = Literal["device", "host", "pinned"]

_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_of_storage: WeakKeyDictionary[Any, Place] = WeakKeyDictionary()
_true_device: Any = torch._C.TensorBase.device


class Memory:
    """Bytes of storages that were asked for on the device and are alive, and the most that there were."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def take(self, storage: torch.UntypedStorage) -> None:
        """Count a storage for as long as it lives."""
        count = storage.nbytes()
        self.allocated += count
        self.peak = max(self.peak, self.allocated)
        finalize(storage, self._give_back, count).atexit = False

    def _give_back(self, count: int) -> None:
        self.allocated -= count


memory = Memory()


def true_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor really lies, whatever it says."""
    if type(tensor) in _PLAIN and not torch._C._len_torch_function_stack():
        device: torch.device = _true_device.__get__(tensor)
    else:  # a mode, or a class of its own, would be asked for what the tensor says
        with torch._C.DisableTorchFunction():
            device = _true_device.__get__(tensor)
    return device


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where a tensor was asked for; None where nobody knows."""
    storage = _storage(tensor)
    return None if storage is None else _of_storage.get(storage)


def put(value: Any, place: Place | None) -> Any:
    """Remember that ``value``, if it is a tensor of the CPU, lies there; the value itself."""
    if place is not None and isinstance(value, torch.Tensor) and true_device(value).type == "cpu":
        storage = _storage(value)
        if storage is not None and _of_storage.get(storage) != place:
            _of_storage[storage] = place
            if place == "device":
                memory.take(storage)
    return value


def is_cuda(device: Any) -> bool:
    """Whether a device, as torch's functions take one, is a CUDA device. A number alone is one."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def real(device: Any) -> Any:
    """The device that stands in: the CPU for a CUDA device, others as they are."""
    return _CPU if is_cuda(device) else device


def place_for(device: Any) -> Place | None:
    """The place that asking for ``device`` means; None for devices that aren't pretended (meta and the like)."""
    if is_cuda(device):
        return "device"
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return "host" if kind == "cpu" else None


def _storage(tensor: torch.Tensor) -> Any:
    try:
        return torch._C.TensorBase.untyped_storage(tensor)
    except (NotImplementedError, RuntimeError):  # of sparse tensors, and those that a transformation wraps
        return None
