"""Warnings of code that is called a thousand times, told once, and code that is tried out, in silence."""

from __future__ import annotations

import builtins
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

Told = tuple[str, str, str, int]
"""A warning as another process takes it: category, message, file and line."""


@contextmanager
def warned_once() -> Iterator[None]:
    """Catch the warnings inside, and give each line's first one of a category at the end, as if that line said it."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            told = {(warning.category, warning.filename, warning.lineno): warning for warning in reversed(caught)}
    for warning in reversed(told.values()):
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def silent() -> Iterator[None]:
    """Drop what Python code prints and warns inside; a filter that makes errors of warnings does not act there."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def as_data(caught: Iterable[warnings.WarningMessage]) -> list[Told]:
    """Warnings for another process, one of each line."""
    found = {(each.filename, each.lineno): (each.category.__name__, str(each.message)) for each in caught}
    return [(*words, *place) for place, words in found.items()]


def tell(found: Iterable[Told]) -> None:
    """Give another process's warnings here; those of a category that isn't Python's own as `UserWarning`."""
    for name, message, file, line in found:
        warnings.warn_explicit(message, getattr(builtins, name, UserWarning), file, line)
