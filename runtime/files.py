"""Files that are there whole or not at all: written beside their place, synced, and renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text_atomically(path: str | Path, text: str) -> Path:
    """`write_bytes_atomically` of a text, in UTF-8."""
    return write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: str | Path, content: bytes) -> Path:
    """Write a file, and its folders where they are missing; return its path.

    Whoever reads it meanwhile, and whoever finds it after a crash, gets the former content or the new one, whole.
    Raises `OSError`, and leaves nothing behind then.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        return Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
