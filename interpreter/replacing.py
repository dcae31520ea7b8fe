"""Attributes that are replaced for a while, and put back."""

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
    """Inside it, each (object, name, value) of ``changes`` holds."""
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
    """Inside it, the changes that ``find`` gives hold; may be nested, in any thread. They are looked for once.

    ``lasting`` ones are put back as the outermost `lasting` ends, where one is under way.
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
                if self._lasting and lasting.begun(self):
                    self._depth += 1
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._outermost.__exit__(None, None, None)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside it, the changes don't hold; whoever enters meanwhile waits."""
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
    """How many `lasting` are under way, and what their end puts back."""

    def __init__(self) -> None:
        self._depth, self._lock = 0, threading.Lock()
        self._kept: list[Shared] = []

    def begun(self, changes: Shared) -> bool:
        """Whether changes that hold from now on are put back by the end."""
        with self._lock:
            if self._depth:
                self._kept.append(changes)
            return bool(self._depth)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside it, lasting changes hold from their first use on: hundreds of attributes aren't replaced each time."""
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                over, self._kept = (self._kept, []) if not self._depth else ([], self._kept)
            for changes in over:
                changes.__exit__()


lasting = _Lasting()
