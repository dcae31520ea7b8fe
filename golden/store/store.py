"""The store: golden records by their content address, on a disk or in an object store, shared by many jobs.

assay-store.json                    marks the folder as a store
records/0f/0f3a...c1.safetensors    a record under its key
manifests/NAME.json                 the records that a campaign expects, with a checksum of its own

There are no locks: a record's key determines its content, so a second writer finds it there or writes the same again.
Each file is replaced atomically: on a disk by writing to a temporary file and renaming it, in an object store by one
PUT. Other remote filesystems (sftp, hdfs, ...) get the temporary name and the rename too, as far as their drivers keep
their word.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

from assay.golden.errors import DamagedRecord, MissingRecord, OtherFormat, StoreError
from assay.golden.store.record import REMAKE, Record
from assay.runtime.files import remove_unfinished, write_bytes_atomically

_MARK = "assay-store.json"
_MARK_CONTENT = b'{"format":1,"what":"golden records of assay"}\n'
_SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{64}")
_MANIFEST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TEMPORARY = "."  # prefix of the names of unfinished files
_ABANDONED_AFTER = 24 * 3600.0  # seconds; no write takes a day
_ONE_PUT = {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "r2"}  # protocols with atomic PUT
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class Store:
    """Records at ``url``: a path, ``file://``, ``memory://``, ``s3://bucket/folder`` or any other of fsspec's.

    ``options`` go to the driver (``{"endpoint_url": ...}``). Nothing is opened before it is needed, and a store can be
    pickled. Any number of processes, on any machines, may read and write the same store at once.

    Every method raises `StoreError`, one line, where the files can't be read or written.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self.options = str(url), dict(options or {})
        self._opened: tuple[int, _Files] | None = None
        self._is_known = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url, self.options)

    def __repr__(self) -> str:
        return f"Store({_shown_url(self.url)!r})"

    def put(self, record: Record) -> str:
        """Store ``record`` and return its key. A valid record of that key stays; a damaged one is replaced."""
        self._create()
        if not self.is_valid(record.key):
            self._files.write(_record_name(record.key), record.to_bytes())
        return record.key

    def get(self, key: str) -> Record:
        """Return the record under ``key``, every bit checked; raise `MissingRecord`, `DamagedRecord`, `OtherFormat`."""
        where = f"record {key} in {_shown_url(self.url)}"
        self._check()
        data = self._files.read(_record_name(key))
        if data is None:
            raise MissingRecord(f"{where}: there is none; build the campaign that has it")
        record = Record.from_bytes(data, where)
        if record.key != key:
            raise DamagedRecord(f"{where} is damaged: it holds record {record.key}; {REMAKE}")
        return record

    def read(self, key: str) -> Record | StoreError:
        """Return the record under ``key``, or the error that `get` would raise of this record alone."""
        try:
            return self.get(key)
        except (DamagedRecord, MissingRecord, OtherFormat) as error:
            return error

    def is_valid(self, key: str) -> bool:
        """Whether there is a record under ``key``, every bit of it as it was written."""
        try:
            self.get(key)
        except (MissingRecord, DamagedRecord):
            return False
        return True

    def __contains__(self, key: str) -> bool:
        """Whether there is a record under ``key``, damaged or not."""
        return _KEY.fullmatch(key) is not None and self._files.exists(_record_name(key))

    def keys(self) -> Iterator[str]:
        """Yield the keys of all records, in order."""
        self._check()
        for name in self._files.names("records"):
            key = name.rpartition("/")[2].removesuffix(_SUFFIX)
            if _KEY.fullmatch(key) and name == _record_name(key):
                yield key

    def damage(self) -> Iterator[tuple[str, str]]:
        """Read every record; yield key and message of each damaged one."""
        for key in self.keys():
            if isinstance(error := self.read(key), DamagedRecord):
                yield key, str(error)

    def discard(self, key: str) -> None:
        """Remove the record under ``key``, if there is one."""
        self._files.delete(_record_name(key))

    def sweep(self) -> None:
        """Remove unfinished files of killed processes, once they are more than a day old."""
        self._check()
        self._files.sweep()

    def write_manifest(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Store ``manifest``, which must be valid JSON, under ``name``; replace an earlier one."""
        self._create()
        self._files.write(_manifest_name(name), _with_checksum(manifest))

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest called ``name``; raise `MissingRecord` or `DamagedRecord`."""
        where = f"manifest {name} in {_shown_url(self.url)}"
        self._check()
        data = self._files.read(_manifest_name(name))
        if data is None:
            raise MissingRecord(f"{where}: there is none; it has: {', '.join(self.manifests()) or 'none'}")
        try:
            content: dict[str, Any] = json.loads(data)["manifest"]
            if _with_checksum(content) != data:
                raise ValueError("its SHA-256 is another")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedRecord(f"{where} is damaged: {error}; build its campaign again") from None
        return content

    def manifests(self) -> Iterator[str]:
        """Yield the names of all manifests, in order."""
        self._check()
        for name in self._files.names("manifests"):
            if name.endswith(".json") and name.count("/") == 1:
                yield name.rpartition("/")[2].removesuffix(".json")

    @property
    def exists(self) -> bool:
        """Whether anything has been stored here yet."""
        return self._check()

    def require(self) -> None:
        """Raise `StoreError` if nothing has been stored yet: the address may be mistyped."""
        if not self.exists:
            raise StoreError(
                f"store {_shown_url(self.url)}: there is nothing; build a campaign first: "
                "assay golden build CAMPAIGN --store URL"
            )

    @property
    def _files(self) -> _Files:
        """The files, opened again in a forked process: drivers have threads, which a fork doesn't copy."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), _Files(self.url, self.options)
        return self._opened[1]

    def _check(self) -> bool:
        """Whether this is a store; raise `StoreError` if it is something else, return False if it is empty."""
        if not self._is_known:
            mark = self._files.read(_MARK)
            if mark is None:
                other = next(iter(self._files.names()), None)
                mark = self._files.read(_MARK)  # another process may have created the store; it writes the mark first
                if mark is None and other is not None:
                    raise StoreError(
                        f"store {_shown_url(self.url)}: it holds {other}, but no {_MARK}; expected a store, "
                        "or a folder that is new or empty"
                    )
            if mark not in (None, _MARK_CONTENT):
                raise StoreError(f"store {_shown_url(self.url)}: {_MARK} isn't one that this version can read")
            self._is_known = mark is not None
        return self._is_known

    def _create(self) -> None:
        """Make this a store if it isn't one yet."""
        if not self._check():
            self._files.write(_MARK, _MARK_CONTENT)
            self._is_known = True


def _record_name(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise StoreError(f"expected a record's key, 64 hexadecimal digits, got {key!r}")
    return f"records/{key[:2]}/{key}{_SUFFIX}"


def _manifest_name(name: str) -> str:
    if not _MANIFEST_NAME.fullmatch(name):
        raise StoreError(f"expected a manifest's name of letters, digits, '.', '_' and '-', got {name!r}")
    return f"manifests/{name}.json"


def _with_checksum(manifest: Mapping[str, Any]) -> bytes:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    content = {"manifest": json.loads(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(content, sort_keys=True, indent=1).encode() + b"\n"


class _Files:
    """Files below ``url``, by relative paths with forward slashes. Every method raises `StoreError`."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._shown = _shown_url(url)
        self._system, root = _opened(url, options)
        self._root = root.rstrip("/")
        protocols = {self._system.protocol} if isinstance(self._system.protocol, str) else set(self._system.protocol)
        self._is_local, self._one_put = "file" in protocols, bool(protocols & _ONE_PUT)

    def read(self, name: str) -> bytes | None:
        """Return the content; None if there is no such file."""
        with self._errors("read", name):
            try:
                return bytes(self._system.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def exists(self, name: str) -> bool:
        with self._errors("look for", name):
            return bool(self._system.isfile(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        """Replace or make the file, atomically."""
        path = self._path(name)
        with self._errors("write", name):
            if self._is_local:
                write_bytes_atomically(path, data, tidy=False)  # its folders are large; see `sweep`
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
        with self._errors("remove", name), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def names(self, folder: str = "") -> Iterator[str]:
        """Yield the names of all finished files below ``folder``, in order."""
        with self._errors("list", folder or "its files"):
            yield from (name for name in self._all(folder) if not _is_temporary(name))

    def sweep(self) -> None:
        """Remove unfinished files whose writers have ended, elsewhere than on a disk those that are old."""
        for name in filter(_is_temporary, self._all("") if not self._one_put else ()):
            with self._errors("remove", name), contextlib.suppress(FileNotFoundError, NotImplementedError):
                if self._is_local:
                    remove_unfinished(Path(self._path(name)))
                if time.time() - self._system.modified(self._path(name)).timestamp() > _ABANDONED_AFTER:
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
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        """Turn errors into a `StoreError` of one line."""
        try:
            yield
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise StoreError(f"store {self._shown}: expected a folder of its own: {_line(error)}") from None
        except Exception as error:  # a driver may raise anything
            raise StoreError(f"store {self._shown}: {_reason(error, verb, name)}") from None


def _shown_url(url: str) -> str:
    """Return the address without a user's name and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def _opened(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the filesystem of an address, and the path on it."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    shown = _shown_url(url)
    try:
        with _no_complaints():
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


@contextlib.contextmanager
def _no_complaints() -> Iterator[None]:
    """Drop what a driver's half made object raises as it is deleted; the error of its making says why."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # which hold the object
        raise
    finally:
        sys.unraisablehook = before


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
