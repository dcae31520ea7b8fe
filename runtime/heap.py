"""What the C library keeps of freed memory: between blocks that are still held glibc leaves several times a model."""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["give_back", "map_blocks", "mapped"]

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


def mapped(shape: Sequence[int]) -> torch.Tensor:
    """A float32 tensor of zeros in memory of its own on the CPU, which goes back to the system with it; in huge pages,
    where there are any, for to get small ones takes several times as long as to write to them."""
    size = math.prod(shape) * 4
    if sys.platform != "linux" or size < _BLOCK:
        return torch.zeros(*shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, np.float32)).view(*shape)
