"""Atomic writes: files are written under a temporary name in the same folder, synced, and renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text_atomically(path: str | Path, text: str) -> Path:
    """Write a text with `write_bytes_atomically`, in UTF-8."""
    return write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: str | Path, content: bytes) -> Path:
    """Write a file, and its missing folders; return its path.

    Concurrent readers, and readers after a crash, see either the former content or the new one, never a part. Raises
    `OSError`, and then leaves nothing behind.
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
