"""The steps of an examination: an error in one becomes a line of the verdict, and all that was found before it stays.

An error that the kernel raises is a finding of the harness and never comes here. What comes here is an error of the
reference, of this machine (memory), or of this package. What the caller asked for and this machine lacks, a setting or
a store, ends the examination.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from assay.golden.errors import StoreError
from assay.interpreter import DependentPrograms
from assay.runtime.errors import AssayError, SettingError, one_line

_PACKAGE = Path(__file__).parents[2]
_ENDING = (SettingError, StoreError, DependentPrograms)
"""Errors that leave a step as they are; after the last, of a case, another size is tried."""
_MOST = 6  # lines that a verdict has of errors
_LONGEST = 240  # characters of the words of an error


@dataclass
class Steps:
    """The errors of an examination's steps, in words, with how often each came.

    ``untried`` counts those in steps that look for faults: with one of them the kernel hasn't passed.
    """

    errors: Counter[str] = field(default_factory=Counter)
    untried: int = 0

    def step(self, name: str, *, looks_for_faults: bool = False, raises: tuple[type[Exception], ...] = ()) -> Step:
        """Return a context that records an error raised inside, and goes on after it, unless its class is in
        ``raises``."""
        return Step(self, name, looks_for_faults, raises)

    @property
    def lines(self) -> tuple[str, ...]:
        """The errors, each once, in the order in which they came."""
        lines = [words if count == 1 else f"{words} ({count} times)" for words, count in self.errors.items()]
        more = (f"and {len(lines) - _MOST} other errors",) if len(lines) > _MOST else ()
        return (*lines[:_MOST], *more)


@dataclass(frozen=True)
class Step:
    """One step of an examination, as a context; `Steps.step` makes it."""

    steps: Steps
    name: str
    looks_for_faults: bool
    raises: tuple[type[Exception], ...]

    def __enter__(self) -> None:
        """Begin the step."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Record an error; return whether to go on after it."""
        if not isinstance(error, Exception) or isinstance(error, (*_ENDING, *self.raises)):
            return False
        self.steps.errors[f"{self.name}: {in_words(error)}"] += 1
        self.steps.untried += self.looks_for_faults
        return True


def in_words(error: Exception) -> str:
    """Return an error in a user's words, in one line; of an error of this package where it was raised."""
    words = one_line(error)
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    if isinstance(error, AssayError):
        return words
    if isinstance(error, MemoryError):
        return "there wasn't enough memory for it; smaller sizes (shapes=) need less"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else words
    frames = traceback.extract_tb(error.__traceback__)
    files = [(Path(frame.filename), frame.lineno) for frame in frames if "site-packages" not in frame.filename]
    own = [(file.relative_to(_PACKAGE), line) for file, line in files if file.is_relative_to(_PACKAGE)]
    at = "".join(f" at {file}:{line}" for file, line in own[-1:])
    return f"an error of assay's own ({type(error).__name__}: {words}{at}); please report it"
