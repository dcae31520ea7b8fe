"""Typed records of JSON and TOML, made by msgspec; a one-line error names the entry that doesn't fit."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from assay.runtime.errors import one_line, unknown
from assay.runtime.files import read_text

LARGEST_SEED = 2**63 - 1
"""The largest seed: torch's generators take no more than 64 bits, and some calls add to it."""
MOST_EXAMPLES = 10**6
MOST_DIGITS = 10**5
Seed = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_SEED)]
_DEEPEST = 100  # levels of tables and lists in a text of others


def from_json(text: str | bytes, where: str, error: Callable[[str], Exception]) -> Any:
    """Return the content of a JSON text that anybody may have written.

    NaN, infinities and halves of surrogate pairs are no JSON. Raises ``error`` of one line, which begins with
    ``where``.
    """
    try:
        return _shallow(msgspec.json.decode(text))
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: is no JSON ({_reason(problem)})") from None


def from_toml(text: str, where: str, error: Callable[[str], Exception]) -> dict[str, Any]:
    """Return the content of a TOML text that anybody may have written.

    Raises ``error`` of one line, which begins with ``where``, and the line's number if it is known.
    """
    try:
        return _shallow(tomllib.loads(text))
    except (ValueError, RecursionError) as problem:
        what, line = _reason(problem), ""
        if (match := re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", what)) is not None:
            what, line = f"{match[1]} at column {match[3]}", f":{match[2]}"
        elif what.endswith("(at end of document)"):
            line = f":{len(text.rstrip().split(chr(10)))}"
        raise error(f"{where}{line}: is no TOML ({what}); mend what stands there") from None


def _reason(problem: Exception) -> str:
    return f"more than {_DEEPEST} levels" if isinstance(problem, RecursionError) else one_line(problem)


def _shallow(content: Any) -> Any:
    """Return the content. Raises `RecursionError` if it has more than `_DEEPEST` levels."""
    level = [content]
    for _ in range(_DEEPEST):
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [part for parts in inner for part in parts]
        if not level:
            return content
    raise RecursionError


def structured(content: Any, kind: Any, where: str, error: Callable[[str], Exception]) -> Any:
    """Return ``content`` as ``kind``: a dataclass, whose annotations are checked strictly, or another type of msgspec.

    Raises ``error`` of one line that begins with ``where`` and the path of the entry that doesn't fit, ``recipe.seed:
    expected a whole number, got 'one'``, or of an unknown key, with the most similar known one. If ``where`` ends with
    a colon it names the whole file: ``mine.toml: seeds: ...``.
    """
    known = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    for name in content if known and isinstance(content, Mapping) else ():
        if name not in known:
            raise error(f"{where.removesuffix(':')}: {unknown('key', name, known)}")
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as problem:
        what, _, path = str(problem).partition(" - at `$")
        path = path.rstrip("`")
        position = f"{where} {path.removeprefix('.')}" if where.endswith(":") and path else f"{where}{path}"
        raise error(f"{position.removesuffix(':')}: {_in_words(what, content, path)}") from None


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_EXPECTED = re.compile(r"Expected `([^`]*)`(?: of)?( length)?( [<>]=? \S+)?(?:, got (.*))?")


def _in_words(what: str, content: Any, path: str) -> str:
    """Return ``expected a whole number >= 0, got -3`` for msgspec's ``Expected `int` >= 0``."""
    match = _EXPECTED.fullmatch(what)
    if match is None:
        return what[0].lower() + what[1:]
    types = [_TYPES.get(name, name) for name in match[1].split(" | ")]
    expected = " or ".join(filter(None, (", ".join(types[:-1]), types[-1])))
    limit = f"{' of' if match[2] else ''}{match[2] or ''}{match[3] or ''}"
    for name, index in re.findall(r"\.(\w+)|\[([^\]]*)\]", path):
        if index == "...":  # msgspec 0.22 doesn't report which entry
            return f"expected {expected}{limit}" + (f", got {match[4]}" if match[4] else "")
        content = content[name] if name else content[int(index)]
    return f"expected {expected}{limit}, got {content!r:.60}"


def read_record(path: Path, mark: str, kind: Any, error: Callable[[str], Exception]) -> Any:
    """Return the record that ``assay MARK`` wrote to a JSON file, as ``kind``; its key ``mark`` is the version, 1.

    Raises ``error`` of one line.
    """
    content = from_json(read_text(path, error), str(path), error)
    if not isinstance(content, dict) or content.pop(mark, None) != 1:
        raise error(f"{path}: expected a record of assay {mark}")
    return structured(content, kind, f"{path}:", error)


def plain(value: Any) -> Any:
    """Return a record as dicts, lists and numbers for JSON; non-finite numbers become "nan", "inf" and "-inf".

    An object with a method ``as_dict`` becomes the result of that method. `msgspec.convert` with ``strict=False`` reads
    it back.
    """
    if hasattr(value, "as_dict"):
        return plain(value.as_dict())
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
