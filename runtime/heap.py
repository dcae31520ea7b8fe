"""Memory that comes and goes: of what is freed glibc keeps several times a model between blocks that are still held."""

import ctypes
import mmap
import sys
from contextlib import suppress

import numpy as np
import torch

__all__ = ["cast", "give_back", "map_blocks"]

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_M_MMAP_THRESHOLD = -3
_BLOCK = 1 << 20


class _Heap:
    """What the process had in memory when freed memory was last returned."""

    resident = 0


def give_back(grown: int = 0) -> None:
    """Return freed memory to the system, where the C library can, if the process has ``grown`` by so many bytes since
    that was last done: what is returned has to be got anew."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None and _resident() >= _Heap.resident + grown:
        trim(0)
        _Heap.resident = _resident()


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def map_blocks() -> None:
    """From now on take blocks of 1 MiB and more from the system, and return them when they are freed, where the C
    library can. It costs time (docs/scale.md)."""
    option = getattr(_LIBC, "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, _BLOCK)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in ``dtype``, itself if that is its own.

    A large one of float32 on the CPU is in memory of its own, which goes back to the system with it; in huge pages, for
    to get small ones takes several times as long as to write to them.
    """
    size = tensor.numel() * dtype.itemsize
    apart = tensor.dtype != dtype == torch.float32 and tensor.device.type == "cpu" and size >= _BLOCK
    if not apart or sys.platform != "linux":
        return tensor.to(dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # where there are none
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, np.float32)).view(tensor.shape).copy_(tensor)
