"""The store: golden records by their content address, on a disk or in an object store, shared by many jobs.

assay-store.json                    what this is
records/0f/0f3a...c1.safetensors    a record under its key
manifests/NAME.json                 what a campaign is made of, with a checksum of its own

There are no locks: a record's key stands for what it must hold, so whoever comes second finds it there, or writes the
same again. Each file is replaced as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from assay.golden.errors import DamagedRecord, MissingRecord, OtherFormat, StoreError
from assay.golden.store.files import Files, shown_url
from assay.golden.store.record import REMAKE, Record

_MARK = "assay-store.json"
_MARK_CONTENT = b'{"format":1,"what":"golden records of assay"}\n'
_SUFFIX = ".safetensors"
_KEY = re.compile(r"[0-9a-f]{64}")
_MANIFEST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Store:
    """Records at ``url``: a path, ``file://``, ``memory://``, ``s3://bucket/folder`` or any other of fsspec's.

    ``options`` go to the driver (``{"endpoint_url": ...}``). Nothing is opened before it is needed, and a store can be
    pickled. Any number of processes, on any machines, may read and write the same store at once.

    Every method raises `StoreError`, one line, where the place can't be read or written.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self.options = str(url), dict(options or {})
        self._opened: tuple[int, Files] | None = None
        self._known = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.url, self.options)

    def __repr__(self) -> str:
        return f"Store({shown_url(self.url)!r})"

    def put(self, record: Record) -> str:
        """Store ``record`` under its key, which is returned. A valid record of that key stays; a damaged one goes."""
        self._begin()
        if not self.is_valid(record.key):
            self._files.write(_name(record.key), record.to_bytes())
        return record.key

    def get(self, key: str) -> Record:
        """The record under ``key``, every bit checked; `MissingRecord`, `DamagedRecord` or `OtherFormat`."""
        where = f"record {key} in {shown_url(self.url)}"
        self._check()
        data = self._files.read(_name(key))
        if data is None:
            raise MissingRecord(f"{where}: there is none; build the campaign that has it")
        record = Record.from_bytes(data, where)
        if record.key != key:
            raise DamagedRecord(f"{where} is damaged: it holds record {record.key}; {REMAKE}")
        return record

    def read(self, key: str) -> Record | StoreError:
        """The record under ``key``, or what stands in the way of this one alone: what `get` would raise of it."""
        try:
            return self.get(key)
        except (DamagedRecord, MissingRecord, OtherFormat) as error:
            return error

    def __contains__(self, key: str) -> bool:
        """Whether there is a record under ``key``; its bits are not looked at."""
        return _KEY.fullmatch(key) is not None and self._files.exists(_name(key))

    def keys(self) -> Iterator[str]:
        """The keys of all records, in order."""
        self._check()
        for name in self._files.names("records"):
            key = name.rpartition("/")[2].removesuffix(_SUFFIX)
            if _KEY.fullmatch(key) and name == _name(key):
                yield key

    def damage(self) -> Iterator[tuple[str, str]]:
        """Read every record: key and message of each that isn't as it was written."""
        for key in self.keys():
            if isinstance(found := self.read(key), DamagedRecord):
                yield key, str(found)

    def discard(self, key: str) -> None:
        """Remove the record under ``key``, if there is one."""
        self._files.delete(_name(key))

    def sweep(self) -> None:
        """Remove what killed processes left behind: unfinished files of more than a day."""
        self._check()
        self._files.sweep()

    def write_manifest(self, name: str, manifest: Mapping[str, Any]) -> None:
        """Store ``manifest``, which JSON must be able to hold, under ``name``, in the place of an earlier one."""
        self._begin()
        self._files.write(_manifest_name(name), _sealed(manifest))

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest called ``name``; `MissingRecord` or `DamagedRecord`."""
        where = f"manifest {name} in {shown_url(self.url)}"
        self._check()
        data = self._files.read(_manifest_name(name))
        if data is None:
            raise MissingRecord(f"{where}: there is none; it has: {', '.join(self.manifests()) or 'none'}")
        try:
            content: dict[str, Any] = json.loads(data)["manifest"]
            if _sealed(content) != data:
                raise ValueError("its SHA-256 is another")
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedRecord(f"{where} is damaged: {error}; build its campaign again") from None
        return content

    def manifests(self) -> Iterator[str]:
        """The names of all manifests, in order."""
        self._check()
        for name in self._files.names("manifests"):
            if name.endswith(".json") and name.count("/") == 1:
                yield name.rpartition("/")[2].removesuffix(".json")

    @property
    def exists(self) -> bool:
        """Whether anything has been stored here yet."""
        return self._check()

    def require(self) -> None:
        """Raise `StoreError` where nothing has been stored yet: a mistyped address, perhaps."""
        if not self.exists:
            raise StoreError(
                f"store {shown_url(self.url)}: there is nothing; build a campaign first: "
                "assay golden build CAMPAIGN --store URL"
            )

    @property
    def _files(self) -> Files:
        """The files, opened anew in a forked process: drivers keep threads, which a fork doesn't."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), Files(self.url, self.options)
        return self._opened[1]

    def is_valid(self, key: str) -> bool:
        """Whether there is a record under ``key``, and every bit of it as it was written."""
        try:
            self.get(key)
        except (MissingRecord, DamagedRecord):
            return False
        return True

    def _check(self) -> bool:
        """Whether this is a store; `StoreError` if it is something else, False if there is nothing yet."""
        if not self._known:
            mark = self._files.read(_MARK)
            if mark is None:
                other = next(iter(self._files.names()), None)
                mark = self._files.read(_MARK)  # by now perhaps another's, who makes a mark before all else
                if mark is None and other is not None:
                    raise StoreError(
                        f"store {shown_url(self.url)}: it holds {other}, but no {_MARK}; expected a store, "
                        "or a folder that is new or empty"
                    )
            if mark not in (None, _MARK_CONTENT):
                raise StoreError(f"store {shown_url(self.url)}: {_MARK} isn't one that this version can read")
            self._known = mark is not None
        return self._known

    def _begin(self) -> None:
        """Make this a store if it isn't one yet."""
        if not self._check():
            self._files.write(_MARK, _MARK_CONTENT)
            self._known = True


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise StoreError(f"expected a record's key, 64 hexadecimal digits, got {key!r}")
    return key


def _name(key: str) -> str:
    return f"records/{_checked(key)[:2]}/{key}{_SUFFIX}"


def _manifest_name(name: str) -> str:
    if not _MANIFEST_NAME.fullmatch(name):
        raise StoreError(f"expected a manifest's name of letters, digits, '.', '_' and '-', got {name!r}")
    return f"manifests/{name}.json"


def _sealed(manifest: Mapping[str, Any]) -> bytes:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    content = {"manifest": json.loads(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(content, sort_keys=True, indent=1).encode() + b"\n"
