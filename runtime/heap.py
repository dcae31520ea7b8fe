"""What the C library keeps of freed memory: between blocks that are still held glibc leaves several times a model."""

import ctypes
import sys

__all__ = ["give_back", "map_blocks"]

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_M_MMAP_THRESHOLD = -3
_BLOCK = 1 << 20


def give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_blocks() -> None:
    """From now on take blocks of 1 MiB and more from the system, and return them when they are freed, where the C
    library can. It costs time (docs/scale.md)."""
    option = getattr(_LIBC, "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, _BLOCK)
