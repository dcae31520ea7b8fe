"""Opening a store's address, and saying in one line what stands in the way of reading or writing there."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec

from assay.golden.errors import StoreError
from assay.golden.store.files import DiskFiles, Files, RemoteFiles

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def opened(url: str, options: Mapping[str, Any] | None = None) -> Files:
    """The files at ``url``: a path, ``file://``, ``memory://``, ``s3://`` or whatever else fsspec has a driver for.

    ``options`` go to the driver. Raises `StoreError`, as do all methods of the files, except that reading what isn't
    there raises `FileNotFoundError`.
    """
    protocol = url.partition("://")[0] if "://" in url else "file"
    shown = shown_url(url)
    try:
        system, path = fsspec.url_to_fs(url, **{"use_listings_cache": False, **(options or {})})
    except ImportError as error:
        raise StoreError(
            f"store {shown}: the driver for {protocol}:// is missing ({error}); "
            f"s3:// comes with pip install 'kernel-assay[remote]', others with their own fsspec package"
        ) from None
    except ValueError as error:
        if "not known" not in str(error):
            raise StoreError(f"store {shown}: {_line(error)}") from None
        raise StoreError(
            f"store {shown}: unknown protocol {protocol}://; expected a path, file://, memory://, s3://, ..."
        ) from None
    except Exception as error:  # a driver may raise anything
        raise StoreError(f"store {shown}: cannot be opened: {_line(error)}") from None
    local = "file" in ((system.protocol,) if isinstance(system.protocol, str) else system.protocol)
    return _Explained(DiskFiles(path) if local else RemoteFiles(system, path), shown)


def shown_url(url: str) -> str:
    """The address without a user's name and password."""
    return re.sub(r"//[^/@]*@", "//", url)


class _Explained:
    """`Files` whose errors are `StoreError`."""

    def __init__(self, files: Files, url: str) -> None:
        self._files, self._url = files, url

    def read(self, name: str) -> bytes:
        try:
            with self._explained("read", name):
                return self._files.read(name)
        except _Absent as error:
            raise FileNotFoundError(str(error)) from None

    def exists(self, name: str) -> bool:
        with self._explained("look for", name):
            return self._files.exists(name)

    def write(self, name: str, data: bytes, *, sync: bool = True) -> None:
        with self._explained("write", name):
            self._files.write(name, data, sync=sync)

    def create(self, name: str, data: bytes, *, sync: bool = True) -> bool:
        with self._explained("write", name):
            return self._files.create(name, data, sync=sync)

    def delete(self, name: str) -> None:
        with self._explained("remove", name):
            self._files.delete(name)

    def names(self, folder: str = "") -> Iterator[str]:
        try:
            with self._explained("list", folder or "its files"):
                yield from self._files.names(folder)
        except _Absent:
            return

    def sweep(self) -> None:
        with self._explained("remove", "old temporary files"):
            self._files.sweep()

    @contextlib.contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise _Absent(f"store {self._url}: cannot {verb} {name}: {_line(error)}") from None
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise StoreError(f"store {self._url}: expected a folder of its own: {_line(error)}") from None
        except OSError as error:
            raise StoreError(f"store {self._url}: {_reason(error, verb, name)}") from None
        except Exception as error:  # a driver may raise anything
            raise StoreError(f"store {self._url}: cannot {verb} {name}: {_line(error)}") from None


class _Absent(StoreError):
    """What was to be read, or the place to write to, isn't there."""


def _reason(error: OSError, verb: str, name: str) -> str:
    if error.errno in _FULL:
        return f"the disk is full, cannot {verb} {name}; free some space and start again: what is stored is whole"
    if error.errno in _FORBIDDEN or isinstance(error, PermissionError):
        return f"no permission to {verb} {name} ({_line(error)}); change it, or give another address"
    return f"cannot {verb} {name}: {_line(error)}"


def _line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return next(iter(str(text).splitlines()), "") or type(error).__name__
