"""The base class of assay's errors, and errors that any package may raise."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class AssayError(Exception):
    """Base of every error that assay raises on purpose."""


class SettingError(AssayError, ValueError):
    """A setting of the examination that cannot be followed."""


class NotInstalled(AssayError, ImportError):
    """An optional package is missing: install the extra that the message names."""


class EngineError(AssayError):
    """An engine for many tasks is unknown or can't be reached."""


_MOST_NAMES = 24  # in a message


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ``; did you mean 'softmax'?`` for a name near a known one; else empty."""
    close = difflib.get_close_matches(str(name), sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return ``unknown spec 'sofmax'; did you mean 'softmax'? (known: ...)``; of many known names, the nearest."""
    names = sorted(known)
    hint = did_you_mean(name, names)
    shown = names if len(names) <= _MOST_NAMES else difflib.get_close_matches(str(name), names, n=8, cutoff=0.0)
    more = f", and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(shown) or 'none'}{more})"


def names_checked(what: str, kind: str, error: type[AssayError]) -> Callable[[_Function], _Function]:
    """Return a decorator that raises ``error``, with the nearest name, for a keyword that the function lacks."""

    def decorated(function: _Function) -> _Function:
        known = [name for name in signature(function).parameters if name != "self"]

        @wraps(function)
        def checked(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in known:
                    raise error(f"{what}: {unknown(kind, name, known)}")
            return function(*arguments, **named)

        return checked  # type: ignore[return-value]

    return decorated


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]


_LONGEST = 600  # characters of a message in one line


def one_line(error: BaseException | str) -> str:
    """Return an error's message in one line; of a very long one, such as of an array, its begin and end."""
    words = " ".join(str(error).split()) or "no message"
    half = _LONGEST // 2
    return words if len(words) <= _LONGEST else f"{words[:half]} ... {words[-half:]}"


def listed(names: Sequence[str], noun: str = "", *, most: int = 1) -> str:
    """Return the first names and the number of further ones: ``a.weight and 3 more``, or ``... more tensors``."""
    more = f" and {len(names) - most} more {noun}".rstrip() if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
