"""Lines that a C library prints to standard output, kept out of it."""

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_lines"]

_LIBC = ctypes.CDLL(None) if os.name == "posix" else None


@contextmanager
def without_lines(start: str) -> Iterator[None]:
    """Within, what goes to the process' standard output waits; afterwards it goes on, but for lines that begin with
    ``start``. Where C's buffers can't be emptied, or the output is closed, all goes on as ever."""
    try:
        before = None if _LIBC is None else os.dup(1)
    except OSError:
        before = None
    if _LIBC is None or before is None:
        yield
        return
    _LIBC.fflush(None)
    with tempfile.TemporaryFile() as waiting:
        os.dup2(waiting.fileno(), 1)
        try:
            yield
        finally:
            _LIBC.fflush(None)
            os.dup2(before, 1)
            waiting.seek(0)
            lines = [line for line in waiting if not line.startswith(start.encode())]
            os.close(before)
            if lines:
                with open(1, "wb", closefd=False) as out:
                    out.writelines(lines)
