"""What can go wrong when a golden is asked for, one class per thing that the caller can mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from assay.precision.errors import AssayError


class UnknownSpec(AssayError, KeyError):
    """No spec has that name."""

    __str__ = Exception.__str__


class OptionError(AssayError, ValueError):
    """An option that the op doesn't have, or a value that the option can't take."""


class ShapeError(AssayError, ValueError):
    """Shapes that contradict the op's signature."""


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
    """A campaign file that can't be followed; the message names file, line and mend."""


class EngineError(AssayError):
    """What shall run the tasks of a campaign isn't installed or can't be reached."""


_MOST_NAMES = 24  # that a message lists


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """``unknown spec 'sofmax'; did you mean 'softmax'? (known: ...)``, of many names those that come nearest."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    shown = names if len(names) <= _MOST_NAMES else difflib.get_close_matches(str(name), names, n=8, cutoff=0.0)
    more = f", and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(shown) or 'none'}{more})"
