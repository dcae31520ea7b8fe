"""The registry of specs: each op's mathematics, written once, with its signature, options and stages."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from assay.golden.errors import OptionError, UnknownSpec, unknown
from assay.golden.signature import Signature, TensorSpec, parse

_REGISTRY: dict[str, Spec] = {}


@dataclass(frozen=True)
class Option:
    """An option of an op: its default, and what it may be."""

    default: Any
    accepts: Callable[[Any], bool]
    expected: str

    def check(self, op: str, name: str, value: Any) -> None:
        """Raise `OptionError` unless ``value`` is one that the option can take."""
        if not self.accepts(value):
            raise OptionError(f"{op}: option {name}={value!r}; expected {self.expected}")

    def normal(self, value: Any) -> Any:
        """The one form of equal values, which enters keys: where a number may be fractional, 30 is 30.0."""
        if type(value) is int and (isinstance(self.default, float) or (self.default is None and self.accepts(0.5))):
            return float(value) if float(value) == value else value
        return value


def choice(*values: Any) -> Option:
    """One of ``values``; the first is the default."""
    return Option(values[0], lambda value: value in values, "one of " + ", ".join(map(repr, values)))


def flag(default: bool = False) -> Option:
    """True or False."""
    return Option(default, lambda value: isinstance(value, bool), "True or False")


def number(default: float | None, *, positive: bool = False) -> Option:
    """A number (or None where that is the default)."""

    def accepts(value: Any) -> bool:
        if value is None:
            return default is None
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        return real and math.isfinite(value) and (value > 0 or not positive)

    kind = "a positive number" if positive else "a number"
    return Option(default, accepts, kind + (" or None" if default is None else ""))


@dataclass(frozen=True)
class Spec:
    """An op: what it takes and returns, and its mathematics over any arithmetic.

    ``definition(xp, *tensors, **options)`` is evaluated by every arithmetic of `assay.golden.arithmetic`.
    ``stages`` are the places where a kernel may round on the way, with the default format (None: no rounding there).
    ``rows`` is the symbol along which rows are independent of each other, or a function of the options that gives it.
    ``columns`` is a second such symbol: of any rows, any columns may be evaluated apart.
    ``sizes`` and ``multiples`` say which sizes a symbol may take (``{"g": (32, 64, 128)}``) and which symbol or number
    it must be a multiple of (``{"K": "g"}``, ``{"K": "4"}``).
    ``least`` names options that a symbol must not fall below (``{"E": "top_k"}``).
    ``work`` is an expression for the cost of a call (the product of all sizes where left out).
    ``empty`` are the symbols that fuzzing may set to zero.
    ``unused(*tensors)`` gives masks, by tensor's name, of the elements that no result depends on: they may hold NaN,
    and integers there are not held to their bounds. It must bear integers beyond their bounds elsewhere too.
    ``chosen`` names the results that others hang on and that are a kernel's own choice (top-k ids, zero-points): the
    definition takes them back as keywords. ``admissible(xp, *tensors, chosen, **options)`` tells, element for element,
    which choices of the first of them are right, where no interval of numbers does.
    ``elementwise``: an element of the result depends on that of the one tensor alone, so that in a format of 16 bits
    or fewer every number there is can be tried.
    ``listed``: among `specs`; compositions that only a checker asks for are not.
    ``version`` is raised whenever the mathematics changes: stored goldens of earlier versions then no longer count.
    """

    name: str
    definition: Callable[..., Any]
    signature_text: str | Callable[[Mapping[str, Any]], str]
    options: Mapping[str, Option] = field(default_factory=dict)
    stages: Mapping[str, str | None] = field(default_factory=dict)
    rows: str | Callable[[Mapping[str, Any]], str | None] | None = None
    columns: str | None = None
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    multiples: Mapping[str, str] = field(default_factory=dict)
    least: Mapping[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    work: str | None = None
    unused: Callable[..., Mapping[str, Any]] | None = None
    chosen: tuple[str, ...] = ()
    admissible: Callable[..., Any] | None = None
    version: int = 1
    elementwise: bool = False
    listed: bool = True

    def signature(self, options: Mapping[str, Any] | None = None) -> Signature:
        """The signature under ``options`` (defaults where left out)."""
        text = self.signature_text
        return parse(text if isinstance(text, str) else text(self.complete(options or {})))

    def independent(self, options: Mapping[str, Any]) -> str | None:
        """The symbol along which rows are independent of each other under complete ``options``."""
        return self.rows(options) if callable(self.rows) else self.rows

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that the op takes under its default options, in order."""
        return self.signature().tensors

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` with the defaults filled in; `OptionError` on an unknown name or a value out of place."""
        for name, value in options.items():
            if name not in self.options:
                raise OptionError(f"{self.name}: {unknown('option', name, self.options)}")
            self.options[name].check(self.name, name, value)
        return {name: option.normal(options.get(name, option.default)) for name, option in self.options.items()}


def define(
    name: str, signature: str | Callable[[Mapping[str, Any]], str], **fields: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register the decorated definition as the spec ``name``; ``fields`` are those of `Spec`."""

    def register(definition: Callable[..., Any]) -> Callable[..., Any]:
        if name in _REGISTRY and _REGISTRY[name].definition.__module__ != definition.__module__:
            raise ValueError(f"spec {name!r} is defined in {_REGISTRY[name].definition.__module__} already")
        rows = fields.get("rows")
        fields.setdefault("empty", (rows,) if isinstance(rows, str) else ())
        _REGISTRY[name] = Spec(name, definition, signature, **fields)
        return definition

    return register


@cache
def _load() -> None:
    package = importlib.import_module("assay.golden.definitions")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"assay.golden.definitions.{module.name}")


def specs() -> tuple[str, ...]:
    """The names of all specs that are listed."""
    _load()
    return tuple(sorted(name for name, definition in _REGISTRY.items() if definition.listed))


def spec(name: str) -> Spec:
    """The spec called ``name``; `UnknownSpec` if there is none."""
    _load()
    if name not in _REGISTRY:
        raise UnknownSpec(unknown("spec", name, _REGISTRY))
    return _REGISTRY[name]
