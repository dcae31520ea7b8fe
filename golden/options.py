"""Options of an op: defaults, accepted values, and the values that a campaign over the whole op varies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from assay.golden.errors import OptionError
from assay.runtime.errors import did_you_mean


@dataclass(frozen=True)
class Option:
    """An option of an op: its default, and the values it accepts.

    ``usual``: the values that a campaign over the whole op varies (empty: only the default). ``tensor``: the option is
    the flag of a keyword tensor of the same name; kernels and the definition get the tensor, or None.
    """

    default: Any
    accepts: Callable[[Any], bool]
    expected: str
    usual: tuple[Any, ...] = ()
    tensor: bool = False

    def check(self, op: str, name: str, value: Any) -> None:
        """Raise `OptionError` unless the option accepts ``value``."""
        if not self.accepts(value):
            hint = did_you_mean(value, [word for word in self.usual if isinstance(word, str)])
            raise OptionError(f"{op}: option {name}={value!r}; expected {self.expected}{hint}")

    def normal(self, value: Any) -> Any:
        """Return one form of equal values, for keys: if a number may be fractional, 30 becomes 30.0."""
        if type(value) is int and (isinstance(self.default, float) or (self.default is None and self.accepts(0.5))):
            return float(value) if float(value) == value else value
        return value


def choice(*values: Any) -> Option:
    """Return an option with one of ``values``; the first is the default."""
    return Option(values[0], lambda value: value in values, "one of " + ", ".join(map(repr, values)), values)


def flag(default: bool = False, *, tensor: bool = False) -> Option:
    """Return a flag; ``tensor``: if True, kernels get the keyword tensor of the option's name."""
    expected = "True, False or a tensor" if tensor else "True or False"
    return Option(default, lambda value: isinstance(value, bool), expected, (default, not default), tensor)


def count(default: int, *, usual: tuple[int, ...] = ()) -> Option:
    """Return an option for a positive whole number."""
    return Option(default, lambda value: type(value) is int and value > 0, "a positive whole number", usual)


def number(default: float | None, *, positive: bool = False, usual: tuple[float | None, ...] = ()) -> Option:
    """Return an option for a number (or None if that is the default)."""

    def accepts(value: Any) -> bool:
        if value is None:
            return default is None
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        return real and math.isfinite(value) and (value > 0 or not positive)

    kind = "a positive number" if positive else "a number"
    return Option(default, accepts, kind + (" or None" if default is None else ""), usual)
