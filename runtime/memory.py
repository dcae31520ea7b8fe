"""Returns memory of freed tensors to the system: glibc otherwise keeps several times a model's size in free blocks."""

import ctypes
import mmap
import sys
from contextlib import suppress

import numpy as np
import torch

__all__ = ["cast", "map_large_blocks", "trim_heap"]

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_M_MMAP_THRESHOLD = -3  # of glibc's <malloc.h>
_BLOCK = 1 << 20  # bytes from which on a block is mapped and returned by itself


class _Heap:
    """Resident bytes after the last trim, and the largest number at any call."""

    resident = 0
    most = 0


def trim_heap(threshold: int = 0) -> None:
    """Return freed memory to the system, if the C library can.

    Getting memory from the system takes longer than writing to it. So with ``threshold`` it is returned only if the
    process has ``threshold`` bytes more than after the last time, and at least as many as ever: its peak is the same.
    """
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is None:
        return
    resident = _resident()
    if not threshold or resident >= max(_Heap.resident + threshold, _Heap.most):
        trim(0)
        _Heap.resident = _resident()
    _Heap.most = max(_Heap.most, resident)


def _resident() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def map_large_blocks() -> None:
    """Take blocks of 1 MiB and more directly from the system from now on, and return each when it is freed.

    No effect if the C library can't. It costs time (docs/scale.md).
    """
    option = getattr(_LIBC, "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, _BLOCK)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in ``dtype``, itself if it has that dtype.

    A large float32 tensor on the CPU gets its own mapping, which returns to the system with it; in huge pages, since
    getting small pages takes several times as long as writing to them.
    """
    size = tensor.numel() * dtype.itemsize
    mapped = tensor.dtype != dtype == torch.float32 and tensor.device.type == "cpu" and size >= _BLOCK
    if not mapped or sys.platform != "linux":
        return tensor.to(dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, np.float32)).view(tensor.shape).copy_(tensor)
