"""Errors of goldens, one class for each thing that the caller can correct."""

from __future__ import annotations

from assay.runtime.errors import AssayError


class UnknownSpec(AssayError, KeyError):
    """No spec has that name."""

    __str__ = Exception.__str__


class DefinitionError(AssayError, ValueError):
    """An invalid definition of an op: its name is taken, or its module can't be imported."""


class ReferenceRefuses(DefinitionError):
    """A reference raised an error of its own, mostly for sizes that it doesn't take."""


class OptionError(AssayError, ValueError):
    """An option that the op doesn't have, or a value that the option doesn't accept."""


class ShapeError(AssayError, ValueError):
    """Shapes that contradict the op's signature; ``symbol`` is the dimension that is wrong, if known."""

    def __init__(self, message: str, symbol: str = "") -> None:
        super().__init__(message)
        self.symbol = symbol


class InputError(AssayError, ValueError):
    """A tensor whose dtype or values the op doesn't accept."""


class RecipeError(AssayError, ValueError):
    """A recipe of inputs that names something unknown, or a text that isn't a recipe."""


class StoreError(AssayError):
    """A store that can't be opened, read or written: a wrong address, no permission, a full disk."""


class MissingRecord(StoreError, KeyError):
    """The store has nothing under that key: build it."""

    __str__ = Exception.__str__


class DamagedRecord(StoreError, ValueError):
    """The record under that key is not what was written: build it again."""


class OtherFormat(StoreError):
    """A record in a format that this version of assay doesn't read; it may be intact."""


class CampaignError(AssayError, ValueError):
    """An invalid campaign file; the message names the file, the line or key, and the correction."""


class MissingOperation(AssayError, NotImplementedError):
    """A reference uses an operation that has no rule for certified numbers."""


class Undecided(AssayError, ValueError):
    """A reference depends on a comparison or choice that the radius leaves undecided; ``line`` is its source line."""

    def __init__(self, message: str, line: str = "the reference") -> None:
        super().__init__(message)
        self.line = line
