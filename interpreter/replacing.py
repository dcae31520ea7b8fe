"""Attributes that are replaced inside a context and restored afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

_MISSING = object()
Change = tuple[Any, str, Any]


@contextlib.contextmanager
def replaced(changes: list[Change]) -> Iterator[None]:
    """Set each (object, name, value) of ``changes`` inside."""
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class Shared:
    """A context in which the changes that ``find`` returns hold; may be nested, in any thread. ``find`` is called once.

    With ``lasting``, changes made inside of `lasting` hold until the outermost `lasting` ends.
    """

    def __init__(self, find: Callable[[], list[Change]], *, lasting: bool = False) -> None:
        self._find, self._lasting = cache(find), lasting
        self._depth, self._lock = 0, threading.RLock()
        self._outermost: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._outermost = replaced(self._find())
                self._outermost.__enter__()
                if self._lasting and lasting.defers(self):
                    self._depth += 1
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._outermost.__exit__(None, None, None)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the originals inside; other threads that enter meanwhile wait."""
        with self._lock:
            if self._depth == 0:
                yield
                return
            self._outermost.__exit__(None, None, None)
            try:
                yield
            finally:
                self._outermost = replaced(self._find())
                self._outermost.__enter__()


class _Lasting:
    """A context that keeps lasting changes from their first use to its end, instead of replacing hundreds each time."""

    def __init__(self) -> None:
        self._depth, self._lock = 0, threading.Lock()
        self._deferred: list[Shared] = []

    def defers(self, changes: Shared) -> bool:
        """Take over the restoring of ``changes`` if the context is active; return whether it is."""
        with self._lock:
            if self._depth:
                self._deferred.append(changes)
            return bool(self._depth)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                ended, self._deferred = (self._deferred, []) if not self._depth else ([], self._deferred)
            for changes in ended:
                changes.__exit__()


lasting = _Lasting()
