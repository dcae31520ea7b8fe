"""Files of a store, on a disk or in an object store: each is there whole or not at all, whatever happens on the way.

fsspec opens the address. On a disk a file is written beside its place and renamed. In an object store one PUT is
atomic. Other remote filesystems (sftp, hdfs, ...) get the temporary name and the rename too, as far as their drivers
keep their word. Whatever stands in the way is said in one line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

from assay.golden.errors import StoreError
from assay.runtime.files import write_bytes_atomically

_TEMPORARY = "."  # what the name of a file begins with that isn't finished yet
_OLD = 24 * 3600.0  # seconds; no write takes a day: what is older than that was left behind
_ONE_PUT = {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "r2"}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class Files:
    """Files below ``url``: a path, ``file://``, ``memory://``, ``s3://`` or whatever else fsspec has a driver for.

    Names are relative paths with forward slashes. ``options`` go to the driver. Every method raises `StoreError`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._shown = shown_url(url)
        self._system, root = _opened(url, options or {})
        self._root = root.rstrip("/")
        protocols = {self._system.protocol} if isinstance(self._system.protocol, str) else set(self._system.protocol)
        self._is_local, self._one_put = "file" in protocols, bool(protocols & _ONE_PUT)

    def read(self, name: str) -> bytes | None:
        """The content; None if there is no such file."""
        with self._explained("read", name):
            try:
                return bytes(self._system.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        with self._explained("look for", name):
            return bool(self._system.isfile(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        """Replace or make the file, atomically."""
        path = self._path(name)
        with self._explained("write", name):
            if self._is_local:
                write_bytes_atomically(path, data)
            elif self._one_put:
                self._system.pipe_file(path, data)
            else:
                folder, _, last = path.rpartition("/")
                temporary = f"{folder}/{_TEMPORARY}{last}.{secrets.token_hex(8)}"
                self._system.makedirs(folder, exist_ok=True)
                self._system.pipe_file(temporary, data)
                self._system.mv(temporary, path)

    def delete(self, name: str) -> None:
        """Remove the file, if it is there."""
        with self._explained("remove", name), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def names(self, folder: str = "") -> Iterator[str]:
        """The names of all files below ``folder``, unfinished ones left out, in order."""
        with self._explained("list", folder or "its files"):
            yield from (name for name in self._all(folder) if not _is_temporary(name))

    def sweep(self) -> None:
        """Remove unfinished files that a killed process left behind, once they are old."""
        for name in filter(_is_temporary, self._all("") if not self._one_put else ()):
            with self._explained("remove", name), contextlib.suppress(FileNotFoundError, NotImplementedError):
                if time.time() - self._system.modified(self._path(name)).timestamp() > _OLD:
                    self._system.rm_file(self._path(name))

    def _all(self, folder: str) -> Iterator[str]:
        start = self._path(folder).rstrip("/")
        if self._is_local:
            for path, folders, files in os.walk(start, onerror=_unless_absent):
                folders.sort()
                yield from ((Path(path) / file).relative_to(self._root).as_posix() for file in sorted(files))
        else:
            self._system.invalidate_cache()  # other processes write too
            with contextlib.suppress(FileNotFoundError):
                yield from (path.removeprefix(self._root).lstrip("/") for path in sorted(self._system.find(start)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        """What goes wrong within is told as a `StoreError`."""
        try:
            yield
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise StoreError(f"store {self._shown}: expected a folder of its own: {_line(error)}") from None
        except Exception as error:  # a driver may raise anything
            raise StoreError(f"store {self._shown}: {_reason(error, verb, name)}") from None


def shown_url(url: str) -> str:
    """The address without a user's name and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def _opened(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The filesystem of an address, and the path on it."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    shown = shown_url(url)
    try:
        return fsspec.url_to_fs(url, **{"use_listings_cache": False, **options})
    except ImportError as error:
        raise StoreError(
            f"store {shown}: the driver for {protocol}:// is missing ({error}); "
            f"s3:// comes with pip install 'kernel-assay[remote]', others with their own fsspec package"
        ) from None
    except Exception as error:  # a driver may raise anything
        if isinstance(error, ValueError) and "not known" in str(error):
            expected = "expected a path, file://, memory://, s3://, ..."
            raise StoreError(f"store {shown}: unknown protocol {protocol}://; {expected}") from None
        raise StoreError(f"store {shown}: cannot be opened: {_line(error)}") from None


def _reason(error: Exception, verb: str, name: str) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return f"the disk is full, cannot {verb} {name}; free some space and start again: what is stored is whole"
    if number in _FORBIDDEN or isinstance(error, PermissionError):
        return f"no permission to {verb} {name} ({_line(error)}); change it, or give another address"
    return f"cannot {verb} {name}: {_line(error)}"


def _line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(str(text).splitlines()), "") or type(error).__name__


def _is_temporary(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_TEMPORARY)


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
