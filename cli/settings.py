"""What is written on a command line, as the values that `examine` takes."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from assay.golden.registry import Spec
from assay.verify.errors import ContractError, SettingError

_WORDS = {"none": None, "true": True, "false": False}


def dtypes(texts: Sequence[str]) -> tuple[Any, ...]:
    """``bfloat16``, or ``q=float16,k=bfloat16`` for a dtype per tensor; each text is an examination of its own."""
    return tuple(_assignments("--dtype", text) if "=" in text else text for text in texts)


def options(definition: Spec, texts: Sequence[str]) -> dict[str, list[Any]]:
    """``causal=none,bottom_right``: an option and the values to vary over; tuples stand in parentheses."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, values = _split("--option", text, "name=value,value")
        found[name] = [_option_value(definition, name, value) for value in _parts(values)]
    return found


def _option_value(definition: Spec, name: str, text: str) -> Any:
    """The reading of ``text`` that the option accepts: as a value of Python, or as the text itself."""
    readings = [text, *([_literal(text)] if _literal(text) != text else [])]
    option = definition.options.get(name)
    fitting = [reading for reading in readings if option is None or option.accepts(reading)]
    value = fitting[0] if fitting else readings[-1]
    definition.complete({name: value})
    return value


def shapes(texts: Sequence[str]) -> dict[str, Sequence[int]]:
    """``D=64,128``: sizes; ``Sq=1:300`` or ``N=0:4096:16``: as Python's ``range(1, 300)``, ``range(0, 4096, 16)``."""
    found: dict[str, Sequence[int]] = {}
    for text in texts:
        symbol, sizes = _split("--shape", text, "D=64,128 or D=1:300")
        try:
            numbers = [int(part) for part in sizes.split(":" if ":" in sizes else ",")]
            found[symbol] = range(*numbers) if ":" in sizes else numbers
        except (TypeError, ValueError):
            raise SettingError(f"--shape {text!r}; expected D=64,128 or D=1:300") from None
    return found


def contract(texts: Sequence[str], named: Any) -> dict[str, Any]:
    """``field=value``, ``stages.name=format``, ``ulps.name=2``, or a contract's name, which ``named`` looks up."""
    fields: dict[str, Any] = {}
    for text in texts:
        if "=" not in text:
            fields |= named(text)
            continue
        name, value = _split("--contract", text, "a contract's name, or field=value")
        group, _, inner = name.partition(".")
        if group in ("stages", "ulps"):
            fields[group] = dict(fields.get(group, {})) | _inner(text, group, inner, value)
        else:
            fields[name] = _WORDS.get(value.lower(), value)
    return fields


def _inner(text: str, group: str, name: str, value: str) -> dict[str, Any]:
    """One entry of a contract's ``stages`` or ``ulps``; ``stages=none`` has none."""
    if not name and value.lower() in ("none", "{}"):
        return {}
    if not name:
        raise ContractError(f"--contract {text!r}; expected {group}.name={value}, or {group}=none")
    if group == "stages":
        return {name: _WORDS.get(value.lower(), value)}
    try:
        return {name: float(value)}
    except ValueError:
        raise ContractError(f"--contract {text!r}; expected a number of ulps") from None


def _assignments(flag: str, text: str) -> Mapping[str, str]:
    return dict(_split(flag, part, "name=dtype,name=dtype") for part in _parts(text))


def _split(flag: str, text: str, expected: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise SettingError(f"{flag} {text!r}; expected {expected}")
    return name, value


def _parts(text: str) -> list[str]:
    """The parts between commas, where these aren't inside parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _literal(text: str) -> Any:
    """What ``text`` is as a value of Python, or itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value
