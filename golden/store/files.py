"""Files of a store, on a disk or in an object store: each is there whole or not at all, whatever happens on the way.

On a disk a file is written under a temporary name in its own folder, synced, and renamed; then the folder is synced. A
process killed in between leaves a temporary file that nothing reads. In an object store one PUT is atomic. Other remote
filesystems (sftp, hdfs, ...) get the temporary name and the rename as well, as far as their drivers keep their word.

To make a file that isn't there yet takes a hard link on a disk, and a conditional PUT in an object store. Where neither
is to be had, two processes that make the same file in the same instant may both be told that it was they.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

TEMPORARY = ".tmp-"
_OLD = 24 * 3600.0  # no write takes a day: what is older than that was left behind
_ONE_PUT = {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "r2"}


class Files(Protocol):
    """Named files; names are relative paths with forward slashes.

    Methods raise `OSError`, or a driver's own error. ``sync=False``: the file need not outlast the machine's failure.
    """

    def read(self, name: str) -> bytes:
        """The content; `FileNotFoundError` if there is none."""

    def exists(self, name: str) -> bool:
        """Whether the file is there."""

    def write(self, name: str, data: bytes, *, sync: bool = True) -> None:
        """Replace or make the file, atomically."""

    def create(self, name: str, data: bytes, *, sync: bool = True) -> bool:
        """Make the file unless it exists, atomically; whether this call made it."""

    def delete(self, name: str) -> None:
        """Remove the file, if it is there."""

    def names(self, folder: str = "") -> Iterator[str]:
        """The names of all files below ``folder``, temporary ones left out, in order."""

    def sweep(self) -> None:
        """Remove temporary files that a killed process left behind, once they are old."""


class DiskFiles:
    """Files below a folder of this machine."""

    def __init__(self, root: str) -> None:
        self.root = Path(root).absolute()

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def exists(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(self.root / name).st_mode)
        except FileNotFoundError:
            return False

    def write(self, name: str, data: bytes, *, sync: bool = True) -> None:
        with self._written(name, data, sync) as temporary:
            os.replace(temporary, self.root / name)

    def create(self, name: str, data: bytes, *, sync: bool = True) -> bool:
        if self.exists(name):
            return False
        with self._written(name, data, sync) as temporary:
            try:
                os.link(temporary, self.root / name)
            except FileExistsError:
                os.unlink(temporary)
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                os.replace(temporary, self.root / name)  # here two that ask at once may both be told yes
            else:
                os.unlink(temporary)
        return True

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def names(self, folder: str = "") -> Iterator[str]:
        for name in self._all(folder):
            if not name.rpartition("/")[2].startswith(TEMPORARY):
                yield name

    def sweep(self) -> None:
        for name in self._all(""):
            if name.rpartition("/")[2].startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - (self.root / name).stat().st_mtime > _OLD:
                        self.delete(name)

    def _all(self, folder: str) -> Iterator[str]:
        for path, folders, files in os.walk(self.root / folder, onerror=_unless_absent):
            folders.sort()
            below = Path(path).relative_to(self.root)
            yield from ((below / file).as_posix() for file in sorted(files))

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes, sync: bool) -> Iterator[Path]:
        """A temporary file beside ``name`` that holds ``data``, synced; afterwards the folder is synced too."""
        folder = (self.root / name).parent
        self._make(folder)
        temporary = folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                if sync:
                    os.fsync(file.fileno())
            yield temporary
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()  # a full disk must not stay full of what could not be finished
            raise
        if sync:
            _sync(folder)

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make(folder.parent)
            folder.mkdir(exist_ok=True)
            _sync(folder.parent)


class RemoteFiles:
    """Files below a path of an fsspec filesystem."""

    def __init__(self, system: Any, root: str) -> None:
        protocols = {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)
        self.system, self.root = system, root.rstrip("/")
        self.one_put = bool(protocols & _ONE_PUT)

    def read(self, name: str) -> bytes:
        return bytes(self.system.cat_file(self._path(name)))

    def exists(self, name: str) -> bool:
        return bool(self.system.isfile(self._path(name)))

    def write(self, name: str, data: bytes, *, sync: bool = True) -> None:
        path = self._path(name)
        if self.one_put:
            self.system.pipe_file(path, data)
            return
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        self.system.makedirs(folder, exist_ok=True)
        self.system.pipe_file(temporary, data)
        self.system.mv(temporary, path)

    def create(self, name: str, data: bytes, *, sync: bool = True) -> bool:
        if not self.one_put:  # what a driver makes of mode="create" need not be there whole
            return not self.exists(name) and self._wrote(name, data)
        try:
            self.system.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):  # an old driver: two that ask at once may both be told yes
            return not self.exists(name) and self._wrote(name, data)
        return True

    def _wrote(self, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.system.rm_file(self._path(name))

    def names(self, folder: str = "") -> Iterator[str]:
        return (name for name in self._all(folder) if not name.rpartition("/")[2].startswith(TEMPORARY))

    def sweep(self) -> None:
        for name in self._all("") if not self.one_put else ():
            if name.rpartition("/")[2].startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError, NotImplementedError):
                    if time.time() - self.system.modified(self._path(name)).timestamp() > _OLD:
                        self.delete(name)

    def _all(self, folder: str) -> Iterator[str]:
        self.system.invalidate_cache()  # other processes write too
        found = self.system.find(self._path(folder).rstrip("/"))
        return (path.removeprefix(self.root).lstrip("/") for path in sorted(found))

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"


_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _sync(folder: Path) -> None:
    """Make a rename or a new name in ``folder`` last; not every platform lets a folder be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
