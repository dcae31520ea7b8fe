"""Control of printed output and warnings: control characters made visible, each warning once, output without lines."""

from __future__ import annotations

import builtins
import ctypes
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

_LIBC = ctypes.CDLL(None) if os.name == "posix" else None
WarningData = tuple[str, str, str, int]
"""A warning for another process: category, message, file and line."""


_HIDDEN = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""Characters that a terminal or a page obeys or drops: controls but tabs and line ends, changes of direction, halves of
surrogate pairs."""


def visible(text: str) -> str:
    """Return a text of others for a terminal or a page: what would act there is written as its escape, ``\\x1b``."""
    return _HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _Visible:
    """A stream whose texts are made `visible`; ``raw`` is the stream beneath."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def visible_output() -> Iterator[None]:
    """Make `visible` what Python code prints inside."""
    streams: list[Any] = [sys.stdout, sys.stderr]
    with redirect_stdout(_Visible(streams[0])), redirect_stderr(_Visible(streams[1])):
        yield


def beneath(stream: Any) -> Any:
    """Return the stream that takes a terminal's own control sequences."""
    return getattr(stream, "raw", stream) if isinstance(stream, _Visible) else stream


@contextmanager
def warned_once() -> Iterator[None]:
    """Catch the warnings inside, and at the end repeat the first of each line and category, at its original line."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            first = {(warning.category, warning.filename, warning.lineno): warning for warning in reversed(caught)}
    for warning in reversed(first.values()):
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def silent() -> Iterator[None]:
    """Drop output and warnings of Python code inside; filters that turn warnings into errors have no effect there."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def as_data(caught: Iterable[warnings.WarningMessage]) -> list[WarningData]:
    """Return the warnings, one of each line, as data for another process."""
    warned = {(each.filename, each.lineno): (each.category.__name__, str(each.message)) for each in caught}
    return [(*words, *line) for line, words in warned.items()]


def warn_again(warned: Iterable[WarningData]) -> None:
    """Repeat another process's warnings here; categories that aren't built in become `UserWarning`."""
    for name, message, file, line in warned:
        warnings.warn_explicit(message, getattr(builtins, name, UserWarning), file, line)


@contextmanager
def without_lines(start: str) -> Iterator[None]:
    """Hold back the process's standard output inside, and write it afterwards without lines that begin with ``start``.

    Works on the file descriptor, so also on output of C libraries. No effect if C's buffers can't be flushed, or the
    output is closed.
    """
    try:
        before = None if _LIBC is None else os.dup(1)
    except OSError:
        before = None
    if _LIBC is None or before is None:
        yield
        return
    _LIBC.fflush(None)
    with tempfile.TemporaryFile() as waiting:
        os.dup2(waiting.fileno(), 1)
        try:
            yield
        finally:
            _LIBC.fflush(None)
            os.dup2(before, 1)
            waiting.seek(0)
            lines = [line for line in waiting if not line.startswith(start.encode())]
            os.close(before)
            if lines:
                with open(1, "wb", closefd=False) as out:
                    out.writelines(lines)
