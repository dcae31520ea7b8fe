"""Reading of a text from left to right: an error names the character, and marks it with a caret."""

from __future__ import annotations

import re

_SHOWN = 24  # characters of the text that an error shows


class ReadingError(ValueError):
    """A text that isn't in its grammar; ``marked`` is the text with a caret where it isn't."""

    def __init__(self, message: str, marked: str) -> None:
        super().__init__(message)
        self.marked = marked


class Reader:
    """Reads a text from left to right; ``what`` it is begins the messages of errors, which are of the class `failure`.

    ``at`` is the position.
    """

    failure: type[ReadingError] = ReadingError

    def __init__(self, text: str, what: str = "") -> None:
        self.text, self.at, self._what = text, 0, f"{what}: " if what else ""

    def skip_blanks(self) -> None:
        """Go on to the next character that isn't blank."""
        self.at += len(self.text[self.at :]) - len(self.text[self.at :].lstrip())

    def error(self, expected: str, at: int | None = None, hint: str = "") -> ReadingError:
        """Return the error that something else was expected at a position, by default the present one."""
        at = self.at if at is None else at
        rest = self.text[at:].strip()
        got = repr(rest if len(rest) <= _SHOWN else rest[:_SHOWN] + "...") if rest else "the end"
        message = f"{self._what}expected {expected} at character {at + 1}, got {got}{hint}"
        return self.failure(message, f"{self.text[:at]}^{self.text[at:]}")

    def is_at(self, pattern: str) -> bool:
        """Whether the pattern comes next, after blanks."""
        self.skip_blanks()
        return re.compile(pattern).match(self.text, self.at) is not None

    def take(self, pattern: str, expected: str = "", *, keep: bool = False) -> str:
        """Return what comes next, and go on behind it unless ``keep``. Raises `ReadingError` if it isn't
        ``expected``."""
        self.skip_blanks()
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            raise self.error(expected)
        self.at = self.at if keep else match.end()
        return match[0]
