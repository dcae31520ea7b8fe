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


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """``unknown spec 'sofmax'; did you mean 'softmax'? known: ...``"""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(names) or 'none'})"
