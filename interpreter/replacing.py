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
    """Inside it, the changes that ``find`` gives hold; may be nested, in any thread. They are looked for once."""

    def __init__(self, find: Callable[[], list[Change]]) -> None:
        self._find = cache(find)
        self._depth, self._lock = 0, threading.RLock()
        self._outermost: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._outermost = replaced(self._find())
                self._outermost.__enter__()
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
            self._outermost.__exit__(None, None, None)
            try:
                yield
            finally:
                self._outermost = replaced(self._find())
                self._outermost.__enter__()
