"""Where in a TOML text each key and each element stands: `tomllib` doesn't tell, and errors must.

The text is one that `tomllib` has accepted, so nothing is checked here a second time.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(r"""[ \t]*([A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')[ \t]*""")
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*\'''',
    re.DOTALL,
)
_PLAIN = re.compile(r"[^,\]}\n#]*")


class Positions:
    """The line, counted from one, of every key, table and array element of a TOML text.

    A path is written as one walks down what `tomllib` returns: ``("golden", 0, "shapes", 2, "H")``.
    """

    def __init__(self, text: str) -> None:
        self._text = text = text.replace("\r\n", "\n")
        self._newlines = [place for place, letter in enumerate(text) if letter == "\n"]
        self._lines: dict[Path, int] = {}
        self._elements: dict[Path, int] = {}  # how many [[tables]] of that name there are so far
        self._place = 0
        self._document()

    def line(self, path: Path) -> int:
        """The line of ``path``, or else of the innermost thing around it that the text names."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def __contains__(self, path: Path) -> bool:
        return path in self._lines

    def _document(self) -> None:
        table: Path = ()
        self._skip()
        while self._place < len(self._text):
            if self._text.startswith("[[", self._place):
                table = self._header(2)
            elif self._text[self._place] == "[":
                table = self._header(1)
            else:
                self._assignment(table)
            self._skip()

    def _header(self, brackets: int) -> Path:
        """A table's header; the path of what follows it."""
        start, self._place = self._place, self._place + brackets
        path: Path = ()
        keys = self._key()
        for depth, key in enumerate(keys, 1):
            path += (key,)
            self._note(path, start)
            if depth == len(keys) and brackets == 2:
                self._elements[path] = self._elements.get(path, 0) + 1
            if path in self._elements:
                path += (self._elements[path] - 1,)
                self._note(path, start)
        self._place += brackets
        return path

    def _assignment(self, table: Path) -> None:
        """``key = value`` within ``table``."""
        start, path = self._place, table
        for key in self._key():
            path += (key,)
            self._note(path, start)
        self._place = self._text.index("=", self._place) + 1
        self._skip()
        self._value(path)

    def _value(self, path: Path) -> None:
        opening = self._text[self._place]
        if opening == "[":
            self._sequence("]", lambda place: self._element((*path, place)))
        elif opening == "{":
            self._sequence("}", lambda place: self._assignment(path))
        else:
            found = _STRING.match(self._text, self._place) or _PLAIN.match(self._text, self._place)
            self._place = found.end() if found else len(self._text)

    def _element(self, path: Path) -> None:
        self._note(path, self._place)
        self._value(path)

    def _sequence(self, closing: str, item: Callable[[int], None]) -> None:
        """What stands between brackets, item by item."""
        self._place += 1
        self._skip()
        count = 0
        while self._text[self._place] != closing:
            item(count)
            count += 1
            self._skip()
            if self._text[self._place] == ",":
                self._place += 1
                self._skip()
        self._place += 1

    def _key(self) -> list[str]:
        """The parts of a dotted key."""
        parts = []
        while (found := _KEY_PART.match(self._text, self._place)) is not None:
            part = found[1]
            parts.append(tomllib.loads(f"_ = {part}")["_"] if part[0] in "\"'" else part)
            self._place = found.end()
            if not self._text.startswith(".", self._place):
                break
            self._place += 1
        return parts

    def _skip(self) -> None:
        """Blanks, line ends and comments."""
        found = _BLANK.match(self._text, self._place)
        self._place = found.end() if found else self._place

    def _note(self, path: Path, place: int) -> None:
        self._lines.setdefault(path, bisect_left(self._newlines, place) + 1)
