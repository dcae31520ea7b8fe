"""Files of others are read within limits; our own are written atomically.

A written file gets a temporary name in the same folder, is synced, and is renamed. Lines are appended whole, under a
lock.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LARGEST = 2**26
"""Bytes of a text that `read_text` reads where its caller states no other limit: 64 MiB."""
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def read_text(path: str | Path, error: Callable[[str], Exception], hint: str = "", *, most: int = LARGEST) -> str:
    """Return the text of a file that anybody may have written, with ``\\n`` for every line end and no byte order mark.

    Raises ``error`` of one line, which ends with ``hint``, for anything but a regular file of at most ``most`` bytes of
    UTF-8. Pipes and devices are refused and not waited for.
    """
    end = f"; {hint}" if hint else ""
    try:
        content = _content(path, most)
    except OSError as problem:
        raise error(f"{named(path)}: can't be read ({problem.strerror or problem}){end}") from None
    except ValueError as problem:  # a name that no file can have
        raise error(f"{named(path)}: can't be read ({problem}){end}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        what = f"byte {problem.start} is no UTF-8; save the file as UTF-8"
        raise error(f"{named(path)}: {what}{end}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _content(path: str | Path, most: int) -> bytes:
    """Return the bytes of a regular file. Raises `OSError`, or `ValueError` if no file has such a name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        for is_kind, words in _KINDS.items():
            if is_kind(mode):
                raise OSError(f"expected a file, got {words}")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(descriptor)
    if len(content) > most:
        raise OSError(f"expected at most {most:,} bytes, got more")
    return content


_SHOWN = 200  # characters of a path in a message


def named(path: str | Path) -> str:
    """Return a path as messages name it: of a very long one, its begin and end."""
    words = str(path)
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN // 2]}...{words[-_SHOWN // 2 :]}"


class OwnFolder:
    """A temporary folder, removed by `close`, or by `remove_abandoned` if its process was killed.

    Its process holds its lock. ``path`` begins with ``prefix``, which no others use. ``parent``: where it is made; in
    the system's temporary folder if left out. As a context manager it gives its path, and removes it.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        remove_abandoned(prefix, parent)
        unlocked = Path(tempfile.mkdtemp(prefix=f"{prefix}{_UNLOCKED}", dir=parent))
        self._descriptor = os.open(unlocked, os.O_RDONLY | os.O_CLOEXEC)
        _lock_now(self._descriptor)
        self.path = unlocked.rename(unlocked.with_name(unlocked.name.replace(_UNLOCKED, "", 1)))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        _remove(self.path)
        os.close(self._descriptor)


_UNLOCKED = "unlocked-"  # in the name of a folder that is about to get its lock
_UNFINISHED = ".assay-"  # in the name of a file that is being written
_RANDOM = "?" * 8  # what `tempfile` adds to a prefix
_NEW = 60.0  # seconds for which a folder or file without a lock may be about to get one


def remove_abandoned(prefix: str, parent: Path | None = None) -> None:
    """Remove the folders of `OwnFolder` whose processes have ended."""
    parent = parent or Path(tempfile.gettempdir())
    for middle in ("", _UNLOCKED):
        for folder in parent.glob(f"{glob.escape(prefix)}{middle}{_RANDOM}"):
            if _is_abandoned(folder, locked_once=not middle):
                _remove(folder)


def _is_abandoned(path: Path, *, locked_once: bool) -> bool:
    """Return whether the process of a file or folder has ended: it is this user's and nobody holds its lock.

    One that may not have had its lock yet (``locked_once``) has a minute for it.
    """
    with suppress(OSError):  # it is gone
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(descriptor)
            settled = locked_once or time.time() - state.st_mtime > _NEW
            return settled and state.st_uid == os.geteuid() and _lock_now(descriptor)
        finally:
            os.close(descriptor)
    return False


def _lock_now(descriptor: int) -> bool:
    """Take a file's lock if nobody has it; return False if somebody has it, or the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove a folder, also one that is deeper than Python's recursion, or has folders without permissions."""
    with suppress(OSError, RecursionError):
        return shutil.rmtree(folder)
    for command in (["chmod", "-R", "u+rwx", str(folder)], ["rm", "-rf", str(folder)]):
        with suppress(OSError):
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder that is there; other processes that want it wait. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, and make the file and its folders if they are missing; it is on the disk afterwards.

    The line is written whole, by one call. If the last line there has no end, because its writer was stopped, the new
    line begins after it. Raises `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        start = b"" if file.read(1) in (b"", b"\n") else b"\n"
        content = start + line.encode() + b"\n"
        if (written := file.write(content)) != len(content):
            file.truncate(end)
            raise OSError(f"{path}: only {written} of {len(content)} bytes could be written")
        os.fsync(file.fileno())


def write_text_atomically(path: str | Path, text: str) -> Path:
    """Write a text with `write_bytes_atomically`, in UTF-8."""
    return write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: str | Path, content: bytes, *, tidy: bool = True) -> Path:
    """Write a file, and its missing folders; return its path.

    Concurrent readers, and readers after a crash, see either the former content or the new one, never a part. Raises
    `OSError`, and then leaves nothing behind. ``tidy``: remove what killed writers of this file left behind, which
    lists its folder.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if tidy:
        for other in target.parent.glob(f".{glob.escape(target.name)}{_UNFINISHED}{_RANDOM}"):
            remove_unfinished(other)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}{_UNFINISHED}", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            _lock_now(descriptor)  # before its first byte: see `remove_unfinished`
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            return Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_unfinished(temporary: Path) -> None:
    """Remove a temporary file of `write_bytes_atomically` if its writer has ended."""
    with suppress(FileNotFoundError):
        # Its lock is there before its first byte.
        if _UNFINISHED in temporary.name and _is_abandoned(temporary, locked_once=temporary.stat().st_size > 0):
            temporary.unlink()
