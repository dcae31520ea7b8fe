"""What can go wrong when a golden is asked for, one class per thing that the caller can mend."""

from __future__ import annotations

from assay.runtime.errors import AssayError


class UnknownSpec(AssayError, KeyError):
    """No spec has that name."""

    __str__ = Exception.__str__


class DefinitionError(AssayError, ValueError):
    """A definition of an op that can't stand: a name that is taken, or a module of ops that can't be imported."""


class OptionError(AssayError, ValueError):
    """An option that the op doesn't have, or a value that the option can't take."""


class ShapeError(AssayError, ValueError):
    """Shapes that contradict the op's signature; ``symbol`` is the one to blame, if it is one."""

    def __init__(self, message: str, symbol: str = "") -> None:
        super().__init__(message)
        self.symbol = symbol


class InputError(AssayError, ValueError):
    """A tensor whose dtype or values the op can't take."""


class RecipeError(AssayError, ValueError):
    """A recipe of inputs that names something which isn't there, or a text that isn't a recipe."""


class StoreError(AssayError):
    """A store that can't be opened, read or written: a wrong address, no permission, a full disk."""


class MissingRecord(StoreError, KeyError):
    """The store has nothing under that key: build it."""

    __str__ = Exception.__str__


class DamagedRecord(StoreError, ValueError):
    """What is stored under that key isn't what was written: make it again."""


class OtherFormat(StoreError):
    """A record of a format that this version of assay doesn't read; it needn't be damaged."""


class CampaignError(AssayError, ValueError):
    """A campaign file that can't be followed; the message names file, place and mend."""


class MissingOperation(AssayError, NotImplementedError):
    """A reference uses an operation that numbers can't be computed with."""


class Undecided(AssayError, ValueError):
    """A reference asks what the radius of its numbers leaves open: a comparison, or a choice; ``line`` is where."""

    def __init__(self, message: str, line: str = "the reference") -> None:
        super().__init__(message)
        self.line = line
